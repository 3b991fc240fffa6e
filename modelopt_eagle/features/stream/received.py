"""How much a TCP connection of ZeroMQ's has received: what bounds a message of frames without an end.

ZeroMQ bounds a frame and counts whole messages; the frames of one that never ends are kept until memory is full, thirty
times their bytes on the wire where they are empty. The kernel counts what a connection received (``TCP_INFO``), so a
connection that is far ahead of the messages taken from it can be told and ended. Only Linux is asked.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
import uuid
import weakref
from collections.abc import Iterator, Sequence

LARGEST_LEAD = 256 * 2**10
"""Bytes that one connection may be ahead of the messages taken from it; well above a request of ours."""
LARGEST_LEADS = 4 * 2**20
"""The same over all connections."""

_LOOK = 0.02
"""Seconds between looks at all connections."""
_RECEIVED = struct.Struct("Q")
_RECEIVED_AT = 128  # tcpi_bytes_received of Linux's struct tcp_info
_GONE = (7, 8)  # TCP_CLOSE, TCP_CLOSE_WAIT: its first byte


class Connection:
    """A second handle on a connection that ZeroMQ holds.

    Args:
        descriptor: of ZeroMQ's socket; its own handle stays open until :meth:`close`.

    Raises:
        OSError: no such socket any more.
    """

    def __init__(self, descriptor: int):
        self._socket = socket.socket(fileno=os.dup(descriptor))
        self.taken = 0

    def local_port(self) -> int:
        """The port at this end."""
        return int(self._socket.getsockname()[1])

    def info(self) -> tuple[int, bool]:
        """Bytes received so far, and whether the other side has left."""
        if sys.platform != "linux":
            return 0, False
        told = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        received = _RECEIVED.unpack_from(told, _RECEIVED_AT)[0] if len(told) >= _RECEIVED_AT + 8 else 0
        return received, told[0] in _GONE

    def end(self) -> None:
        """Let ZeroMQ find the connection closed; it then drops what it kept of it."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # gone already

    def close(self) -> None:
        """Let go of this handle."""
        self._socket.close()


class Watched:
    """A ZeroMQ socket whose connections' events are told.

    The one thread in which ZeroMQ moves the bytes of a process waits, for ever and for all sockets, where an event
    cannot be handed over. So their queue has no bound, and they are switched off before its end is closed, also where
    nobody calls :meth:`close` and the garbage collector lets go of a circle of objects, in whatever order: hold the
    socket by this object alone.

    Args:
        zmq: the module.
        socket: not connected yet.
        events: of ``zmq.EVENT_…``, or-ed.

    Attributes:
        socket: the socket.
        events: where events come in, for a poller.
    """

    def __init__(self, zmq, socket, events: int):
        address = f"inproc://events-{uuid.uuid4().hex}"
        self.socket, self.events = socket, zmq.Context.instance().socket(zmq.PAIR)
        self.events.setsockopt(zmq.RCVHWM, 0)
        self.events.setsockopt(zmq.LINGER, 0)
        socket.monitor(address, events)
        self.events.connect(address)
        # by a finalizer, which holds both ends: in __del__ the collector may have closed the events' end already
        self._end = weakref.finalize(self, _end_in_order, socket, self.events)

    def told(self) -> Iterator[tuple[int, int]]:
        """``(event, descriptor)`` of what has happened since the last call; the second is an error for some events."""
        from zmq.utils.monitor import parse_monitor_message

        while not self.events.closed and self.events.poll(0):
            told = parse_monitor_message(self.events.recv_multipart())
            yield told["event"], int(told["value"])

    def close(self) -> None:
        """Close the socket, after its events; a second call does nothing."""
        self._end()


def _end_in_order(socket, events) -> None:
    """Switch the events of a socket off, then close the end where they come in, then the socket."""
    if not socket.closed:
        socket.monitor(None, 0)
    events.close()
    socket.close()


def wire_bytes(frames: Sequence[bytes]) -> int:
    """Bytes that the frames of a message take on the wire."""
    return sum(len(frame) + (2 if len(frame) < 256 else 9) for frame in frames)


class Connections:
    """The connections that a listening ZeroMQ socket has accepted; the socket is closed with this object.

    Args:
        zmq: the module.
        listener: the socket, bound already.
        port: that it listens on.
    """

    def __init__(self, zmq, listener, port: int):
        self._zmq, self._port = zmq, port
        self._listener = Watched(zmq, listener, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._open: dict[int, Connection] = {}
        self._next = 0.0  # time to look again

    def _follow(self) -> None:
        """Take in which connections came and went."""
        for event, descriptor in self._listener.told():
            if (before := self._open.pop(descriptor, None)) is not None:
                before.close()
            if event == self._zmq.EVENT_ACCEPTED:
                try:
                    connection = Connection(descriptor)
                except OSError:
                    continue  # it came and went
                if connection.local_port() == self._port:
                    self._open[descriptor] = connection
                else:  # it went, and the number is another socket's
                    connection.close()

    def took(self, frames: Sequence) -> None:
        """Count a message that was taken.

        Args:
            frames: ``zmq.Frame`` of a message, without the sender's.
        """
        self._follow()
        try:
            connection = self._open.get(frames[0].get(self._zmq.SRCFD)) if frames else None
        except self._zmq.ZMQError:
            return
        if connection is not None:
            connection.taken += wire_bytes([frame.buffer for frame in frames])

    def end_floods(self) -> list[int]:
        """End the connections that are too far ahead of what was taken; returns by how many bytes each was."""
        self._follow()
        now, leads = time.monotonic(), {}
        if now < self._next:
            return []
        self._next = now + _LOOK
        for descriptor, connection in list(self._open.items()):
            received, gone = connection.info()
            if gone:
                self._open.pop(descriptor).close()
            else:
                leads[descriptor] = max(0, received - connection.taken)
        total, ended = sum(leads.values()), []
        for descriptor in sorted(leads, key=leads.__getitem__, reverse=True):
            lead = leads[descriptor]
            if lead <= LARGEST_LEAD and total <= LARGEST_LEADS:
                break
            connection = self._open.pop(descriptor)
            connection.end()
            connection.close()
            total -= lead
            ended.append(lead)
        return ended

    def close(self) -> None:
        """Stop following, and close the listener."""
        self._listener.close()
        for connection in self._open.values():
            connection.close()
        self._open.clear()
