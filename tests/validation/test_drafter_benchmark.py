"""``drafters.py`` and ``choices.py`` of the benchmarks: train, answer, time, go on where they ended, add up."""

import json
import runpy
from pathlib import Path

import pytest

from modelopt_eagle.common.acceptance import paired_difference, pooled_length
from modelopt_eagle.recipe import dump_resolved, load_recipe, same_recipe

SCRIPTS = Path(__file__).parents[2] / "scripts" / "benchmark"
SCRIPT, CHOICES = (runpy.run_path(str(SCRIPTS / f"{name}.py")) for name in ("drafters", "choices"))
main, build_parser, equal_minutes = (SCRIPT[name] for name in ("main", "build_parser", "equal_minutes"))


def command(folder, *more, heads=("--drafters", "eagle3", "medusa")):
    return [
        "--output", str(folder / "out"), *heads, "--minutes", "0.004",
        "--base_model", str(folder / "target"), "--data", str(folder / "rows.jsonl"), "--prompts",
        str(folder / "prompts.jsonl"), "--num_samples", "4000", "--max_new_tokens", "12", "--turns", "1",
        "--speedup_prompts", "1", "--seeds", "0", "1", *more,
        "--set", "eagle.draft_vocab_size=64", "training.batch_size=4",
    ]  # fmt: skip


@pytest.mark.parametrize("option", ["--minutes", "--num_samples", "--turns"])
def test_a_refused_option_is_named_as_it_was_given(option, tmp_path, capsys):
    assert main([*command(tmp_path), option, "0"]) == 2
    assert f"error: {option} must be above 0, found 0" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_numbers_without_an_end_and_seeds_below_zero_name_their_options(tmp_path, capsys):
    for wrong, told in (
        (("--minutes", "inf"), "error: --minutes must be a number above 0, found inf"),
        (("--minutes", "nan"), "error: --minutes must be above 0, found nan"),
        (("--seeds", "0", "-1"), "error: --seeds must be different numbers from 0 to 4294967295, found 0 -1"),
        (("--seeds", str(2**32)), "error: --seeds must be different numbers from 0 to 4294967295, found 4294967296"),
        (("--speedup_prompts", "0"), "error: --speedup_prompts must be above 0, found 0"),
    ):
        assert main(command(tmp_path, *wrong)) == 2
        assert capsys.readouterr().err == told + "\n"


def write_inputs(root):
    """Text and prompts, which :func:`command` names."""
    from tests.training.runs import write_conversations

    write_conversations(root / "rows.jsonl", 16)
    rows = [{"id": f"p{n}", "category": "ab"[n % 2], "turns": [f"say {n}"]} for n in range(4)]
    (root / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))


OWN = [
    "training.seed=1", "training.time_budget_minutes=1", "training.time_budget_clock=wall", "training.output_dir=x",
    "training.run_budget_minutes=1", "training.epochs=1", "training.max_steps=1", "data.train_path=x",
    "model.base_model=x", "algorithm=medusa",
]  # fmt: skip


def test_set_changes_nothing_of_the_comparison_itself(tmp_path, capsys):
    for text in OWN:
        assert main([*command(tmp_path), text]) == 2
        key = text.split("=")[0].replace("algorithm", "drafter.algorithm")
        assert capsys.readouterr().err.startswith(f"error: --set {text}: {key} is not an option here: ")
    given = command(tmp_path, heads=("--choices", "ttt5"))
    assert CHOICES["main"]([*given, "eagle.ttt_steps=4"]) == 2
    assert "error: --set eagle.ttt_steps=4: eagle.ttt_steps is what ttt5 changes" in capsys.readouterr().err
    equal_minutes.check_overrides(["eagle.ttt_steps=4"], SCRIPT["DRAFTERS"])  # of all heads alike
    assert not (tmp_path / "out").exists()


def test_missing_files_and_folders_are_told_before_a_head_is_trained(tmp_path, capsys):
    write_inputs(tmp_path)
    for name in ("prompts.jsonl", "rows.jsonl"):
        hidden = (tmp_path / name).rename(tmp_path / "hidden")
        assert main(command(tmp_path)) == 2
        assert name in capsys.readouterr().err and not (tmp_path / "out").exists()
        hidden.rename(tmp_path / name)
    (tmp_path / "out").touch()
    for place in (tmp_path / "out", tmp_path / "out" / "below"):
        assert main([*command(tmp_path)[2:], "--output", str(place)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: cannot write into {place}: ") and line.endswith("--output that can be written")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from modelopt_eagle.target.tiny import make_tiny_target

    root = tmp_path_factory.mktemp("drafters")
    make_tiny_target(root / "target")
    write_inputs(root)
    given = command(root, heads=("--drafters", "eagle3", "medusa", "eagle3"))  # named twice, made and told once
    assert main(given) == 0
    return root


def test_the_table_adds_up(folder):
    found = json.loads((folder / "out/comparison.json").read_text())
    assert [(row["drafter"], row["draft"]) for row in found["rows"]] == [
        ("eagle3", "chain 3"), ("eagle3", "tree 2x3, 7 nodes"), ("medusa", "chain 3"),
    ]  # fmt: skip
    row = found["rows"][0]
    parts = [
        json.loads((folder / f"out/eagle3-seed{seed}/answers-chain-3.json").read_text())["rows"] for seed in (0, 1)
    ]
    everything = [each["accepted"] for part in parts for each in part]
    assert row["acceptance_length"] == pooled_length(everything) and row["rounds"] == sum(map(len, everything))
    assert row["by_seed"] == [pooled_length([each["accepted"] for each in part]) for part in parts]
    assert set(row["categories"]) == {"a", "b"} and len(row["steps"]) == 2 and min(row["steps"]) > 0
    only = [each["accepted"] for part in parts for each in part if each["category"] == "a"]
    assert row["categories"]["a"]["acceptance_length"] == pooled_length(only)
    low, high = row["ci95"]
    assert low <= row["acceptance_length"] <= high and row["draft_cost"] > 0 and row["round_cost"] > 0
    text = (folder / "out/comparison.md").read_text()
    assert f"| `eagle3` | chain 3 | {row['acceptance_length']:.3f} | {low:.3f} to {high:.3f} |" in text
    assert "0.004 minutes of processor time" in text and "; 4 prompts, answers" in text and "Times of 1 prompts" in text
    assert "| drafter | a | b |" in text
    assert (folder / "out/eagle3-seed0/features").resolve() == (folder / "out/eagle3-seed1/features").resolve()


def test_a_second_start_does_what_is_left(folder, monkeypatch, capsys):
    import modelopt_eagle.training

    monkeypatch.setattr(modelopt_eagle.training, "train", lambda recipe: pytest.fail("it was trained already"))
    gone = folder / "out/medusa-seed1/answers-chain-3.json"
    before, text = gone.read_text(), (folder / "out/comparison.md").read_text()
    gone.unlink()
    assert main(command(folder)) == 0
    assert gone.read_text() == before and (folder / "out/comparison.md").read_text() == text
    assert main([*command(folder), "training.learning_rate=1e-3"]) == 2
    assert main(command(folder, "--max_new_tokens", "13")) == 2
    assert "holds a comparison with another max_new_tokens (12)" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [("--minutes", "0"), ("--seeds", "1", "1"), ("--speedup_prompts", "0")])
def test_bad_numbers_are_told_before_anything_is_done(wrong, folder, capsys, tmp_path):
    assert main([*command(folder, *wrong), "eagle.nonsense=1"]) == 2
    given = command(folder, *wrong)
    given[1] = str(tmp_path / "new")
    assert main(given) == 2
    assert "error: " in capsys.readouterr().err and not list(tmp_path.glob("new/*"))


def test_every_drafter_has_a_recipe_and_plans(tmp_path):
    arguments = build_parser().parse_args(["--output", str(tmp_path)])
    for name, contestant in SCRIPT["DRAFTERS"].items():
        recipe = equal_minutes.recipe_of(contestant, name, 1, arguments)
        assert recipe.training.seed == 1 and recipe.training.time_budget_clock == "processor" and contestant.plans
        assert name.startswith(recipe.drafter.algorithm)
    assert equal_minutes.recipe_of(SCRIPT["DRAFTERS"]["dflash8"], "dflash8", 0, arguments).dflash.block_size == 8


@pytest.fixture(scope="module")
def choices(folder):
    """The folder of the drafters, gone on with: three choices, one of which is held against another."""
    heads = [folder / f"out/eagle3-seed{seed}.json" for seed in (0, 1)]
    before = [head.stat().st_mtime_ns for head in heads]
    given = command(folder, heads=("--choices", "lk", "wide"))
    assert CHOICES["main"](given) == 0
    assert [head.stat().st_mtime_ns for head in heads] == before  # the drafters' heads are taken as they are
    return folder / "out"


def test_choices_are_held_against_the_drafters_heads(choices):
    found = json.loads((choices / "choices.json").read_text())
    assert [(row["choice"], row["draft"]) for row in found["rows"]] == [
        ("eagle3", "chain 3"), ("eagle3", "chain 3, T = 1"), ("lk", "chain 3"), ("lk", "chain 3, T = 1"),
        ("random", "chain 3"), ("wide", "chain 3"),
    ]  # fmt: skip

    def accepted(name, ending=""):
        parts = [json.loads((choices / f"{name}-seed{s}/answers-chain-3{ending}.json").read_text()) for s in (0, 1)]
        return [sum((part["rows"][n]["accepted"] for part in parts), []) for n in range(4)]

    rows = {(row["choice"], row["draft"]): row for row in found["rows"]}
    for name, against, ending, draft in (
        ("lk", "eagle3", "", "chain 3"), ("lk", "eagle3", "-t1", "chain 3, T = 1"), ("wide", "random", "", "chain 3"),
    ):  # fmt: skip
        row, other = rows[name, draft], rows[name, draft]["difference"]
        expected = paired_difference(accepted(against, ending), accepted(name, ending))
        assert other["against"] == against and other["prompts"] == 4
        assert (other["difference"], tuple(other["ci95"])) == (expected.difference, expected.ci95)
        assert row["acceptance_length"] == pooled_length(accepted(name, ending))
        assert other["by_seed"][0] == pytest.approx(row["by_seed"][0] - rows[against, draft]["by_seed"][0])
    assert load_recipe(choices / "lk-seed0" / "recipe.yaml").eagle.loss == "lk"
    speed = rows["lk", "chain 3"]["speed"]
    assert speed["over_the_other"] > 0 and speed["draft_cost"] > 0 and rows["eagle3", "chain 3"]["speed"] is None


def test_choices_are_told_and_drawn(choices):
    text = (choices / "choices.md").read_text()
    assert "| `lk` | eagle3 | chain 3, T = 1 | " in text and "| `wide` | random | chain 3 | " in text
    assert "; 4 prompts, answers" in text and "Times of 1 prompts" in text
    assert "commit" in text and "lk: the LK loss in place of KL" in text
    page = (choices / "choices.html").read_text()
    assert page.count("<figure>") >= 3 and "<td>wide</td>" in page
    for name in ("choices-differences", "choices-eagle3-1-first", "choices-random-1-first"):
        assert (choices / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_choices_go_on_and_refuse_another_recipe(choices, folder, monkeypatch, capsys):
    import modelopt_eagle.training
    import modelopt_eagle.validation

    asked, measure = [], modelopt_eagle.validation.measure_acceptance

    def watched(*given, **options):
        asked.append((options["sampling"].temperature, options["sample_drafts"], options["seed"]))
        return measure(*given, **options)

    monkeypatch.setattr(modelopt_eagle.validation, "measure_acceptance", watched)
    monkeypatch.setattr(modelopt_eagle.training, "train", lambda recipe: pytest.fail("it was trained already"))
    gone, text = choices / "lk-seed1/answers-chain-3-t1.json", (choices / "choices.md").read_text()
    before = gone.read_text()
    gone.unlink()
    given = command(folder, heads=("--choices", "lk", "wide"))
    assert CHOICES["main"](given) == 0
    assert asked == [(1.0, True, 1)] and gone.read_text() == before and (choices / "choices.md").read_text() == text
    assert CHOICES["main"]([*given, "eagle.loss_decay=2"]) == 2
    assert CHOICES["main"]([*given[:5], "--minutes", "0", *given[7:]]) == 2
    assert "error: " in capsys.readouterr().err
    states = [{"history": [], "evaluations": [{"drawn_length": 9.0}, {"drawn_length": last}]} for last in (1.25, 1.75)]
    monkeypatch.setitem(CHOICES["main"].__globals__, "states_of", lambda heads: states)  # as if rows were held out
    assert CHOICES["main"](given) == 0
    rows = json.loads((choices / "choices.json").read_text())["rows"]
    assert {row["expected_at_temperature_1"] for row in rows} == {1.5}


def test_every_choice_changes_the_quick_start_as_it_says(tmp_path):
    arguments = CHOICES["build_parser"]().parse_args(["--output", str(tmp_path)])
    table, plain = CHOICES["CHOICES"], tmp_path / "plain.yaml"
    for name, choice in table.items():
        recipe = equal_minutes.recipe_of(choice.contestant, name, 0, arguments)
        if name == "eagle3":
            dump_resolved(recipe, plain)
            drafter = equal_minutes.recipe_of(SCRIPT["DRAFTERS"][name], name, 0, arguments)
            assert same_recipe(drafter, plain) == []
        assert {text.split("=")[0] for text in choice.overrides} == {*same_recipe(recipe, plain)}, name
        assert CHOICES["with_bases"]([name])[0] == "eagle3" and choice.against in CHOICES["with_bases"]([name])
    assert CHOICES["readings_of"]("eagle3", ["eagle3", "lk", "ttt5"]) == [((3,), 0.0), ((3,), 1.0), ((5,), 0.0)]


def test_a_learning_curve_pools_the_seeds_over_minutes():
    def state(*points):
        return {"history": [{"elapsed": at, "accuracy": [a, b], "per_step": [1.0, c]} for at, a, b, c in points]}

    states = [state((60, 0.1, 0, 0), (600, 0.3, 0.2, 1)), state((66, 0.2, 0, 0), (1200, 0.5, 0.4, 1))]
    minutes, shares = CHOICES["learning_curve"](states, 0)
    assert minutes == pytest.approx([1.05, 10, 20]) and shares == pytest.approx([0.15, 0.3, 0.5])
    minutes, shares = CHOICES["learning_curve"](states, 1)  # without what was not trained yet
    assert minutes == pytest.approx([10, 20]) and shares == pytest.approx([0.2, 0.4])
