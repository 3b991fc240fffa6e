"""Training from server processes: the same batches as online, whatever happens to servers, trainer and messages.

Every test runs against the in-repo server, and with ``--engine`` against a real ``vllm serve`` too. Real in both cases:
the servers, kill -9, restarts, refusals, tokens. What a healthy server never does, a proxy in front of it does: answer
late, and send spoilt messages. The transport NIXL is tested where it is installed.
"""

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest
import torch

from modelopt_eagle.cli.serve_features import TOKEN_VARIABLE
from modelopt_eagle.data import prepare_dataset
from modelopt_eagle.draft import DraftConfig, EagleModule
from modelopt_eagle.errors import StreamError
from modelopt_eagle.features import OnlineSource, StreamedSource
from modelopt_eagle.features.stream.client import MailboxClient
from modelopt_eagle.target import load_target
from modelopt_eagle.training import distillation_loss, rollout, train
from tests.features.conftest import SERVED_LAYERS, TOKEN
from tests.features.serving import ROOT, SETTINGS, Proxy
from tests.training.runs import small_recipe

LAYERS = ",".join(map(str, SERVED_LAYERS))


def stream(servers, dataset, target, **options):
    options = {"timeout": 30.0, "patience": 150.0, "token": TOKEN} | options
    return StreamedSource([server.url for server in servers], dataset, target, SERVED_LAYERS, **options)


def all_batches(source, epoch=0, **options):
    return list(source.batches(epoch, batch_size=2, seed=4, **options))


def assert_equal_batches(streamed, online):
    """Row by row and layer by layer."""
    for ours, theirs in zip(streamed, online, strict=True):
        assert ours.row_ids == theirs.row_ids
        assert torch.equal(ours.input_ids, theirs.input_ids) and torch.equal(ours.target_top1, theirs.target_top1)
        torch.testing.assert_close(ours.aux_hidden, theirs.aux_hidden, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.final_hidden, theirs.final_hidden, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.target_logsumexp, theirs.target_logsumexp, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def online(served, dataset):
    return OnlineSource(served, dataset, SERVED_LAYERS)


def losses(batches, target):
    torch.manual_seed(1)
    module = EagleModule(DraftConfig.from_target(target.config, aux_layer_ids=SERVED_LAYERS))
    values = []
    for batch in batches:
        embedded = target.embedding(batch.input_ids)  # [1,N,Ht]
        output = rollout(module, embedded, batch.aux_hidden, steps=3, document_ids=batch.document_ids)
        loss = distillation_loss(
            output, module, batch.supervised, target_hidden=batch.final_hidden, target_lm_head=target.lm_head_weight
        )
        values.append(loss.loss.item())
    return values


NIXL = ["nixl"] if find_spec("nixl_cu12") or find_spec("nixl_cu13") else []


@pytest.mark.parametrize("transport", ["shm", "tcp", *NIXL])
def test_streamed_batches_and_losses_equal_online_ones(fleet, served, dataset, online, transport):
    servers = fleet.up(2)
    streamed = all_batches(stream(servers, dataset, served, transport=transport))
    assert_equal_batches(streamed, all_batches(online))
    assert losses(streamed, served) == pytest.approx(losses(all_batches(online), served), abs=1e-4)
    assert [server.unfetched() for server in servers] == [[], []]


def test_a_streamed_run_equals_an_online_run(fleet, served_dir, conversations, tmp_path, monkeypatch):
    """The whole trainer, loss by loss."""
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    options = ("training.epochs=2", "training.log_steps=1", f"eagle.aux_layer_ids=[{LAYERS}]", "eagle.init=target")
    urls = ",".join(server.url for server in fleet.up(2))
    results = [
        train(small_recipe(served_dir, conversations, tmp_path / name, *options, *more))
        for name, more in (("online", ()), ("streamed", (f"data.streaming_server_url={urls}",)))
    ]
    online, streamed = ([entry["loss"] for entry in result.history if "loss" in entry] for result in results)
    assert len(online) >= 4 and streamed == pytest.approx(online, abs=1e-4)


def test_a_trainer_that_is_killed_goes_on_at_the_exact_row(fleet, served_dir, conversations, online):
    (server,) = fleet.up(1)
    line = [sys.executable, "-m", "tests.features.stream_trainer", server.url, str(served_dir), str(conversations)]
    start = {"cwd": ROOT, "stdout": subprocess.PIPE, "text": True, "env": os.environ | SETTINGS}
    with subprocess.Popen([*line, "0"], **start) as trainer:
        seen = [json.loads(trainer.stdout.readline()) for _ in range(2)]
        trainer.kill()  # in the middle of an epoch, with batches asked for ahead
    with subprocess.Popen([*line, "2"], **start) as trainer:
        seen += [json.loads(text) for text in trainer.stdout]
    wanted = all_batches(online)
    assert [batch["rows"] for batch in seen] == [batch.row_ids for batch in wanted]
    sums = [batch.aux_hidden.double().sum().item() for batch in wanted]
    assert [batch["sum"] for batch in seen] == pytest.approx(sums, abs=1e-2)


def test_a_slow_server_is_not_run_ahead_of(fleet, served, dataset, online):
    with Proxy(fleet.up(1)[0], delay=0.2) as slow:
        source = stream([slow], dataset, served, prefetch=2)
        batches = source.batches(0, batch_size=1, seed=4)
        before = slow.asked
        got = [next(batches)]
        time.sleep(2.0)  # the trainer is busy
        assert slow.asked - before <= 1 + 2 + 1  # taken, waiting, in the making
        got += list(batches)
    assert_equal_batches(got, list(online.batches(0, batch_size=1, seed=4)))


def test_a_refusal_stops_with_the_servers_words(fleet, served, dataset, tmp_path):
    talk = [{"role": "user", "content": "go on"}, {"role": "assistant", "content": "and on " * 60}]
    (tmp_path / "long.jsonl").write_text(json.dumps({"id": "long", "messages": talk}))
    source = stream(fleet.up(1), dataset, served)
    rows = prepare_dataset(served.tokenizer, tmp_path / "long.jsonl").rows
    with pytest.raises(StreamError, match=r"answered 400: .*(maximum context length is \d+|takes up to \d+ tokens)"):
        source.fetch_rows(rows)
    assert source.load([0]).row_ids == ["talk-0"]  # the server is well


def spoil_header(**changes):
    return lambda frames: [json.dumps(json.loads(frames[0]) | changes).encode(), *frames[1:]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda frames: [b"{", *frames[1:]], "malformed message: no JSON"),
        (lambda frames: frames[:1], "malformed message: 1 frames, 2 expected"),
        (lambda frames: [frames[0], frames[1][:-4]], "malformed message: .* arrived"),
        (lambda frames: [frames[0], bytes(4) + frames[1][4:]], "checksum differs"),
        (spoil_header(version=9), "speaks message version 9"),
        (spoil_header(token_ids=[1, 2]), "shape .* expected for its tokens and layers"),
        (lambda frames: spoil_header(token_ids=json.loads(frames[0])["token_ids"][::-1])(frames), "or of others"),
        (spoil_header(aux_layer_ids=[0, 1, 2]), r"states of layers \[0, 1, 2\] came back"),
        (spoil_header(segment="../../etc/passwd"), "segment name '../../etc/passwd'"),
    ],
)
def test_spoilt_messages_are_refused(fleet, served, dataset, change, words):
    with Proxy(fleet.up(1)[0], change=change) as proxy, pytest.raises(StreamError, match=words):
        stream([proxy], dataset, served, transport="tcp")


def test_tokens(fleet, served, dataset):
    """The second server listens on all addresses."""
    server = fleet.up(2)[1]
    for token in ("guess", None):
        with pytest.raises(StreamError, match="answered 401: "):
            stream([server], dataset, served, token=token)
        with pytest.raises(StreamError, match="wrong or missing token"):
            MailboxClient(f"127.0.0.1:{server.feature_port}", token, timeout=10.0).hello()


def test_other_layers_and_another_model_are_refused(fleet, other_dir, served, dataset):
    servers = fleet.up(1)
    with pytest.raises(StreamError, match=r"aux_layer_ids: the server has \(1, 3, 4\), this run has \(1, 2, 5\)"):
        StreamedSource([servers[0].url], dataset, served, (1, 2, 5), token=TOKEN)
    with pytest.raises(StreamError, match="revision: the server has .* this run has"):
        stream(servers, dataset, load_target(other_dir))


def test_killed_and_restarted_servers_lose_no_row_and_another_model_is_refused(
    fleet, served, dataset, online, served_dir, other_dir
):
    first, second = fleet.up(2)
    source = stream([first, second], dataset, served)
    batches = source.batches(0, batch_size=2, seed=4)
    got = [next(batches)]
    second.kill()  # rows were asked of it
    got += list(batches)
    assert_equal_batches(got, all_batches(online))

    source = stream([first], dataset, served, prefetch=1, in_flight=2)
    batches = source.batches(1, batch_size=2, seed=4)
    got = [next(batches)]
    first.kill()  # now none is left
    first.start(served_dir)
    got += list(batches)  # waits for it
    assert_equal_batches(got, all_batches(online, epoch=1))

    first.wait()
    first.kill()
    first.start(other_dir)
    first.wait()
    with pytest.raises(StreamError, match="(?s)does not serve what this run needs:.*revision"):
        all_batches(source)
    assert first.interrupt() in (0, 130)  # Ctrl-C
