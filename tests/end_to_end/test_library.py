"""The package as a library: its names, a whole run over what a program holds, the programs in the documentation."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import modelopt_eagle
from modelopt_eagle import load_draft, run
from modelopt_eagle.target import load_target
from tests.training.runs import write_conversations

ROOT = Path(__file__).parents[2]
SECTIONS = {
    "training": {"epochs": 1, "max_steps": 2, "batch_size": 4, "report_to": "none"},
    "eagle": {"draft_vocab_size": 64},
    "validation": {"num_samples": 2, "max_new_tokens": 6, "speedup_prompts": 1, "ar_lower_bound": 4.5},
}  # fmt: skip


def recipe(folder):
    return {**SECTIONS, "training": {**SECTIONS["training"], "output_dir": str(folder)}}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    file = write_conversations(tmp_path_factory.mktemp("data") / "rows.jsonl", 12)
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_names_of_the_package_are_there_and_cost_nothing_until_asked_for():
    assert set(modelopt_eagle.__all__) <= set(dir(modelopt_eagle))
    for name in modelopt_eagle.__all__:
        assert callable(getattr(modelopt_eagle, name)), name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = modelopt_eagle.nothing
    code = "import sys, modelopt_eagle; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert (Path(modelopt_eagle.__file__).parent / "py.typed").is_file()


def test_a_whole_run_over_a_target_and_rows_in_memory(tiny_target_dir, rows, tmp_path, capfd, monkeypatch):
    target = load_target(tiny_target_dir)

    def never(*args, **kwargs):
        raise AssertionError("the target was loaded although it was given")

    monkeypatch.setattr("modelopt_eagle.target.load_target", never)
    monkeypatch.setattr("modelopt_eagle.target.load_target_tables", never)
    seen = []
    capfd.readouterr()
    result = run(recipe(tmp_path / "run"), target, rows, on_step=seen.append, quiet=True)
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err == ""
    assert result.training.steps == 2 and [metrics["step"] for metrics in seen] == [1, 2]
    written = json.loads((tmp_path / "run" / "report" / "acceptance.json").read_text())
    assert result.acceptance == written and 1 <= result.acceptance_length <= 4 and result.below_bound
    head = load_draft(result.export_path, tokenizer_hash=target.identity().tokenizer_hash)
    best = load_draft(result.training.best_checkpoint)
    assert torch.equal(head.fc.weight, best.fc.weight)
    assert "rows given in Python; 12 conversations read" in (result.export_path / "README.md").read_text()

    monkeypatch.setattr("modelopt_eagle.validation.measure_acceptance", never)
    monkeypatch.setattr("modelopt_eagle.export.export_checkpoint", never)
    again = run(recipe(tmp_path / "run"), target, rows)
    assert again.acceptance == written and "exported already" in capfd.readouterr().err


def test_a_run_that_the_callback_stops_is_neither_measured_nor_exported(tiny_target, rows, tmp_path):
    stopped = run(recipe(tmp_path / "run"), tiny_target, rows, on_step=lambda metrics: True, quiet=True)
    assert not stopped.training.finished and stopped.acceptance is None and stopped.export_path is None
    assert stopped.acceptance_length is None and not stopped.below_bound
    assert run(recipe(tmp_path / "run"), tiny_target, rows, quiet=True).training.finished


def test_the_program_of_the_page_runs(tiny_target_dir, tmp_path):
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "library.md").read_text(), flags=re.S)
    lines = [line for line in program.splitlines() if line.strip()]
    assert len(lines) <= 10
    names = f"NAME, FOLDER = {str(tiny_target_dir)!r}, {str(tmp_path / 'run')!r}\n"
    done = subprocess.run([sys.executable, "-c", names + program], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\d\.\d\d tokens a step, the loss went from \d+\.\d\d to \d+\.\d\d\n", done.stdout), (
        done.stdout
    )
    assert load_draft(tmp_path / "run" / "export").config.vocab_size == 256


def test_the_notebook_runs(tiny_target_dir, tmp_path, monkeypatch):
    """Each code cell in one namespace, as a kernel does; the parameters are those of the tiny target."""
    notebook = json.loads((ROOT / "docs" / "quickstart.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells), "clear the outputs before a commit"
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for cell in cells:
        exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
        if "parameters" in cell["metadata"].get("tags", ()):
            names |= {"NAME": str(tiny_target_dir), "ROWS": 12, "PROMPTS": 2}
    assert names["result"].finished and len(names["steps"]) >= 2
    assert 1 <= names["report"].acceptance_length <= 4
    assert load_draft(tmp_path / "ckpts" / "notebook" / "export").config.vocab_size == 256
