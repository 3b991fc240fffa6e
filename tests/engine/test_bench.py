"""A bench of a real vLLM on a CPU, started with and without a head: it counts what our generator does, to a draft."""

import json

import pytest

from modelopt_eagle.cli.main import run_command
from modelopt_eagle.data import Message, render_text
from modelopt_eagle.decoding import PseudoSpeculativeGenerator
from modelopt_eagle.export import export_checkpoint
from modelopt_eagle.target import load_target
from modelopt_eagle.target.tiny import make_tiny_target
from tests.decoding.heads import learn_answers, make_head

QUESTIONS = ["Say one.", "And two?", "Three!", "Which is four?", "Five, please.", "Six."]
TOKENS = 24


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A tiny target whose heads vLLM takes on a CPU, a head that knows its answers, and what ours makes of it."""
    root = tmp_path_factory.mktemp("served")
    make_tiny_target(root / "target", heads=2, kv_heads=1)
    target = load_target(root / "target")
    tokenizer = target.tokenizer
    texts = [render_text(tokenizer, [Message("user", q)], add_generation_prompt=True) for q in QUESTIONS]
    encoded = [list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    head = learn_answers(target, make_head(target), encoded, length=TOKENS, updates=60)
    export_checkpoint(head, None, root / "export", target=target)
    rows = [{"task_id": f"T/{n}", "prompt": question} for n, question in enumerate(QUESTIONS)]
    (root / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return root, PseudoSpeculativeGenerator(target, head, num_steps=3).generate(encoded, max_new_tokens=TOKENS)


def test_acceptance_of_a_started_engine_is_our_generators(served, engine_python, tmp_path, capsys):
    root, ours = served
    file, page = tmp_path / "bench.json", tmp_path / "bench.html"
    options = {
        "url": "started", "base_model": root / "target", "export_path": root / "export", "engine_python": engine_python,
        "prompts": root / "tasks.jsonl", "max_new_tokens": TOKENS, "output": file, "html": page,
    }  # fmt: skip
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    code = run_command("bench", [*words, "--concurrency", "1", "3"])
    print(out := capsys.readouterr().out)
    found = json.loads(file.read_text())
    assert code == 0 and found["whole"] and found["notes"] == [], found["notes"]
    plain, headed = found["sides"]
    assert (plain["name"], headed["name"], headed["engine"]) == ("without", "with", "vllm")
    new_tokens = sum(map(len, ours.tokens))
    assert ours.accepted_per_position[0] > 0.3 * ours.steps  # a wrong head would be seen
    for without, row in zip(plain["rows"], headed["rows"], strict=True):
        acceptance = row["acceptance"]
        assert (acceptance["drafts"], acceptance["accepted_per_position"]) == (ours.steps, ours.accepted_per_position)
        assert acceptance["accepted"] == sum(ours.accepted_per_position)
        assert without["acceptance"] is None and row["prompt_tokens_from_cache"] == 0
        for each in (without, row):
            assert each["answered"] == len(QUESTIONS) and each["completion_tokens"] == new_tokens
            assert each["tokens_counted_by_server"] == new_tokens and each["tokens_per_second"] > 0
            assert 0 < each["first_token"]["p50"] <= each["request"]["p50"]
        assert row["speedup"] == pytest.approx(row["tokens_per_second"] / without["tokens_per_second"])
    assert "acceptance length" in out and page.read_text().count("<svg") == 3
