"""Where a feature server leaves finished messages, and trainers fetch them: by TCP (ZeroMQ), shared memory or NIXL.

A trainer sends one JSON frame to the mailbox's ZeroMQ socket and gets one or two frames back:

``{"op": "hello", "token": …}``
    → ``{"ok": true, "identity": {…}}``, what the server serves.
``{"op": "get", "key": …, "token": …, "transport": "tcp" | "shm" | "nixl", "wait": seconds}``
    → the two frames of ``stream.message``, each message once. With ``nixl`` the second frame is read from the server's
    memory (``stream.nixl``); with ``shm`` the second frame stays in ``/dev/shm`` and
    the header says where; who fetched it deletes it, and the mailbox what nobody fetched in :data:`SEGMENT_LIFE`.

Anything that fails is answered by ``{"ok": false, "error": …}``. A frame above :data:`LARGEST_REQUEST` bytes ends the
connection that it came by, before it is taken into memory; so do frames without an end (``stream.received``).
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import json
import math
import secrets
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator

from modelopt_eagle.common.console import warn
from modelopt_eagle.common.package import require_extra
from modelopt_eagle.common.strict_json import parse_json
from modelopt_eagle.errors import StreamError
from modelopt_eagle.features.stream.message import FeatureMessage, encode
from modelopt_eagle.features.stream.nixl import NixlSender
from modelopt_eagle.features.stream.received import Connections
from modelopt_eagle.features.stream.segments import Segments, delete_left_segments

LARGEST_REQUEST = 64 * 2**10
"""Bytes of a request's frame at most."""
LONGEST_KEY = 1024
"""Characters of a key at most."""
LONGEST_WAIT = 3600.0
"""Seconds that a request may wait for its message at most."""
MOST_WAITING = 10_000
"""Requests that may wait at a time."""

_TICK_MS = 5
_AT_A_TIME = 100  # requests taken before waiting ones and connections are looked at


def check_bind(address: str, token: str | None) -> None:
    """A server that others can reach needs a token.

    Args:
        address: ``host:port`` that the server listens on.
        token: the shared token, or None.

    Raises:
        StreamError: an address that is not loopback, without a token; or a token that no header can carry.
    """
    host = address.rsplit(":", 1)[0].strip("[]")
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback and not token:
        raise StreamError(
            f"{address} can be reached from other hosts and there is no token: set MODELOPT_EAGLE_STREAM_TOKEN to the "
            "same secret for server and trainer, or listen on 127.0.0.1"
        )
    if token and not (token.isascii() and token.isprintable()):
        raise StreamError("the token of a feature server may hold printable ASCII characters only: choose another")


BIND_PATIENCE = 2.0
"""Seconds to wait for a port that the server before has closed: ZeroMQ lets go of it a little after ``close``."""


def check_free(address: str, option: str) -> None:
    """Wait up to :data:`BIND_PATIENCE` for a port to be free.

    Args:
        address: ``host:port`` that a server will listen on.
        option: that names the port, for the message.

    Raises:
        StreamError: something listens there, or the host is not one of this machine's.
    """
    host, port = address.rsplit(":", 1)
    host = host.strip("[]")
    until = time.monotonic() + BIND_PATIENCE
    while True:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                return probe.bind((host, int(port)))
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > until:
                    raise StreamError(f"cannot listen on {address}: {error}; choose another by {option}") from error
        time.sleep(0.05)


def _bind(zmq, listener, address: str) -> None:
    """Listen on ``host:port``; a port still held after :data:`BIND_PATIENCE` closes the socket with a StreamError."""
    until = time.monotonic() + BIND_PATIENCE
    while True:
        try:
            return listener.bind(f"tcp://{address}")
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE or time.monotonic() > until:
                listener.close()
                raise StreamError(f"cannot listen on {address} for features: {error}; choose another port") from error
            time.sleep(0.05)


def same_secret(given, secret: str) -> bool:
    """Whether what somebody gave is the secret, in a time that does not tell how much of it is right.

    Args:
        given: anything; only a string can be it.
        secret: the token.
    """
    given = given if isinstance(given, str) else ""
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), secret.encode("utf-8", "surrogateescape"))


def _is_wait(value) -> bool:
    """Whether a value is a number of seconds that a request may wait."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value) and 0 <= value <= LONGEST_WAIT


class Mailbox:
    """Finished messages, held until they are fetched or pushed out by newer ones.

    Args:
        identity: what the server serves, answered to ``hello``.
        address: ``host:port`` to listen on; port 0 takes a free one.
        token: shared secret that every request must carry; required off loopback.
        max_bytes: bound of the memory for messages; the oldest unfetched are dropped, and asking for one is answered
            by an error that says so (the trainer then asks for the row again).

        on_failure: called when the mailbox cannot go on, so that its server does not either.

    Attributes:
        port: the port that it listens on.
        failure: what ended it, or None while it is well.
    """

    def __init__(
        self,
        identity: dict,
        address: str,
        token: str | None = None,
        max_bytes: int = 4 * 2**30,
        on_failure: Callable[[], None] = lambda: None,
    ):
        check_bind(address, token)
        zmq = require_extra("zmq", "stream")
        self._server = secrets.token_hex(8)
        self._identity = identity | {"server": self._server}
        self._token, self._max_bytes = token, max_bytes
        self._nixl: NixlSender | None = None  # made for the first trainer that asks for it
        self._ready: OrderedDict[str, tuple[dict, bytes]] = OrderedDict()
        self._dropped: OrderedDict[str, None] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._segments = Segments()
        self.failure: BaseException | None = None
        self._on_failure = on_failure
        self._reported: set[str] = set()  # faults of our own, each said once
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, ":" in address.rsplit(":", 1)[0])
        self._socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_REQUEST)
        _bind(zmq, self._socket, address)
        delete_left_segments()
        self.port = int(self._socket.getsockopt(zmq.LAST_ENDPOINT).decode().rsplit(":", 1)[1])
        self._connections = Connections(zmq, self._socket, self.port)
        self._thread = threading.Thread(target=self._serve, name="feature-mailbox", daemon=True)
        self._thread.start()

    def put(self, key: str, message: FeatureMessage) -> None:
        """Leave a message under ``key``."""
        header, payload = encode(message)
        header["server"] = self._server
        with self._lock:
            self._ready[key] = (header, payload)
            self._bytes += len(payload)
            while self._bytes > self._max_bytes and len(self._ready) > 1:
                old, (_, dropped) = self._ready.popitem(last=False)
                self._bytes -= len(dropped)
                self._dropped[old] = None
                if len(self._dropped) > 10_000:
                    self._dropped.popitem(last=False)

    def close(self) -> None:
        """Stop listening."""
        self._stop.set()
        self._thread.join()
        self._connections.close()
        self._segments.delete_all()

    def check(self) -> None:
        """Refuse to go on with a mailbox that has ended.

        Raises:
            StreamError: says what ended it.
        """
        if self.failure is not None:
            raise StreamError(
                f"the mailbox on port {self.port} has ended, no features can be fetched: "
                f"{type(self.failure).__name__}: {self.failure}; start the server again"
            )

    def _serve(self) -> None:
        """The thread: answers until it is closed; whatever ends it otherwise ends the server, too."""
        try:
            self._loop()
        except BaseException as error:
            self.failure = error
            warn(f"the feature mailbox ended: {type(error).__name__}: {error}")
            self._on_failure()

    def _loop(self) -> None:
        waiting: list[tuple[bytes, dict, float]] = []  # requests for messages that are not there yet
        while not self._stop.is_set():
            for sender, frames in self._messages(_TICK_MS if waiting else 10 * _TICK_MS):
                request = self._guarded(sender, self._take, sender, frames)
                if request is not None and len(waiting) >= MOST_WAITING:
                    self._refuse(sender, f"{MOST_WAITING} requests wait already: ask again later")
                elif request is not None:
                    waiting.append((sender, request, time.monotonic() + request.get("wait", 0)))
            now = time.monotonic()
            waiting = [entry for entry in waiting if self._guarded(entry[0], self._answer, *entry, now) is False]
            for lead in self._connections.end_floods():
                warn(f"feature mailbox: ended a connection that sent {lead} bytes which make no request")
            self._segments.delete_old(now)
            if self._nixl is not None:
                self._nixl.release()

    def _messages(self, patience: int) -> Iterator[tuple[bytes, list[bytes]]]:
        """(sender, frames) of what has come or comes in so many milliseconds; some at a time, for others wait, too."""
        for _ in range(_AT_A_TIME):
            if not self._socket.poll(patience):
                return
            patience = 0
            sender, *frames = self._socket.recv_multipart(copy=False)
            self._connections.took(frames)
            yield sender.bytes, [frame.bytes for frame in frames]

    def _guarded(self, sender: bytes, action: Callable, *arguments):
        """What ``action`` returns; a fault of our own is answered and said once, and the mailbox goes on."""
        try:
            return action(*arguments)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if len(self._reported) < 100 and text not in self._reported:
                self._reported.add(text)
                warn(f"feature mailbox: a request failed: {text}")
            self._refuse(sender, f"the request failed: {type(error).__name__}")
            return None

    def _take(self, sender: bytes, frames: list[bytes]) -> dict | None:
        """Answer a request at once; a ``get`` is returned, for its message may be still to come."""
        request, error = self._parse(frames)
        if error is not None:
            self._refuse(sender, error)
        elif request["op"] == "hello":
            self._reply(sender, {"ok": True, "identity": self._identity})
        else:
            return request
        return None

    def _parse(self, frames: list[bytes]) -> tuple[dict, str | None]:
        """The request, or the error to answer."""
        try:
            request = parse_json(frames[0]) if len(frames) == 1 else None
        except ValueError:
            request = None
        if not isinstance(request, dict) or request.get("op") not in ("hello", "get"):
            return {}, "malformed request: one JSON frame with op hello or get expected"
        if self._token and not same_secret(request.get("token"), self._token):
            return {}, "wrong or missing token: set MODELOPT_EAGLE_STREAM_TOKEN to the server's"
        if request["op"] == "get" and not (
            isinstance(request.get("key"), str)
            and len(request["key"]) <= LONGEST_KEY
            and request.get("transport") in ("tcp", "shm", "nixl")
            and _is_wait(request.get("wait", 0))
        ):
            return {}, (
                f"malformed request: get needs key, transport tcp, shm or nixl, and wait, 0 to {LONGEST_WAIT:g} seconds"
            )
        return request, None

    def _answer(self, sender: bytes, request: dict, deadline: float, now: float) -> bool:
        """Try to answer a get; False while its message is still to come."""
        key = request["key"]
        with self._lock:
            if key in self._ready:
                header, payload = self._ready.pop(key)
                self._bytes -= len(payload)
            elif key in self._dropped:
                self._refuse(sender, f"the message of {key} was dropped to bound memory: fetch sooner or ask again")
                return True
            elif now >= deadline:
                self._refuse(sender, f"no message under {key}")
                return True
            else:
                return False
        if request["transport"] == "shm":
            try:
                segment = self._segments.write(payload)
            except OSError as error:
                self._refuse(sender, f"cannot write {len(payload)} bytes of shared memory: {error}")
                return True
            self._reply(sender, header | {"segment": segment})
        elif request["transport"] == "nixl":
            try:
                self._nixl = self._nixl or NixlSender()
                offer = self._nixl.offer(payload)
            except Exception as error:  # NIXL raises kinds of its own; the mailbox goes on for the other transports
                self._refuse(sender, f"cannot hand states out by NIXL: {error}")
                return True
            self._reply(sender, header | {"nixl": offer})
        else:
            self._reply(sender, header, payload)
        return True

    def _refuse(self, sender: bytes, error: str) -> None:
        self._reply(sender, {"ok": False, "error": error})

    def _reply(self, sender: bytes, header: dict, payload: bytes | None = None) -> None:
        frames = [sender, json.dumps(header).encode()]
        self._socket.send_multipart(frames if payload is None else [*frames, payload], copy=False)
