"""One buffer for the target's captured features, allocated once: ``[max_tokens + N·max_requests, A·Ht]``.

An engine fills it layer by layer while the target runs (a block of columns a layer) and the draft reads it afterwards.
Its address never changes, so that CUDA graphs can write to it: a replayed graph copies the rows that it was captured
with, and :meth:`CaptureBuffer.replayed` then says how many of them are real.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from modelopt_eagle.common.layers import check_layer_ids, default_layer_ids
from modelopt_eagle.errors import DecodingError


class CaptureBuffer:
    """Features of the rows of one forward pass.

    Args:
        num_layers: layers of the target.
        hidden_size: Ht.
        max_tokens: tokens of the largest prefill batch.
        max_requests: requests decoded together.
        num_nodes: N, nodes that each of them verifies.
        aux_layer_ids: layers to capture; ``None``: the default three; empty: capture is off and nothing is allocated.
        dtype, device: of the buffer.

    Raises:
        TargetError: ids repeated or out of range, or no ids and fewer than 6 layers.
        DecodingError: a size below 1.
    """

    def __init__(
        self,
        num_layers: int,
        hidden_size: int,
        max_tokens: int,
        max_requests: int,
        num_nodes: int,
        aux_layer_ids: Sequence[int] | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        for name, value in (("max_tokens", max_tokens), ("max_requests", max_requests), ("num_nodes", num_nodes)):
            if value < 1:
                raise DecodingError(f"{name} must be at least 1, found {value}")
        if aux_layer_ids is None:
            self.layer_ids = default_layer_ids(num_layers)
        else:
            self.layer_ids = check_layer_ids(aux_layer_ids, num_layers) if len(aux_layer_ids) else ()
        self.width = hidden_size
        self.rows = max_tokens + num_nodes * max_requests
        size = self.rows if self.layer_ids else 0
        self.data = torch.zeros(size, len(self.layer_ids) * hidden_size, dtype=dtype, device=device)
        self._filled: dict[int, int] = {}

    @property
    def enabled(self) -> bool:
        """Whether anything is captured."""
        return bool(self.layer_ids)

    def wants(self, layer: int) -> bool:
        """Whether the output of ``layer`` is to be captured."""
        return layer in self.layer_ids

    def begin(self) -> None:
        """Start a forward pass: what is in the buffer no longer counts."""
        self._filled.clear()

    def write(self, layer: int, hidden: Tensor, num_rows: int, residual: Tensor | None = None) -> None:
        """Copy the real rows of a layer's output into its columns.

        Args:
            layer: a captured layer.
            hidden: ``[rows, Ht]``; rows behind ``num_rows`` are a graph's padding and are not copied.
            num_rows: real rows.
            residual: ``[rows, Ht]`` of a layer that keeps it apart: the sum is what counts.

        Raises:
            DecodingError: a layer that is not captured, fewer rows than said, or more than the buffer holds.
        """
        if layer not in self.layer_ids:
            raise DecodingError(f"layer {layer} is not captured: the buffer holds layers {list(self.layer_ids)}")
        if (
            hidden.dim() != 2
            or hidden.shape[1] != self.width
            or (residual is not None and residual.shape != hidden.shape)
        ):
            raise DecodingError(f"layer {layer}: expected [rows, {self.width}], found {list(hidden.shape)}")
        if num_rows > len(hidden):
            raise DecodingError(f"layer {layer}: {num_rows} rows were announced, its output has {len(hidden)}")
        self._check_room(num_rows)
        start = self.layer_ids.index(layer) * self.width
        columns = self.data[:num_rows, start : start + self.width]  # [rows,Ht]
        if residual is None:
            columns.copy_(hidden[:num_rows])
        else:
            columns.copy_(hidden[:num_rows] + residual[:num_rows])
        self._filled[layer] = num_rows

    def replayed(self, num_rows: int) -> None:
        """Count ``num_rows`` rows of every layer as written: a replayed graph has copied them without :meth:`write`.

        Raises:
            DecodingError: more rows than the buffer holds.
        """
        self._check_room(num_rows)
        self._filled = dict.fromkeys(self.layer_ids, num_rows)

    def _check_room(self, num_rows: int) -> None:
        if num_rows > self.rows:
            raise DecodingError(
                f"{num_rows} rows do not fit a capture buffer of {self.rows} (max_tokens + N·max_requests): "
                "raise max_tokens or max_requests"
            )

    def read(self, num_rows: int) -> Tensor:
        """The features ``[num_rows, A·Ht]`` of this pass, a view.

        Raises:
            DecodingError: capture is off, or a layer brought fewer rows.
        """
        if not self.enabled:
            raise DecodingError("capture is switched off (no layer ids)")
        short = {layer: self._filled.get(layer, 0) for layer in self.layer_ids if self._filled.get(layer, 0) < num_rows}
        if short:
            raise DecodingError(f"{num_rows} rows were asked for; layers brought fewer in this pass: {short}")
        return self.data[:num_rows]
