"""The serving check's judgement, with a stand-in for the engine: a script that answers what it is told to."""

import json
import stat
import sys
from pathlib import Path

import pytest

from modelopt_eagle.cli.main import run_command
from modelopt_eagle.decoding import PseudoSpeculativeGenerator
from modelopt_eagle.errors import CheckpointError, ExportError
from modelopt_eagle.export import export_checkpoint
from modelopt_eagle.export.serving import (
    RUNNERS,
    check_serving,
    engine_environment,
    first_difference,
    judge,
    per_position,
    run_engine,
)
from modelopt_eagle.target.tiny import make_tiny_target

from .conftest import build_head

STAND_IN = """#!{python}
import json, sys
job = json.load(open(sys.argv[2]))
answers = json.load(open({answers!r}))
assert job["dtype"] == "float32" and job["num_speculative_tokens"] == 3, job
if answers.get("crash"):
    print("the engine could not allocate its cache")
    sys.exit(3)
answer = answers["drafted" if job["draft"] else "plain"]
json.dump({{"engine_version": "0", "seconds": 1.0, **answer}}, open(sys.argv[3], "w"))
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A tiny target, an export for it, prompts, and what our own generator makes of them."""
    root = tmp_path_factory.mktemp("served")
    target = make_tiny_target(root / "target")
    identity = target.identity()
    head = build_head(
        hidden_size=64, target_hidden_size=64, vocab_size=256, draft_vocab_size=128, own_embedding=False,
        tokenizer_hash=identity["tokenizer_hash"],
    )  # fmt: skip
    export_checkpoint(head, None, root / "export", target=target)
    rows = [{"id": f"p{n}", "category": "all", "turns": [f"Say {n}."]} for n in range(3)]
    (root / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    encoded = [
        target.tokenizer(
            target.tokenizer.apply_chat_template(
                [{"role": "user", "content": row["turns"][0]}], tokenize=False, add_generation_prompt=True
            ),
            add_special_tokens=False,
        )["input_ids"]
        for row in rows
    ]
    ours = PseudoSpeculativeGenerator(target, head, num_steps=3).generate(encoded, max_new_tokens=12)
    answer = {"token_ids": ours.tokens, "drafts": ours.steps, "accepted_per_position": ours.accepted_per_position}
    return root, {"plain": answer, "drafted": answer}


def engine(root, answers) -> Path:
    (root / "answers.json").write_text(json.dumps(answers))
    script = root / "engine"
    script.write_text(STAND_IN.format(python=sys.executable, answers=str(root / "answers.json")))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


def run(root, answers, **options):
    return check_serving(
        root / "export", str(root / "target"), engine_python=engine(root, answers), prompts=root / "prompts.jsonl",
        max_new_tokens=12, say=lambda line: None, **options,
    )  # fmt: skip


def test_an_engine_that_agrees_passes(served):
    root, answers = served
    report = run(root, answers)
    assert report.passed and report.divergences == [] and report.per_position == report.our_per_position
    assert report.prompts == 3 and report.drafts == report.our_drafts and "as it was trained" in report.table()
    assert "those of 0.32.0, not of 0" in report.table()  # B65: the engine is not the one whose rules are known
    assert json.loads(json.dumps(report.to_dict()))["passed"] is True


def changed(answers, **drafted):
    return {**answers, "drafted": {**answers["drafted"], **drafted}}


def test_other_acceptance_other_text_or_no_draft_fail(served):
    root, answers = served
    counts = [count + 2 for count in answers["drafted"]["accepted_per_position"]]
    report = run(root, changed(answers, accepted_per_position=counts))
    assert (
        not report.passed and "acceptance at position 1" in report.failures[0] and "NOT SERVED RIGHT" in report.table()
    )
    texts = [list(text) for text in answers["drafted"]["token_ids"]]
    texts[1][4] = (texts[1][4] + 7) % 256
    report = run(root, changed(answers, token_ids=texts))
    assert not report.passed and [d.prompt for d in report.divergences] == ["p1", "p1"]
    assert report.divergences[0].position == 4 and not report.divergences[0].is_tie
    report = run(root, changed(answers, drafts=0, accepted_per_position=[]))
    assert any("did not use the head" in failure for failure in report.failures)


def test_a_tie_is_named_and_does_not_fail(served, monkeypatch):
    root, answers = served
    monkeypatch.setattr("modelopt_eagle.export.serving.TIE", 1e9)
    texts = [list(text) for text in answers["drafted"]["token_ids"]]
    texts[0][2] = (texts[0][2] + 1) % 256
    report = run(root, changed(answers, token_ids=texts))
    assert report.passed and report.divergences[0].is_tie and "tie: prompt p0, token 2" in report.table()


def test_what_the_engine_said_last_is_shown_when_it_fails(served):
    root, answers = served
    with pytest.raises(ExportError, match="(?s)exit code 3.*could not allocate its cache"):
        run(root, {"crash": True})
    with pytest.raises(ExportError, match="setup_vllm_cpu.sh"):
        check_serving(root / "export", str(root / "target"), engine_python=root / "nowhere")
    with pytest.raises(ExportError, match="cannot be run here"):
        check_serving(root / "export", str(root / "target"), engine="sglang")
    with pytest.raises(ExportError, match="no prompt of .* tokens long"):
        run(root, answers, num_speculative_tokens=2030)


def test_a_head_of_another_tokenizer_is_refused_before_the_engine_starts(served, tmp_path):
    root, answers = served
    head = build_head(hidden_size=64, target_hidden_size=64, vocab_size=256, draft_vocab_size=128)
    export_checkpoint(head, None, tmp_path / "other")
    with pytest.raises(CheckpointError, match="another tokenizer"):
        check_serving(tmp_path / "other", str(root / "target"), engine_python=engine(root, answers))


def test_the_command_prints_a_verdict_and_returns_it(served, capsys, tmp_path):
    root, answers = served
    given = ["--export_path", root / "export", "--base_model", root / "target", "--max_new_tokens", "12",
             "--engine-python", engine(root, answers), "--prompts", root / "prompts.jsonl",
             "--json", tmp_path / "out/serving.json"]  # fmt: skip
    given = [str(part) for part in given]
    assert run_command("check_serving", given) == 0
    assert "verdict" in capsys.readouterr().out and json.loads((tmp_path / "out/serving.json").read_text())["passed"]
    engine(root, changed(answers, drafts=0, accepted_per_position=[]))
    assert run_command("check_serving", given) == 1
    assert run_command("check_serving", [*given, "--num_samples", "0"]) == 2
    assert "at least 1" in capsys.readouterr().err


def test_small_parts():
    assert first_difference([1, 2], [1, 2]) is None and first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1]) == 1
    assert per_position([4, 2], 8, 3) == [0.5, 0.25, 0.0] and per_position([], 0, 2) == [0.0, 0.0]
    assert judge([0.5], [0.509], 10, [], 0.01) == [] and judge([0.5], [0.511], 10, [], 0.01)


def test_the_engines_environment_keeps_what_the_user_set(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libiomp5.so").write_text("")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    made = engine_environment(tmp_path / "bin/python")
    assert made["LD_PRELOAD"].endswith("libiomp5.so") and made["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    monkeypatch.setenv("LD_PRELOAD", "mine.so")
    assert engine_environment(tmp_path / "bin/python")["LD_PRELOAD"] == "mine.so"


FAKE_VLLM = """
from types import SimpleNamespace as N
__version__ = "fake"
class SamplingParams:
    def __init__(self, **options):
        self.options = options
class LLM:
    count = 0
    def __init__(self, **options):
        assert options["speculative_config"]["method"] == "eagle3" and options["dtype"] == "float32", options
    def generate(self, prompts, sampling, use_tqdm):
        LLM.count += len(prompts)
        make = lambda prompt: N(outputs=[N(token_ids=prompt["prompt_token_ids"][:1], text="x", logprobs=None)])
        return [make(prompt) for prompt in prompts]
    def get_metrics(self):
        return [N(name="vllm:spec_decode_num_drafts", value=LLM.count),
                N(name="vllm:spec_decode_num_draft_tokens", value=3 * LLM.count),
                N(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=[LLM.count, 0, 0])]
"""


def test_the_runner_counts_only_the_timed_requests(tmp_path, monkeypatch):
    (tmp_path / "vllm.py").write_text(FAKE_VLLM)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    job = {"model": "m", "draft": "d", "prompts": [[5], [6]], "max_new_tokens": 1, "num_speculative_tokens": 3,
           "dtype": "float32", "max_model_len": 9, "batch_size": 2}  # fmt: skip
    result = run_engine(python, "vllm", job)
    assert result["drafts"] == 2 and result["draft_tokens"] == 6 and result["accepted_per_position"] == [2, 0, 0]
    assert result["token_ids"] == [[5], [6]] and result["engine_version"] == "fake"
    assert RUNNERS["vllm"].is_file()
