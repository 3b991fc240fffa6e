"""What attention of a rollout step computes (``column_attention.py``), in plain PyTorch; the least work of a call."""

from __future__ import annotations

import math

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
    return dense_column_attention_with_sum(q, keys, values, column_keys, column_values, rows, starts, scale, sees)[0]


def dense_column_attention_with_sum(
    q: Tensor, keys: Tensor, values: Tensor, column_keys: Tensor, column_values: Tensor,
    rows: Tensor, starts: Tensor, scale: float, sees: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """:func:`dense_column_attention`, and the base-2 log-sum-exp of each query's scores ``[n, heads]`` float32."""
    scores = _dense_scores(q, keys, column_keys, rows, starts, scale, sees)  # [n,h,N+k]
    context, own = scores.softmax(dim=-1).split((len(keys), scores.shape[-1] - len(keys)), dim=-1)
    repeat = q.shape[1] // keys.shape[1]
    out = torch.einsum("nhm,mhd->nhd", context, values.repeat_interleave(repeat, 1))
    out = out + torch.einsum("nhk,nkhd->nhd", own, column_values.repeat_interleave(repeat, 2))
    return out.contiguous(), scores.float().logsumexp(-1) / math.log(2)


def _dense_scores(q, keys, column_keys, rows, starts, scale, sees) -> Tensor:
    """``[n, heads, N+k]``: every score, ``-inf`` where a key is not seen."""
    repeat = q.shape[1] // keys.shape[1]
    place = torch.arange(len(keys), device=q.device)  # [N]
    seen = (place >= starts[:, None]) & (place <= rows[:, None])  # [n,N]
    logits = torch.einsum("nhd,mhd->nhm", q, keys.repeat_interleave(repeat, 1)) * scale  # [n,h,N]
    logits = logits.masked_fill(~seen[:, None], float("-inf"))
    column = torch.einsum("nhd,nkhd->nhk", q, column_keys.repeat_interleave(repeat, 2)) * scale  # [n,h,k]
    if sees is not None:
        column = column.masked_fill(~sees.repeat(keys.shape[1], 1), float("-inf"))
    return torch.cat((logits, column), dim=-1)


def dense_column_attention_backward(
    upstream: Tensor, q: Tensor, keys: Tensor, values: Tensor, column_keys: Tensor, column_values: Tensor,
    rows: Tensor, starts: Tensor, scale: float, sees: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of :func:`dense_column_attention` by its first five arguments, from ``upstream [n, heads, dv]``."""
    groups, repeat, tokens = keys.shape[1], q.shape[1] // keys.shape[1], len(keys)
    weights = _dense_scores(q, keys, column_keys, rows, starts, scale, sees).softmax(-1)  # [n,h,N+k]
    context = torch.einsum("nhd,mhd->nhm", upstream, values.repeat_interleave(repeat, 1))  # [n,h,N]
    own = torch.einsum("nhd,nkhd->nhk", upstream, column_values.repeat_interleave(repeat, 2))  # [n,h,k]
    change = torch.cat((context, own), -1)  # [n,h,N+k] gradient of the weights
    change = weights * (change - (change * weights).sum(-1, keepdim=True)) * scale  # of the scores
    grad_q = torch.einsum("nhm,mhd->nhd", change[..., :tokens], keys.repeat_interleave(repeat, 1))
    grad_q = grad_q + torch.einsum("nhk,nkhd->nhd", change[..., tokens:], column_keys.repeat_interleave(repeat, 2))

    def grouped(wide: Tensor) -> Tensor:
        """``[n, h, m] -> [n, g, r, m]``."""
        return wide.unflatten(1, (groups, repeat))

    grads = (
        grad_q,
        torch.einsum("ngrm,ngrd->mgd", grouped(change[..., :tokens]), grouped(q)),
        torch.einsum("ngrm,ngrd->mgd", grouped(weights[..., :tokens]), grouped(upstream)),
        torch.einsum("ngrk,ngrd->nkgd", grouped(change[..., tokens:]), grouped(q)),
        torch.einsum("ngrk,ngrd->nkgd", grouped(weights[..., tokens:]), grouped(upstream)),
    )
    return tuple(grad.contiguous() for grad in grads)
