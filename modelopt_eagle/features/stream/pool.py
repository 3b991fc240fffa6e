"""Several feature servers as one: rows are spread over them, and a server that fails is replaced by the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from modelopt_eagle.common.console import warn
from modelopt_eagle.errors import StreamError
from modelopt_eagle.features.stream.client import TRANSPORTS, MailboxClient, StreamTimeout
from modelopt_eagle.features.stream.http import CompletionsClient
from modelopt_eagle.features.stream.message import FeatureMessage

_FIRST_REST, _LONGEST_REST = 0.25, 8.0
"""Seconds in which a server that failed is left alone; doubled with each further failure."""


@dataclass
class _Server:
    """One server: its clients, and how it does."""

    completions: CompletionsClient
    mailbox: MailboxClient | None = None
    busy: int = 0
    failures: int = 0
    rests_until: float = 0.0
    failed_since: float | None = None
    instance: str | None = None  # of the process that was checked; another one is checked anew
    lock: threading.Lock = field(default_factory=threading.Lock)


class ServerPool:
    """Fetches the states of token rows from whichever server is well.

    Args:
        urls: addresses such as ``http://host:8000``.
        check: called with (url, identity) for the first states of every server process, so also after a restart, which
            may be with another model; raises :class:`StreamError` to refuse it.
        token: the shared token, or None.
        transport: see :class:`~modelopt_eagle.features.stream.client.MailboxClient`.
        timeout: seconds after which a server that does not answer is given up for another.
        patience: seconds of failures on all servers after which the run stops.
        token_bytes: bytes of a token's states at most; None: any.

    Raises:
        StreamError: no server, or a bad address or transport.
    """

    def __init__(
        self,
        urls: Sequence[str],
        check: Callable[[str, dict], None],
        *,
        token: str | None = None,
        transport: str = "auto",
        timeout: float = 120.0,
        patience: float = 600.0,
        token_bytes: int | None = None,
    ):
        if not urls:
            raise StreamError("no feature server given: http://host:port expected")
        if transport not in TRANSPORTS:
            raise StreamError(f"transport {transport!r} is not known; choose {', '.join(TRANSPORTS)}")
        self._servers = [_Server(CompletionsClient(url, token, timeout)) for url in urls]
        self._check, self._token, self._transport = check, token, transport
        self._timeout, self._patience, self._token_bytes = timeout, patience, token_bytes
        self._lock = threading.Lock()

    def fetch(self, row_id: str, token_ids: Sequence[int], stop: threading.Event | None = None) -> FeatureMessage:
        """States of one row, from any server.

        Args:
            row_id: for messages.
            token_ids: the tokens of the row.
            stop: once set, no server is asked again.

        Raises:
            StreamError: a server refused the row or is of another model, answered nonsense or states of other tokens;
                no server has answered for ``patience`` seconds; or ``stop`` was set.
        """
        give_up = time.monotonic() + self._patience
        stop = stop or threading.Event()
        while True:
            server = self._take(stop)
            try:
                message = self._ask(server, row_id, token_ids)
                if server.failed_since is not None:
                    self._recovered(server)
                return message
            except StreamTimeout as error:
                self._failed(server, error)
                if time.monotonic() > give_up:
                    raise StreamError(
                        f"row {row_id!r}: no feature server has answered for {self._patience:g} s; last error: {error}"
                    ) from error
            finally:
                with self._lock:
                    server.busy -= 1

    def _failed(self, server: _Server, error: StreamTimeout) -> None:
        """Let a server rest; the first failure of several is told."""
        now = time.monotonic()
        with self._lock:
            if server.rests_until <= now:  # else another row has met the same failure
                server.rests_until = now + min(_FIRST_REST * 2**server.failures, _LONGEST_REST)
                server.failures += 1
            first = server.failed_since is None
            if first:
                server.failed_since = now
        if first:
            others = "the others are asked" if len(self._servers) > 1 else f"it is asked for {self._patience:g} s more"
            warn(f"a feature server failed, {others}: {error}")

    def _recovered(self, server: _Server) -> None:
        """Take a server's failures from it, and tell how long they lasted."""
        with self._lock:
            since, server.failed_since, server.failures = server.failed_since, None, 0
        if since is not None:  # no other thread was faster
            warn(f"{server.completions.url} answers again, after {time.monotonic() - since:.0f} s")

    def _take(self, stop: threading.Event) -> _Server:
        """The least busy server that is not resting; if all are, the first to end its rest, after waiting for that.

        Raises:
            StreamError: ``stop`` is set.
        """
        while True:
            if stop.is_set():
                raise StreamError("the fetching of features was broken off")
            now = time.monotonic()
            with self._lock:
                well = [server for server in self._servers if server.rests_until <= now]
                if well:
                    server = min(well, key=lambda s: s.busy)
                    server.busy += 1
                    return server
                wait = min(server.rests_until for server in self._servers) - now
            stop.wait(wait)

    def _ask(self, server: _Server, row_id: str, token_ids: Sequence[int]) -> FeatureMessage:
        if server.failures:
            server.completions.forget()
        ticket = server.completions.run(token_ids)
        with server.lock:
            if server.mailbox is None or server.mailbox.address != ticket.address:
                server.mailbox = MailboxClient(ticket.address, self._token, self._transport, self._timeout)
        largest = None if self._token_bytes is None else len(token_ids) * self._token_bytes
        message = server.mailbox.fetch(ticket.key, largest)
        with server.lock:
            if message.server != server.instance:
                identity = server.mailbox.hello()
                if identity.get("server") != message.server:
                    raise StreamTimeout(f"{server.completions.url} was restarted while it was asked")
                self._check(server.completions.url, identity)
                server.instance = message.server
        if message.token_ids != list(token_ids):
            raise StreamError(
                f"row {row_id!r}: {len(token_ids)} tokens were sent to {server.completions.url}, states of "
                f"{len(message.token_ids)} tokens came back, or of others; is the server's vLLM one that we know?"
            )
        return message
