"""Features from TensorRT-LLM's ``SaveHiddenStatesDecodingConfig``, which writes one file a request.

A file holds a list of one dictionary: ``id``, ``input_ids [s]``, ``hidden_state [s, Ht]`` (post-norm) and
``aux_hidden_states [s, A·Ht]``. Requests are told apart by their tokens, not by the number in a file's name.
The engine needs a GPU; everything but the engine call is tested with a recorded file (see docs/features.md).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from modelopt_eagle.common.package import require_extra
from modelopt_eagle.common.pickles import load_tensors
from modelopt_eagle.errors import FeatureError

ROWS_AT_A_TIME = 64


def open_engine(
    model: str, aux_layer_ids: Sequence[int], folder: Path, tensor_parallel_size: int = 1, options: dict | None = None
) -> Callable:
    """Start TensorRT-LLM; returns ``generate(token id lists)``, which leaves the states in ``folder``.

    Args:
        model: hub id or local folder.
        aux_layer_ids: canonical ids.
        folder: where the engine writes.
        tensor_parallel_size, options: passed to ``tensorrt_llm.LLM``.

    Raises:
        MissingExtraError: TensorRT-LLM is not installed.
    """
    trtllm = require_extra("tensorrt_llm", "stream")
    config = require_extra("tensorrt_llm.llmapi", "stream")
    engine = trtllm.LLM(
        model=model,
        disable_overlap_scheduler=False,
        cuda_graph_config=None,
        enable_chunked_prefill=False,
        kv_cache_config=config.KvCacheConfig(enable_block_reuse=False, free_gpu_memory_fraction=0.5),
        tensor_parallel_size=tensor_parallel_size,
        speculative_config=config.SaveHiddenStatesDecodingConfig(
            output_directory=str(folder),
            write_interval=1,
            file_prefix="states",
            eagle3_layers_to_capture=set(aux_layer_ids),
        ),
        **(options or {}),
    )
    sampling = trtllm.SamplingParams(max_tokens=1, temperature=0)
    return lambda prompts: engine.generate(prompts, sampling)


def saved_states(path: Path) -> tuple[tuple[int, ...], Tensor, Tensor]:
    """Token ids, aux states [s, A·Ht] and post-norm final states [s, Ht] of one of the engine's files.

    Raises:
        FeatureError: the file is not laid out as described above.
    """
    try:
        value = load_tensors(path)
    except ValueError as error:
        raise FeatureError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, list) or len(value) != 1 or not isinstance(value[0], dict):
        raise FeatureError(f"{path}: a list of one dictionary expected; this TensorRT-LLM writes something else")
    names = ("input_ids", "aux_hidden_states", "hidden_state")
    if missing := [name for name in names if name not in value[0]]:
        raise FeatureError(f"{path} has no {missing}; it has {sorted(value[0])}")
    ids, aux, final = (value[0][name] for name in names)
    return tuple(torch.as_tensor(ids).flatten().tolist()), aux, final


def states(
    rows: Sequence, generate: Callable[[list[list[int]]], object], folder: Path
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """States of all rows: run the engine over some, read what it has written, delete it.

    Args:
        rows: tokenised rows with ``id, input_ids``.
        generate: runs the engine over lists of token ids (see :func:`open_engine`).
        folder: where the engine writes.

    Yields:
        (number of the row, aux states [s, A·Ht], post-norm final states [s, Ht]).

    Raises:
        FeatureError: a row for which the engine wrote no states, or not one for each token.
    """
    for start in range(0, len(rows), ROWS_AT_A_TIME):
        part = rows[start : start + ROWS_AT_A_TIME]
        generate([list(row.input_ids) for row in part])
        found = {}
        for path in folder.glob("*.pt"):
            ids, aux, final = saved_states(path)
            found[ids] = (aux, final)
            path.unlink()
        for offset, row in enumerate(part):
            tokens = tuple(row.input_ids)
            if tokens not in found:
                raise FeatureError(f"row {row.id!r}: TensorRT-LLM wrote no states of its {len(tokens)} tokens")
            aux, final = found[tokens]  # rows of equal tokens share one file
            if len(aux) != len(tokens) or len(final) != len(tokens):
                raise FeatureError(
                    f"row {row.id!r}: {len(tokens)} tokens, but {len(aux)} and {len(final)} states were written"
                )
            yield start + offset, aux, final


class TrtllmFeatures:
    """An engine that is started when the first row is asked for.

    Args:
        model, aux_layer_ids, tensor_parallel_size, options: see :func:`open_engine`.
    """

    def __init__(
        self, model: str, aux_layer_ids: Sequence[int], tensor_parallel_size: int = 1, options: dict | None = None
    ):
        self._model, self._layers, self._parallel, self._options = model, aux_layer_ids, tensor_parallel_size, options

    def states(self, rows: Sequence) -> Iterator[tuple[int, Tensor, Tensor]]:
        """See :func:`states`."""
        with tempfile.TemporaryDirectory(prefix="eagle-states-") as folder:
            generate = open_engine(self._model, self._layers, Path(folder), self._parallel, self._options)
            yield from states(rows, generate, Path(folder))
