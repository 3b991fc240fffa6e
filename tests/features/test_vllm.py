"""The offline vLLM engine on the quick-start target: two workers, one killed, dump the same rows as transformers.

Collected with ``--engine`` (``bash scripts/test.sh --engine``): see tests/conftest.py.
"""

import json
import os
import signal
import subprocess
import time

import pytest
import torch

from modelopt_eagle.data import prepare_dataset
from modelopt_eagle.features import OfflineSource, OnlineSource
from modelopt_eagle.features.dump import TargetBackEnd
from modelopt_eagle.serving.engine_server import engine_environment
from modelopt_eagle.target import load_target
from modelopt_eagle.target.gguf import convert_quickstart
from tests.features.serving import ROOT, SETTINGS

QUESTIONS = (
    ("Name three rivers.", "The Nile, the Amazon and the Danube are three rivers."),
    ("What is two plus two? Explain it to a child.", "Two plus two is four: take two apples, take two more, count."),
    ("Write hello world in Python.", "print('hello world')"),
    ("Tell me a long story about a fox.", "Once upon a time a fox lived at the edge of a wood. " * 12),
    ("And one about a hen.", "A hen lived there too. " * 8),
    ("Is it true?", "No."),
    ("Count to ten.", "One, two, three, four, five, six, seven, eight, nine, ten."),
    ("Which sea is the saltiest?", "The Dead Sea, which is a lake. " * 5),
)
LONGEST = 150


@pytest.fixture(scope="module")
def target():
    return load_target(convert_quickstart())


@pytest.fixture(scope="module")
def talks(tmp_path_factory):
    path = tmp_path_factory.mktemp("talks") / "talks.jsonl"
    rows = [
        {"id": f"talk-{n}", "messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for n, (q, a) in enumerate(QUESTIONS)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture(scope="module")
def rows(target, talks):
    return prepare_dataset(target.tokenizer, talks, max_length=LONGEST, end_token_ids=target.end_token_ids)


def worker(python, talks, folder, log, shard):
    """One dump as the user starts it; a shard file a row, one row at a time."""
    line = [str(python), str(ROOT / "collect_hidden_states" / "compute_hidden_states_vllm.py")]
    line += ["--model", str(convert_quickstart()), "--input-file", str(talks), "--output-dir", str(folder)]
    line += ["--dtype", "float32", "--target-dtype", "float32", "--max-length", str(LONGEST)]
    line += ["--shard", shard, "--shard-mib", "0.1", "--batch-tokens", "16"]
    with open(log, "w") as out:
        environment = engine_environment(python) | SETTINGS
        return subprocess.Popen(line, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)


def assert_same(ours, theirs, layers):
    assert ours.row_ids == theirs.row_ids and torch.equal(ours.input_ids, theirs.input_ids)
    assert torch.equal(ours.target_top1, theirs.target_top1)
    ours_by_layer = [*ours.aux_hidden[0].unflatten(-1, (layers, -1)).unbind(1), ours.final_hidden[0]]
    theirs_by_layer = [*theirs.aux_hidden[0].unflatten(-1, (layers, -1)).unbind(1), theirs.final_hidden[0]]
    for mine, other in zip(ours_by_layer, theirs_by_layer, strict=True):
        assert (mine - other).norm() / other.norm() < 1e-4


def test_dumps_equal_transformers_layer_by_layer_also_after_a_kill(engine_python, target, talks, rows, tmp_path):
    folder, logs = tmp_path / "store", (tmp_path / "log-0", tmp_path / "log-1")
    killed, second = (worker(engine_python, talks, folder, log, f"{n}/2") for n, log in enumerate(logs))
    until = time.monotonic() + 300
    manifest = folder / "manifest-0-of-2.json"
    while not (manifest.is_file() and json.loads(manifest.read_text())["shards"]):  # a shard that none names is no row
        assert killed.poll() is None and time.monotonic() < until, logs[0].read_text()[-3000:]
        time.sleep(0.01)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    first = worker(engine_python, talks, folder, logs[0], "0/2")
    for process, log in zip((first, second), logs, strict=True):
        assert process.wait(300) == 0, log.read_text()[-3000:]
    assert "rows of this worker are stored already" in logs[0].read_text()
    online = OnlineSource(target, rows)
    source = OfflineSource(folder, expected=TargetBackEnd(target).contract)
    assert source.lengths == online.lengths == rows.lengths
    for number in range(len(rows.rows)):
        ours, theirs = source.load([number]), online.load([number])
        theirs.final_hidden[(ours.final_hidden == 0).all(-1)] = 0  # the store keeps what is needed
        assert_same(ours, theirs, len(online.contract.aux_layer_ids))
