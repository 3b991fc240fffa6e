"""Attention of a rollout step: the causal keys of step 0, merged with the few keys of the anchor's own column.

At step ``k`` anchor ``i`` sees the step-0 rows ``j <= i`` of its document and its own rows of steps ``1..k``. That is
one softmax over two groups of keys. On a GPU :func:`column_attention` is one kernel
(:mod:`modelopt_eagle.kernels.column_attention`). Elsewhere it works through the queries in chunks, each against the one
slice of step-0 keys that it can see. Both keep only the output and the log-sum-exp for the backward pass, so nothing of
size S x S exists. :func:`dense_column_attention` is the plain reference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from modelopt_eagle.draft.documents import Documents, upload
from modelopt_eagle.draft.fused import product_dtype
from modelopt_eagle.kernels.column_attention import askers_of
from modelopt_eagle.kernels.column_attention import column_attention as kernel
from modelopt_eagle.kernels.column_reference import dense_column_attention as dense
from modelopt_eagle.kernels.column_tiles import supported
from modelopt_eagle.kernels.dispatch import choose_backend, on_gpu

MAX_QUERIES = {"cpu": 64}
"""Queries of a chunk by device: on a CPU its scores should stay in the cache."""

MAX_QUERIES_ELSEWHERE = 512

MAX_SCORES = 1 << 18
"""Most query-key pairs of one chunk and head: bounds the scratch memory whatever the length."""


_LARGEST_CHUNK_ALONE: ContextVar[bool] = ContextVar("largest_chunk_alone", default=False)


@contextlib.contextmanager
def largest_chunk_alone() -> Iterator[None]:
    """Let plans made inside hold their largest chunk alone, twice where there are several.

    What an attention allocates is then the same, and what it gives is not: for who goes through a step to see what
    memory it takes. The chunks are many, and each lets go what it made while the next one is computed.
    """
    token = _LARGEST_CHUNK_ALONE.set(True)
    try:
        yield
    finally:
        _LARGEST_CHUNK_ALONE.reset(token)


@dataclass(frozen=True)
class QueryPlan:
    """Which step-0 keys each query sees: the flat range ``[start, row]``.

    Attributes:
        rows: ``[n]`` int64 flat index of each anchor, ascending.
        starts: ``[n]`` int64 flat index of the first token that it sees, ascending.
        host: the plan on the CPU, from which chunks are cut; ``None`` for one that lies there, or was made elsewhere.
    """

    rows: Tensor
    starts: Tensor
    host: QueryPlan | None = None
    _askers: dict[int, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def make(cls, rows: Tensor, starts: Tensor) -> QueryPlan:
        """The plan of queries whose ranges are known."""
        return cls(rows, starts)

    def to(self, device) -> QueryPlan:
        """A plan that was made on the CPU, on a device."""
        if self.rows.device == torch.device(device):
            return self
        return QueryPlan(upload(self.rows, device), upload(self.starts, device), self)

    @cached_property
    def chunks(self) -> tuple[tuple[int, int, int, int], ...]:
        """``(first query, last query + 1, first key, last key + 1)`` of each chunk of the plain code.

        A chunk has at most ``MAX_QUERIES`` rows and ``MAX_SCORES`` pairs.
        """
        most = MAX_QUERIES_ELSEWHERE if on_gpu(self.rows.device) else MAX_QUERIES["cpu"]
        known = self if self.host is None else self.host
        ends, begins = known.rows.tolist(), known.starts.tolist()
        chunks: list[tuple[int, int, int, int]] = []
        first = 0
        while first < len(ends):
            last = first + 1
            while (
                last < len(ends)
                and last - first < most
                and (last + 1 - first) * (ends[last] + 1 - begins[first]) <= MAX_SCORES
            ):
                last += 1
            chunks.append((first, last, begins[first], ends[last - 1] + 1))
            first = last
        if _LARGEST_CHUNK_ALONE.get():
            largest = sorted(chunks, key=lambda chunk: (chunk[1] - chunk[0]) * (chunk[3] - chunk[2]))[-1:]
            chunks = largest * min(2, len(chunks))
        return tuple(chunks)

    def askers(self, tokens: int) -> Tensor:
        """``[2, tokens]`` int32: of each step-0 key the first query that sees it, and one past the last; kept."""
        if tokens not in self._askers:
            self._askers[tokens] = askers_of(self.rows, self.starts, tokens)
        return self._askers[tokens]

    def mask(self, first: int, last: int, low: int, high: int) -> Tensor:
        """``[queries, keys]`` bool of one chunk: true where the key is seen."""
        keys = torch.arange(low, high, device=self.rows.device)  # [m]
        return (keys >= self.starts[first:last, None]) & (keys <= self.rows[first:last, None])


def plan_queries(rows: Tensor, documents: Documents, window: int | None, step: int = 0) -> QueryPlan:
    """Which step-0 keys the queries of a step see: those of their document, as far back as the window reaches.

    Args:
        rows: ``[n]`` flat anchors, ascending; at step k their queries stand k positions further on.
        window: positions that a query sees, its own among them; ``None``: all.
    """
    starts = documents.starts[rows]  # [n]
    if window is not None:
        starts = torch.maximum(starts, rows + (step + 1 - window))
    return QueryPlan.make(rows, starts)


class _ColumnAttention(torch.autograd.Function):
    """In-place arithmetic on one chunk of scores at a time; a pass over them costs as much as a product."""

    @staticmethod
    def forward(ctx, q, keys, values, column_keys, column_values, plan: QueryPlan, scale: float, sees: Tensor | None):
        n, heads, _ = q.shape
        groups = keys.shape[1]
        q = q * scale
        out = q.new_empty(n, heads, values.shape[-1])  # [n,h,dv]
        lse = q.new_empty(n, heads, dtype=torch.float32)  # [n,h]
        for chunk in plan.chunks:
            first, last, low, high = chunk
            logits, column = _chunk_logits(q, keys, column_keys, plan, chunk, sees)  # [g,r,c,m] [g,r,c,k]
            peak = logits.amax(-1, keepdim=True)  # [g,r,c,1]; the own step-0 row is always seen
            if column.shape[-1]:
                peak = torch.maximum(peak, column.amax(-1, keepdim=True))
            weights, own = logits.sub_(peak).exp_(), column.sub_(peak).exp_()
            total = weights.sum(-1, keepdim=True) + own.sum(-1, keepdim=True)  # [g,r,c,1]
            result = weights.flatten(1, 2).to(q.dtype) @ values[low:high].transpose(0, 1)  # [g,r·c,dv]
            result = result.unflatten(1, (heads // groups, last - first))  # [g,r,c,dv]
            if own.shape[-1]:
                result = result + torch.einsum("grck,ckgd->grcd", own.to(q.dtype), column_values[first:last])
            result = result / total.to(q.dtype)
            out[first:last] = result.permute(2, 0, 1, 3).flatten(1, 2)
            lse[first:last] = (peak + total.log())[..., 0].permute(2, 0, 1).flatten(1, 2)
        ctx.save_for_backward(q, keys, values, column_keys, column_values, out, lse)
        ctx.plan, ctx.scale, ctx.sees = plan, scale, sees
        return out

    @staticmethod
    def backward(ctx, grad):
        q, keys, values, column_keys, column_values, out, lse = ctx.saved_tensors  # q is scaled
        groups = keys.shape[1]
        grad_q = torch.empty_like(q)
        grad_k, grad_v = torch.zeros_like(keys), torch.zeros_like(values)
        grad_ck, grad_cv = torch.empty_like(column_keys), torch.empty_like(column_values)
        # D of the softmax's backward pass, one number a query and head, over both groups of keys at once
        delta = (grad.float() * out.float()).sum(-1)  # [n,h]
        for chunk in ctx.plan.chunks:
            first, last, low, high = chunk
            logits, column = _chunk_logits(q, keys, column_keys, ctx.plan, chunk, ctx.sees)  # [g,r,c,m] [g,r,c,k]
            total = _by_group(lse[first:last, :, None], groups)  # [g,r,c,1]
            offset = _by_group(delta[first:last, :, None], groups)  # [g,r,c,1]
            upstream = _by_group(grad[first:last], groups)  # [g,r,c,dv]
            queries = _by_group(q[first:last], groups)  # [g,r,c,dk]
            weights = logits.sub_(total).exp_()  # [g,r,c,m]
            flat_up, flat_q = upstream.flatten(1, 2), queries.flatten(1, 2)  # [g,r·c,d]
            grad_v[low:high] += (weights.flatten(1, 2).to(q.dtype).transpose(1, 2) @ flat_up).transpose(0, 1)
            score = (flat_up @ values[low:high].permute(1, 2, 0)).float().unflatten(1, weights.shape[1:3])  # [g,r,c,m]
            score = score.sub_(offset).mul_(weights).to(q.dtype).flatten(1, 2)  # [g,r·c,m]
            grad_k[low:high] += (score.transpose(1, 2) @ flat_q).transpose(0, 1)
            result = (score @ keys[low:high].transpose(0, 1)).unflatten(1, weights.shape[1:3])  # [g,r,c,dk]
            if column.shape[-1]:
                weights = column.sub_(total).exp_()  # [g,r,c,k]
                score = torch.einsum("grcd,ckgd->grck", upstream, column_values[first:last]).float()
                score = (weights * (score - offset)).to(q.dtype)  # [g,r,c,k]
                result = result + torch.einsum("grck,ckgd->grcd", score, column_keys[first:last])
                grad_ck[first:last] = torch.einsum("grck,grcd->ckgd", score, queries)
                grad_cv[first:last] = torch.einsum("grck,grcd->ckgd", weights.to(q.dtype), upstream)
            grad_q[first:last] = result.permute(2, 0, 1, 3).flatten(1, 2)
        return grad_q.mul_(ctx.scale), grad_k, grad_v, grad_ck, grad_cv, None, None, None


def _by_group(x: Tensor, groups: int) -> Tensor:
    """``[c, heads, d] -> [groups, heads // groups, c, d]``."""
    return x.unflatten(1, (groups, -1)).permute(1, 2, 0, 3)


def _chunk_logits(q, keys, column_keys, plan, chunk, sees) -> tuple[Tensor, Tensor]:
    """Scores of one chunk of scaled queries, float32 and free to overwrite.

    Returns:
        ``[g,r,c,m]`` for the step-0 keys (``-inf`` where unseen), ``[g,r,c,k]`` for the column.
    """
    first, last, low, high = chunk
    queries = _by_group(q[first:last], keys.shape[1])  # [g,r,c,dk]
    logits = queries.flatten(1, 2) @ keys[low:high].permute(1, 2, 0)  # [g,r·c,m]
    logits = logits.float().unflatten(1, queries.shape[1:3])
    logits.masked_fill_(~plan.mask(first, last, low, high), float("-inf"))
    column = torch.einsum("grcd,ckgd->grck", queries, column_keys[first:last]).float()
    if sees is not None:
        column = column.masked_fill(~sees[None, :, None], float("-inf"))
    return logits, column


def column_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    column_keys: Tensor,
    column_values: Tensor,
    plan: QueryPlan,
    scale: float,
    sees: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """One softmax over the visible step-0 keys and the anchor's own column.

    Args:
        q: ``[n, heads, dk]`` queries of the anchors.
        keys, values: ``[N, kv_heads, dk]``, ``[N, kv_heads, dv]`` of step 0, all tokens.
        column_keys, column_values: ``[n, k, kv_heads, dk]``, ``[n, k, kv_heads, dv]`` of the anchor's steps 1..k.
        plan: which keys each query sees.
        scale: factor on ``q·k``.
        sees: ``[heads / kv_heads, k]`` bool, which keys of the column each query head of a group sees; ``None``: all.
        backend: which code runs, see :mod:`modelopt_eagle.kernels.dispatch`; its reference here are the chunks.
            ``auto`` takes the kernel on CUDA tensors, but for float64 and heads wider than 256 (float32: 128).

    Returns:
        ``[n, heads, dv]``. Scores and softmax are float32 whatever the inputs.
    """
    if choose_backend(backend, q.device) == "triton":
        tensors = _of_one_dtype((q, keys, values, column_keys, column_values))
        if backend == "triton" or supported(*tensors):
            q, keys, values, column_keys, column_values = tensors
            return kernel(
                q, keys, values, column_keys, column_values, plan.rows, plan.starts, scale, sees,
                askers=plan.askers(len(keys)), backend=backend,
            )  # fmt: skip
    return _ColumnAttention.apply(q, keys, values, column_keys, column_values, plan, scale, sees)


def _of_one_dtype(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The tensors in the dtype of the products under autocast, else in the widest of theirs."""
    dtype = product_dtype(*tensors)
    return tuple(tensor.to(dtype) for tensor in tensors)


def dense_column_attention(q, keys, values, column_keys, column_values, plan: QueryPlan, scale: float) -> Tensor:
    """Plain reference of :func:`column_attention`: every score at once, gradients by autograd."""
    return dense(q, keys, values, column_keys, column_values, plan.rows, plan.starts, scale)
