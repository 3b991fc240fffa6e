"""The serving check with llama.cpp, by a stand-in for its server that answers and logs what it is told to."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from modelopt_eagle.cli.main import run_command
from modelopt_eagle.decoding import PseudoSpeculativeGenerator
from modelopt_eagle.errors import ExportError, TargetError
from modelopt_eagle.export import convert_checkpoint, export_checkpoint
from modelopt_eagle.export.gguf import read_gguf_head
from modelopt_eagle.serving.check import ServingCheck, check_serving
from modelopt_eagle.serving.llama_cpp_runner import counted, cut, rounds_of
from modelopt_eagle.target import load_target
from modelopt_eagle.target.tiny import make_tiny_target
from modelopt_eagle.target.to_gguf import NAMES, by_pair, float32_gguf, gguf_name
from tests.export.conftest import build_head

SERVER = '''#!{python}
"""Answers requests in turn out of a file; logs as the real one does."""
import http.server, json, os, sys
given = dict(zip(sys.argv[1::1], sys.argv[2::1]))
told = json.load(open({told!r}))
for file in [given["--model"]] + ([given["--model-draft"]] if "--model-draft" in given else []):
    assert open(file, "rb").read(4) == b"GGUF", file
open({told!r} + ".args", "a").write(" ".join(sys.argv[1:]) + "\\n")
if told.get("crash"):
    print("error: unknown model architecture")
    sys.exit(7)
answers = [told["drafted" if "--model-draft" in given else "plain"][n] for n in [0, *range(len(told["plain"]))]]

class Handler(http.server.BaseHTTPRequestHandler):
    count = 0
    def log_message(self, *given):
        pass
    def send(self, data, code=200):
        body = json.dumps(data).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.send({{"build_info": "b10894-pypi"}})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["temperature"] == 0 and not asked["cache_prompt"] and asked["return_tokens"]
        answer, task = answers[Handler.count], Handler.count
        Handler.count += 1
        if told.get("dies") == task:
            print("GGML_ASSERT(t_layer_inp[il] != nullptr) failed", flush=True)
            os._exit(6)
        print(f"slot launch_slot_: id  0 | task {{task}} | processing task, is_child = 0")
        drafted = accepted = 0
        for known, tokens, right in answer["rounds"] if Handler.count > 1 else []:
            for place, token in enumerate(tokens):
                print(f"spec   draft:  - seq_id 0, draft candidate   0, pos   {{place}}: {{token:6d}} (   0.412) 'x'")
                print(f"spec   draft:  - seq_id 0, draft candidate   1, pos   {{place}}: {{token + 1:6d}} (   0.1) 'y'")
            print(f"slot handle_: id  0 | task {{task}} | generate_draft: id=0, #tokens={{known - 1}}, "
                  f"#draft={{len(tokens)}}, pos_next=1")
            print(f"slot update: id  0 | task {{task}} | add accepted tokens: sampled=5, ids.size={{right + 1}}, "
                  f"n_draft={{len(tokens)}}", flush=True)
            drafted, accepted = drafted + len(tokens), accepted + right
        timings = {{"prompt_ms": 100.0, "predicted_ms": 900.0, "draft_n": drafted + told.get("lies", 0),
                   "draft_n_accepted": accepted}}
        self.send({{"tokens": answer["tokens"], "content": "", "timings": timings}})

http.server.HTTPServer(("127.0.0.1", int(given["--port"])), Handler).serve_forever()
'''


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A tiny target, an export for it, prompts, and what a server would answer: our own text, with our own drafts."""
    root = tmp_path_factory.mktemp("served")
    target = make_tiny_target(root / "target")
    identity = target.identity()
    head = build_head(
        hidden_size=64, target_hidden_size=64, vocab_size=256, draft_vocab_size=128, own_embedding=False,
        tokenizer_hash=identity["tokenizer_hash"],
    )  # fmt: skip
    export_checkpoint(head, None, root / "export", target=target)
    rows = [{"id": f"p{n}", "category": "all", "turns": [f"Say {n}."]} for n in range(2)]
    (root / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (root / "bin").mkdir()
    (root / "bin/python").symlink_to(sys.executable)
    (root / "bin/llama-server").write_text(SERVER.format(python=sys.executable, told=str(root / "told.json")))
    (root / "bin/llama-server").chmod(0o755)
    prompts = [
        target.tokenizer(
            target.tokenizer.apply_chat_template(
                [{"role": "user", "content": row["turns"][0]}], tokenize=False, add_generation_prompt=True
            ),
            add_special_tokens=False,
        )["input_ids"]
        for row in rows
    ]
    generator = PseudoSpeculativeGenerator(target, head, num_steps=3)
    answers = []
    for prompt in prompts:
        longer = generator.generate([prompt], max_new_tokens=24).tokens[0]
        rounds, known = [], len(prompt) + 1
        while known - len(prompt) < min(17, len(longer)):
            right = [*longer, -1, -1, -1][known - len(prompt) : known - len(prompt) + 3]
            drafted = first_draft(target, head, prompt + longer[: known - len(prompt)])
            accepted = next((n for n in range(3) if drafted[n] != right[n]), 3)
            rounds.append([known, drafted, accepted])
            known += accepted + 1
        answers.append({"tokens": longer, "rounds": rounds})
    return root, {"plain": answers, "drafted": answers}


def first_draft(target, head, ids):
    """Three tokens drafted from scratch behind ``ids``, whose last token the target has not read."""
    from modelopt_eagle.draft.algorithm import algorithm_of
    from modelopt_eagle.draft.plan import DraftPlan

    with torch.inference_mode():
        known = torch.tensor([ids])
        aux = target.features(known, None, head.config.aux_layer_ids).aux_hidden
        loop = algorithm_of(head.config).drafter(head, target.embedding, DraftPlan.chain(3), None).loop(1, len(ids))
        loop.commit(known[:, 1:], aux[:, :-1], [0], [len(ids) - 1])
        return loop.draft([len(ids) - 1], known[:, -1])[0].tolist()


def run(root, told, export="export", **options):
    (root / "told.json").write_text(json.dumps(told))
    (root / "told.json.args").unlink(missing_ok=True)
    return check_serving(
        root / export, str(root / "target"), engine="llama.cpp", engine_python=root / "bin/python",
        prompts=root / "prompts.jsonl", max_new_tokens=12, say=lambda line: None, **options,
    )  # fmt: skip


def test_a_server_that_agrees_passes(served):
    root, told = served
    report = run(root, told)
    assert report.passed, report.table()
    assert report.engine_version == "10894" and report.drafts == report.our_drafts
    assert report.per_position == report.our_per_position and report.proposals == 3 * report.drafts
    assert report.proposals_equal == report.proposals
    lengths = [(min(12, len(answer["tokens"])), len(answer["tokens"])) for answer in told["drafted"]]
    assert report.new_tokens == sum(shown for shown, _ in lengths)
    plain, drafted = (root / "told.json.args").read_text().splitlines()
    assert "--model-draft" not in plain and "--spec-type draft-eagle3 --spec-draft-n-max 3" in drafted
    for line in (plain, drafted):
        assert "--parallel 1" in line and "--cache-type-k f32 --cache-type-v f32" in line and "--offline" in line
    assert "--spec-draft-p-min 0" in drafted and "--spec-draft-type-k f32" in drafted
    seconds = sum(0.1 + 0.9 * shown / all_of_it for shown, all_of_it in lengths)
    assert report.seconds_plain == pytest.approx(seconds)  # without what lies behind the answers


def test_other_acceptance_and_other_drafts_fail(served):
    root, told = served
    more = [{**answer, "rounds": [[k, t, 3] for k, t, _ in answer["rounds"]]} for answer in told["drafted"]]
    assert any("acceptance at position 1" in f for f in run(root, {**told, "drafted": more}).failures)
    others = [
        {**answer, "rounds": [[k, [(n + 1) % 256 for n in t], a] for k, t, a in answer["rounds"]]}
        for answer in told["drafted"]
    ]
    assert any("drafted tokens are not the head's" in f for f in run(root, {**told, "drafted": others}).failures)


def test_a_written_file_is_served_as_it_is(served, tmp_path):
    root, told = served
    convert_checkpoint(root / "export", root / "gguf", "gguf", overwrite=True)
    report = run(root, told, export="gguf", checkpoint=root / "export")
    assert report.passed and str(root / "gguf/draft.gguf") in (root / "told.json.args").read_text()


def test_a_server_that_ends_or_logs_otherwise_is_an_error_that_says_so(served):
    root, told = served
    with pytest.raises(ExportError, match=r"(?s)unknown model architecture.*ended with 7 when it started"):
        run(root, {**told, "crash": True})
    with pytest.raises(ExportError, match=r"(?s)t_layer_inp.*llama-server ended with 6 at a request"):
        run(root, {**told, "dies": 1})
    with pytest.raises(ExportError, match="writes another log than the one that was read"):
        run(root, {**told, "lies": 1})
    os.rename(root / "bin/llama-server", root / "bin/elsewhere")
    try:
        with pytest.raises(ExportError, match="has no llama_cpp: make its environment with `bash scripts/setup_llama"):
            run(root, told)
    finally:
        os.rename(root / "bin/elsewhere", root / "bin/llama-server")


def test_a_head_that_it_cannot_compute_and_wrong_files_are_refused_before_it_starts(served, tmp_path):
    root, told = served
    head = build_head(
        hidden_size=64, target_hidden_size=64, vocab_size=256, draft_vocab_size=128, own_embedding=False, fc_norm=True,
        tokenizer_hash=None,
    )  # fmt: skip
    export_checkpoint(head, None, root / "other")
    with pytest.raises(ExportError, match="llama.cpp 10894 would not serve this head as trained: it has no fc_norm"):
        run(root, told, export="other")
    with pytest.raises(ExportError, match="nowhere.gguf is no file"):
        run(root, told, target_gguf=tmp_path / "nowhere.gguf")
    with pytest.raises(ExportError, match="a GGUF file of the target is nothing vllm reads"):
        ServingCheck(str(root / "target"), target_gguf=tmp_path / "nowhere.gguf")
    assert not (root / "told.json.args").exists()


def test_the_command_knows_the_engine(served, tmp_path, capsys):
    root, told = served
    (root / "told.json").write_text(json.dumps(told))
    given = ["--export_path", str(root / "export"), "--base_model", str(root / "target"), "--engine", "llama.cpp"]
    given += ["--engine-python", str(root / "bin/python"), "--prompts", str(root / "prompts.jsonl")]
    assert run_command("check_serving", [*given, "--max_new_tokens", "12", "--json", str(tmp_path / "r.json")]) == 0
    assert "llama.cpp 10894" in capsys.readouterr().out
    assert json.loads((tmp_path / "r.json").read_text())["engine"] == "llama_cpp"


def test_rounds_behind_the_last_token_of_an_answer_are_left_out():
    job = {"num_speculative_tokens": 2, "max_new_tokens": 4, "stops": [9], "prompts": [[1, 2], [1, 2, 3]]}
    assert cut([5, 6, 7, 8, 4], job) == [5, 6, 7, 8] and cut([5, 9, 7], job) == [5, 9] and cut([], job) == []
    answers = [
        {"tokens": [5, 6, 7, 8, 4, 4], "timings": {"draft_n": 5, "draft_n_accepted": 3}},
        {"tokens": [5, 9, 7, 7], "timings": {"draft_n": 4, "draft_n_accepted": 1}},
    ]
    rounds = [[[3, [6, 7], 2], [6, [4, 4], 1], [8, [4], 0]], [[4, [9, 1], 1], [6, [7, 7], 0]]]
    found = counted(answers, rounds, job)
    assert found == {
        "drafts": 2, "draft_tokens": 4, "accepted_per_position": [2, 1],
        "proposals": [[0, 3, [6, 7]], [1, 4, [9, 1]]],
    }  # fmt: skip


def test_a_cut_draft_is_read_by_its_length():
    lines = [
        "slot launch_slot_: id  0 | task 4 | processing task, is_child = 0",
        "spec        draft:  - seq_id 0, draft candidate   0, pos   0:    617 (   0.2) ' a,",
        "' ",
        "spec        draft:  - seq_id 0, draft candidate   0, pos   1:   1240 (   0.9) 'b'",
        "slot handle_last_: id  0 | task 4 | generate_draft: id=0, #tokens=43, #draft=1, pos_next=43",
        "slot   operator(): id  0 | task 4 | add accepted tokens: sampled=1, ids.size=2, n_draft=1",
        "slot launch_slot_: id  0 | task 9 | processing task, is_child = 0",
    ]
    assert rounds_of(lines) == {"4": [[44, [617], 1]], "9": []}


def test_a_plain_llama_is_written_whole(served, tmp_path):
    root, _ = served
    target = load_target(root / "target")
    float32_gguf(target, root / "target", tmp_path / "t.gguf")
    fields, tensors = read_gguf_head(tmp_path / "t.gguf")
    state = target.model.state_dict()
    assert len(tensors) == len(state) and fields["general.architecture"] == "llama"
    assert fields["llama.vocab_size"] == len(fields["tokenizer.ggml.tokens"]) == 256
    assert fields["tokenizer.ggml.eos_token_id"] == target.end_token_ids[0]
    for name, tensor in state.items():
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
        assert torch.equal(tensors[gguf_name(name)], by_pair(tensor, heads) if heads else tensor), name
    assert gguf_name("model.layers.0.self_attn.q_proj.bias") is None and set(NAMES.values()) <= set(tensors)
    target.model.config.hidden_act = "gelu"
    with pytest.raises(TargetError, match="name the file with --target_gguf"):
        float32_gguf(target, root / "target", tmp_path / "u.gguf")
    assert not Path(tmp_path / "u.gguf").exists()
