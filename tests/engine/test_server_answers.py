"""Answers by a real ``vllm serve`` on a CPU: the target's own, in order, resumed after a kill, learned as written."""

import json
import subprocess
import time

import pytest

from modelopt_eagle.data import prepare_dataset
from modelopt_eagle.decoding import PlainGenerator
from modelopt_eagle.serving.engine_server import serve_engine
from modelopt_eagle.target.gguf import convert_quickstart
from tests.features.serving import command

QUESTIONS = ["Count to five.", "Name a colour.\n\n", "What is rain?", "Say yes.", "Which sea is salty?", "Why?"]
TOKENS = 12


@pytest.fixture(scope="module")
def server(engine_python):
    """Its address, once it answers."""
    job = {"model": str(convert_quickstart()), "served_name": "quick", "dtype": "float32", "max_model_len": 512}
    with serve_engine(engine_python, "vllm", {**job, "batch_size": 8}) as url:
        yield url


def asking(server, prompts, output):
    line = command("synthesize-answers", "--server", server, "--input", prompts, "--output", output,
                   "--max_new_tokens", TOKENS, "--concurrency", 1)  # fmt: skip
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_answers_of_a_real_server_killed_in_the_middle(server, target, tmp_path):
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [question, "And then?"]}) + "\n" for question in QUESTIONS))
    killed = asking(server, prompts, output)
    until = time.monotonic() + 120
    while not output.is_file() or len(output.read_text().splitlines()) < 2:
        assert killed.poll() is None and time.monotonic() < until, killed.communicate()[0]
        time.sleep(0.02)
    killed.kill()
    killed.wait()
    again = asking(server, prompts, output)
    said, _ = again.communicate(timeout=300)
    assert again.returncode == 0 and "0 failed" in said, said
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["messages"][0]["content"] for row in rows] == QUESTIONS  # in order, each once
    assert all("token_ids" in row["messages"][1] for row in rows)
    data = prepare_dataset(target.tokenizer, output, end_token_ids=target.end_token_ids)
    assert not data.report.dropped and data.report.read == len(QUESTIONS)
    generator = PlainGenerator(target)
    for row in data.rows:
        start = row.prompt_length
        ours = generator.generate([row.input_ids[:start]], TOKENS, eos_token_id=list(target.end_token_ids)).tokens[0]
        assert row.input_ids[start : start + len(ours)] == ours  # greedy in float32: the engine's ids are the target's
        assert all(row.supervised[start : start + len(ours)])
