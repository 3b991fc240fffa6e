"""A feature server without vLLM: the target runs by transformers, the protocol is the same.

For small targets, hosts where vLLM is not installed, and tests. One forward at a time.
"""

from __future__ import annotations

import threading

import torch

from modelopt_eagle.common.dtypes import dtype_name
from modelopt_eagle.errors import StreamError
from modelopt_eagle.features.batch import FeatureContract
from modelopt_eagle.features.engines.vllm import window
from modelopt_eagle.features.stream.http_server import JsonServer, Refused
from modelopt_eagle.features.stream.mailbox import Mailbox, check_bind
from modelopt_eagle.features.stream.message import MESSAGE_VERSION, FeatureMessage


class TargetServer:
    """Serves the features of a loaded target.

    Args:
        target: a ``Target``.
        aux_layer_ids: canonical ids; None for the default three.
        address: ``host:port`` of the HTTP side; port 0 takes a free one.
        feature_address: ``host:port`` of the mailbox.
        token: shared secret; required off loopback.
        max_length: longest row in tokens, at most the positions that the target knows; longer ones are answered 400.
        max_bytes: bound of the mailbox.

    Attributes:
        url: of the HTTP side.
        max_length: longest row that is taken.
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
        known = window(target.config)
        self.max_length = max_length if known is None else min(max_length, known)
        self._target = target
        contract = FeatureContract.from_target(target, aux_layer_ids)
        self._layers = contract.aux_layer_ids
        identity = {name: contract.to_dict()[name] for name in ("model", "revision", "tokenizer_hash", "hidden_size")}
        identity |= {
            "message_version": MESSAGE_VERSION,
            "aux_layer_ids": list(self._layers),
            "final_is_normed": True,
            "dtype": dtype_name(target.dtype),
            "max_length": self.max_length,
        }
        self._http: JsonServer | None = None
        self._mailbox = Mailbox(identity, feature_address, token, max_bytes, on_failure=self._stop)
        self._turn = threading.Lock()
        self._count = 0
        try:
            largest = 2**16 + 24 * self.max_length  # an id takes some digits, a comma and perhaps blanks
            self._http = JsonServer(address, self._answer, token=token, largest=largest)
        except BaseException:
            self._mailbox.close()
            raise
        self.url = self._http.url

    def serve_forever(self) -> None:
        """Answer until :meth:`close` is called from another thread.

        Raises:
            StreamError: the mailbox has ended.
        """
        self._mailbox.check()
        self._http.serve_forever(poll_interval=0.05)
        self._mailbox.check()

    def _stop(self) -> None:
        """End :meth:`serve_forever`: without its mailbox the server is of no use."""
        if self._http is not None:
            threading.Thread(target=self._http.shutdown, daemon=True).start()  # this waits, and the mailbox calls us

    def close(self) -> None:
        """Stop both sides."""
        self._http.shutdown()
        self._http.server_close()
        self._mailbox.close()

    def _answer(self, method: str, path: str, body) -> dict:
        """What the paths give: the server's health, the model's name, and completions."""
        if method == "GET" and path == "/health":
            try:
                self._mailbox.check()
            except StreamError as error:
                raise Refused(503, str(error)) from error
            return {}
        if method == "GET" and path == "/v1/models":
            return {"object": "list", "data": [{"id": self._target.name, "object": "model"}]}
        if method == "POST" and path == "/v1/completions":
            return self._complete(body)
        raise Refused(404, f"no such path: {path}")

    def _complete(self, body) -> dict:
        """Run the target over the prompt and leave the states in the mailbox."""
        if isinstance(body, dict) and body.get("model", self._target.name) != self._target.name:
            raise Refused(404, f"The model `{body['model']}` does not exist; this server has {self._target.name}")
        ids = body.get("prompt") if isinstance(body, dict) else None
        if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
            raise Refused(400, "prompt must be a list of token ids")
        if len(ids) > self.max_length:
            raise Refused(400, f"this server takes up to {self.max_length} tokens, the prompt has {len(ids)}")
        if not all(0 <= i < self._target.vocab_size for i in ids):
            raise Refused(400, f"token ids must lie in [0, {self._target.vocab_size})")
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
