"""A feature server without vLLM: the target runs by transformers, the protocol is the same.

For small targets, hosts where vLLM is not installed, and tests. One forward at a time.
"""

from __future__ import annotations

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

from modelopt_eagle.features.batch import FeatureContract
from modelopt_eagle.features.stream.mailbox import Mailbox, check_bind
from modelopt_eagle.features.stream.message import MESSAGE_VERSION, FeatureMessage


class _Refused(Exception):
    """An HTTP status and the words that go with it."""

    def __init__(self, status: int, words: str):
        super().__init__(words)
        self.status, self.words = status, words


class _HttpServer6(ThreadingHTTPServer):
    address_family = socket.AF_INET6


class TargetServer:
    """Serves the features of a loaded target.

    Args:
        target: a ``Target``.
        aux_layer_ids: canonical ids; None for the default three.
        address: ``host:port`` of the HTTP side; port 0 takes a free one.
        feature_address: ``host:port`` of the mailbox.
        token: shared secret; required off loopback.
        max_length: longest row in tokens; longer ones are answered 400.
        max_bytes: bound of the mailbox.

    Attributes:
        url: of the HTTP side.
    """

    def __init__(
        self,
        target,
        aux_layer_ids=None,
        *,
        address: str = "127.0.0.1:0",
        feature_address: str = "127.0.0.1:0",
        token: str | None = None,
        max_length: int = 4096,
        max_bytes: int = 4 * 2**30,
    ):
        check_bind(address, token)
        self._target, self._token, self._max_length = target, token, max_length
        contract = FeatureContract.from_target(target, aux_layer_ids)
        self._layers = contract.aux_layer_ids
        identity = {name: contract.to_dict()[name] for name in ("model", "revision", "tokenizer_hash", "hidden_size")}
        identity |= {
            "message_version": MESSAGE_VERSION,
            "aux_layer_ids": list(self._layers),
            "final_is_normed": True,
            "dtype": str(target.dtype).removeprefix("torch."),
            "max_length": max_length,
        }
        self._mailbox = Mailbox(identity, feature_address, token, max_bytes)
        self._turn = threading.Lock()
        self._count = 0
        host, port = address.rsplit(":", 1)
        try:
            kind = _HttpServer6 if ":" in host else ThreadingHTTPServer
            self._http = kind((host.strip("[]"), int(port)), self._handler())
        except BaseException:
            self._mailbox.close()
            raise
        self._http.daemon_threads = True
        self.url = f"http://{host}:{self._http.server_address[1]}"

    def serve_forever(self) -> None:
        """Answer until :meth:`close` is called from another thread."""
        self._http.serve_forever(poll_interval=0.05)

    def close(self) -> None:
        """Stop both sides."""
        self._http.shutdown()
        self._http.server_close()
        self._mailbox.close()

    def _complete(self, body) -> dict:
        """Run the target over the prompt and leave the states in the mailbox."""
        if isinstance(body, dict) and body.get("model", self._target.name) != self._target.name:
            raise _Refused(404, f"The model `{body['model']}` does not exist; this server has {self._target.name}")
        ids = body.get("prompt") if isinstance(body, dict) else None
        if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
            raise _Refused(400, "prompt must be a list of token ids")
        if len(ids) > self._max_length:
            raise _Refused(400, f"this server takes up to {self._max_length} tokens, the prompt has {len(ids)}")
        if not all(0 <= i < self._target.vocab_size for i in ids):
            raise _Refused(400, f"token ids must lie in [0, {self._target.vocab_size})")
        with self._turn:
            output = self._target.features(torch.tensor([ids]), None, self._layers)
            self._count += 1
            key = f"request-{self._count}"
        aux = output.aux_hidden[0].unflatten(-1, (len(self._layers), -1))  # [s,A,Ht]
        states = torch.cat([aux, output.final_hidden[0].unsqueeze(1)], 1).cpu()  # [s,A+1,Ht]
        self._mailbox.put(key, FeatureMessage(key, ids, list(self._layers), True, states))
        return {
            "id": key,
            "object": "text_completion",
            "model": self._target.name,
            "choices": [{"index": 0, "text": "", "finish_reason": "length"}],
            "kv_transfer_params": {"feature_key": key, "feature_port": self._mailbox.port},
        }

    def _handler(self):
        server = self

        class Handler(BaseHTTPRequestHandler):
            """Two paths: the model's name, and completions."""

            protocol_version = "HTTP/1.1"

            def do_GET(self):
                self._answer(dict if self.path == "/health" else self._models, public=self.path == "/health")

            def do_POST(self):
                self._answer(self._completions)

            def _models(self):
                if self.path != "/v1/models":
                    raise _Refused(404, f"no such path: {self.path}")
                return {"object": "list", "data": [{"id": server._target.name, "object": "model"}]}

            def _completions(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if self.path != "/v1/completions":
                    raise _Refused(404, f"no such path: {self.path}")
                try:
                    return server._complete(json.loads(body))
                except ValueError as error:
                    raise _Refused(400, f"the request is no JSON: {error}") from error

            def _answer(self, make, public=False):
                try:
                    if server._token and not public and self.headers.get("Authorization") != f"Bearer {server._token}":
                        raise _Refused(401, "wrong or missing token")
                    status, value = 200, make()
                except _Refused as refused:
                    status, value = refused.status, {"error": {"message": refused.words, "code": refused.status}}
                content = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format, *values):
                """Requests are too many to print."""

        return Handler
