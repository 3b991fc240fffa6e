"""An HTTP server of JSON that nobody outside can stop: bounded in connections, in time and in bytes of a request."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from modelopt_eagle.common.console import warn
from modelopt_eagle.common.strict_json import parse_json
from modelopt_eagle.features.stream.mailbox import same_secret

REQUEST_SECONDS = 30.0
"""Seconds in which a request must have arrived, and its answer must have been taken."""
MOST_CONNECTIONS = 512
"""Connections at a time; further ones are answered 503."""


class Refused(Exception):
    """An HTTP status and the words that go with it."""

    def __init__(self, status: int, words: str):
        super().__init__(words)
        self.status, self.words = status, words


class JsonServer(ThreadingHTTPServer):
    """Answers each connection in a thread of its own.

    Args:
        address: ``host:port``; brackets around an IPv6 address; port 0 takes a free one.
        answer: ``answer(method, path, body)`` gives the object to answer; ``body`` is the parsed JSON of a POST, else
            None. It raises :class:`Refused` to answer another status than 200.
        token: bearer token that every request but those of ``public`` paths must carry, or None.
        largest: bytes of a body at most.
        public: paths that need no token.

    Attributes:
        url: of the server.
    """

    request_queue_size = 1024
    """Connections that the system keeps until they are accepted: bursts of a whole cluster of trainers."""
    daemon_threads = True

    def __init__(
        self,
        address: str,
        answer: Callable[[str, str, object], object],
        *,
        token: str | None = None,
        largest: int = 2**20,
        public: tuple[str, ...] = ("/health",),
    ):
        host, port = address.rsplit(":", 1)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.answer, self.token, self.largest, self.public = answer, token, largest, public
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._waited_for: dict[socket.socket, float] = {}  # by when what we wait for must have come
        super().__init__((host.strip("[]"), int(port)), _Handler)
        self.url = f"http://{host}:{self.server_address[1]}"

    def wait_for(self, connection: socket.socket, waits: bool) -> None:
        """Say that a connection is waited for from now on, or is not any more."""
        with self._lock:
            if waits:
                self._waited_for[connection] = time.monotonic() + REQUEST_SECONDS
            else:
                self._waited_for.pop(connection, None)

    def service_actions(self) -> None:
        """End connections that have kept us waiting too long; called at every turn of ``serve_forever``."""
        now = time.monotonic()
        with self._lock:
            late = [connection for connection, until in self._waited_for.items() if until < now]
        for connection in late:
            try:
                connection.shutdown(socket.SHUT_RDWR)  # its thread wakes up and closes it
            except OSError:
                continue

    def process_request(self, request, client_address) -> None:
        """Give a connection a thread, if there are not too many."""
        with self._lock:
            full = len(self._open) >= MOST_CONNECTIONS
            if not full:
                self._open.add(request)
        if full:
            words = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            request.setblocking(False)
            try:
                request.send(words)
            except OSError:
                pass  # gone, or not reading
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def shutdown_request(self, request) -> None:
        """Close a connection and forget it."""
        with self._lock:
            self._open.discard(request)
            self._waited_for.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request, client_address) -> None:
        """A client that left needs no words; anything else is a fault of ours, said in one line."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            warn(f"feature server: a request failed: {type(error).__name__}: {error}")


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    timeout = REQUEST_SECONDS  # of a single read or write

    def handle_one_request(self) -> None:
        self.server.wait_for(self.connection, True)
        try:
            super().handle_one_request()
        finally:
            self.server.wait_for(self.connection, False)

    def do_GET(self) -> None:
        self._respond(lambda: None)

    def do_POST(self) -> None:
        self._respond(self._body)

    def _respond(self, read: Callable[[], object]) -> None:
        try:
            self._authorise()
            value, status = self.server.answer(self.command, self.path, read()), 200
        except Refused as refused:
            status, value = refused.status, {"error": {"message": refused.words, "code": refused.status}}
        except Exception as error:  # a fault of ours, or the device's: the client may ask another server
            words = f"{type(error).__name__}: {error}"
            warn(f"feature server: a request failed: {words}")
            status, value = 500, {"error": {"message": f"the server failed: {words}", "code": 500}}
        content = json.dumps(value).encode()
        self.server.wait_for(self.connection, True)  # now for the client to take the answer
        self.close_connection = self.close_connection or status >= 400  # its body may not have been read
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def _authorise(self) -> None:
        server, given = self.server, self.headers.get("Authorization", "")
        if server.token and self.path not in server.public:
            if not same_secret(given, f"Bearer {server.token}"):
                raise Refused(401, "wrong or missing token")

    def _body(self) -> object:
        """The parsed body of a POST."""
        if "Transfer-Encoding" in self.headers:
            raise Refused(411, "a body with Content-Length is expected, not one in chunks")
        length = self.headers.get("Content-Length", "").strip()
        if not length.isascii() or not length.isdigit():
            words = f"Content-Length must be a number of bytes, found {length[:40]!r}"
            raise Refused(400 if length else 411, words)
        if len(length) > 15 or int(length) > self.server.largest:
            raise Refused(413, f"a request has at most {self.server.largest} bytes, this one says {length[:40]}")
        body = self.rfile.read(int(length))
        self.server.wait_for(self.connection, False)  # it is ours to work now
        if len(body) < int(length):
            raise Refused(400, f"Content-Length says {length} bytes, {len(body)} came")
        try:
            return parse_json(body)
        except ValueError as error:
            raise Refused(400, f"the request is no JSON: {error}") from error

    def log_message(self, format, *values) -> None:
        """Requests are too many to print."""
