"""One frame of anybody's must not end, stall or fill a feature mailbox; its death must be seen."""

import gc
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
        shake_hands(attacker, b"DEALER", b"ROUTER")
        attacker.sendall(b"\x02" + (300 * 2**20).to_bytes(8, "big"))
        attacker.settimeout(10)
        with pytest.raises(ConnectionError):  # it is cut off, long before all is sent
            for _ in range(300):
                attacker.sendall(bytes(2**20))
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < 50 * 1024
    for frame in (b" " * (LARGEST_REQUEST + 1), b"[" * 100_000):
        assert send_frames(box.port, [frame], wait=0.5) is None
    assert MailboxClient(f"127.0.0.1:{box.port}", "secret", timeout=5.0).hello()["model"] == "m"


GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)


def shake_hands(connection, kind, until):
    """ZeroMQ's handshake as a socket of this kind, ``DEALER`` or ``ROUTER``; reads until these words have come."""
    words = b"\x05READY" + b"\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
    connection.sendall(GREETING + b"\x04" + bytes([len(words)]) + words)
    connection.settimeout(10)
    came = b""
    while until not in came:
        came += connection.recv(4096)


def flood(connection, frame, most):
    """Send frames that each say that more follow, until the connection is ended; returns the bytes sent."""
    sent, piece = 0, frame * (2**16 // len(frame))
    connection.settimeout(10)
    try:
        while sent < most:
            connection.sendall(piece)
            sent += len(piece)
    except OSError:
        return sent
    return sent


def resident():
    """Bytes of this process's memory now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


FRAMES_OF = {"empty": b"\x01\x00", "long": b"\x03" + (60_000).to_bytes(8, "big") + bytes(60_000)}


@pytest.mark.parametrize("kind", FRAMES_OF)
def test_frames_without_an_end_are_cut_off(box, kind, caplog):
    before = resident()
    with socket.create_connection(("127.0.0.1", box.port)) as attacker:
        shake_hands(attacker, b"DEALER", b"ROUTER")
        assert flood(attacker, FRAMES_OF[kind], 4 * 2**30) < 2**30
    assert resident() - before < 2**30
    assert MailboxClient(f"127.0.0.1:{box.port}", "secret", timeout=5.0).hello()["model"] == "m"
    assert "bytes which make no request" in caplog.text


def test_many_slow_floods_are_bounded_together(box, monkeypatch):
    monkeypatch.setattr("modelopt_eagle.features.stream.received.LARGEST_LEADS", 2**20)
    attackers = [socket.create_connection(("127.0.0.1", box.port)) for _ in range(12)]
    try:
        for attacker in attackers:  # each stays below what one may be ahead
            shake_hands(attacker, b"DEALER", b"ROUTER")
            attacker.sendall(b"\x01\x00" * 90_000)
        time.sleep(0.5)
        ended = 0
        for attacker in attackers:
            attacker.settimeout(0.2)
            try:
                while attacker.recv(4096):
                    pass
                ended += 1
            except TimeoutError:
                pass
            except OSError:
                ended += 1
        assert 7 <= ended < 12  # 12 times 180 kB, and five are below a megabyte
    finally:
        for attacker in attackers:
            attacker.close()


def test_requests_that_are_answered_are_no_flood(box):
    """Many more bytes than a connection may be ahead by, each message taken."""
    request = json.dumps({"op": "hello", "token": "wrong", "pad": "x" * 20_000}).encode()
    with zmq.Context.instance().socket(zmq.DEALER) as client:
        client.setsockopt(zmq.LINGER, 0)
        client.connect(f"tcp://127.0.0.1:{box.port}")
        for number in range(200):
            client.send(request)
            assert client.poll(5000), number
            assert "wrong or missing token" in json.loads(client.recv())["error"]


def test_handles_on_connections_are_let_go(box):
    for _ in range(5):
        MailboxClient(f"127.0.0.1:{box.port}", "secret", timeout=5.0).hello()
    with socket.create_connection(("127.0.0.1", box.port)) as one:
        shake_hands(one, b"DEALER", b"ROUTER")
        time.sleep(0.3)
        assert box._connections._open
    gc.collect()
    until = time.monotonic() + 5
    while box._connections._open and time.monotonic() < until:
        time.sleep(0.05)
    assert not box._connections._open


@pytest.mark.parametrize("kind", FRAMES_OF)
def test_a_server_that_answers_without_an_end_does_not_fill_a_trainers_memory(kind):
    sent = []

    def answer(listener):
        connection, _ = listener.accept()
        with connection:
            shake_hands(connection, b"ROUTER", b'"op"')
            sent.append(flood(connection, FRAMES_OF[kind], 8 * 2**30))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,), daemon=True)
        thread.start()
        client = MailboxClient(f"127.0.0.1:{listener.getsockname()[1]}", timeout=20.0)
        with pytest.raises(StreamError, match="answers a get by more than .* bytes, at most"):
            client.fetch("key", largest=2**20)
        thread.join(15)
    assert sent and sent[0] < 2 * 2**30  # loopback brings some gigabytes a second, and the trainer looks now and then


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
