"""The serving check's judgement, with a stand-in for the engine: a script that answers what it is told to."""

import json
import shutil
import stat
import sys
from pathlib import Path

import pytest
import torch

from modelopt_eagle.cli.main import run_command
from modelopt_eagle.decoding import PseudoSpeculativeGenerator
from modelopt_eagle.errors import CheckpointError, ExportError
from modelopt_eagle.export import export_checkpoint, load_draft
from modelopt_eagle.serving.check import (
    RUNNERS,
    ServingCheck,
    check_serving,
    engine_environment,
    find_engine_python,
    first_difference,
    judge,
    per_position,
    run_engine,
)
from modelopt_eagle.serving.proposals import ProposalCount, compare_proposals
from modelopt_eagle.target.tiny import make_tiny_target
from modelopt_eagle.training import rollout
from tests.export.conftest import build_head

STAND_IN = """#!{python}
import json, sys
job = json.load(open(sys.argv[2]))
answers = json.load(open({answers!r}))
assert job["dtype"] == "float32" and job["num_speculative_tokens"] == 3, job
open({answers!r} + ".log", "a").write(f"{{job['draft']}}\\n")
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
    (root / "answers.json.log").write_text("")
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
    monkeypatch.setattr("modelopt_eagle.serving.check.TIE", 1e9)
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


def test_a_head_of_another_vocabulary_or_no_head_is_refused(served, tmp_path):
    root, answers = served
    export_checkpoint(build_head(tokenizer_hash=None), None, tmp_path / "small")
    for export, options, error, words in (
        (tmp_path / "small", {}, CheckpointError, "vocabulary of 64 tokens, the target has 256"),
        (tmp_path / "nowhere", {}, CheckpointError, "nowhere"),
        (tmp_path / "nowhere", {"checkpoint": root / "export"}, ExportError, "holds no config.json"),
    ):
        with pytest.raises(error, match=words):
            check_serving(
                export, str(root / "target"), engine_python=engine(root, answers), say=lambda line: None, **options
            )
    assert (root / "answers.json.log").read_text() == ""  # the engine was never started


def test_the_run_without_a_head_serves_several_heads(served):
    root, answers = served
    check = ServingCheck(
        str(root / "target"), engine_python=engine(root, answers), prompts=root / "prompts.jsonl", max_new_tokens=12,
        say=lambda line: None,
    )  # fmt: skip
    assert check.check(root / "export").passed and check.check(root / "export").passed
    assert (root / "answers.json.log").read_text().splitlines() == ["None", *[str(root / "export")] * 2]
    # vLLM stops drafting, for the whole batch, where one request is within two drafts of the window
    assert check._job["max_model_len"] > max(map(len, check.prompts)) + 12 + 2 * 3


def test_an_export_is_held_against_the_checkpoint(served, tmp_path):
    """The engine gets the folder as it is; ours is the head as trained, so a fault of the export is seen."""
    root, answers = served
    folder = shutil.copytree(root / "export", tmp_path / "edited")
    config = json.loads((folder / "config.json").read_text())
    config["eagle_aux_hidden_state_layer_ids"] = [1, 2, 3]
    (folder / "config.json").write_text(json.dumps(config))
    wrong = changed(answers, accepted_per_position=[0, 0, 0], drafts=30)
    options = {"engine_python": engine(root, wrong), "prompts": root / "prompts.jsonl", "say": lambda line: None}
    with pytest.raises(CheckpointError, match="which were captured in training"):
        check_serving(folder, str(root / "target"), max_new_tokens=12, **options)
    report = check_serving(
        folder, str(root / "target"), max_new_tokens=12, checkpoint=root / "export", tolerance=0.0, **options
    )
    assert (root / "answers.json.log").read_text().splitlines()[-1] == str(folder)
    first = report.our_per_position[0]
    assert report.our_drafts == answers["plain"]["drafts"] and report.passed == (first == 0)


def test_prompts_that_do_not_fit_are_named(served, tmp_path):
    root, answers = served
    rows = [json.loads(line) for line in (root / "prompts.jsonl").read_text().splitlines()]
    rows.append({"id": "endless", "category": "all", "turns": ["word " * 2000]})
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    said = []
    report = check_serving(
        root / "export", str(root / "target"), engine_python=engine(root, answers), prompts=tmp_path / "prompts.jsonl",
        max_new_tokens=12, say=said.append,
    )  # fmt: skip
    line = "1 of the prompts, too long for the window, left out: endless"
    assert report.left_out == ["endless"] and report.prompts == 3 and line in said[0] and line in report.table()


def test_an_interpreter_without_the_engine_or_half_an_environment_is_named(served, tmp_path, monkeypatch):
    root, _ = served
    with pytest.raises(ExportError, match="has no vllm: make its environment with .*setup_vllm_cpu.sh"):
        check_serving(
            root / "export", str(root / "target"), engine_python=sys.executable, max_new_tokens=2,
            prompts=root / "prompts.jsonl", say=lambda line: None,
        )  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".venv-vllm").mkdir()
    (tmp_path / ".venv-vllm/.modelopt_eagle_begun").touch()
    with pytest.raises(ExportError, match="half-made"):
        find_engine_python(None)
    (tmp_path / ".venv-vllm/.modelopt_eagle_begun").unlink()
    with pytest.raises(ExportError, match="no interpreter"):
        find_engine_python(None)
    (tmp_path / ".venv-vllm/bin").mkdir()
    (tmp_path / ".venv-vllm/bin/python").touch()
    assert find_engine_python(None) == tmp_path / ".venv-vllm/bin/python"


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
    for wrong in (["--prompts", "nowhere.jsonl"], ["--export_path", "nowhere"], ["--checkpoint", "nowhere"],
                  ["--engine-python", "nowhere"], ["--base_model", str(root / "export")]):  # fmt: skip
        assert run_command("check_serving", [*given, *wrong]) == 2
        shown = capsys.readouterr()
        assert shown.err.splitlines()[-1].startswith("error: ") and "Traceback" not in shown.err and shown.out == ""


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


def test_prompts_are_rendered_by_a_template_that_is_given(served, tmp_path):
    root, answers = served
    (tmp_path / "plain.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    options = {"engine_python": engine(root, answers), "prompts": root / "prompts.jsonl", "say": lambda line: None}
    own = ServingCheck(str(root / "target"), max_new_tokens=12, **options)
    given = ServingCheck(str(root / "target"), max_new_tokens=12, chat_template=tmp_path / "plain.jinja", **options)
    assert given.target.tokenizer.decode(given.prompts[0]) == "Say 0." and len(own.prompts[0]) > len(given.prompts[0])


def first_tokens(target, head, ids):
    """``[S]``: what the head drafts first when all tokens up to i+1 are known, by the rollout of training."""
    ids = torch.tensor([ids])
    aux = target.features(ids, None, head.config.aux_layer_ids).aux_hidden
    logits = rollout(head, target.embedding(ids), aux, steps=1).logits(0)[0]  # [S,Vd]
    return head.vocab.to_target(logits.argmax(-1)).tolist()


@torch.inference_mode()
def test_drafted_tokens_are_held_against_the_heads_own_one_by_one(served):
    root, _ = served
    target, head = make_tiny_target(root / "again"), load_draft(root / "export")
    texts = [[5, 9, 17, 33, 65, 7, 70, 12], [80, 81, 82, 83, 84, 85]]
    drafts = [
        [place, known, [first_tokens(target, head, text)[known - 2]]]
        for place, text in enumerate(texts)
        for known in range(2, len(text) + 1)
    ]
    assert len({tokens[0] for *_, tokens in drafts}) > 2
    assert compare_proposals(target, head, texts, drafts, 1) == ProposalCount(12, 12)
    drafts[3][2][0] += 1
    assert compare_proposals(target, head, texts, drafts, 1) == ProposalCount(12, 11)
    longer = [[place, known, [*tokens, 0, 0, 0]] for place, known, tokens in drafts[:3]]
    found = compare_proposals(target, head, texts, longer, 1)  # an engine that drafts more than it was told
    assert (found.compared, found.equal) == (12, 3)


def test_other_drafted_tokens_fail_and_unseen_ones_are_said(served):
    root, answers = served
    unseen = run(root, answers)
    assert unseen.passed and "drafted tokens were not seen one by one" in unseen.table()
    report = run(root, changed(answers, proposals=[[0, 8, [1, 2, 3]], [1, 8, [1, 2, 3]]]))
    assert report.proposals == 6 and not report.passed and "6 drafted tokens are not the head's" in report.failures[-1]
    assert "not seen one by one" not in report.table()


@pytest.mark.parametrize("tolerance", [float("nan"), -0.1, 1.0])
def test_a_tolerance_that_would_pass_everything_is_refused(served, tolerance):
    root, answers = served
    with pytest.raises(ExportError, match="tolerance of at least 0 and below 1"):
        run(root, answers, tolerance=tolerance)


def test_prompts_are_rendered_as_the_heads_rows_were(served, tmp_path, monkeypatch):
    """With the head's arguments, and all that a prompt brings."""
    root, _ = served[0], served[1]
    template = (
        "{{ tools | length if tools else 'no' }} tools, {{ mood }}. {% for m in messages %}{{ m.content }}{% endfor %}"
    )
    (tmp_path / "template.jinja").write_text(template)
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {}}}
    row = {"id": "a", "turns": ["And now?"], "system": "Be brief.", "tools": [tool]}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(row))
    head = load_draft(root / "export")
    head.config.extra["template_arguments"] = {"mood": "calm"}
    export_checkpoint(head, None, tmp_path / "export")
    asked = []

    def check(self, *given, **named):
        asked.extend(map(self.target.tokenizer.decode, self.prompts))

    monkeypatch.setattr(ServingCheck, "check", check)
    check_serving(
        tmp_path / "export", str(root / "target"), engine_python=sys.executable, prompts=tmp_path / "prompts.jsonl",
        chat_template=tmp_path / "template.jinja",
    )  # fmt: skip
    assert asked == ["1 tools, calm. Be brief.And now?"]
