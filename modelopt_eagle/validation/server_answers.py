"""Answers by servers that speak OpenAI's chat completions (vLLM, SGLang, llama.cpp, TensorRT-LLM).

Several servers share the work, a request that fails is tried again on the next one after a while, rows are written in
the order of the prompts, and a second start goes on behind the first. What a server says of reasoning, tool calls and
token ids is kept.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import random
import time
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from modelopt_eagle.data.prompts import Prompt
from modelopt_eagle.data.report import RowRejected
from modelopt_eagle.data.roles import Message, refuse_half_characters
from modelopt_eagle.data.tools import tool_calls_of
from modelopt_eagle.data.turn_fields import finish_reason, reasoning_of
from modelopt_eagle.errors import DataError, StreamError
from modelopt_eagle.features.stream.workers import Workers
from modelopt_eagle.validation.synthesis import (
    Account,
    Answered,
    AnswerFile,
    SynthesisSettings,
    as_dict,
    prompt_name,
)

KEY_VARIABLE = "MODELOPT_EAGLE_SERVER_KEY"
"""Environment variable of the token that a server asks for; a command line is no place for it."""
_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)


class Refused(StreamError):
    """A server's answer that no other try would change."""


@dataclass
class ChatServers:
    """Servers that answer the same model.

    Attributes:
        urls: ``http://host:port``, with or without ``/v1``.
        retries: further tries of a request, each on the next server, after a wait that doubles (at most 30 s).
        timeout: seconds that an answer may take.
        key: sent as a bearer token where servers ask for one.
    """

    urls: Sequence[str]
    retries: int = 5
    timeout: float = 600.0
    key: str | None = None
    wait: float = 0.5
    _turn: Any = field(default_factory=itertools.count)
    _asks_ids: bool = True

    def __post_init__(self):
        self.urls = [url.rstrip("/").removesuffix("/v1") for url in self.urls]
        for url in self.urls:
            check_address(url, "--server")

    def model(self) -> str:
        """The name of the model that the first server serves.

        Raises:
            StreamError: it does not answer, or names none.
        """
        found = self._request("GET", "/v1/models", None)
        try:
            return str(found["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise StreamError(
                f"{self.urls[0]} names no model ({json.dumps(found)[:200]}): give the name that it serves as --model"
            ) from error

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """The first choice of a chat completion.

        Raises:
            Refused: the server's own words, where it says that the request is at fault.
            StreamError: no server answered in all tries.
        """
        asked = {**body, "return_token_ids": True} if self._asks_ids else body
        try:
            answer = self._request("POST", "/v1/chat/completions", asked)
        except Refused as error:
            if asked is body or "return_token_ids" not in str(error):
                raise
            self._asks_ids = False  # a server that takes no keys beyond OpenAI's; others may be under way with it
            answer = self._request("POST", "/v1/chat/completions", body)
        choices = answer.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not (isinstance(choice, dict) and isinstance(choice.get("message"), dict)):
            raise Refused(f"no choice with a message in the answer: {json.dumps(answer)[:200]}")
        return choice

    def _request(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        said = ""
        for attempt in range(self.retries + 1):
            url = self.urls[next(self._turn) % len(self.urls)]
            try:
                return self._once(method, url + path, body)
            except Refused:
                raise
            except NO_ANSWER as error:
                said = f"{url}: {error}"
            if attempt < self.retries:
                time.sleep(min(30.0, self.wait * 2**attempt) * (0.5 + random.random() / 2))
        raise StreamError(f"no answer in {self.retries + 1} tries; the last: {said}")

    def _once(self, method: str, url: str, body: dict[str, Any] | None) -> dict[str, Any]:
        with open_request(method, url, body, timeout=self.timeout, key=self.key) as response:
            found = json.loads(response.read())
        if not isinstance(found, dict):
            raise StreamError(f"expected a JSON object, found {type(found).__name__}")
        return found


NO_ANSWER = (OSError, http.client.HTTPException, StreamError, ValueError)
"""What asking a server ends in where it does not answer: refused connections, timeouts, halves of answers."""


def check_address(url: str, option: str) -> None:
    """Refuse what is no address of a server.

    Raises:
        DataError: it is none; ``option`` is where it was given.
    """
    if not url.startswith(("http://", "https://")):
        raise DataError(f"{option} takes http://HOST:PORT, found {url!r}")


@contextlib.contextmanager
def open_request(
    method: str, url: str, body: dict[str, Any] | None, *, timeout: float, key: str | None = None
) -> Iterator[http.client.HTTPResponse]:
    """Ask a server, and hand out its answer to be read.

    Args:
        timeout: seconds without a byte after which it is given up.
        key: sent as a bearer token.

    Yields:
        the response, of which nothing was read yet.

    Raises:
        Refused: the server says that the request is at fault.
        StreamError: it says that it cannot answer now.
        OSError: there is no connection, or it broke.
    """
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers, method=method)
    local = urllib.parse.urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")  # no proxy leads there
    opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if local else []))
    try:
        response = opener.open(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        words = error.read(2000).decode("utf-8", "replace")
        kind = StreamError if error.code in _AGAIN else Refused
        raise kind(f"HTTP {error.code}: {words}") from error
    with response:
        yield response


def request_body(prompt: Prompt, turn: int, messages: Sequence[Message], settings: SynthesisSettings) -> dict[str, Any]:
    """A chat completion for a turn of a prompt, behind the messages before it; its seed is the prompt's own."""
    body: dict[str, Any] = {
        "model": settings.model, "max_tokens": settings.max_new_tokens, "temperature": settings.temperature,
        "seed": zlib.crc32(f"{settings.seed}/{prompt_name(prompt)}/{turn}".encode()) % 2**31,
        "messages": [_sent(message) for message in messages],
    }  # fmt: skip
    if prompt.tools:
        body["tools"] = list(prompt.tools)
    if prompt.template_arguments:
        body["chat_template_kwargs"] = dict(prompt.template_arguments)
    return body


def answer(servers: ChatServers, prompt: Prompt, settings: SynthesisSettings) -> Answered:
    """Every user turn of a prompt, each behind the answers before it; it ends early where the model calls a tool.

    Raises:
        StreamError: see :meth:`ChatServers.complete`.
    """
    dialogue = Answered.of(prompt)
    for turn in range(len(prompt.turns)):
        dialogue.messages.append(prompt.message(turn))
        body = request_body(prompt, turn, dialogue.messages, settings)
        choice = servers.complete(body)
        message = received(choice)
        dialogue.messages.append(message)
        dialogue.finish_reason = message.finish_reason or "stop"
        if message.tool_calls:
            dialogue.finish_reason = "tool_calls"
            break
    return dialogue


def _sent(message: Message) -> dict[str, Any]:
    """A message as clients send it: without the ids, and calls with their arguments as text."""
    made = as_dict(message)
    for key in ("token_ids", "finish_reason"):
        made.pop(key, None)
    return made


def received(choice: dict[str, Any]) -> Message:
    """The message of a choice, with its reasoning, tool calls and token ids.

    Raises:
        Refused: a message that holds nothing, or what no row can hold.
    """
    said = choice["message"]
    try:
        refuse_half_characters("the answer", json.dumps(said, ensure_ascii=False))
        reasoning, calls = reasoning_of(said, "the answer"), tool_calls_of(said, "the answer")
    except RowRejected as error:
        raise Refused(str(error)) from error
    content = said.get("content") or ""
    ended, _ = finish_reason(choice)
    ids = choice.get("token_ids") or said.get("token_ids")
    ids = tuple(ids) if isinstance(ids, list) and ids and all(type(i) is int for i in ids) else None
    if not (isinstance(content, str) and (content or reasoning or calls)):
        raise Refused(f"the answer holds no text: {json.dumps(said)[:200]}")
    return Message(
        "assistant", content, "length" if ended == "length" else None, reasoning=reasoning, tool_calls=calls,
        token_ids=ids,
    )  # fmt: skip


def synthesize_by_servers(
    servers: ChatServers,
    answers: AnswerFile,
    settings: SynthesisSettings,
    concurrency: int = 16,
    on_row: Callable[[Account], None] = lambda account: None,
) -> Account:
    """Answer the prompts that the output does not hold yet, in their order.

    Rows appear in the order of the prompts; one that no server answers fails with the server's words. Stopping it at
    any moment loses what is under way.

    Args:
        concurrency: requests under way at a time, over all servers.

    Raises:
        StreamError: the first requests all fail for want of a server.
    """
    account, left = answers.account, iter(answers.missing)
    waiting: deque[tuple[str, Prompt, Future]] = deque()
    workers = Workers(concurrency, "answers")
    try:
        while True:
            # a slow answer holds up the writing of those behind it, not the asking
            for name, prompt in itertools.islice(left, max(0, 4 * concurrency - len(waiting))):
                waiting.append((name, prompt, workers.submit(answer, servers, prompt, settings)))
            if not waiting:
                break
            name, prompt, future = waiting.popleft()
            try:
                row = future.result().row(name)
            except StreamError as error:
                if not isinstance(error, Refused) and not account.answered and account.failed >= 2:
                    raise
                answers.fail(name, str(error))
            else:
                answers.add(row)
            on_row(account)
    finally:
        for _, _, future in waiting:
            future.cancel()
    return account
