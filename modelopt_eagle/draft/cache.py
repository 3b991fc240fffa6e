"""The draft head's own keys and values: one buffer a layer, rows of different lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class CachedHead(Protocol):
    """A head whose layers keep keys and values."""

    fc: nn.Linear
    layers: Any


class DraftCache:
    """Keys and values of committed anchors, followed by those of the nodes being drafted.

    Slot ``j`` of a row holds the step-0 key of anchor ``j`` (true target features); the slots behind the last anchor
    hold this round's nodes and are overwritten in the next round, so no key made from the head's own guesses stays.

    Args:
        keys, values: a tensor ``[B, kv_heads, capacity, d]`` a layer of the head.
    """

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor]):
        self.keys, self.values = list(keys), list(values)

    @classmethod
    def allocate(cls, module: CachedHead, batch: int, capacity: int) -> DraftCache:
        """Zeros for ``batch`` rows of ``capacity`` slots, as the head's layers need them."""
        parts = [layer.self_attn for layer in module.layers]
        weight = module.fc.weight
        return cls(
            [weight.new_zeros(batch, part.kv_heads, capacity, part.key_dim) for part in parts],
            [weight.new_zeros(batch, part.kv_heads, capacity, part.value_dim) for part in parts],
        )

    def tensors(self) -> list[Tensor]:
        """Keys of all layers, then values."""
        return [*self.keys, *self.values]

    @classmethod
    def over(cls, tensors: Sequence[Tensor]) -> DraftCache:
        """A cache whose memory is ``tensors``, in the order of :meth:`tensors`."""
        half = len(tensors) // 2
        return cls(tensors[:half], tensors[half:])

    def first_rows(self, count: int) -> DraftCache:
        """The first ``count`` rows, in the same memory."""
        return DraftCache([k[:count] for k in self.keys], [v[:count] for v in self.values])

    def keep(self, rows: Tensor) -> None:
        """Keep the rows ``[b]`` int64."""
        self.keys = [k[rows] for k in self.keys]
        self.values = [v[rows] for v in self.values]

    def compact(self, rows: Tensor) -> None:
        """Move the rows ``[b]`` int64 to the front; the memory stays where it is."""
        for tensor in self.tensors():
            tensor[: len(rows)] = tensor[rows]

    def clear(self) -> None:
        """Zeros everywhere: a masked number of an earlier use is harmless, a masked NaN would spread."""
        for tensor in self.tensors():
            tensor.zero_()

    def write(self, layer: int, k: Tensor, v: Tensor, place: int | Tensor) -> None:
        """Put ``k, v [B, n, heads, d]`` at one slot of every row and those behind it, or at slots ``[B, n]``."""
        if isinstance(place, int):
            self.keys[layer][:, :, place : place + k.shape[1]] = k.transpose(1, 2)
            self.values[layer][:, :, place : place + v.shape[1]] = v.transpose(1, 2)
            return
        rows = torch.arange(len(place), device=place.device)[:, None]  # [B,1]
        self.keys[layer][rows, :, place] = k
        self.values[layer][rows, :, place] = v

    def attend(self, layer: int, q: Tensor, visible: Tensor | None, width: int, scale: float) -> Tensor:
        """Attention over the first ``width`` slots.

        The query heads of a group are laid beside the query rows, so keys are never repeated.

        Args:
            q: ``[B, n, heads, dk]``.
            visible: ``[B or 1, n, width]`` bool; ``None``: every slot.
            scale: factor on ``q·k``.

        Returns:
            ``[B, n, heads·dv]``.
        """
        keys, values = self.keys[layer][:, :, :width], self.values[layer][:, :, :width]  # [B,hkv,W,d]
        batch, count, heads, dim = q.shape
        groups = heads // keys.shape[1]
        q = q.view(batch, count, -1, groups, dim).permute(0, 2, 1, 3, 4).reshape(batch, -1, count * groups, dim)
        mask = None
        if visible is not None:
            mask = torch.zeros(visible.shape, dtype=q.dtype, device=q.device)  # [B,n,W]
            mask = mask.masked_fill_(~visible, torch.finfo(q.dtype).min).repeat_interleave(groups, 1)[:, None]
        out = torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)
        return out.unflatten(2, (count, groups)).permute(0, 2, 1, 3, 4).reshape(batch, count, -1)  # [B,n,h·dv]
