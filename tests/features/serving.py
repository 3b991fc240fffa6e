"""Feature servers as processes, started by the user's command, and proxies that spoil what they send."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import zmq

from modelopt_eagle.cli.serve_features import TOKEN_VARIABLE
from modelopt_eagle.features.engines.vllm import free_port
from modelopt_eagle.features.stream.segments import SEGMENT_PREFIX, SHARED_MEMORY

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
START_SECONDS = 240


def command(name, *options):
    """The command line of a sub-command of the toolkit."""
    return [sys.executable, "-m", "modelopt_eagle.cli.main", name, *map(str, options)]


class ServerProcess:
    """``modelopt-eagle serve-features`` in a process group of its own; ports stay the same over restarts.

    Args:
        engine: options that choose the engine.
        log: file for its output.
        token: for the environment.
        options: further options.
    """

    def __init__(self, engine, log, token, *options, host="127.0.0.1"):
        self.port, self.feature_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._engine, self._log, self._options, self._host = engine, log, options, host
        self._environment = os.environ | SETTINGS | {TOKEN_VARIABLE: token}
        self._process = None

    @property
    def runs(self):
        return self._process is not None and self._process.poll() is None

    def start(self, target_dir):
        """Start it without waiting."""
        line = command(
            "serve-features", "--model", target_dir, "--host", self._host, "--port", self.port,
            "--feature-port", self.feature_port, *self._engine, *self._options,
        )  # fmt: skip
        with open(self._log, "w") as log:
            self._process = subprocess.Popen(
                line, env=self._environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self):
        """Until it says that it serves; its last words if it does not."""
        until = time.monotonic() + START_SECONDS
        while "serving features of" not in self._log.read_text():
            assert self.runs and time.monotonic() < until, self._log.read_text()[-4000:]
            time.sleep(0.1)

    def unfetched(self):
        """Files in shared memory that its processes have written; those of other tests are there, too."""
        return [path.name for path in SHARED_MEMORY.glob(f"{SEGMENT_PREFIX}*") if self._wrote(path.name)]

    def _wrote(self, name):
        try:
            return os.getpgid(int(name.split("-")[-2])) == self._process.pid
        except (ValueError, ProcessLookupError):
            return False

    def kill(self):
        """As when its host dies: kill -9 for all of its processes."""
        if self._process is not None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self._process.wait()

    def interrupt(self):
        """Ctrl-C; returns the exit code."""
        os.killpg(self._process.pid, signal.SIGINT)
        return self._process.wait(60)


class Proxy:
    """Stands in front of a server and lets everything through, slowly or with changes.

    Args:
        server: with ``url`` and ``feature_port``.
        delay: seconds that every completion takes longer.
        change: ``change(frames) -> frames`` of what the mailbox answers, or None.
    """

    def __init__(self, server, delay=0.0, change=None):
        self._url, self._delay, self.asked = server.url, delay, 0
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self.feature_port = server.feature_port
        self._stop, self._threads = threading.Event(), [threading.Thread(target=self._http.serve_forever, args=(0.05,))]
        if change is not None:
            front = zmq.Context.instance().socket(zmq.ROUTER)
            self.feature_port = front.bind_to_random_port("tcp://127.0.0.1")
            self._threads.append(threading.Thread(target=self._relay, args=(front, server.feature_port, change)))
        for thread in self._threads:
            thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._stop.set()
        self._http.shutdown()
        self._http.server_close()
        for thread in self._threads:
            thread.join()

    def _relay(self, front, port, change):
        with front, zmq.Context.instance().socket(zmq.DEALER) as back:
            for end in (front, back):
                end.setsockopt(zmq.LINGER, 0)
            back.connect(f"tcp://127.0.0.1:{port}")
            while not self._stop.is_set():
                if front.poll(50):
                    sender, request = front.recv_multipart()
                    back.send(request)
                    frames = back.recv_multipart()
                    front.send_multipart([sender, *(change(frames) if b'"get"' in request else frames)])

    def _handler(self):
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            """Passes both methods on."""

            protocol_version = "HTTP/1.1"

            def do_GET(self):
                self._pass(None)

            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                proxy.asked += 1
                time.sleep(proxy._delay)
                self._pass(body)

            def _pass(self, body):
                headers = {n: self.headers[n] for n in ("Content-Type", "Authorization") if n in self.headers}
                request = urllib.request.Request(proxy._url + self.path, body, headers)
                try:
                    with urllib.request.urlopen(request, timeout=60) as response:
                        status, content = response.status, response.read()
                except urllib.error.HTTPError as error:
                    status, content = error.code, error.read()
                answer = json.loads(content)
                if where := answer.get("kv_transfer_params"):
                    where["feature_port"] = proxy.feature_port
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format, *values):
                """Requests are too many to print."""

        return Handler
