"""Fetch a message from a server's mailbox."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time

from modelopt_eagle.common.package import require_extra
from modelopt_eagle.errors import StreamError
from modelopt_eagle.features.stream.mailbox import LONGEST_WAIT
from modelopt_eagle.features.stream.message import FeatureMessage, check_header, decode, parse_header
from modelopt_eagle.features.stream.nixl import NixlLost, NixlReceiver
from modelopt_eagle.features.stream.received import Connection, Watched
from modelopt_eagle.features.stream.segments import SEGMENT_PREFIX, SHARED_MEMORY, delete_left_segments

TRANSPORTS = ("auto", "tcp", "shm", "nixl")
LARGEST_HEADER = 16 * 2**20
"""Bytes of an answer beside its states at most: its token ids are the most of it."""
_LOOK = 0.1
"""Seconds between looks at how much of an answer has come."""


class StreamTimeout(StreamError):
    """A server that did not answer in time, or is gone; another one may be asked."""


class MailboxClient:
    """Speaks to one mailbox; may be used by several threads (each gets its own socket).

    Args:
        address: ``host:port`` of the mailbox.
        token: the shared token, or None.
        transport: ``"tcp"``, ``"shm"`` (same host only), ``"nixl"``, or ``"auto"``: shm on loopback, and tcp if the
            server turns out to have another ``/dev/shm`` (a container whose port is forwarded).
        timeout: seconds to wait for an answer.
    """

    def __init__(self, address: str, token: str | None = None, transport: str = "tcp", timeout: float = 60.0):
        if transport not in TRANSPORTS:
            raise StreamError(f"transport {transport!r} is not known; choose {', '.join(TRANSPORTS)}")
        self._falls_back = transport == "auto"
        if transport == "auto":
            transport = "shm" if address.rsplit(":", 1)[0] in ("127.0.0.1", "localhost", "[::1]") else "tcp"
        self.address, self._token, self._transport, self._timeout = address, token, transport, timeout
        self._zmq = require_extra("zmq", "stream")
        self._local = threading.local()
        self._nixl = NixlReceiver() if transport == "nixl" else None
        if transport == "shm":
            delete_left_segments()

    def hello(self) -> dict:
        """What the server serves: model, revision, tokenizer_hash, aux_layer_ids, hidden_size, …

        Raises:
            StreamTimeout: no answer.
            StreamError: a refusal, or a malformed answer.
        """
        header = parse_header(self._ask({"op": "hello"}, LARGEST_HEADER)[0], self.address)
        if not isinstance(header.get("identity"), dict):
            raise StreamError(f"{self.address}: {header.get('error', 'malformed answer: no identity')}")
        return header["identity"]

    def fetch(self, key: str, largest: int | None = None) -> FeatureMessage:
        """The message under ``key``; it is gone from the server afterwards.

        Args:
            key: that the server gave.
            largest: bytes of the states at most; an answer far beyond them is not taken to its end.

        Raises:
            StreamTimeout: no answer, or the server no longer has the message: ask for the row again.
            StreamError: a refusal, or a malformed message.
        """
        wait = min(self._timeout / 2, LONGEST_WAIT)
        request = {"op": "get", "key": key, "transport": self._transport, "wait": wait}
        frames = self._ask(request, None if largest is None else largest + LARGEST_HEADER)
        header = parse_header(frames[0], self.address)
        if header.get("ok") is False:
            error = str(header.get("error"))
            lost = "no message under" in error or "was dropped" in error
            raise (StreamTimeout if lost else StreamError)(f"{self.address}: {error}")
        check_header(header, self.address)  # before memory is taken for what it says
        if "segment" in header:
            payload = self._take_segment(header["segment"], header["bytes"])
        elif self._nixl is not None:
            try:
                payload = self._nixl.read(header.get("nixl"), header["bytes"], self._timeout)
            except NixlLost as error:
                raise StreamTimeout(f"{self.address}: {error}") from error
        elif len(frames) == 2:
            payload = frames[1]
        else:
            raise StreamError(f"{self.address} sent a malformed message: {len(frames)} frames, 2 expected")
        return decode(header, payload, self.address)

    def _take_segment(self, name, size: int) -> bytearray:
        """Read and delete a shared-memory file; only names that a mailbox gives are opened."""
        if not isinstance(name, str) or not name.startswith(SEGMENT_PREFIX) or os.sep in name or "\0" in name:
            raise StreamError(f"{self.address} sent a malformed message: segment name {name!r}")
        path = SHARED_MEMORY / name
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb", buffering=0) as file:
                if (found := os.fstat(file.fileno()).st_size) != size:
                    raise StreamError(
                        f"{self.address} sent a malformed message: {size} bytes of shared memory expected, "
                        f"{found} found"
                    )
                payload = bytearray(size)
                file.readinto(payload)
            path.unlink()
        except OSError as error:
            if self._falls_back:
                self._transport = "tcp"
                raise StreamTimeout(f"{self.address} has another {SHARED_MEMORY} ({error}): TCP from now on") from error
            raise StreamError(
                f"cannot read shared memory {path} ({error}); if the server runs on another host, use transport tcp"
            ) from error
        return payload

    def _ask(self, request: dict, largest: int | None) -> list[bytes]:
        """Send a request; wait for its answer, as long as the connection lasts and at most ``largest`` bytes come."""
        zmq = self._zmq
        if getattr(self._local, "watched", None) is None:
            self._connect()
        if self._is_gone():  # the server has left since the last request, and may be back
            self._disconnect()
            self._connect()
        watched = self._local.watched
        socket = watched.socket
        before, until = self._received(), time.monotonic() + self._timeout
        socket.send(json.dumps(request | {"token": self._token}).encode())
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(watched.events, zmq.POLLIN)
        gone = False
        while not gone and (left := until - time.monotonic()) > 0:
            ready = dict(poller.poll(1000 * min(left, _LOOK)))
            if socket in ready:
                return socket.recv_multipart()
            gone = self._is_gone()
            if largest is not None and (came := self._received() - before) > largest:
                self._disconnect()
                raise StreamError(
                    f"{self.address} answers a {request['op']} by more than {came} bytes, at most {largest} can be: "
                    "it is no feature server, or one of another target"
                )
        self._disconnect()  # an answer that comes late must not be taken for the next one's
        what = f"did not answer a {request['op']} within {self._timeout:g} s"
        raise StreamTimeout(f"{self.address} {'cannot be reached, or is gone' if gone else what}")

    def _connect(self) -> None:
        zmq = self._zmq
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, self.address.startswith("["))
        events = zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
        self._local.watched, self._local.connection = Watched(zmq, socket, events), None
        socket.connect(f"tcp://{self.address}")

    def _is_gone(self) -> bool:
        """Take in what became of the connection; whether it was lost, or could not be made."""
        for event, descriptor in self._local.watched.told():
            if event != self._zmq.EVENT_CONNECTED:
                return True
            with contextlib.suppress(OSError):  # it came and went
                self._local.connection = Connection(descriptor)
        return False

    def _received(self) -> int:
        """Bytes that the connection has received; 0 while there is none."""
        connection = self._local.connection
        return 0 if connection is None else connection.info()[0]

    def _disconnect(self) -> None:
        self._local.watched.close()
        self._local.watched = None
        if self._local.connection is not None:
            self._local.connection.close()
