"""``scripts/ar_validate.py`` from its command line to its exit code."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from modelopt_eagle.cli.main import run_command
from modelopt_eagle.export import export_checkpoint
from modelopt_eagle.target.tiny import make_tiny_target

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
        (["--engine_options", "none.json", "--topk", "2"], "leave --mode"),
    ],
)
def test_bad_input_is_said_without_a_traceback(folders, capsys, arguments, words):
    assert run_command("ar_validate", command(folders, *arguments)) == 2
    assert words in capsys.readouterr().err


def test_missing_base_model_is_the_heads_own(folders, capsys):
    arguments = command(folders, "--speedup_prompts", "0", "--num_samples", "1")
    arguments = [*arguments[:2], *arguments[4:]]
    assert run_command("ar_validate", arguments) == 2  # the export records a name, not where this machine keeps it
    assert "target" in capsys.readouterr().err
