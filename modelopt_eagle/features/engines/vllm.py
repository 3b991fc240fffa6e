"""Features from a vLLM engine in this process: for dumps, under the Python that has vLLM installed."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator, Sequence

from modelopt_eagle.errors import FeatureError
from modelopt_eagle.features.stream.client import MailboxClient
from modelopt_eagle.features.stream.message import FeatureMessage

CONNECTOR_MODULE = "modelopt_eagle.features.engines.vllm_connector"


def engine_layer_ids(aux_layer_ids: Sequence[int], num_layers: int) -> list[int]:
    """vLLM's ids: canonical + 1 (it counts layer inputs), then the number of layers for the final state, pre-norm."""
    return [i + 1 for i in aux_layer_ids] + [num_layers]


def speculative_config(aux_layer_ids: Sequence[int], num_layers: int) -> dict:
    """vLLM's ``--speculative-config`` for handing out these layers."""
    ids = engine_layer_ids(aux_layer_ids, num_layers)
    return {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}},
    }


def context_length(config, max_length: int) -> int:
    """vLLM's ``--max-model-len``: room for the longest row and the one token that vLLM wants to make behind it.

    Args:
        config: the target's text config.
        max_length: longest row in tokens.

    Returns:
        ``max_length + 2``, but not more than the positions that the target knows (which vLLM refuses): a row that fills
        all of them cannot be served by vLLM.
    """
    known = window(config)
    return max_length + 2 if known is None else min(max_length + 2, known)


def window(config) -> int | None:
    """Positions that a target knows, or None where its config does not bound them (scaled rotary positions).

    Args:
        config: the target's text config.
    """
    limit = getattr(config, "max_position_embeddings", None)
    scaled = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default") != "default"
    return None if scaled else limit


def transfer_config(address: str, max_bytes: int = 4 * 2**30) -> dict:
    """vLLM's ``--kv-transfer-config`` for our connector, whose mailbox listens on ``address`` (host:port)."""
    return {
        "kv_connector": "EagleFeatureConnector",
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"address": address, "max_bytes": max_bytes},
    }


def free_port() -> int:
    """A TCP port of the loopback interface that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class VllmFeatures:
    """A vLLM engine that hands out states.

    Args:
        model: hub id or local folder.
        aux_layer_ids: canonical ids.
        num_layers: layers of the target.
        dtype: of the engine, such as "bfloat16"; "auto" is float32 on a CPU, else the checkpoint's own.
        context: tokens of a request at most, see :func:`context_length`.
        batch_tokens: tokens in flight at a time.
        revision, tensor_parallel_size, options: passed to ``vllm.LLM``.

    Raises:
        FeatureError: vLLM is not installed for this Python, or cannot load the target.
    """

    def __init__(
        self,
        model: str,
        aux_layer_ids: Sequence[int],
        num_layers: int,
        *,
        dtype: str = "auto",
        context: int = 4098,
        batch_tokens: int = 8192,
        revision: str | None = None,
        tensor_parallel_size: int = 1,
        options: dict | None = None,
    ):
        try:
            import vllm
        except ImportError as error:
            raise FeatureError(
                f"this Python ({sys.executable}) cannot load vLLM ({error}): run the script by the one that has it, "
                "with this repository on PYTHONPATH (`bash scripts/setup_vllm_cpu.sh` makes .venv-vllm for CPUs)"
            ) from error
        self._vllm, self._batch_tokens = vllm, batch_tokens
        if dtype == "auto" and vllm.platforms.current_platform.is_cpu():
            dtype = "float32"
        address = f"127.0.0.1:{free_port()}"
        try:
            self._engine = vllm.LLM(
                model=model,
                revision=revision,
                dtype=dtype,
                tensor_parallel_size=tensor_parallel_size,
                max_model_len=context,
                enable_prefix_caching=False,  # a cached prefix would leave its states in another request's blocks
                enforce_eager=True,
                speculative_config=speculative_config(aux_layer_ids, num_layers),
                kv_transfer_config=transfer_config(address),
                **(options or {}),
            ).llm_engine
        except Exception as error:  # vLLM and its libraries raise many kinds; its log above says more
            raise FeatureError(f"vLLM cannot serve {model}: {error}") from error
        self._client = MailboxClient(address, transport="shm", timeout=600)

    def states(self, rows: Sequence) -> Iterator[tuple[int, FeatureMessage]]:
        """States of all rows, in the order in which the engine finishes them.

        Args:
            rows: tokenised rows with ``id, input_ids``.

        Yields:
            (number of the row, its message); the message's token ids are the row's own.

        Raises:
            FeatureError: the engine rejected a row, or handed out states of other tokens.
        """
        sampling = self._vllm.SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        waiting = sorted(range(len(rows)), key=lambda i: (len(rows[i].input_ids), -i))  # longest taken first
        flying: dict[str, int] = {}
        tokens = 0
        while waiting or flying:
            while waiting and (not flying or tokens + len(rows[waiting[-1]].input_ids) <= self._batch_tokens):
                index = waiting.pop()
                tokens += len(rows[index].input_ids)
                flying[f"row-{index}"] = index
                self._add(f"row-{index}", rows[index], sampling)
            for output in self._engine.step():
                if not output.finished:
                    continue
                index = flying.pop(output.request_id)
                tokens -= len(rows[index].input_ids)
                yield index, self._receive(output, rows[index])

    def _add(self, request: str, row, sampling) -> None:
        try:
            self._engine.add_request(request, {"prompt_token_ids": list(row.input_ids)}, sampling)
        except ValueError as error:  # longer than the engine takes, or ids outside its vocabulary
            raise FeatureError(f"row {row.id!r} of {len(row.input_ids)} tokens: vLLM refused it: {error}") from error

    def _receive(self, output, row) -> FeatureMessage:
        where = output.kv_transfer_params or {}
        if "feature_key" not in where:
            raise FeatureError(f"row {row.id!r}: vLLM finished it without states; is it longer than the engine allows?")
        message = self._client.fetch(where["feature_key"])
        if message.token_ids != list(row.input_ids):
            raise FeatureError(
                f"row {row.id!r}: {len(row.input_ids)} tokens were sent, states of {len(message.token_ids)} tokens "
                "came back, or of others; this vLLM does not fit the connector"
            )
        return message
