"""Hooks that take the output of chosen decoder layers out of a forward pass."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torch import Tensor, nn

from modelopt_eagle.errors import TargetError
from modelopt_eagle.target.shards import for_another


class LayerCapture:
    """Context manager: while it is active, every forward pass of the backbone leaves its layer outputs here.

    Layer k's value is the residual-complete OUTPUT of layer k, 0-based: what the layer returns, before anything that
    the model adds between two layers. A layer that returns ``(hidden, residual)``, two tensors of one shape, gives
    their sum. The values are copied, so later in-place changes do not reach them. The hooks are removed on exit,
    also after an exception. Passes that other threads run through the same model, and those that are run for another
    process, are not looked at.

    Args:
        backbone: the module whose forward runs the layers.
        layers: its decoder layers.
        layer_ids: ascending ids of the layers, any of them including the last.
        width: Ht, which each output is checked against.
        gradient: keep the values in the graph of the forward pass, for a target with adapters.
        into: a :class:`~modelopt_eagle.decoding.CaptureBuffer` of these layers that the values are written to, all
            rows of a pass one after the other; without it every pass gets new memory. ``aux_hidden`` is then a view
            of the buffer, which the next pass overwrites. Not with ``gradient``.
        next_input: take what layer k+1 gets instead: the output of layer k with what the model adds to it before the
            next layer. Some vision-language models (Qwen3-VL) add features of the images there, and vLLM captures
            behind it.
    """

    def __init__(
        self,
        backbone: nn.Module,
        layers: nn.ModuleList,
        layer_ids: Sequence[int],
        width: int,
        gradient: bool = False,
        into=None,
        next_input: bool = False,
    ):
        if gradient and into is not None:
            raise TargetError("values in the graph cannot be written to a fixed buffer: leave out gradient or into")
        self.layer_ids, self._gradient, self._into = tuple(layer_ids), gradient, into
        self._backbone, self._layers, self._width = backbone, layers, width
        self._next_input = next_input
        self._handles: list = []
        self._buffer: Tensor | None = None
        self._missing = set(self.layer_ids)

    def __enter__(self) -> LayerCapture:
        self._thread = threading.get_ident()
        self._handles.append(self._backbone.register_forward_pre_hook(self._reset))
        for slot, layer_id in enumerate(self.layer_ids):
            hook = self._hook(slot, layer_id)
            if self._next_input and layer_id + 1 < len(self._layers):
                self._handles.append(
                    self._layers[layer_id + 1].register_forward_pre_hook(_input_hook(hook), with_kwargs=True)
                )
            else:
                self._handles.append(self._layers[layer_id].register_forward_hook(hook))
        return self

    def __exit__(self, *exception) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def aux_hidden(self) -> Tensor:
        """Outputs [B, S, A·Ht] of the last forward pass, side by side in ascending layer order, the model's dtype.

        Raises:
            TargetError: no forward pass ran, or it did not run every layer.
        """
        if not self._missing and self._into is not None:
            return self._into.read(self._rows.numel()).view(*self._rows, -1)
        if not self._missing and self._buffer is not None:
            return self._buffer
        raise TargetError(
            f"expected outputs of layers {list(self.layer_ids)}, but the last forward pass did not run layers "
            f"{sorted(self._missing)}; run the model inside the `with target.capture(...)` block"
        )

    def _reset(self, module, arguments) -> None:
        if threading.get_ident() != self._thread:
            return
        self._buffer, self._missing = None, set(self.layer_ids)
        if self._into is not None:
            self._into.begin()

    def _hook(self, slot: int, layer_id: int):
        def hook(module, arguments, output) -> None:
            if threading.get_ident() != self._thread or for_another():
                return
            hidden = self._hidden(output, layer_id)  # [B,S,Ht]
            self._missing.discard(layer_id)
            if self._into is not None:
                self._rows = hidden.shape[:-1]
                self._into.write(layer_id, hidden.flatten(0, 1), self._rows.numel())
                return
            if self._buffer is None:
                shape = (*hidden.shape[:-1], len(self.layer_ids) * self._width)
                self._buffer = hidden.new_empty(shape)  # [B,S,A·Ht]
            self._buffer[..., slot * self._width : (slot + 1) * self._width] = hidden

        return hook

    def _hidden(self, output, layer_id: int) -> Tensor:
        """The hidden state [B,S,Ht] inside what a layer returned."""
        parts = output if isinstance(output, (tuple, list)) else (output,)
        hidden = parts[0] if parts else None
        if not isinstance(hidden, Tensor) or hidden.dim() != 3 or hidden.shape[-1] != self._width:
            found = tuple(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__
            raise TargetError(
                f"layer {layer_id} ({type(self._layers[layer_id]).__name__}): expected an output of "
                f"[batch, tokens, {self._width}], found {found}; EAGLE-3 needs layers with one residual stream"
            )
        if len(parts) > 1 and isinstance(parts[1], Tensor) and parts[1].shape == hidden.shape:
            hidden = hidden + parts[1]
        return hidden if self._gradient else hidden.detach()


def _input_hook(hook):
    """The hook of an output as one of a layer's input."""

    def before(module, arguments, named) -> None:
        hook(module, arguments, arguments[0] if arguments else named.get("hidden_states"))

    return before
