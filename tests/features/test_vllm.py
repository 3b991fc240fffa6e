"""The same rows from transformers and from a real vLLM, dumped and streamed, on the quick-start target.

Collected where ``.venv-vllm`` exists (``bash scripts/setup_vllm_cpu.sh`` makes it): see conftest.py.
"""

import json
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from modelopt_eagle.data import prepare_dataset
from modelopt_eagle.errors import StreamError
from modelopt_eagle.export.serving import engine_environment
from modelopt_eagle.features import OfflineSource, OnlineSource, StreamedSource
from modelopt_eagle.features.dump import TargetBackEnd, stop_ids
from modelopt_eagle.features.vllm_engine import free_port
from modelopt_eagle.target import load_target
from modelopt_eagle.target.convert import convert_quickstart

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / ".venv-vllm" / "bin" / "python"
QUESTIONS = (
    ("Name three rivers.", "The Nile, the Amazon and the Danube are three rivers."),
    ("What is two plus two? Explain it to a child.", "Two plus two is four: take two apples, take two more, count."),
    ("Write hello world in Python.", "print('hello world')"),
    ("Tell me a long story about a fox.", "Once upon a time a fox lived at the edge of a wood. " * 12),
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
    ends = stop_ids(target.model.generation_config, target.config)
    return prepare_dataset(target.tokenizer, talks, max_length=LONGEST, end_token_ids=ends)


def environment():
    settings = {"PYTHONPATH": str(ROOT), "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return engine_environment(ENGINE) | settings | {"HF_HUB_OFFLINE": "1"}


def assert_same(ours, theirs, layers):
    assert ours.row_ids == theirs.row_ids and torch.equal(ours.input_ids, theirs.input_ids)
    assert torch.equal(ours.target_top1, theirs.target_top1)
    ours_by_layer = [*ours.aux_hidden[0].unflatten(-1, (layers, -1)).unbind(1), ours.final_hidden[0]]
    theirs_by_layer = [*theirs.aux_hidden[0].unflatten(-1, (layers, -1)).unbind(1), theirs.final_hidden[0]]
    for mine, other in zip(ours_by_layer, theirs_by_layer, strict=True):
        assert (mine - other).norm() / other.norm() < 1e-4


def test_dump_equals_transformers_layer_by_layer(target, talks, rows, tmp_path):
    command = [str(ENGINE), str(ROOT / "collect_hidden_states" / "compute_hidden_states_vllm.py")]
    command += ["--model", str(convert_quickstart()), "--input-file", str(talks), "--output-dir", str(tmp_path)]
    command += ["--dtype", "float32", "--target-dtype", "float32", "--max-length", str(LONGEST)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    online = OnlineSource(target, rows)
    source = OfflineSource(tmp_path, expected=TargetBackEnd(target).contract)
    assert source.lengths == online.lengths == rows.lengths
    for number in range(len(rows.rows)):
        ours, theirs = source.load([number]), online.load([number])
        theirs.final_hidden[(ours.final_hidden == 0).all(-1)] = 0  # the store keeps what is needed
        assert_same(ours, theirs, len(online.contract.aux_layer_ids))


@contextmanager
def serving(log):
    port, feature_port = free_port(), free_port()
    command = [sys.executable, "-m", "modelopt_eagle.cli.main", "serve-features", "--model", str(convert_quickstart())]
    command += ["--engine-python", str(ENGINE), "--port", str(port), "--feature-port", str(feature_port)]
    command += ["--dtype", "float32", "--max-length", str(LONGEST)]
    with open(log, "w") as file:
        server = subprocess.Popen(command, env=environment(), stdout=file, stderr=subprocess.STDOUT)
    try:
        for _ in range(600):
            assert server.poll() is None, log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
                break
            except OSError:
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def test_streamed_equals_online_and_a_refusal_has_the_servers_words(target, rows, talks, tmp_path):
    online = OnlineSource(target, rows)
    layers = online.contract.aux_layer_ids
    with serving(tmp_path / "log") as url:
        for transport in ("shm", "tcp"):
            source = StreamedSource([url], rows, target, layers, transport=transport, timeout=60)
            batches = source.batches(0, batch_size=2, seed=3), online.batches(0, batch_size=2, seed=3)
            for ours, theirs in zip(*batches, strict=True):
                assert_same(ours, theirs, len(layers))
        whole = prepare_dataset(target.tokenizer, talks)  # one row is longer than the server takes
        source = StreamedSource([url], whole, target, layers, timeout=60)
        with pytest.raises(StreamError, match="answered 400: .*maximum context length"):
            source.load([3])
        with pytest.raises(StreamError, match="aux_layer_ids: the server has"):
            StreamedSource([url], rows, target, (1, 2, 3), timeout=60)
