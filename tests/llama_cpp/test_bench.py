"""A bench of a real llama.cpp, started with and without a head: its counters are our generator's, to a draft."""

import json

import torch

from modelopt_eagle.cli.main import run_command
from modelopt_eagle.data import Message, render_text
from modelopt_eagle.decoding import PseudoSpeculativeGenerator
from modelopt_eagle.export import export_checkpoint
from modelopt_eagle.target import load_target
from modelopt_eagle.target.tiny import make_tiny_target
from tests.conftest import LLAMA_CPP, python_of
from tests.decoding.heads import learn_answers, make_head
from tests.llama_cpp.words import with_words

QUESTIONS = ["Say one.", "And two?", "Three!", "Which is four?"]
TOKENS, STEPS = 24, 3


def as_it_counts(output):
    """Our rounds as the server drafts them: no more than are still asked for, and none where that is nothing.

    Returns:
        rounds, drafted tokens, and the rounds that accepted at least so many.
    """
    rounds, drafted, positions = 0, 0, [0] * STEPS
    for accepted in output.accepted_lengths:
        known = 1  # the prompt's own pass gave it
        for count in accepted:
            room = min(STEPS, TOKENS - known - 1)
            if room > 0:
                rounds, drafted = rounds + 1, drafted + room
                for place in range(min(count, room)):
                    positions[place] += 1
            known += count + 1
    return rounds, drafted, positions


def plain_text(target):
    """Make it write letters alone: the server breaks off answers that are no UTF-8."""
    words = target.tokenizer.convert_ids_to_tokens(range(len(target.tokenizer)))
    letters = {number for number, word in enumerate(words) if len(word) == 1 and word.isascii() and word.isalnum()}
    with torch.no_grad():
        target.model.lm_head.weight[sorted(set(range(target.vocab_size)) - letters)] = 0  # [V,H]


def test_acceptance_of_a_started_server_is_our_generators(tmp_path, capsys):
    make_tiny_target(tmp_path / "target")
    target = load_target(tmp_path / "target")
    plain_text(target)
    target.model.save_pretrained(tmp_path / "target")
    with_words(target, tmp_path / "target", tmp_path / "words.gguf")
    tokenizer = target.tokenizer
    texts = [render_text(tokenizer, [Message("user", q)], add_generation_prompt=True) for q in QUESTIONS]
    encoded = [list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    head = learn_answers(target, make_head(target), encoded, length=TOKENS, updates=60)
    head.config.tokenizer_hash = None  # of the file's tokenizer it is another one, with the same words
    export_checkpoint(head, None, tmp_path / "export")
    rows = [{"task_id": f"T/{n}", "prompt": question} for n, question in enumerate(QUESTIONS)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = {
        "url": "started", "engine": "llama.cpp", "engine_python": python_of(LLAMA_CPP), "export_path":
        tmp_path / "export", "base_model": tmp_path / "words.gguf", "prompts": tmp_path / "tasks.jsonl",
        "max_new_tokens": TOKENS, "num_speculative_tokens": STEPS, "output": tmp_path / "bench.json",
    }  # fmt: skip
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    code = run_command("bench", [*words, "--concurrency", "1", "2"])
    print(capsys.readouterr().out)
    found = json.loads((tmp_path / "bench.json").read_text())
    assert code == 0 and found["whole"] and found["notes"] == [], found["notes"]
    ours = PseudoSpeculativeGenerator(target, head, num_steps=STEPS).generate(encoded, max_new_tokens=TOKENS)
    rounds, drafted, positions = as_it_counts(ours)
    assert positions[0] > 0.3 * rounds  # a wrong head would be seen
    plain, headed = found["sides"]
    assert (headed["engine"], headed["version"]) == ("llama_cpp", "b10894-pypi")
    for without, row in zip(plain["rows"], headed["rows"], strict=True):
        acceptance = row["acceptance"]
        if row["concurrency"] == 1:  # of several at a time this build of the server drafts otherwise, see docs/bench.md
            assert (acceptance["drafts"], acceptance["drafted"]) == (rounds, drafted)
            assert acceptance["accepted_per_position"] == positions and acceptance["accepted"] == sum(positions)
        assert without["acceptance"]["drafts"] == 0
        for each in (without, row):
            assert each["answered"] == len(QUESTIONS) and each["prompt_tokens_from_cache"] == 0
            assert each["completion_tokens"] == sum(map(len, ours.tokens)) == each["tokens_counted_by_server"]
            assert each["prompt_tokens"] == sum(map(len, encoded))
