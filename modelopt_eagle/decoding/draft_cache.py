"""The draft head's own keys and values: one buffer a layer, rows of different lengths."""

from __future__ import annotations

import torch
from torch import Tensor

from modelopt_eagle.draft import EagleModule


class DraftCache:
    """Keys and values of committed anchors, followed by those of the nodes being drafted.

    Slot ``j`` of a row holds the step-0 key of anchor ``j`` (true target features); the slots behind the last anchor
    hold this round's nodes and are overwritten in the next round, so no key made from the head's own guesses stays.

    Args:
        module: the head.
        batch: rows.
        capacity: slots a row.
    """

    def __init__(self, module: EagleModule, batch: int, capacity: int):
        weight = module.fc.weight
        self.capacity = capacity
        self.keys, self.values = [], []
        for layer in module.layers:
            part = layer.self_attn
            self.keys.append(weight.new_zeros(batch, part.kv_heads, capacity, part.key_dim))
            self.values.append(weight.new_zeros(batch, part.kv_heads, capacity, part.value_dim))

    def keep(self, rows: Tensor) -> None:
        """Keep the rows ``[b]`` int64."""
        self.keys = [k[rows] for k in self.keys]
        self.values = [v[rows] for v in self.values]

    def write(self, layer: int, k: Tensor, v: Tensor, start: int | None, slots: Tensor | None) -> None:
        """Put ``k, v [B, n, heads, d]`` at slot ``start`` of every row, or at ``slots [B, n]``."""
        if start is not None:
            self.keys[layer][:, :, start : start + k.shape[1]] = k.transpose(1, 2)
            self.values[layer][:, :, start : start + v.shape[1]] = v.transpose(1, 2)
            return
        rows = torch.arange(len(slots), device=slots.device)[:, None]  # [B,1]
        self.keys[layer][rows, :, slots] = k
        self.values[layer][rows, :, slots] = v

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
        return out.unflatten(2, (count, groups)).permute(0, 2, 1, 3, 4).reshape(batch, count, -1)  # [B,n,h*dv]
