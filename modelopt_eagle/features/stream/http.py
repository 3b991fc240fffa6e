"""The HTTP side of a feature server: OpenAI-style completions of one token, whose answer says where the states are."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from modelopt_eagle.common.strict_json import parse_json
from modelopt_eagle.errors import StreamError
from modelopt_eagle.features.stream.client import StreamTimeout

LARGEST_ANSWER = 16 * 2**20
"""Bytes of an answer at most; the states come another way."""
LARGEST_WORDS = 64 * 2**10
"""Bytes of a refusal that are read."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the token to whoever it names: it is answered as any other refusal."""

    def redirect_request(self, *arguments) -> None:
        return None


# servers are near: no proxy knows them
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())
_RETRIED = (408, 425, 429)  # the server is busy, not of another opinion


class Refusal(StreamError):
    """A 4xx that asking again does not change.

    Attributes:
        status: the code.
    """

    def __init__(self, text: str, status: int):
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Ticket:
    """Where a server has left the states of one request: the key, and the address of its mailbox."""

    key: str
    address: str


class CompletionsClient:
    """Asks one server to run the target over token ids.

    Args:
        url: such as ``http://127.0.0.1:8000``.
        token: sent as a bearer token, or None.
        timeout: seconds to wait for an answer.

    Raises:
        StreamError: not such a URL, or a token that no header can carry.
    """

    def __init__(self, url: str, token: str | None = None, timeout: float = 120.0):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
            raise StreamError(f"a server's address such as http://host:8000 expected, {url!r} found")
        if token and not (token.isascii() and token.isprintable()):
            raise StreamError("the token of a feature server may hold printable ASCII characters only: choose another")
        self.url, self._host = url.rstrip("/"), parts.hostname
        self._token, self._timeout = token, timeout
        self._model: str | None = None

    def run(self, token_ids: Sequence[int]) -> Ticket:
        """Run the target over some tokens.

        Returns:
            what the mailbox's message is fetched by.

        Raises:
            StreamTimeout: no answer in time, the server is gone, busy, or failed (5xx): another one may be asked.
            StreamError: it refused (4xx; the message holds its own words), or answered nonsense.
        """
        known = self._model
        try:
            answer = self._complete(token_ids)
        except Refusal as refusal:
            if refusal.status != 404 or known is None:
                raise
            self.forget()  # restarted under another name, with this model or another: the first states will tell
            answer = self._complete(token_ids)
        where = answer.get("kv_transfer_params")
        if not isinstance(where, dict) or not isinstance(where.get("feature_key"), str):
            raise StreamError(
                f"{self.url} answered without saying where the states are: it does not run our connector; start it by "
                "`modelopt-eagle serve-features`"
            )
        host = f"[{self._host}]" if ":" in self._host else self._host
        return Ticket(where["feature_key"], f"{host}:{where.get('feature_port')}")

    def _complete(self, token_ids: Sequence[int]) -> dict:
        if self._model is None:
            self._model = self._model_name()
        body = {"model": self._model, "prompt": list(token_ids), "max_tokens": 1, "temperature": 0.0}
        return self._call("/v1/completions", body)

    def forget(self) -> None:
        """Ask for the served model again before the next request: the server may have been restarted."""
        self._model = None

    def _model_name(self) -> str:
        served = self._call("/v1/models").get("data")
        if not isinstance(served, list) or not served or not isinstance(served[0], dict) or "id" not in served[0]:
            raise StreamError(f"{self.url}/v1/models names no model; is it a vLLM or serve-features server?")
        return served[0]["id"]

    def _call(self, path: str, body: dict | None = None) -> dict:
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=headers)
        try:
            with _OPENER.open(request, timeout=self._timeout) as response:
                content = response.read(LARGEST_ANSWER + 1)
            if len(content) > LARGEST_ANSWER:
                raise StreamError(f"{self.url}{path} answered more than {LARGEST_ANSWER} bytes: no feature server")
            answer = parse_json(content)
        except StreamError:
            raise
        except urllib.error.HTTPError as error:
            words = _words(error)
            if error.code in (301, 302, 303, 307, 308):
                place = error.headers.get("Location", "nowhere")
                words = f"a redirect to {place!r}, which is not followed: give the server's own address"
            text = f"{self.url} answered {error.code}: {words}"
            if error.code >= 500 or error.code in _RETRIED:
                raise StreamTimeout(text) from error
            raise Refusal(text, error.code) from error
        except (OSError, http.client.HTTPException) as error:
            raise StreamTimeout(f"{self.url} cannot be reached or did not answer in time: {error}") from error
        except ValueError as error:
            raise StreamError(f"{self.url}{path} answered no JSON ({error})") from error
        if not isinstance(answer, dict):
            raise StreamError(f"{self.url}{path} answered {type(answer).__name__}, a JSON object expected")
        return answer


def _words(error: urllib.error.HTTPError) -> str:
    """The server's own explanation."""
    try:
        text = error.read(LARGEST_WORDS).decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return str(error.reason)
    try:
        value = parse_json(text)
        value = value.get("error", value)
        return str(value.get("message", value) if isinstance(value, dict) else value)
    except (ValueError, AttributeError):
        return text.strip() or error.reason
