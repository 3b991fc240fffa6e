"""One frame of anybody's must not end, stall or fill a feature mailbox; its death must be seen."""

import json
import resource
import socket
import threading
import time

import pytest
import zmq

from modelopt_eagle.errors import StreamError
from modelopt_eagle.features.stream.client import MailboxClient
from modelopt_eagle.features.stream.mailbox import LARGEST_REQUEST, Mailbox
from tests.attacks.wire import ask, send_frames, serving

FRAMES = {
    "60,000 lists": [b"[" * 60_000],
    "12,000 objects": [b'{"a":' * 12_000],
    "half a character in the token": [b'{"op": "hello", "token": "\\ud800"}'],
    "half a character in the key": [b'{"op": "get", "key": "\\ud800", "transport": "tcp", "token": "secret"}'],
    "no end of waiting": [b'{"op": "get", "key": "k", "transport": "tcp", "wait": 1e400, "token": "secret"}'],
    "no number": [b'{"op": "get", "key": "k", "transport": "tcp", "wait": NaN, "token": "secret"}'],
    "a million years": [b'{"op": "get", "key": "k", "transport": "tcp", "wait": 1e15, "token": "secret"}'],
    "less than no time": [b'{"op": "get", "key": "k", "transport": "tcp", "wait": -1e15, "token": "secret"}'],
    "a number of 5,000 digits": [b'{"op": "hello", "x": ' + b"9" * 5000 + b"}"],
    "a token of another kind": [b'{"op": "hello", "token": {"a": []}}'],
    "a key of 60,000 characters": [
        json.dumps({"op": "get", "key": "k" * 60_000, "transport": "tcp", "token": "secret"}).encode()
    ],
    "no frame": [b""],
    "no text": [b"\xff\xfe\x00"],
    "1,000 frames": [b"{}"] * 1000,
}


@pytest.fixture(scope="module")
def box():
    box = Mailbox({"model": "m"}, "127.0.0.1:0", token="secret")
    yield box
    box.close()


@pytest.mark.parametrize("name", FRAMES)
def test_a_frame_is_answered_by_an_error_and_the_mailbox_goes_on(box, name):
    assert send_frames(box.port, FRAMES[name])["ok"] is False
    assert MailboxClient(f"127.0.0.1:{box.port}", "secret", timeout=5.0).hello()["model"] == "m"
    assert box._thread.is_alive() and box.failure is None


def test_a_frame_of_300_megabytes_is_not_taken_into_memory(box):
    """The connection ends at the frame's header, wherever its 300 MB would have been put."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with socket.create_connection(("127.0.0.1", box.port)) as attacker:
        greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
        ready = b"\x05READY" + b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
        attacker.sendall(greeting + b"\x04" + bytes([len(ready)]) + ready)
        attacker.sendall(b"\x02" + (300 * 2**20).to_bytes(8, "big"))
        attacker.settimeout(10)
        with pytest.raises(ConnectionError):  # it is cut off, long before all is sent
            for _ in range(300):
                attacker.sendall(bytes(2**20))
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < 50 * 1024
    for frame in (b" " * (LARGEST_REQUEST + 1), b"[" * 100_000):
        assert send_frames(box.port, [frame], wait=0.5) is None
    assert MailboxClient(f"127.0.0.1:{box.port}", "secret", timeout=5.0).hello()["model"] == "m"


def test_garbage_and_silent_connections_do_not_keep_others_out(box):
    idle = []
    try:
        for number in range(300):
            idle.append(socket.create_connection(("127.0.0.1", box.port)))
            if number % 2:
                idle[-1].sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(range(256)))
        assert MailboxClient(f"127.0.0.1:{box.port}", "secret", timeout=10.0).hello()["model"] == "m"
    finally:
        for connection in idle:
            connection.close()


def test_waiting_requests_are_bounded(monkeypatch):
    monkeypatch.setattr("modelopt_eagle.features.stream.mailbox.MOST_WAITING", 50)
    box = Mailbox({"model": "m"}, "127.0.0.1:0")
    try:
        with zmq.Context.instance().socket(zmq.DEALER) as flood:
            flood.setsockopt(zmq.LINGER, 0)
            flood.connect(f"tcp://127.0.0.1:{box.port}")
            for number in range(80):
                flood.send(json.dumps({"op": "get", "key": str(number), "transport": "tcp", "wait": 60}).encode())
            answers = 0
            while flood.poll(500):
                assert "requests wait already" in json.loads(flood.recv())["error"]
                answers += 1
            assert answers == 30
        assert MailboxClient(f"127.0.0.1:{box.port}", timeout=5.0).hello()["model"] == "m"
    finally:
        box.close()


def test_a_fault_of_our_own_is_answered_and_the_mailbox_goes_on(monkeypatch, caplog):
    box = Mailbox({"model": "m"}, "127.0.0.1:0")
    try:
        monkeypatch.setattr(box, "_parse", lambda frames: 1 / 0)
        for _ in range(3):
            assert send_frames(box.port, [b'{"op": "hello"}']) == {
                "ok": False, "error": "the request failed: ZeroDivisionError",
            }  # fmt: skip
        monkeypatch.undo()
        assert MailboxClient(f"127.0.0.1:{box.port}", timeout=5.0).hello()["model"] == "m"
    finally:
        box.close()
    assert caplog.text.count("ZeroDivisionError") == 1


def test_the_death_of_a_mailbox_ends_its_server_and_shows_in_its_health(tiny_target, monkeypatch):
    with serving(tiny_target) as server:
        assert ask(server.url)[0] == 200
        stopped = threading.Event()
        monkeypatch.setattr(server, "_stop", stopped.set)
        monkeypatch.setattr(server._mailbox, "_on_failure", stopped.set)
        monkeypatch.setattr(server._mailbox._segments, "delete_old", lambda now: 1 / 0)
        assert stopped.wait(5)
        status, words = ask(server.url)
        assert status == 503 and b"ZeroDivisionError" in words
        monkeypatch.undo()
        with pytest.raises(StreamError, match="the mailbox on port .* has ended"):
            server._mailbox.check()


def test_a_server_ends_when_its_mailbox_does(tiny_target, monkeypatch):
    from modelopt_eagle.features.stream.target_server import TargetServer

    server = TargetServer(tiny_target)
    ended = []

    def serve():
        try:
            server.serve_forever()
        except StreamError as error:
            ended.append(str(error))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        time.sleep(0.2)
        monkeypatch.setattr(server._mailbox._segments, "delete_old", lambda now: 1 / 0)
        thread.join(10)
        assert not thread.is_alive() and "has ended" in ended[0]
    finally:
        monkeypatch.undo()
        server.close()
