"""Attention of a rollout step: a range of step-0 keys for each query, and the few keys of its own column.

Query ``i`` sees the keys ``starts[i] <= j <= rows[i]`` and its own ``k`` column keys, in one softmax. Both bounds
ascend with the query, so a block of queries reads one slice of keys, and a block of keys is read by one run of
queries. Query heads that share a key head ask side by side.
"""

from __future__ import annotations

import torch
from torch import Tensor

from modelopt_eagle.kernels.work import Work


def column_attention_work(
    pairs: int, tokens: int, queries: int, columns: int, heads: int, groups: int, dk: int, dv: int, size: int
) -> dict[str, Work]:
    """The least that one call does, forward and backward.

    Args:
        pairs: visible step-0 keys, over all queries: ``(rows - starts + 1).sum()``.
        tokens: N, keys of step 0.
        queries: n.
        columns: k, keys of a query's own column.
        heads, groups: query heads; key and value heads.
        dk, dv: widths of a key and of a value.
        size: bytes of an element.

    Returns:
        ``forward`` (two products a pair) and ``backward`` (five: scores, values' and scores' gradients, queries' and
        keys' gradients).
    """
    seen = heads * (pairs + queries * columns)
    asked, answered = queries * heads * dk * size, queries * heads * dv * size  # q; out
    keys = (tokens + queries * columns) * groups * (dk + dv) * size
    statistics = 4 * queries * heads  # log-sum-exp
    forward = Work(asked + keys + answered + statistics, 2 * seen * (dk + dv))
    backward = Work(2 * (asked + keys) + 2 * answered + statistics, 2 * seen * (3 * dk + 2 * dv))
    return {"forward": forward, "backward": backward}


def dense_column_attention(
    q: Tensor, keys: Tensor, values: Tensor, column_keys: Tensor, column_values: Tensor,
    rows: Tensor, starts: Tensor, scale: float, sees: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Plain reference: every score at once, gradients by autograd.

    Args:
        q: ``[n, heads, dk]``.
        keys, values: ``[N, groups, dk]``, ``[N, groups, dv]``.
        column_keys, column_values: ``[n, k, groups, dk]``, ``[n, k, groups, dv]``.
        rows, starts: ``[n]`` last and first key that each query sees.
        scale: factor on ``q·k``.
        sees: ``[heads / groups, k]`` bool, which column keys each query head of a group sees; ``None``: all.

    Returns:
        ``[n, heads, dv]``.
    """
    repeat = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(repeat, 1), values.repeat_interleave(repeat, 1)  # [N,h,d]
    column_keys = column_keys.repeat_interleave(repeat, 2)  # [n,k,h,d]
    column_values = column_values.repeat_interleave(repeat, 2)
    place = torch.arange(len(keys), device=q.device)  # [N]
    seen = (place >= starts[:, None]) & (place <= rows[:, None])  # [n,N]
    logits = torch.einsum("nhd,mhd->nhm", q, keys) * scale  # [n,h,N]
    logits = logits.masked_fill(~seen[:, None], float("-inf"))
    column = torch.einsum("nhd,nkhd->nhk", q, column_keys) * scale  # [n,h,k]
    if sees is not None:
        every_head = sees.repeat(q.shape[1] // len(sees), 1)  # [h,k]
        column = column.masked_fill(~every_head, float("-inf"))
    weights = torch.cat((logits, column), dim=-1).softmax(dim=-1)  # [n,h,N+k]
    context = torch.einsum("nhm,mhd->nhd", weights[..., : len(keys)], values)
    return context + torch.einsum("nhk,nkhd->nhd", weights[..., len(keys) :], column_values)
