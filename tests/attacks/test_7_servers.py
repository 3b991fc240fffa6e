"""Requests to a feature server's HTTP side that stall, burst, lie or lead elsewhere; memory it shares after a kill."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch

from modelopt_eagle.errors import StreamError
from modelopt_eagle.features.stream import http_server
from modelopt_eagle.features.stream.http import CompletionsClient
from modelopt_eagle.features.stream.mailbox import Mailbox
from modelopt_eagle.features.stream.segments import SEGMENT_PREFIX, SHARED_MEMORY
from modelopt_eagle.features.stream.target_server import TargetServer
from tests.attacks.wire import ask, connect, send_bytes, serving

POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


def test_a_burst_of_200_requests_is_answered(tiny_target):
    body = json.dumps({"model": tiny_target.name, "prompt": [5, 6, 7]})
    with serving(tiny_target) as server, ThreadPoolExecutor(200) as pool:
        gate = threading.Barrier(200)

        def one(_):
            gate.wait()
            return ask(server.url, "POST", "/v1/completions", body)[0]

        assert list(pool.map(one, range(200))) == [200] * 200


def test_slow_connections_are_ended_and_do_not_keep_others_out(tiny_target, monkeypatch):
    """Silent ones, and ones that send a byte now and then, before and inside the body."""
    monkeypatch.setattr(http_server, "REQUEST_SECONDS", 1.0)
    with serving(tiny_target) as server:
        before = threading.active_count()
        slow = [connect(server.url) for _ in range(300)]
        for number, client in enumerate(slow):
            client.sendall([b"", b"GET /heal", POST + b"Content-Length: 1000\r\n\r\n[1,"][number % 3])
        assert ask(server.url)[0] == 200
        until = time.monotonic() + 10
        while threading.active_count() > before + 5 and time.monotonic() < until:
            time.sleep(0.2)
            for client in slow[:50]:
                try:
                    client.sendall(b" ")
                except OSError:
                    continue
        assert threading.active_count() <= before + 5
        for client in slow:
            client.close()


def test_connections_are_bounded(tiny_target, monkeypatch):
    monkeypatch.setattr(http_server, "MOST_CONNECTIONS", 20)
    with serving(tiny_target) as server:
        held = [connect(server.url) for _ in range(20)]
        time.sleep(0.5)
        assert ask(server.url)[0] == 503
        for client in held:
            client.close()
        time.sleep(0.5)
        assert ask(server.url)[0] == 200


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (POST + b"Content-Length: many\r\n\r\n{}", 400),
        (POST + b"Content-Length: -5\r\n\r\n{}", 400),
        (POST + b"Content-Length: \xb2\r\n\r\n{}", 400),
        (POST + b"Content-Length: 1e9\r\n\r\n{}", 400),
        (POST + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n{}", 413),
        (POST + b"Content-Length: 99999999999\r\n\r\n{}", 413),
        (POST + b"\r\n{}", 411),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", 411),
        (POST + b"Content-Length: 60000\r\n\r\n" + b"[" * 60000, 400),
        (POST + b'Content-Length: 13\r\n\r\n{"prompt": 1}', 400),
        (POST + b'Content-Length: 17\r\n\r\n{"prompt": [1e3]}', 400),
        (POST + b'Content-Length: 18\r\n\r\n{"prompt": [true]}', 400),
        (POST + b'Content-Length: 17\r\n\r\n{"prompt": [NaN]}', 400),
        (POST + b'Content-Length: 16\r\n\r\n{"prompt": [-1]}', 400),
        (POST + b"Content-Length: 2\r\n\r\n\xff\xfe", 400),
        (b"POST /../../etc/passwd HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}", 404),
        (b"BREW /coffee HTTP/1.1\r\n\r\n", 501),
        (b"GET " + b"/" * 70000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET /health HTTP/1.1\r\nA: " + b"a" * 70000 + b"\r\n\r\n", 431),
    ],
)
def test_bad_requests_get_a_status_and_no_traceback(tiny_target, capfd, content, status):
    with serving(tiny_target) as server:
        answer = send_bytes(server.url, content)
        assert f" {status} ".encode() in answer.splitlines()[0], answer
        assert ask(server.url)[0] == 200
    assert "Traceback" not in capfd.readouterr().err


def test_the_token_is_compared_in_constant_time_and_first(tiny_target, monkeypatch):
    compared = []
    real = http_server.same_secret
    monkeypatch.setattr(http_server, "same_secret", lambda *pair: compared.append(pair) or real(*pair))
    with serving(tiny_target, token="secret") as server:
        assert ask(server.url, "POST", "/v1/completions", "{", {"Authorization": "Bearer guess"})[0] == 401
        assert ask(server.url, "GET", "/v1/models", None, {"Authorization": "Bearer secret"})[0] == 200
        assert ask(server.url, "GET", "/v1/models", None, {"Authorization": "Bearer secr\xe9t"})[0] == 401
        assert ask(server.url, "GET", "/v1/models")[0] == 401
        assert len(compared) == 4
    with pytest.raises(StreamError, match="printable ASCII"):
        TargetServer(tiny_target, token="a\nb")
    with pytest.raises(StreamError, match="printable ASCII"):
        CompletionsClient("http://127.0.0.1:1", "schlüssel")


def test_a_row_past_the_targets_window_is_refused(tiny_target, monkeypatch):
    monkeypatch.setattr(tiny_target.config, "max_position_embeddings", 50)
    with serving(tiny_target) as server:
        body = {"prompt": [5] * 50}
        assert ask(server.url, "POST", "/v1/completions", json.dumps(body))[0] == 200
        status, words = ask(server.url, "POST", "/v1/completions", json.dumps({"prompt": [5] * 51}))
        assert status == 400 and b"takes up to 50 tokens" in words


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_does_not_carry_the_token_to_another_host(status):
    heard = []

    class Elsewhere(BaseHTTPRequestHandler):
        def do_GET(self):
            heard.append(self.headers.get("Authorization"))
            self.send_response(200)
            self.end_headers()

        do_POST = do_GET

        def log_message(self, *values):
            pass

    elsewhere = HTTPServer(("127.0.0.1", 0), Elsewhere)

    class Redirecting(Elsewhere):
        def do_GET(self):
            self.send_response(status)
            self.send_header("Location", f"http://127.0.0.1:{elsewhere.server_port}/v1/models")
            self.end_headers()

    front = HTTPServer(("127.0.0.1", 0), Redirecting)
    for server in (elsewhere, front):
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        with pytest.raises(StreamError, match="a redirect to .* which is not followed"):
            CompletionsClient(f"http://127.0.0.1:{front.server_port}", "secret").run([1, 2])
        assert heard == []
    finally:
        for server in (elsewhere, front):
            server.shutdown()
            server.server_close()


@pytest.mark.parametrize("answer", [b"[" * 100_000, b'{"data": NaN}', b'{"data": 1e999}', b" " * (17 * 2**20), b"\xff"])
def test_an_answer_of_a_server_that_is_no_json_is_an_error(answer):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *values):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        with pytest.raises(StreamError, match="answered (no JSON|more than)"):
            CompletionsClient(f"http://127.0.0.1:{server.server_port}").run([1, 2])
    finally:
        server.shutdown()
        server.server_close()


HOLDER = """
import sys, time, torch
from modelopt_eagle.features.stream.segments import Segments
segments = Segments()
print(segments.write(bytes(1000)), segments.write(bytes(1000)), flush=True)
time.sleep(60)
"""


def hold():
    """A process that has handed out two files in shared memory; the process and their paths."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    return process, [SHARED_MEMORY / name for name in process.stdout.readline().split()]


def test_shared_memory_is_freed_after_a_kill():
    process, paths = hold()
    assert all(path.is_file() for path in paths)
    paths[0].unlink()  # a trainer has fetched it
    process.kill()
    process.wait()
    until = time.monotonic() + 10
    while paths[1].exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not paths[1].exists()


def test_shared_memory_is_freed_by_the_next_server_after_a_kill_of_the_whole_group():
    process, paths = hold()
    living, kept = hold()
    try:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        Mailbox({}, "127.0.0.1:0").close()
        assert not any(path.exists() for path in paths)
        assert all(path.is_file() for path in kept)
    finally:
        os.killpg(living.pid, signal.SIGKILL)
        living.wait()
        Mailbox({}, "127.0.0.1:0").close()
    assert not any(path.exists() for path in kept)


def test_a_link_in_shared_memory_is_not_followed(tiny_target, tmp_path):
    from modelopt_eagle.features.stream.client import MailboxClient

    (tmp_path / "secret").write_bytes(bytes(16))
    link = SHARED_MEMORY / f"{SEGMENT_PREFIX}link-{os.getpid()}"
    link.symlink_to(tmp_path / "secret")
    try:
        client = MailboxClient("127.0.0.1:1", transport="shm")
        with pytest.raises(StreamError, match="cannot read shared memory"):
            client._take_segment(link.name, 16)
        assert (tmp_path / "secret").is_file()
    finally:
        link.unlink(missing_ok=True)


def test_a_target_that_fails_is_answered_500_and_asked_again(tiny_target, monkeypatch, capfd):
    with serving(tiny_target) as server:
        monkeypatch.setattr(type(tiny_target), "features", lambda *a, **k: torch.zeros(2) @ torch.zeros(3))
        status, words = ask(server.url, "POST", "/v1/completions", json.dumps({"prompt": [5]}))
        assert status == 500 and b"RuntimeError" in words
    assert "Traceback" not in capfd.readouterr().err
