"""Streamed training: the same batches as online, whatever happens to servers, trainer and messages."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from modelopt_eagle.cli import serve_features
from modelopt_eagle.cli.main import run_command
from modelopt_eagle.draft import DraftConfig, EagleModule
from modelopt_eagle.errors import MissingExtraError, StreamError
from modelopt_eagle.features import OnlineSource, StreamedSource
from modelopt_eagle.features.stream.client import MailboxClient, StreamTimeout
from modelopt_eagle.features.stream.mailbox import SEGMENT_PREFIX, SHARED_MEMORY, Mailbox
from modelopt_eagle.features.stream.message import FeatureMessage, decode, encode
from modelopt_eagle.features.stream.target_server import TargetServer
from modelopt_eagle.features.vllm_engine import engine_layer_ids, free_port
from modelopt_eagle.target.tiny import make_tiny_target
from modelopt_eagle.training import distillation_loss, rollout

AUX = (1, 3, 4)


@contextmanager
def serving(target, **options):
    """A server in a thread."""
    server = TargetServer(target, AUX, **options)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join()


def stream(urls, dataset, target, **options):
    options = {"timeout": 5.0, "patience": 20.0} | options
    return StreamedSource(urls, dataset, target, AUX, **options)


def all_batches(source, **options):
    return list(source.batches(0, batch_size=3, seed=4, **options))


def assert_equal_batches(streamed, online):
    for ours, theirs in zip(streamed, online, strict=True):
        assert ours.row_ids == theirs.row_ids
        assert torch.equal(ours.input_ids, theirs.input_ids) and torch.equal(ours.target_top1, theirs.target_top1)
        torch.testing.assert_close(ours.aux_hidden, theirs.aux_hidden, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.final_hidden, theirs.final_hidden, rtol=1e-4, atol=1e-4)


def losses(batches, target):
    torch.manual_seed(1)
    module = EagleModule(DraftConfig.from_target(target.config, aux_layer_ids=AUX))
    values = []
    for batch in batches:
        embedded = target.embedding(batch.input_ids)  # [1,N,Ht]
        output = rollout(module, embedded, batch.aux_hidden, steps=3, document_ids=batch.document_ids)
        loss = distillation_loss(
            output,
            module,
            batch.supervised,
            target_hidden=batch.final_hidden,
            target_lm_head=target.lm_head_weight,
        )
        values.append(loss.loss.item())
    return values


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_streamed_training_equals_online_training(tiny_target, dataset, transport):
    online = all_batches(OnlineSource(tiny_target, dataset, AUX))
    with serving(tiny_target) as server:
        streamed = all_batches(stream([server.url], dataset, tiny_target, transport=transport))
    assert_equal_batches(streamed, online)
    assert losses(streamed, tiny_target) == pytest.approx(losses(online, tiny_target), abs=1e-4)
    assert not list(SHARED_MEMORY.glob(f"{SEGMENT_PREFIX}*"))


def start_server(target_dir, port, feature_port):
    command = [sys.executable, "-m", "modelopt_eagle.cli.main", "serve-features", "--model", str(target_dir)]
    command += ["--engine", "hf", "--device", "cpu", "--aux-layers", "1,3,4"]
    command += ["--port", str(port), "--feature-port", str(feature_port)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def test_a_killed_server_and_a_restarted_one_lose_no_row(tiny_target, tiny_target_dir, dataset):
    ports = [(free_port(), free_port()) for _ in range(2)]
    servers = [start_server(tiny_target_dir, *pair) for pair in ports]
    try:
        for server in servers:
            assert "serving features" in server.stdout.readline()
        urls = [f"http://127.0.0.1:{port}" for port, _ in ports]
        source = stream(urls, dataset, tiny_target, patience=60.0)
        batches = source.batches(0, batch_size=2, seed=4)
        got = [next(batches)]
        servers[0].send_signal(signal.SIGKILL)
        servers[0].wait()
        got += list(batches)
        online = list(OnlineSource(tiny_target, dataset, AUX).batches(0, batch_size=2, seed=4))
        assert_equal_batches(got, online)

        batches = source.batches(1, batch_size=2, seed=4)  # now none is left for a while
        got = [next(batches)]
        servers[1].send_signal(signal.SIGKILL)
        servers[1].wait()
        servers.append(start_server(tiny_target_dir, *ports[1]))
        got += list(batches)
        assert_equal_batches(got, list(OnlineSource(tiny_target, dataset, AUX).batches(1, batch_size=2, seed=4)))
    finally:
        for server in servers:
            server.kill()
            server.communicate()


def test_a_resumed_trainer_goes_on_at_the_exact_row(tiny_target, dataset):
    whole = all_batches(OnlineSource(tiny_target, dataset, AUX))
    with serving(tiny_target) as server:
        first = stream([server.url], dataset, tiny_target).batches(0, batch_size=3, seed=4)
        got = [next(first), next(first)]
        first.close()  # what was prefetched is given up
        got += all_batches(stream([server.url], dataset, tiny_target), start=2)
    assert_equal_batches(got, whole)


def test_another_model_is_refused_also_after_a_restart(tiny_target, dataset):
    other = make_tiny_target(seed=1)
    with serving(other) as server, pytest.raises(StreamError, match="revision: the server has .* this run has"):
        stream([server.url], dataset, tiny_target)
    port, feature_port = free_port(), free_port()
    places = {"address": f"127.0.0.1:{port}", "feature_address": f"127.0.0.1:{feature_port}"}
    with serving(tiny_target, **places) as server:
        source = stream([server.url], dataset, tiny_target, prefetch=1, in_flight=1, timeout=1.0)
    with serving(other, **places), pytest.raises(StreamError, match="does not serve what this run needs"):
        all_batches(source)


def test_other_layers_are_refused(tiny_target, dataset):
    with serving(tiny_target) as server, pytest.raises(StreamError, match=r"aux_layer_ids: the server has \(1, 3, 4\)"):
        StreamedSource([server.url], dataset, tiny_target, (1, 2, 5), timeout=5.0)


def test_a_slow_server_is_not_run_ahead_of(tiny_target, dataset):
    with serving(tiny_target) as server:
        source = stream([server.url], dataset, tiny_target, prefetch=2)
        before = server._count
        batches = source.batches(0, batch_size=1, seed=0)
        next(batches)
        time.sleep(0.5)
        assert server._count - before <= 1 + 2 + 1  # taken, waiting, in the making
        batches.close()


def test_a_refusal_stops_with_the_servers_words(tiny_target, dataset):
    longest = max(dataset.lengths)
    with serving(tiny_target, max_length=longest - 1) as server:
        source = stream([server.url], dataset, tiny_target)
        with pytest.raises(StreamError, match=f"answered 400: this server takes up to {longest - 1} tokens"):
            all_batches(source)


def test_nobody_there_and_bad_addresses(tiny_target, dataset):
    with pytest.raises(StreamError, match="has answered for 0.5 s; last error: .*cannot be reached"):
        stream([f"http://127.0.0.1:{free_port()}"], dataset, tiny_target, patience=0.5)
    with pytest.raises(StreamError, match="address such as http://host:8000 expected"):
        stream(["localhost:8000"], dataset, tiny_target)
    with pytest.raises(StreamError, match="no feature server given"):
        stream([], dataset, tiny_target)


def test_token(tiny_target, dataset, monkeypatch):
    monkeypatch.delenv(serve_features.TOKEN_VARIABLE, raising=False)
    with pytest.raises(StreamError, match="can be reached from other hosts and there is no token"):
        TargetServer(tiny_target, AUX, address="0.0.0.0:0")
    with pytest.raises(StreamError, match="there is no token"):
        Mailbox({}, "[::]:0")
    assert run_command("serve_features", ["--model", "m", "--host", "0.0.0.0"]) == 2
    with serving(tiny_target, token="secret") as server:
        assert stream([server.url], dataset, tiny_target, token="secret").load([0]).row_ids == ["talk-0"]
        with pytest.raises(StreamError, match="answered 401: wrong or missing token"):
            stream([server.url], dataset, tiny_target, token="guess")
        with pytest.raises(StreamError, match="wrong or missing token"):
            MailboxClient(f"127.0.0.1:{server._mailbox.port}", "guess", timeout=2.0).hello()


def message(tokens=3):
    states = torch.arange(tokens * 2 * 4, dtype=torch.float32).view(tokens, 2, 4)
    return FeatureMessage("r", list(range(tokens)), [1], False, states)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_messages_come_back_equal(dtype):
    sent = message()
    sent.states = sent.states.to(dtype)
    header, payload = encode(sent)
    got = decode(json.loads(json.dumps(header)), payload, "server")
    assert torch.equal(got.states, sent.states) and got.token_ids == sent.token_ids and not got.final_is_normed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "speaks message version 2"),
        ({"token_ids": [0, 1]}, r"shape \[2, 2, 'Ht'\] expected"),
        ({"aux_layer_ids": "1"}, "aux_layer_ids of type list expected"),
        ({"shape": [3, 2, 5]}, "120 bytes expected"),
        ({"shape": [3, 2, -4]}, "malformed"),
        ({"dtype": "int64"}, "dtype 'int64'"),
        ({"checksum": "00"}, "checksum differs"),
        ({"bytes": None}, "bytes of type int expected"),
    ],
)
def test_malformed_messages_are_refused(change, words):
    header, payload = encode(message())
    with pytest.raises(StreamError, match=words):
        decode(header | change, payload, "server")


def test_mailbox_is_bounded_waits_and_refuses():
    box = Mailbox({"model": "m"}, "127.0.0.1:0", max_bytes=250)
    client = MailboxClient(f"127.0.0.1:{box.port}", timeout=2.0)
    try:
        assert client.hello()["model"] == "m"
        for key in ("a", "b", "c"):  # 96 bytes each: the first is pushed out
            box.put(key, message())
        with pytest.raises(StreamTimeout, match="dropped to bound memory"):
            client.fetch("a")
        assert torch.equal(client.fetch("b").states, message().states)
        with pytest.raises(StreamTimeout, match="no message under b"):
            MailboxClient(client.address, timeout=2.0).fetch("b")  # each message once
        threading.Timer(0.2, box.put, ("late", message())).start()
        assert client.fetch("late").request == "r"
        for frames in ([b"\xff"], [b"{}"], [b'{"op": "get", "key": 3}'], [b"{}", b"{}"]):
            assert b"malformed request" in raw(box.port, frames)
        assert client.hello()["model"] == "m"  # and goes on
    finally:
        box.close()
    began = time.monotonic()
    with pytest.raises(StreamTimeout, match="cannot be reached, or is gone"):
        MailboxClient(client.address, timeout=30.0).hello()
    assert time.monotonic() - began < 5  # said at once, not after the time-out


def raw(port, frames):
    import zmq

    with zmq.Context.instance().socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"tcp://127.0.0.1:{port}")
        socket.send_multipart(frames)
        assert socket.poll(2000)
        return socket.recv()


def test_nixl_that_is_missing_is_named(tiny_target, dataset, monkeypatch):
    monkeypatch.setattr("modelopt_eagle.features.stream.nixl._MODULES", ("no_such_nixl._api",))
    with pytest.raises(MissingExtraError, match="pip install nixl-cu12"):
        MailboxClient("127.0.0.1:1", transport="nixl")
    with serving(tiny_target) as server:
        source = stream([server.url], dataset, tiny_target)
        key = source._pool._servers[0].completions.run([5, 6, 7]).key
        answer = raw(server._mailbox.port, [json.dumps({"op": "get", "key": key, "transport": "nixl"}).encode()])
        assert "pip install nixl-cu12" in json.loads(answer)["error"]


def test_a_server_of_garbage_is_refused(tiny_target, dataset, monkeypatch):
    with serving(tiny_target) as server:
        source = stream([server.url], dataset, tiny_target, transport="tcp")
        reply = server._mailbox._reply
        monkeypatch.setattr(server._mailbox, "_reply", lambda sender, header, payload=None: reply(sender, [1], payload))
        with pytest.raises(StreamError, match="malformed message: an object expected, list found"):
            source.load([0])


def test_states_of_other_tokens_are_refused(tiny_target, dataset, monkeypatch):
    with serving(tiny_target) as server:
        source = stream([server.url], dataset, tiny_target)
        put = server._mailbox.put

        def shorter(key, sent):
            sent.token_ids, sent.states = sent.token_ids[:-1], sent.states[:-1]
            put(key, sent)

        monkeypatch.setattr(server._mailbox, "put", shorter)
        with pytest.raises(StreamError, match="tokens were sent to .* came back"):
            source.load([0])


def test_serve_command_for_vllm(tiny_target_dir, capsys):
    assert engine_layer_ids((1, 14, 26), 30) == [2, 15, 27, 30]
    code = run_command(
        "serve_features", ["--model", str(tiny_target_dir), "--print", "--port", "9", "--", "--max-num-seqs", "4"]
    )
    command = capsys.readouterr().out
    assert code == 0 and "serve" in command and command.rstrip().endswith("--max-num-seqs 4")
    assert '"eagle_aux_hidden_state_layer_ids": [2, 4, 5, 8]' in command
    assert '"kv_connector_module_path": "modelopt_eagle.features.vllm_connector"' in command
    options = SimpleNamespace(aux_layers="1,x")
    with pytest.raises(StreamError, match="takes numbers"):
        serve_features._layers(options)


def test_a_port_that_is_about_to_be_free_is_waited_for(tiny_target):
    """The server before lets go of its port a little after it stopped; a port that stays taken is named."""
    holder = socket.socket()
    holder.bind(("127.0.0.1", 0))
    holder.listen()
    address = f"127.0.0.1:{holder.getsockname()[1]}"
    release = threading.Timer(0.3, holder.close)
    release.start()
    Mailbox({}, address).close()
    release.join()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(StreamError, match="choose another port"):
            Mailbox({}, f"127.0.0.1:{taken.getsockname()[1]}")
