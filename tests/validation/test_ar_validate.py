"""``scripts/ar_validate.py`` from its command line to its exit code."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from modelopt_eagle.cli import ar_validate, check_serving, diagnose
from modelopt_eagle.cli._options import output_file
from modelopt_eagle.cli.main import run_command
from modelopt_eagle.errors import DecodingError
from modelopt_eagle.export import export_checkpoint, load_draft
from modelopt_eagle.target.chat import chat_settings
from modelopt_eagle.target.tiny import make_tiny_target
from modelopt_eagle.training import train
from tests.training.runs import small_recipe, write_conversations

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folders(tmp_path_factory, good_head):
    """A saved target, the exported head, and a file of prompts in MT-Bench's format."""
    root = tmp_path_factory.mktemp("validate")
    target = make_tiny_target(root / "target")
    export_checkpoint(good_head, None, root / "head", target=target)
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["Say a word.", "And another."]},
        {"question_id": 82, "category": "math", "turns": ["Count to three, slowly."]},
    ]
    (root / "question.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def command(root, *more) -> list[str]:
    paths = ["--model_path", str(root / "head"), "--base_model", str(root / "target")]
    return [*paths, "--prompts", str(root / "question.jsonl"), "--max_new_tokens", "24", *more]


def test_script_prints_the_table_and_writes_both_reports(folders):
    out = folders / "out"
    arguments = ["--output", str(out / "acceptance.json"), "--html", str(out / "report.html"), "--speedup_prompts", "1"]
    run = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "ar_validate.py"), *command(folders, *arguments)],
        capture_output=True,
        text=True,
        cwd=folders,
    )
    assert run.returncode == 0, run.stderr
    for text in ("<|im_start|>user\nSay a word.<|im_end|>", "writing", "math", "all", "speed-up"):  # B142: first prompt
        assert text in run.stdout
    data = json.loads((out / "acceptance.json").read_text())
    assert data["prompts"] == 2 and len(data["per_position"]) == 3 and set(data["per_category"]) == {"writing", "math"}
    assert f"{data['acceptance_length']:.3f}" in run.stdout
    page = (out / "report.html").read_text()
    assert page.count("<svg") == 4 and "By position" in page and "&lt;|im_start|&gt;user" in page


@pytest.mark.parametrize(("word", "code"), [("on", 2), ("off", 0)])
def test_a_cuda_graph_needs_a_cuda_device(folders, capsys, tmp_path, monkeypatch, word, code):
    monkeypatch.chdir(tmp_path)
    more = ["--speedup_prompts", "0", "--num_samples", "1", "--device", "cpu", "--cuda-graph", word]
    assert run_command("ar_validate", command(folders, *more)) == code
    assert ("needs a head on a CUDA device, found cpu" in capsys.readouterr().err) is (code == 2)


def test_lower_bound_decides_the_exit_code(folders, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quick = ["--speedup_prompts", "0", "--num_samples", "1"]
    assert run_command("ar_validate", command(folders, *quick, "--ar_lower_bound", "1.0")) == 0
    assert run_command("ar_validate", command(folders, *quick, "--ar_lower_bound", "3.99")) == 1
    assert "below the bound of 3.99" in capsys.readouterr().out
    assert json.loads((tmp_path / "acceptance.json").read_text())["prompts"] == 1  # written without being asked


def test_tree_and_sweep(folders, capsys, monkeypatch):
    monkeypatch.setattr("modelopt_eagle.validation.sweep.CHAINS", (1, 3))
    monkeypatch.setattr("modelopt_eagle.validation.sweep.TREES", ((2, 3, 7), (1000, 3, 7)))
    out = folders / "sweep.json"
    arguments = [
        "--mode",
        "tree",
        "--topk",
        "2",
        "--steps",
        "4",
        "--num_nodes",
        "9",
        "--sweep",
        "--speedup_prompts",
        "1",
    ]
    page = folders / "tree.html"
    assert run_command("ar_validate", command(folders, *arguments, "--output", str(out), "--html", str(page))) == 0
    printed = capsys.readouterr().out
    data = json.loads(out.read_text())
    assert len(data["per_position"]) == 4  # --steps is the depth where --depth is not given
    assert len(data["sweep"]) == 3  # the tree that is wider than the draft vocabulary is left out
    speeds = [row["speedup"] for row in data["sweep"]]
    assert speeds == sorted(speeds, reverse=True)
    assert data["draft"] == {"mode": "tree", "topk": 2, "depth": 4, "num_nodes": 9}
    text = page.read_text()
    assert text.count("<svg") == 5 and "By depth" in text and "Best on this machine" in text
    assert "tree of topk 2, depth 4, 9 nodes" in text and "tree of topk 2, depth 4, 9 nodes" in printed
    shape = {key: value for key, value in data["sweep"][0].items() if key in ("mode", "num_steps", "topk")}
    assert data["best"] == {"mode": "plain"} or shape.items() <= data["best"].items()
    for row in data["sweep"]:
        assert f"{row['acceptance_length']:.3f}" in text and f"{row['acceptance_length']:.3f}" in printed
    assert "best on this machine" in printed and "tree, topk 2, depth 3, num_nodes 7" in printed


def test_an_engines_options_and_drawn_answers(folders, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    engine = tmp_path / "options.json"
    engine.write_text(
        '{"decoding_type": "Eagle3", "max_draft_len": 2, "use_dynamic_tree": true, "dynamic_tree_max_topK": 2, '
        '"max_batch_size": 4}'
    )
    drawn = ["--temperature", "0.8", "--top_k", "20", "--sample_drafts", "--seed", "5"]
    quick = ["--speedup_prompts", "0", "--num_samples", "2", "--max_new_tokens", "12"]
    assert run_command("ar_validate", command(folders, *quick, "--engine_options", str(engine), *drawn)) == 0
    data = json.loads((tmp_path / "acceptance.json").read_text())
    assert data["draft"] == {"mode": "tree", "topk": 2, "depth": 2, "num_nodes": 5}
    assert data["sampling"]["temperature"] == 0.8 and data["sampling"]["sample_drafts"] is True
    assert "answers drawn: temperature 0.8, top_k 20" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "0"], "--steps must be at least 1"),
        (["--topk", "2"], 'mode="tree"'),
        (["--mode", "tree"], "topk is missing"),
        (["--mode", "tree", "--topk", "2", "--num_nodes", "3"], r"[4, 11]"),
        (["--mode", "tree", "--topk", "9999"], "at most the draft vocabulary"),
        (["--ar_lower_bound", "0.5"], "at least 1"),
        (["--batch_size", "0"], "--batch_size"),
        (["--base_model", "no/such/folder"], "no such folder"),
        (["--num_samples", "0"], "at least 1"),
        (["--top_p", "0.9"], "need a --temperature above 0"),
        (["--sample_drafts"], "need a --temperature above 0"),
        (["--temperature", "-1"], "temperature must be finite"),
        (["--concurrent", "1"], "--concurrent takes numbers of at least 2"),
        (["--engine_options", "none.json"], "expected JSON or YAML"),
        (["--engine_options", "none.json", "--topk", "2"], "leave --topk out"),
        (["--engine_options", "none.json", "--mode", "tree", "--steps", "5"], "leave --mode, --steps out"),
    ],
)
def test_bad_input_is_said_without_a_traceback(folders, capsys, arguments, words):
    assert run_command("ar_validate", command(folders, *arguments)) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("command", [ar_validate, diagnose, check_serving])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_loaded(command, capsys, tmp_path):
    (tmp_path / "file").touch()
    parser = command.build_parser()
    written = [action for action in parser._actions if action.type is output_file]
    assert written and all(action.dest in ("output", "html", "json") for action in written)
    for action in written:
        for place, words in (
            (tmp_path, f"{tmp_path} is a folder: name a file in it"),
            (tmp_path / "file" / "sub" / "x", f"as {tmp_path / 'file'} is no folder that takes files"),
        ):
            with pytest.raises(SystemExit):
                parser.parse_args(["--model_path", "head", action.option_strings[0], str(place)])
            assert words in capsys.readouterr().err
    assert output_file(str(tmp_path / "new" / "sub" / "x.json")) == tmp_path / "new" / "sub" / "x.json"


def test_a_runs_own_target_is_found_where_its_recipe_says(folders, capsys, tmp_path, monkeypatch):
    """A head records the name of a local folder, not its place; an export elsewhere leaves only the name."""
    monkeypatch.chdir(tmp_path)
    data, target = write_conversations(tmp_path / "rows.jsonl", 24), tmp_path / "kept" / "local-target"
    make_tiny_target(target)
    recipe = small_recipe(target, data, tmp_path / "run", "training.max_steps=1")
    head = train(recipe).last_checkpoint
    export_checkpoint(load_draft(head), None, tmp_path / "run" / "export")
    export_checkpoint(load_draft(head), None, tmp_path / "elsewhere")
    quick = ["--prompts", str(folders / "question.jsonl"), "--max_new_tokens", "8", "--speedup_prompts", "0"]
    for place in (tmp_path / "run", head, tmp_path / "run" / "export"):
        assert run_command("ar_validate", ["--model_path", str(place), *quick]) == 0, place
    assert json.loads((tmp_path / "acceptance.json").read_text())["target"].endswith("local-target")
    words = "is what {} records of its target: if that is a folder of this machine, give it as --base_model FOLDER"
    for name in ("ar_validate", "diagnose"):
        assert run_command(name, ["--model_path", str(tmp_path / "elsewhere")]) == 2
        assert words.format(tmp_path / "elsewhere") in capsys.readouterr().err
    target.rename(tmp_path / "moved")
    assert run_command("ar_validate", ["--model_path", str(head), *quick]) == 2
    assert words.format(head) in capsys.readouterr().err
    assert run_command("ar_validate", ["--model_path", str(head), "--base_model", str(target), *quick]) == 2
    assert "records of its target" not in capsys.readouterr().err  # it is the caller's own word


def test_numbers_are_written_before_a_sweep_begins(folders, tmp_path, monkeypatch):
    def broken(*given, **named):
        raise DecodingError("the sweep stops")

    monkeypatch.setattr("modelopt_eagle.validation.sweep.sweep", broken)
    out = tmp_path / "kept.json"
    given = command(folders, "--speedup_prompts", "0", "--num_samples", "1", "--sweep", "--output", str(out))
    assert run_command("ar_validate", given) == 2
    assert json.loads(out.read_text())["prompts"] == 1


def test_template_arguments_may_be_taken_back(folders, tmp_path):
    """``{}`` is none, not the head's own."""
    head = load_draft(folders / "head")
    head.config.extra["template_arguments"] = {"enable_thinking": False}
    export_checkpoint(head, None, tmp_path / "head")
    for given, found in (([], {"enable_thinking": False}), (["--template_arguments", "{}"], {})):
        paths = ["--model_path", str(tmp_path / "head"), "--base_model", str(folders / "target")]
        target, _ = ar_validate.load_pair(ar_validate.build_parser().parse_args([*paths, *given]))
        assert chat_settings(target.tokenizer).arguments == found
