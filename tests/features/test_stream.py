"""The parts of streaming by themselves: addresses, tokens, messages, mailbox, ports. Servers: test_streamed.py."""

import json
import os
import socket
import threading
import time
from contextlib import contextmanager

import pytest
import torch

from modelopt_eagle.cli import serve_features
from modelopt_eagle.cli.main import run_command
from modelopt_eagle.errors import MissingExtraError, StreamError
from modelopt_eagle.features import StreamedSource
from modelopt_eagle.features.engines.vllm import free_port
from modelopt_eagle.features.stream.client import MailboxClient, StreamTimeout
from modelopt_eagle.features.stream.mailbox import Mailbox
from modelopt_eagle.features.stream.message import FeatureMessage, decode, encode
from modelopt_eagle.features.stream.segments import SHARED_MEMORY
from modelopt_eagle.features.stream.target_server import TargetServer

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


def test_files_in_shared_memory_that_nobody_fetched_are_deleted():
    box = Mailbox({}, "127.0.0.1:0")
    try:
        for key in ("a", "b"):
            box.put(key, message())
            request = {"op": "get", "key": key, "transport": "shm"}
            segment = SHARED_MEMORY / json.loads(raw(box.port, [json.dumps(request).encode()]))["segment"]
            assert segment.is_file()  # and the trainer is killed
            if key == "a":
                os.utime(segment, (0, 0))
                Mailbox({}, "127.0.0.1:0").close()  # the next server of this host, after a kill of both
                assert not segment.exists()
    finally:
        box.close()
    assert not segment.exists()


def test_a_server_with_another_shared_memory_is_asked_by_tcp(tiny_target, dataset, tmp_path, monkeypatch):
    """A container whose port is forwarded to loopback."""
    with serving(tiny_target) as server:
        monkeypatch.setattr("modelopt_eagle.features.stream.client.SHARED_MEMORY", tmp_path)
        assert stream([server.url], dataset, tiny_target).load([0]).row_ids == ["talk-0"]
        with pytest.raises(StreamError, match="if the server runs on another host, use transport tcp"):
            stream([server.url], dataset, tiny_target, transport="shm")


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
