"""A running OpenAI-compatible server: streamed answers with their times, and what its metrics count."""

from __future__ import annotations

import http.client
import json
import math
import re
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from modelopt_eagle.errors import StreamError
from modelopt_eagle.export.engines import ENGINES
from modelopt_eagle.export.engines.profile import Counters
from modelopt_eagle.validation.server_answers import NO_ANSWER, ChatServers, Refused, check_address, open_request

METRICS_SECONDS = 10.0
"""How long a server may take to tell its metrics; it tells them between its other work."""
SETTLE_SECONDS = 3.0
"""How long counters are read again until they stand still, since a server counts a little later than it answers."""

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(\{.*\})?\s+(\S+)")
_POSITION = re.compile(r'[{,]\s*position="(\d+)"')


@dataclass(frozen=True)
class StreamedAnswer:
    """One answer and when it came.

    Attributes:
        text: the content.
        first: seconds from the request to the first piece of text, reasoning or call (or to the end of an empty one).
        last: seconds to the last piece.
        whole: seconds to the end of the stream.
        prompt_tokens, completion_tokens: by the server's usage; ``None`` where it tells none.
        finish_reason: as the server says it.
    """

    text: str
    first: float
    last: float
    whole: float
    prompt_tokens: int | None
    completion_tokens: int | None
    finish_reason: str


@dataclass(frozen=True)
class Reading:
    """A server's counters at a moment.

    Attributes:
        engine: whose names they have; ``None``: no engine that is known.
        values: field of ``Counters`` to its number; those that the server does not have are missing.
        positions: number by position, from 0 on.
        trouble: why nothing could be read, or empty.
    """

    engine: str | None
    values: dict[str, int]
    positions: dict[int, int]
    trouble: str = ""


@dataclass(frozen=True)
class Acceptance:
    """What an engine counted of drafts.

    Attributes:
        drafts: rounds of drafting and verifying.
        accepted: drafted tokens that were accepted.
        drafted: tokens that were drafted; ``None`` where that is not told.
        positions: drafts of which at least 1, 2, … tokens were accepted; empty where that is not told.
    """

    drafts: int
    accepted: int
    drafted: int | None
    positions: tuple[int, ...]

    def __add__(self, other: Acceptance) -> Acceptance:
        """Both together; what one does not tell, the sum does not."""
        length = max(len(self.positions), len(other.positions))
        both = not ((self.drafts and not self.positions) or (other.drafts and not other.positions))
        padded = [(*found.positions, *(0,) * (length - len(found.positions))) for found in (self, other)]
        return Acceptance(
            self.drafts + other.drafts,
            self.accepted + other.accepted,
            None if self.drafted is None or other.drafted is None else self.drafted + other.drafted,
            tuple(a + b for a, b in zip(*padded, strict=True)) if both else (),
        )


@dataclass(frozen=True)
class Counted:
    """The difference of two readings.

    Attributes:
        acceptance: ``None`` where the server does not tell it, then ``trouble`` says why.
        generated: tokens of answers that the server counted; ``None``: not told.
        cached: tokens of prompts that it did not compute again; ``None``: not told.
    """

    acceptance: Acceptance | None
    generated: int | None
    cached: int | None
    trouble: str = ""


class LiveServer:
    """A client of one server.

    Args:
        url: ``http://host:port``, with or without ``/v1``.
        model: the name it serves; default: what it says itself.
        engine: whose counters it has; default: told by their names.
        key: sent as a bearer token.
        timeout: seconds that an answer may take.

    Raises:
        DataError: an address that is none.
        StreamError: no model was named and the server does not answer.
    """

    def __init__(
        self, url: str, *, model: str | None = None, engine: str | None = None, key: str | None = None,
        timeout: float = 600.0,
    ):  # fmt: skip
        check_address(url, "--url")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.key, self.timeout, self.engine = key, timeout, engine
        self.model = model or self._own_model()
        self._asks_usage = True

    def _own_model(self) -> str:
        return ChatServers([self.url], retries=1, timeout=min(self.timeout, 30.0), key=self.key).model()

    def ask(self, body: dict[str, Any], stop: threading.Event) -> StreamedAnswer:
        """A chat completion, streamed; it is tried once.

        Args:
            body: of the request; streaming and the wish for usage are added.
            stop: breaks it off when set.

        Raises:
            StreamError: there was no whole answer, and why (:class:`Refused` if the request itself is at fault).
        """
        asked = {**body, "stream": True}
        if self._asks_usage:
            asked["stream_options"] = {"include_usage": True}
        begun = time.perf_counter()
        try:
            with open_request(
                "POST", f"{self.url}/v1/chat/completions", asked, timeout=self.timeout, key=self.key
            ) as response:
                return read_stream(response, begun, self.timeout, stop)
        except Refused as error:
            if "stream_options" in asked and "stream_options" in str(error):
                self._asks_usage = False  # a server that does not know it
                return self.ask(body, stop)
            raise
        except StreamError:
            raise
        except NO_ANSWER as error:
            raise StreamError(said_of(error, self.timeout)) from error

    def version(self) -> str | None:
        """The engine's version, where the server tells it as one of the engines does that are known."""
        engines = [self.engine] if self.engine in ENGINES else list(ENGINES)
        pages = [counters.version for counters in (ENGINES[key].counters for key in engines) if counters]
        return next((told for page, key in pages if (told := self._told(page, key)) is not None), None)

    def _told(self, page: str, key: str) -> str | None:
        """A text under a key of a page; ``None`` if there is none."""
        try:
            with open_request("GET", self.url + page, None, timeout=METRICS_SECONDS, key=self.key) as response:
                value = json.loads(response.read())[key]
        except (*NO_ANSWER, KeyError, TypeError):
            return None
        return value if isinstance(value, str) and value else None

    def reading(self) -> Reading:
        """The counters now; a server without them is no error."""
        try:
            with open_request("GET", f"{self.url}/metrics", None, timeout=METRICS_SECONDS, key=self.key) as response:
                text = response.read().decode("utf-8", "replace")
        except NO_ANSWER as error:
            return Reading(None, {}, {}, f"no metrics at /metrics: {said_of(error, METRICS_SECONDS)[:200]}")
        return read_metrics(text, self.engine)

    def settled(self, since: Reading, tokens: int) -> Reading:
        """The counters as soon as they hold what was answered and stand still, or after ``SETTLE_SECONDS``.

        Args:
            since: a reading before the answers.
            tokens: new tokens of the answers.
        """
        until = time.monotonic() + SETTLE_SECONDS
        least = since.values.get("generated", 0) + tokens
        found = self.reading()
        while not found.trouble and time.monotonic() < until:
            time.sleep(0.1)
            before, found = found, self.reading()
            if found == before and found.values.get("generated", least) >= least:
                break
        return found


def said_of(error: BaseException, timeout: float) -> str:
    """What went wrong with a connection, the same words for the same fault."""
    if isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError):
        return f"no answer within {timeout:g} s"
    if isinstance(error, http.client.IncompleteRead):
        return "the stream ended before the answer did"
    return str(error) or type(error).__name__


def read_stream(lines: Iterable[bytes], begun: float, timeout: float, stop: threading.Event) -> StreamedAnswer:
    """Server-sent events of a chat completion, timed as they come.

    Args:
        lines: as they arrive.
        begun: when the request was sent, by ``time.perf_counter``.
        timeout: seconds that all of it may take.
        stop: breaks it off when set.

    Raises:
        StreamError: the server tells an error, the stream ends before ``[DONE]`` or without a reason to finish, holds
            no JSON, or takes too long.
    """
    pieces: list[str] = []
    first = last = None
    finish, usage, done = None, {}, False
    for line in lines:
        now = time.perf_counter() - begun
        if stop.is_set():
            raise StreamError("broken off")
        if now > timeout:
            raise StreamError(f"not whole within {timeout:g} s")
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            done = True
            break
        event = _event(data)
        usage = event.get("usage") or usage
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            if any(delta.get(key) for key in ("content", "reasoning", "reasoning_content", "tool_calls")):
                first, last = now if first is None else first, now
                pieces.append(delta.get("content") or "")
            finish = choice.get("finish_reason") or finish
    whole = time.perf_counter() - begun
    if not done or finish is None:
        raise StreamError("the stream ended before the answer did")
    first, last = (whole, whole) if first is None or last is None else (first, last)
    return StreamedAnswer(
        "".join(pieces), first, last, whole, _count(usage, "prompt_tokens"), _count(usage, "completion_tokens"),
        str(finish),
    )  # fmt: skip


def _event(data: bytes) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError as error:
        raise StreamError("an event of the stream is no JSON") from error
    if not isinstance(event, dict):
        raise StreamError("an event of the stream is no JSON object")
    if error := event.get("error"):
        words = error.get("message") if isinstance(error, dict) else error
        raise StreamError(f"the server broke off: {words}")
    return event


def _count(usage: Any, key: str) -> int | None:
    value = usage.get(key) if isinstance(usage, dict) else None
    return value if type(value) is int and value >= 0 else None


def read_metrics(text: str, engine: str | None = None) -> Reading:
    """The counters of a page of metrics in Prometheus' text form, summed over what else tells them apart.

    Args:
        text: the page.
        engine: whose names are looked for; default: the first whose counter of tokens is there.
    """
    samples: dict[str, float] = {}
    positions: dict[str, dict[int, float]] = {}
    for line in text.splitlines():
        if (found := _SAMPLE.match(line)) is None:  # comments, too
            continue
        name, labels, value = found.groups()
        try:
            number = float(value)
        except ValueError:
            continue
        if not math.isfinite(number):
            continue
        samples[name] = samples.get(name, 0.0) + number
        if place := _POSITION.search(labels or ""):
            by_position = positions.setdefault(name, {})
            by_position[int(place[1])] = by_position.get(int(place[1]), 0.0) + number
    known = {key: each.counters for key, each in ENGINES.items() if each.counters and engine in (None, key)}
    for key, names in known.items():
        if names.generated in samples or names.drafts in samples:
            return _reading(key, names, samples, positions)
    *most, last = (f"{ENGINES[key].name}'s" for key in known)
    whose = f"{', '.join(most)} or {last}" if most else last
    return Reading(None, {}, {}, f"its metrics hold none of {whose} counters")


def _reading(key: str, names: Counters, samples: dict[str, float], positions: dict[str, dict[int, float]]) -> Reading:
    wanted = {field: getattr(names, field) for field in ("drafts", "generated", "accepted", "drafted", "cached")}
    values = {field: round(samples[name]) for field, name in wanted.items() if name in samples}
    places = positions.get(names.per_position or "", {})
    if names.digits is not None and max(values.values()) >= 10**names.digits:
        most = f"{10**names.digits:,}"
        trouble = f"{ENGINES[key].name} rounds counters above {most}, and these are: start the server anew"
        return Reading(key, {}, {}, trouble)
    return Reading(key, values, {place: round(number) for place, number in sorted(places.items())})


def difference(after: Reading, before: Reading, answers: int) -> Counted:
    """What was counted between two readings.

    Args:
        answers: that were given in between, for engines that do not count accepted tokens themselves.
    """
    if trouble := after.trouble or before.trouble:
        return Counted(None, None, None, trouble)
    values = {field: number - before.values.get(field, 0) for field, number in after.values.items()}
    last = max(after.positions, default=-1)
    positions = tuple(after.positions.get(k, 0) - before.positions.get(k, 0) for k in range(last + 1))
    gone = set(before.values) - set(after.values)
    if gone or any(number < 0 for number in (*values.values(), *positions)):
        return Counted(None, None, None, "its counters began anew in between: the server was started again")
    generated, cached, drafts = (values.get(field) for field in ("generated", "cached", "drafts"))
    accepted = values.get("accepted")
    names = ENGINES[after.engine].counters if after.engine else None
    if drafts is not None and accepted is None and names and names.accepted is None and generated is not None:
        accepted = max(0, generated - answers - drafts)  # each answer begins with a token that nothing drafted
    if drafts is None or accepted is None:
        return Counted(None, generated, cached, "it counts no drafts")
    return Counted(Acceptance(drafts, accepted, values.get("drafted"), positions), generated, cached)
