"""``scripts/benchmark/drafters.py``: trains, answers, times, goes on where it ended, and adds its parts up."""

import json
import runpy
from pathlib import Path

import pytest

from modelopt_eagle.common.acceptance import pooled_length

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "benchmark" / "drafters.py"))
main, recipe_of, build_parser = (SCRIPT[name] for name in ("main", "recipe_of", "build_parser"))


def command(folder, *more):
    return [
        "--output", str(folder / "out"), "--drafters", "eagle3", "medusa", "--minutes", "0.004",
        "--base_model", str(folder / "target"), "--data", str(folder / "rows.jsonl"), "--prompts",
        str(folder / "prompts.jsonl"), "--num_samples", "4", "--max_new_tokens", "12", "--turns", "1",
        "--speedup_prompts", "1", "--seeds", "0", "1", *more,
        "--set", "eagle.draft_vocab_size=64", "training.batch_size=4",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from modelopt_eagle.target.tiny import make_tiny_target
    from tests.training.runs import write_conversations

    root = tmp_path_factory.mktemp("drafters")
    make_tiny_target(root / "target")
    write_conversations(root / "rows.jsonl", 16)
    rows = [{"id": f"p{n}", "category": "ab"[n % 2], "turns": [f"say {n}"]} for n in range(4)]
    (root / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert main(command(root)) == 0
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
    assert "0.004 minutes of processor time" in text and "| drafter | a | b |" in text
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
    for name in SCRIPT["DRAFTERS"]:
        recipe = recipe_of(name, 1, arguments)
        assert recipe.training.seed == 1 and recipe.training.time_budget_clock == "processor" and SCRIPT["PLANS"][name]
        assert name.startswith(recipe.drafter.algorithm)
    assert recipe_of("dflash8", 0, arguments).dflash.block_size == 8
