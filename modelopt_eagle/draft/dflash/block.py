"""Blocks in training: which are drawn, and the one pass that computes all of them.

Block n has the anchor ``a``: the last token whose features it reads. Slot 0 holds the token ``x_{a+1}`` at position
``a+1``, slot k the mask at ``a+1+k``; its row predicts the token there, so its teacher is the target's distribution at
token ``a+k``. It sees the context up to ``a`` within its document, and its own block, nothing of other blocks.

The B slots of a block ask for one range of context keys, as the query heads of a group do, so they stand beside each
other as further heads of :func:`~modelopt_eagle.draft.attention.column_attention`: memory is linear in blocks × B and
in S, and no key is repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modelopt_eagle.draft.attention import QueryPlan, column_attention
from modelopt_eagle.draft.counting import counted_predictions
from modelopt_eagle.draft.dflash.module import DFlashModule
from modelopt_eagle.draft.documents import upload
from modelopt_eagle.draft.predictions import BatchView, Predictions


@dataclass(frozen=True)
class BlockSettings:
    """What planning and the pass read of a recipe.

    Attributes:
        block_size: B.
        anchors: most blocks of a row in a step.
        gamma: decay of the weights by slot, ``exp(−(k−1)/gamma)``.
        dpace: weigh by how likely the head's own draft is to come so far, instead.
        dpace_alpha: share of certainty in these weights.
        convention: which tokens count.
    """

    block_size: int
    anchors: int
    gamma: float
    dpace: bool
    dpace_alpha: float
    convention: str


def plan_blocks(view: BatchView, settings: BlockSettings, generator: torch.Generator | None) -> Predictions:
    """Predictions of the blocks of one step: anchors drawn uniformly from those whose first slot counts.

    Args:
        generator: of the draw; ``None``: a fixed one.
    """
    everything = counted_predictions(view, settings.block_size - 1, settings.convention)
    candidates = everything.anchor[everything.depth == 0]  # [c] ascending
    if generator is None:
        generator = torch.Generator(candidates.device).manual_seed(0)
    drawn = torch.rand(len(candidates), generator=generator, device=candidates.device)
    order = drawn.argsort()
    row = view.documents.starts[candidates]  # [c] of which row
    order = order[row[order].argsort(stable=True)]  # by row, then as drawn
    first = torch.searchsorted(row[order].contiguous(), row[order].contiguous())  # [c] where the row begins
    rank = torch.arange(len(order), device=order.device) - first
    chosen = torch.zeros(len(view.input_ids), dtype=torch.bool, device=order.device)
    chosen[candidates[order[rank < settings.anchors]]] = True
    return everything.select(chosen[everything.anchor])


def block_states(
    module: DFlashModule,
    view: BatchView,
    predictions: Predictions,
    settings: BlockSettings,
    generator: torch.Generator | None = None,
) -> Tensor:
    """``[n, H]`` after the final norm, in the order of the predictions."""
    return _states(module, view, predictions, settings.block_size)


def block_drafts(module: DFlashModule, view: BatchView, steps: int) -> tuple[Predictions, Tensor]:
    """Predictions and states of every draft of ``steps`` tokens within the answers, for the acceptance walk."""
    predictions = counted_predictions(view, steps, "served")
    return predictions, _states(module, view, predictions, steps + 1)


def _states(module: DFlashModule, view: BatchView, predictions: Predictions, size: int) -> Tensor:
    host = predictions.on_host()
    anchors, place = host.anchor.unique(return_inverse=True)  # [r] ascending, [n], on the CPU
    rows = run_blocks(module, view, anchors, size)  # [r,B,H]
    return rows.flatten(0, 1).index_select(0, upload(place * size + 1 + host.depth, rows.device))


def run_blocks(module: DFlashModule, view: BatchView, anchors: Tensor, size: int) -> Tensor:
    """All slots of the blocks at ``anchors [r]`` (ascending, on the CPU), ``[r, B, H]`` after the final norm."""
    plan = QueryPlan.make(anchors, view.on_host().documents.starts[anchors]).to(view.aux_hidden.device)
    anchors, positions = plan.rows, view.documents.positions  # [r], [N]
    context = module.context(view.aux_hidden)  # [N,H]
    tables = module.rotary(positions, view.length)  # [N,d/2] each
    slots = positions[anchors][:, None] + 1 + torch.arange(size, device=anchors.device)  # [r,B]
    cos, sin = module.rotary(slots, view.length + size + 1)  # [r,B,d/2]
    state = torch.cat((view.embed(anchors + 1)[:, None], mask_rows(module, view.embed_ids, len(anchors), size - 1)), 1)
    for layer in module.layers:
        keys, values = layer.context(context, *tables)  # [N,hkv,d]
        q, k, v = layer.project(state, cos, sin)  # [r,B,h,d] [r,B,hkv,d]
        attention = block_attention(q, keys, values, k, v, plan, layer.scale, module.config.causal)
        state = layer.combine(attention.flatten(2), state)  # [r,B,H]
    return module.norm(state)


def mask_rows(module: DFlashModule, embed_ids: Any, count: int, masks: int) -> Tensor:
    """``[count, masks, H]`` embeddings of the mask token."""
    row = embed_ids(torch.full((1,), module.config.mask(), device=module.d2t.device))  # [1,H]
    return row.to(module.dtype).expand(count, masks, -1)


def block_attention(
    q: Tensor, keys: Tensor, values: Tensor, own_k: Tensor, own_v: Tensor, plan: QueryPlan, scale: float, causal: bool
) -> Tensor:
    """One softmax a slot over its context and its block.

    Args:
        q: ``[r, B, heads, d]`` of the slots.
        keys, values: ``[N, kv_heads, d]`` of the context, all tokens.
        own_k, own_v: ``[r, B, kv_heads, d]`` of the slots.
        plan: context range of each block.
        scale: factor on ``q·k``.
        causal: a slot sees the slots up to itself only.

    Returns:
        ``[r, B, heads, d]``.
    """
    blocks, size, heads, dim = q.shape
    groups = keys.shape[1]
    wide = q.view(blocks, size, groups, heads // groups, dim).permute(0, 2, 3, 1, 4)  # [r,g,h/g,B,d]
    sees = None
    if causal:
        sees = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()  # [B,B]
        sees = sees.repeat(heads // groups, 1)  # [h/g*B,B]
    out = column_attention(wide.reshape(blocks, -1, dim), keys, values, own_k, own_v, plan, scale, sees)
    return out.view(blocks, groups, heads // groups, size, -1).permute(0, 3, 1, 2, 4).flatten(2, 3)


def dense_block_attention(
    q: Tensor, keys: Tensor, values: Tensor, own_k: Tensor, own_v: Tensor, plan: QueryPlan, scale: float, causal: bool
) -> Tensor:
    """Plain reference of :func:`block_attention`: every score at once, gradients by autograd."""
    repeat = q.shape[2] // keys.shape[1]
    keys, values = keys.repeat_interleave(repeat, 1), values.repeat_interleave(repeat, 1)  # [N,h,d]
    own_k, own_v = own_k.repeat_interleave(repeat, 2), own_v.repeat_interleave(repeat, 2)  # [r,B,h,d]
    context = torch.einsum("rbhd,nhd->rbhn", q, keys) * scale  # [r,B,h,N]
    seen = plan.mask(0, len(q), 0, len(keys))  # [r,N]
    context = context.masked_fill(~seen[:, None, None], float("-inf"))
    block = torch.einsum("rbhd,rchd->rbhc", q, own_k) * scale  # [r,B,h,B]
    if causal:
        size = q.shape[1]
        later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)  # [B,B]
        block = block.masked_fill(later[None, :, None], float("-inf"))
    weights = torch.cat((context, block), -1).softmax(-1)  # [r,B,h,N+B]
    first, second = weights.split((len(keys), block.shape[-1]), -1)
    return torch.einsum("rbhn,nhd->rbhd", first, values) + torch.einsum("rbhc,rchd->rbhd", second, own_v)


@torch.no_grad()
def dpace_weights(
    module: DFlashModule, view: BatchView, predictions: Predictions, states: Tensor, settings: BlockSettings
) -> Tensor | None:
    """``[n]`` D-PACE weights, or ``None``: the recipe weighs by slot alone.

    With ``q_k`` the head's probability of the text's token at slot k and ``s_k = (1−α) q_k + α``, a slot weighs
    ``Σ_{j>=k} Π_{i<=j} s_i`` over the slots of its block that count: what it adds to the expected length.
    """
    if not settings.dpace:
        return None
    labels = view.input_ids[(predictions.teacher + 1).clamp(max=len(view.input_ids) - 1)]  # [n]
    draft_ids = torch.searchsorted(module.target_ids, labels).clamp(max=len(module.target_ids) - 1)  # [n]
    known = module.target_ids[draft_ids] == labels  # [n] whether the head can draft it
    likely = torch.zeros(len(predictions), device=states.device)
    for part in torch.arange(len(predictions), device=states.device).split(512):
        q = module.lm_head(states[part]).float().softmax(-1)  # [c,Vd]
        likely[part] = torch.where(known[part], q.gather(1, draft_ids[part][:, None])[:, 0], 0.0)
    anchors, place = predictions.on_host().anchor.unique(return_inverse=True)
    place = upload(place, states.device)
    steps = torch.zeros(len(anchors), settings.block_size - 1, device=states.device)  # [r,K] 0 where nothing counts
    steps[place, predictions.depth] = (1 - settings.dpace_alpha) * likely + settings.dpace_alpha
    reach = steps.cumprod(1)  # [r,K]
    return reach.flip(1).cumsum(1).flip(1)[place, predictions.depth]
