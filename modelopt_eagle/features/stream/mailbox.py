"""Where a feature server leaves finished messages, and trainers fetch them: by TCP (ZeroMQ), shared memory or NIXL.

A trainer sends one JSON frame to the mailbox's ZeroMQ socket and gets one or two frames back:

``{"op": "hello", "token": …}``
    → ``{"ok": true, "identity": {…}}``, what the server serves.
``{"op": "get", "key": …, "token": …, "transport": "tcp" | "shm" | "nixl", "wait": seconds}``
    → the two frames of ``stream.message``, each message once. With ``nixl`` the second frame is read from the server's
    memory (``stream.nixl``); with ``shm`` the second frame stays in ``/dev/shm`` and
    the header says where; who fetched it deletes it, and the mailbox what nobody fetched in :data:`SEGMENT_LIFE`.

Anything that fails is answered by ``{"ok": false, "error": …}``.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import json
import os
import secrets
import socket
import threading
import time
from collections import OrderedDict, deque
from pathlib import Path

from modelopt_eagle.common.package import require_extra
from modelopt_eagle.errors import StreamError
from modelopt_eagle.features.stream.message import FeatureMessage, encode
from modelopt_eagle.features.stream.nixl import NixlSender

SHARED_MEMORY = Path("/dev/shm")
SEGMENT_PREFIX = "modelopt-eagle-"
SEGMENT_LIFE = 300.0
"""Seconds after which a file in shared memory is taken to be left by a trainer that was killed."""

_TICK_MS = 5


def check_bind(address: str, token: str | None) -> None:
    """A server that others can reach needs a token.

    Args:
        address: ``host:port`` that the server listens on.
        token: the shared token, or None.

    Raises:
        StreamError: an address that is not loopback, without a token.
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


def _delete_old_segments() -> None:
    """Delete what a server and a trainer that were both killed left in shared memory."""
    for path in SHARED_MEMORY.glob(f"{SEGMENT_PREFIX}*"):
        try:
            if time.time() - path.stat().st_mtime > SEGMENT_LIFE:
                path.unlink()
        except OSError:  # another server was faster, or it is another user's
            continue


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


class Mailbox:
    """Finished messages, held until they are fetched or pushed out by newer ones.

    Args:
        identity: what the server serves, answered to ``hello``.
        address: ``host:port`` to listen on; port 0 takes a free one.
        token: shared secret that every request must carry; required off loopback.
        max_bytes: bound of the memory for messages; the oldest unfetched are dropped, and asking for one is answered
            by an error that says so (the trainer then asks for the row again).

    Attributes:
        port: the port that it listens on.
    """

    def __init__(self, identity: dict, address: str, token: str | None = None, max_bytes: int = 4 * 2**30):
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
        self._segments: deque[tuple[float, Path]] = deque()  # handed out, with the time at which they are deleted
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, ":" in address.rsplit(":", 1)[0])
        _bind(zmq, self._socket, address)
        _delete_old_segments()
        self.port = int(self._socket.getsockopt(zmq.LAST_ENDPOINT).decode().rsplit(":", 1)[1])
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
        self._socket.close()
        self._delete_segments(float("inf"))

    def _serve(self) -> None:
        waiting: list[tuple[bytes, dict, float]] = []  # requests for messages that are not there yet
        while not self._stop.is_set():
            if self._socket.poll(_TICK_MS if waiting else 10 * _TICK_MS):
                sender, *frames = self._socket.recv_multipart()
                request, error = self._parse(frames)
                if error is not None:
                    self._refuse(sender, error)
                elif request["op"] == "hello":
                    self._reply(sender, {"ok": True, "identity": self._identity})
                else:
                    waiting.append((sender, request, time.monotonic() + float(request.get("wait", 0))))
            now = time.monotonic()
            waiting = [entry for entry in waiting if not self._answer(*entry, now)]
            self._delete_segments(now)
            if self._nixl is not None:
                self._nixl.release()

    def _delete_segments(self, now: float) -> None:
        """Delete files in shared memory that nobody has fetched in time; those that were are gone already."""
        while self._segments and self._segments[0][0] <= now:
            self._segments.popleft()[1].unlink(missing_ok=True)

    def _parse(self, frames: list[bytes]) -> tuple[dict, str | None]:
        """The request, or the error to answer."""
        try:
            request = json.loads(frames[0]) if len(frames) == 1 else None
        except ValueError:
            request = None
        if not isinstance(request, dict) or request.get("op") not in ("hello", "get"):
            return {}, "malformed request: one JSON frame with op hello or get expected"
        if self._token and not hmac.compare_digest(str(request.get("token") or "").encode(), self._token.encode()):
            return {}, "wrong or missing token: set MODELOPT_EAGLE_STREAM_TOKEN to the server's"
        if request["op"] == "get" and not (
            isinstance(request.get("key"), str)
            and request.get("transport") in ("tcp", "shm", "nixl")
            and isinstance(request.get("wait", 0), (int, float))
        ):
            return {}, "malformed request: get needs key, transport tcp, shm or nixl, and wait in seconds"
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
            segment = SHARED_MEMORY / f"{SEGMENT_PREFIX}{secrets.token_hex(16)}"
            try:
                with open(os.open(segment, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
                    file.write(payload)
            except OSError as error:
                segment.unlink(missing_ok=True)
                self._refuse(sender, f"cannot write {len(payload)} bytes of shared memory: {error}")
                return True
            self._segments.append((now + SEGMENT_LIFE, segment))
            self._reply(sender, header | {"segment": segment.name})
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
