"""A vLLM KV connector that hands out hidden states; vLLM imports it by ``kv_connector_module_path``.

vLLM's speculative method ``extract_hidden_states`` writes the chosen layers' states of every token into a cache-only
layer, laid out as keys [blocks, A+1, block size, Ht]. When a request is finished, this connector copies its rows out
before the blocks are freed, and leaves them in a :class:`~modelopt_eagle.features.stream.mailbox.Mailbox`.
vLLM counts layer inputs: its id is the canonical id + 1, and the last id, the number of layers, is the state before
the final norm. On a CUDA device the copy goes through pinned memory on a side stream; on a CPU it is a plain copy.

Settings (``kv_connector_extra_config``): ``address`` ("127.0.0.1:5557"), ``max_bytes``; the token is read from the
environment variable MODELOPT_EAGLE_STREAM_TOKEN, so that it stands in no command line.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec

from modelopt_eagle.common.dtypes import dtype_name
from modelopt_eagle.errors import StreamError
from modelopt_eagle.features.stream.mailbox import Mailbox
from modelopt_eagle.features.stream.message import MESSAGE_VERSION, FeatureMessage

DEFAULT_ADDRESS = "127.0.0.1:5557"


@dataclass
class _Finished:
    """A request whose states can be taken out: its tokens, and its blocks of the cache-only layer."""

    request_id: str
    token_ids: list[int]
    block_ids: list[int]


@dataclass
class _Metadata(KVConnectorMetadata):
    """What the scheduler tells the worker in one step."""

    finished: list[_Finished] = field(default_factory=list)


class EagleFeatureConnector(KVConnectorBase_V1, SupportsHMA):
    """Takes the states of finished requests out of the cache-only layer (see the module's text)."""

    def __init__(self, vllm_config, role: KVConnectorRole, kv_cache_config):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        speculative = vllm_config.speculative_config
        if speculative is None or speculative.method != "extract_hidden_states":
            raise StreamError(
                "EagleFeatureConnector needs the speculative method extract_hidden_states; start the server by "
                "`modelopt-eagle serve-features`"
            )
        self._layer_ids = list(speculative.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids)
        layers = vllm_config.model_config.get_total_num_hidden_layers()
        if self._layer_ids[-1] != layers:
            raise StreamError(
                f"the last of eagle_aux_hidden_state_layer_ids must be the number of layers, {layers} (the final "
                f"state); found {self._layer_ids}"
            )
        self._group, self._block_size = self._find_group(kv_cache_config)
        self._address = self._kv_transfer_config.get_from_extra_config("address", DEFAULT_ADDRESS)
        self._finished: list[_Finished] = []  # scheduler side
        self._cache: Tensor | None = None  # worker side, [blocks, A+1, block size, Ht]
        self._mailbox: Mailbox | None = None
        self._copies: dict[str, threading.Event] = {}  # worker side: set when the rows have left the device
        self._stream = None
        self._serves = True

    @staticmethod
    def _find_group(kv_cache_config) -> tuple[int, int]:
        """Number and block size of the cache group that holds the cache-only layer."""
        groups = kv_cache_config.kv_cache_groups
        found = [i for i, group in enumerate(groups) if isinstance(group.kv_cache_spec, HiddenStateCacheSpec)]
        if not found and len(groups) == 1:
            found = [0]
        if len(found) != 1:
            raise StreamError(f"one cache group of hidden states expected among {len(groups)}, {len(found)} found")
        return found[0], groups[found[0]].kv_cache_spec.block_size

    # ---- worker ----

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Find the cache-only layer and open the mailbox (tensor-parallel rank 0 only: all ranks hold the same)."""
        from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer

        names = list(get_layers_from_vllm_config(self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches)))
        if len(names) != 1:
            raise StreamError(f"one cache-only layer expected, {names} found: this vLLM is laid out otherwise")
        self._cache = kv_caches[names[0]]
        if self._cache.shape[1:3] != (len(self._layer_ids), self._block_size):
            raise StreamError(
                f"cache-only layer of shape [blocks, {len(self._layer_ids)}, {self._block_size}, Ht] expected, "
                f"{tuple(self._cache.shape)} found: this vLLM is laid out otherwise"
            )
        self._serves = get_tensor_model_parallel_rank() == 0
        if self._serves:
            self._mailbox = Mailbox(
                self._identity(),
                self._address,
                token=os.environ.get("MODELOPT_EAGLE_STREAM_TOKEN"),
                max_bytes=int(self._kv_transfer_config.get_from_extra_config("max_bytes", 4 * 2**30)),
            )

    def _identity(self) -> dict:
        """What this server serves, in the words of a feature contract."""
        from transformers import AutoTokenizer

        from modelopt_eagle.target import identity

        model = self._vllm_config.model_config
        place = Path(model.model)
        tokenizer = AutoTokenizer.from_pretrained(model.tokenizer, revision=model.tokenizer_revision)
        commit = getattr(model.hf_config, "_commit_hash", None)
        return {
            "message_version": MESSAGE_VERSION,
            "model": identity.local_name(place) if place.is_dir() else model.model,
            "revision": identity.folder_fingerprint(place) if place.is_dir() else commit,
            "tokenizer_hash": identity.tokenizer_hash(tokenizer),
            "aux_layer_ids": [i - 1 for i in self._layer_ids[:-1]],
            "final_is_normed": False,
            "hidden_size": model.get_hidden_size(),
            "dtype": dtype_name(model.dtype),
            "max_length": model.max_model_len,
        }

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Begin to copy newly finished requests; report those whose blocks may be freed.

        Returns:
            ids of requests whose blocks may be freed, and ``None``: nothing is received here.
        """
        if self._mailbox is not None:
            self._mailbox.check()  # ends the engine, and with it vLLM's server and its /health
        if self.has_connector_metadata() and self._serves:
            for finished in self._get_connector_metadata().finished:
                self._take_out(finished)
        done = {request_id for request_id, copied in self._copies.items() if copied.is_set()}
        for request_id in done:
            del self._copies[request_id]
        return done or None, None

    def _take_out(self, finished: _Finished) -> None:
        tokens = len(finished.token_ids)
        if tokens > len(finished.block_ids) * self._block_size:
            raise StreamError(
                f"request {finished.request_id}: {tokens} tokens but {len(finished.block_ids)} blocks of "
                f"{self._block_size}: some states were not computed"
            )
        blocks = torch.tensor(finished.block_ids, device=self._cache.device)  # [b]
        copied = self._copies[finished.request_id] = threading.Event()
        if self._cache.device.type != "cuda":
            rows = self._cache[blocks].transpose(1, 2).flatten(0, 1)[:tokens].clone()  # [T,A+1,Ht]
            copied.set()
            self._deliver(finished, rows)
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            on_device = self._cache[blocks].transpose(1, 2).flatten(0, 1)[:tokens]  # [T,A+1,Ht]
            rows = torch.empty_like(on_device, device="cpu", pin_memory=True)
            rows.copy_(on_device, non_blocking=True)
            left = torch.cuda.Event()
            left.record(self._stream)

        def finish():
            left.synchronize()
            copied.set()
            self._deliver(finished, rows)

        threading.Thread(target=finish, name="feature-copy", daemon=True).start()

    def _deliver(self, finished: _Finished, rows: Tensor) -> None:
        layers = [i - 1 for i in self._layer_ids[:-1]]
        message = FeatureMessage(finished.request_id, finished.token_ids, layers, False, rows)
        self._mailbox.put(finished.request_id, message)

    def start_load_kv(self, forward_context, **kwargs: Any) -> None:
        """Nothing to load: this connector only hands out."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to load: this connector only hands out."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata, **kwargs: Any) -> None:
        """The cache-only layer has stored the states already; they are copied when the request is finished."""

    def wait_for_save(self) -> None:
        """Copies are waited for in :meth:`get_finished`."""

    # ---- scheduler ----

    def get_finished_count(self) -> int:
        """One rank reports a request as handed out."""
        return 1

    def get_num_new_matched_tokens(self, request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """No token is loaded from elsewhere."""
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens: int) -> None:
        """No token is loaded from elsewhere."""

    def build_connector_meta(self, scheduler_output) -> KVConnectorMetadata:
        """Tell the worker which requests have finished since the last step; returns what the worker is told."""
        finished, self._finished = self._finished, []
        return _Metadata(finished)

    def request_finished(self, request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks of a finished request until its states are copied; tell the client where to fetch them.

        Returns:
            whether vLLM must keep the blocks, and what the server's answer carries.
        """
        if not block_ids or request.prompt_token_ids is None or request.num_computed_tokens < request.num_prompt_tokens:
            return False, None  # aborted before its prompt was computed
        self._finished.append(_Finished(request.request_id, list(request.prompt_token_ids), list(block_ids)))
        return True, {"feature_key": request.request_id, "feature_port": int(self._address.rsplit(":", 1)[1])}

    def request_finished_all_groups(self, request, block_ids: tuple[list[int], ...]) -> tuple[bool, dict | None]:
        """As :meth:`request_finished`, with the blocks of every cache group."""
        if self._group >= len(block_ids):
            return False, None
        return self.request_finished(request, block_ids[self._group])

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config) -> str | None:
        """All layers of a token side by side, as vLLM's own hidden-state connector asks for."""
        return "LBNHC"
