"""Other ways to compute the rollout attention, that training_kernels.py measures beside the kernel.

Flash attention knows documents and causality, not which tokens ask nor a query's own column: every token asks, and the
column is met apart and merged by the log-sum-exps. FlexAttention takes any mask, over the keys of step 0 and of all
columns in a row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def flash_parts(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """Causal flash attention of documents of one length, by the operations below ``scaled_dot_product_attention``.

    Args:
        q: ``[B, h, S, d]``.
        keys, values: ``[B, g, S, d]``; on a CPU with as many heads as ``q``.
        scale: factor on the scores.

    Returns:
        output ``[B, h, S, d]``, log-sum-exp ``[B, h, S]``, and what the backward pass takes besides.
    """
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, keys, values, 0.0, True, scale=scale)
        return out, lse, ()
    out, lse, *rest = aten._scaled_dot_product_flash_attention(q, keys, values, 0.0, True, scale=scale)
    return out, lse, tuple(rest[:6])  # sequence bounds and lengths, two states of the random generator


def flash_gradients(upstream, q, keys, values, out, lse, rest, scale: float) -> Sequence[Tensor]:
    """Gradients by q, keys and values; ``out`` and ``lse`` are those of the whole softmax, so theirs are, too."""
    given = (upstream, q, keys, values, out, lse)
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, True, scale=scale)
    bounds, randomness = rest[:4], rest[4:]
    return aten._scaled_dot_product_flash_attention_backward(*given, *bounds, 0.0, True, *randomness, scale=scale)


class MergedFlash(torch.autograd.Function):
    """Flash attention over the step-0 keys, the column by plain products, merged.

    The backward pass hands the merged output and log-sum-exp to flash attention's own: ``p = exp(score - lse)`` and
    ``sum(upstream * out)`` are all that it needs to know of the other keys.
    """

    @staticmethod
    def forward(ctx, q, keys, values, column_keys, column_values, rows, length: int, scale: float):
        _, heads, dk = q.shape
        tokens, groups, dv = values.shape
        wide = q.new_zeros(tokens, heads, dk).index_copy_(0, rows, q)  # [N,h,dk]; nobody asks at the other rows
        padded = torch.nn.functional.pad(values, (0, dk - dv))  # [N,g,dk]
        repeat = heads // groups if q.device.type == "cpu" else 1

        def documents(x: Tensor) -> Tensor:
            """``[N, heads, d] -> [B, heads, S, d]``."""
            return x.unflatten(0, (-1, length)).transpose(1, 2)

        given = (
            documents(wide),
            documents(keys.repeat_interleave(repeat, 1)),
            documents(padded.repeat_interleave(repeat, 1)),
        )
        out, lse, rest = flash_parts(*given, scale)
        column = torch.einsum("ngrd,nkgd->ngrk", q.unflatten(1, (groups, -1)), column_keys).float() * scale
        own = lse.transpose(1, 2).flatten(0, 1)[rows].float()  # [n,h] of the step-0 keys
        total = torch.logaddexp(own, column.logsumexp(-1).flatten(1))  # [n,h]; an empty column adds exp(-inf)
        share = (own - total).exp()[..., None].to(q.dtype)  # [n,h,1]
        weights = (column - total.unflatten(1, (groups, -1))[..., None]).exp()  # [n,g,r,k]
        result = out.transpose(1, 2).flatten(0, 1)[rows][..., :dv] * share  # [n,h,dv]
        result = result + torch.einsum("ngrk,nkgd->ngrd", weights.to(q.dtype), column_values).flatten(1, 2)
        ctx.save_for_backward(*given, column_keys, column_values, rows, result, total, lse, weights)
        ctx.rest, ctx.repeat, ctx.scale = rest, repeat, scale
        return result

    @staticmethod
    def backward(ctx, upstream):
        wide, keys, values, column_keys, column_values, rows, result, total, lse, weights = ctx.saved_tensors
        (batch, _, length, dk), dv, groups = wide.shape, result.shape[-1], column_keys.shape[2]

        def spread(x: Tensor, like: Tensor) -> Tensor:
            """``[n, h, ...]`` at the rows that ask, ``like [B, h, S, ...]`` at the others."""
            flat = like.transpose(1, 2).flatten(0, 1).clone()
            return flat.index_copy_(0, rows, x.to(flat.dtype)).unflatten(0, (batch, length)).transpose(1, 2)

        nothing = torch.zeros_like(wide)  # [B,h,S,dk]
        up = spread(torch.nn.functional.pad(upstream, (0, dk - dv)), nothing)
        out = spread(torch.nn.functional.pad(result, (0, dk - dv)), nothing)
        grads = flash_gradients(up, wide, keys, values, out, spread(total, lse).contiguous(), ctx.rest, ctx.scale)
        grad_q, grad_k, grad_v = (grad.transpose(1, 2).flatten(0, 1) for grad in grads)  # [N,heads,dk]
        grad_q = grad_q[rows]  # [n,h,dk]
        if ctx.repeat > 1:
            grad_k, grad_v = (grad.unflatten(1, (groups, ctx.repeat)).sum(2) for grad in (grad_k, grad_v))
        up = upstream.unflatten(1, (groups, -1))  # [n,g,r,dv]
        delta = (upstream.float() * result.float()).sum(-1).unflatten(1, (groups, -1))  # [n,g,r]
        change = torch.einsum("ngrd,nkgd->ngrk", up, column_values).float() - delta[..., None]
        change = (weights * change * ctx.scale).to(up.dtype)  # [n,g,r,k]
        asking = wide.transpose(1, 2).flatten(0, 1)[rows].unflatten(1, (groups, -1))  # [n,g,r,dk]
        grad_q = grad_q + torch.einsum("ngrk,nkgd->ngrd", change, column_keys).flatten(1, 2)
        grad_ck = torch.einsum("ngrk,ngrd->nkgd", change, asking)
        grad_cv = torch.einsum("ngrk,ngrd->nkgd", weights.to(up.dtype), up)
        return grad_q, grad_k, grad_v[..., :dv], grad_ck, grad_cv, None, None, None


def merged_flash(given: Any) -> Tensor:
    """Flash attention over step 0 merged with the column; ``[n, heads, dv]``."""
    if len(set(given.lengths)) > 1:
        raise ValueError("documents of several lengths")
    return MergedFlash.apply(*given.tensors, given.plan.rows, given.lengths[0], given.scale)


@functools.cache
def compiled(name: str) -> Callable[..., Any]:
    """FlexAttention or the maker of its masks, compiled: on a GPU neither runs at its speed otherwise."""
    from torch.nn.attention import flex_attention

    return torch.compile(getattr(flex_attention, name), dynamic=False)


def flex(given: Any) -> Callable[[Any], Tensor]:
    """FlexAttention with the mask of these inputs, which a batch makes once for all its layers and heads."""
    from torch.nn.attention import flex_attention

    q, keys, _, column_keys, _ = given.tensors
    rows, starts, tokens, columns = given.plan.rows, given.plan.starts, len(keys), column_keys.shape[1]

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Whether a query sees a key."""
        step0 = (key < tokens) & (key >= starts[query]) & (key <= rows[query])
        own = (key - tokens).div(max(columns, 1), rounding_mode="floor") == query
        return step0 | ((key >= tokens) & own)

    cpu = q.device.type == "cpu"
    make = flex_attention.create_block_mask if cpu else compiled("create_block_mask")
    mask = make(seen, None, None, len(q), tokens + len(q) * columns, device=q.device)
    attend = flex_attention.flex_attention if cpu else compiled("flex_attention")

    def run(other: Any) -> Tensor:
        q, keys, values, column_keys, column_values = other.tensors
        if cpu:  # has no backward pass, and refuses inputs that ask for one
            q, keys, values, column_keys, column_values = (tensor.detach() for tensor in other.tensors)
        every = [torch.cat((keys, column_keys.flatten(0, 1))), torch.cat((values, column_values.flatten(0, 1)))]
        wide = [tensor.transpose(0, 1)[None] for tensor in (q, *every)]  # [1,heads,·,d]
        out = attend(*wide, block_mask=mask, scale=other.scale, enable_gqa=q.shape[1] != keys.shape[1])
        return out[0].transpose(0, 1)  # [n,h,dv]

    return run
