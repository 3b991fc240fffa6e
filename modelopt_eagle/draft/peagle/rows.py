"""All depths of a P-EAGLE head in one pass over a training batch.

Element ``(i, 0)`` is token ``i`` as in EAGLE-3's first step: embedding of ``x_{i+1}``, state ``fuse(a_i)``. Element
``(i, d)``, d >= 1, is a mask row at rotary position ``i + d``: the mask token's embedding, state ``fuse(mask_hidden)``.
``(i, d)`` sees ``(j, 0)`` for ``j <= i`` of its document and ``(i, d')`` for ``1 <= d' <= d``: what plain causal
attention shows a decoder that stands at anchor ``i``, see ``draft_loop.py``. Its teacher is the target's distribution
at token ``i + 1 + d``.

Each layer projects the rows of all depths together and combines them together; only attention goes depth by depth,
since the rows of depth d see d single keys more (:func:`~modelopt_eagle.draft.attention.column_attention`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modelopt_eagle.draft.attention import QueryPlan, column_attention, plan_queries
from modelopt_eagle.draft.counting import counted_predictions
from modelopt_eagle.draft.documents import Documents, upload
from modelopt_eagle.draft.peagle.module import PEagleModule
from modelopt_eagle.draft.predictions import BatchView, Predictions


@dataclass(frozen=True)
class MaskRows:
    """The mask rows that a list of predictions needs: each anchor's own, up to its deepest prediction.

    Attributes:
        anchor, depth: ``[M]`` int64, by depth and then by anchor.
        place: ``[K, N]`` int64, where ``(anchor, depth)`` lies among them, -1: not at all (row 0 is never read).
    """

    anchor: Tensor
    depth: Tensor
    place: Tensor

    @classmethod
    def make(cls, predictions: Predictions, length: int) -> MaskRows:
        """Those of predictions in a batch of ``length`` tokens."""
        deepest = predictions.anchor.new_zeros(length)  # [N]
        deepest = deepest.scatter_reduce(0, predictions.anchor, predictions.depth, "amax")
        depths = torch.arange(predictions.depths, device=deepest.device)[:, None]  # [K,1]
        wanted = (depths >= 1) & (depths <= deepest)  # [K,N]
        depth, anchor = wanted.nonzero(as_tuple=True)  # [M] each
        place = torch.full_like(wanted, -1, dtype=torch.int64)
        place[wanted] = torch.arange(len(anchor), device=anchor.device)
        return cls(anchor, depth, place)

    def column(self, anchors: Tensor, depth: int) -> Tensor:
        """``[n, d]``: the mask rows of depths 1 to d of anchors ``[n]``."""
        return self.place[1 : depth + 1, anchors].T


@dataclass(frozen=True)
class Asking:
    """The queries of one depth in one layer.

    Attributes:
        count: how many; those of depth d follow those of depth d-1.
        plan: the step-0 keys that they see.
        column: ``[count, d]`` the mask rows that they see.
    """

    count: int
    plan: QueryPlan
    column: Tensor

    @classmethod
    def make(
        cls, anchors: Tensor, depth: int, rows: MaskRows, documents: Documents, window: int | None, device: Any = "cpu"
    ) -> Asking:
        """Queries of ``anchors [n]``, ascending; ``window``: positions that they see. Made on the CPU, for a device."""
        plan = plan_queries(anchors, documents, window, depth)
        return cls(len(anchors), plan.to(device), upload(rows.column(anchors, depth), device))


def attend(
    asking: list[Asking], q: Tensor, context: tuple[Tensor, Tensor], masks: tuple[Tensor, Tensor], scale: float
) -> Tensor:
    """Attention of all depths.

    Args:
        asking: of each depth.
        q: ``[n, heads, dk]`` queries, in the order of ``asking``.
        context: keys and values of step 0, ``[N, kv_heads, d]`` each.
        masks: keys and values of the mask rows, ``[M, kv_heads, d]`` each.
        scale: factor on ``q·k``.

    Returns:
        ``[n, heads·dv]``.
    """
    parts, (keys, values) = [], context
    for part, queries in zip(asking, q.split([part.count for part in asking]), strict=True):
        own_k, own_v = masks[0][part.column], masks[1][part.column]  # [c,d,kv_heads,dk], [c,d,kv_heads,dv]
        parts.append(column_attention(queries, keys, values, own_k, own_v, part.plan, scale))
    return torch.cat(parts).flatten(-2)


def parallel_states(
    module: PEagleModule,
    view: BatchView,
    predictions: Predictions,
    settings: Any = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """``[n, H]`` after the final norm, in the order of the predictions.

    Args:
        view: of the batch; with ``embed_ids``.
        predictions: anchors among the tokens of ``view.axis``.
        settings, generator: not read: nothing is drawn here.

    Raises:
        ValueError: a batch whose embeddings are given by place only, or more depths than the head's window has places.
        CheckpointError: the head names no mask token.
    """
    if view.embed_ids is None:
        raise ValueError("a P-EAGLE head reads its mask token: the batch needs embed_ids")
    window = module.config.sliding_window
    if window is not None and predictions.depths > window:
        raise ValueError(f"{predictions.depths} depths do not fit into the head's window of {window} positions")
    documents, host = view.on_host().documents, predictions.on_host()  # who asks for what is found on the CPU
    tokens, depths, device = view.axis.tokens, range(predictions.depths), view.aux_hidden.device
    last = len(documents.starts) - 1
    rows = MaskRows.make(host, last + 1)
    order = torch.argsort(host.depth * (last + 1) + host.anchor)  # [n] by depth, then by anchor
    sought = [host.anchor[order][host.depth[order] == d] for d in depths]
    final = [Asking.make(anchors, d, rows, documents, window, device) for d, anchors in enumerate(sought)]
    answers = [view.axis.local(upload(sought[0], device))]
    answers += [upload(len(tokens) + rows.place[d, sought[d]], device) for d in depths[1:]]
    below = final
    if len(module.layers) > 1:  # every row below the last layer is a key of the next one
        everyone = [view.axis.host_tokens, *(rows.anchor[rows.depth == d] for d in depths[1:])]
        below = [Asking.make(anchors, d, rows, documents, window, device) for d, anchors in enumerate(everyone)]

    mask_embedding, mask_state = module.mask_row(view.embed_ids)  # [1,H] each
    masked = (len(rows.anchor), -1)
    real = view.embed((tokens + 1).clamp(max=last))  # [m,H]
    embedding = torch.cat((real, mask_embedding.to(real.dtype).expand(masked)))  # [m+M,H]
    state = torch.cat((module.fuse(view.aux_hidden), mask_state.expand(masked)))  # [m+M,H]
    places = documents.positions  # [N]
    positions = torch.cat((places[view.axis.host_tokens], places[rows.anchor] + rows.depth))  # [m+M]
    positions = upload(positions, device)
    cos, sin = module.rotary(positions, view.length + predictions.depths)
    for index, layer in enumerate(module.layers):
        is_last = index == len(module.layers) - 1
        q, k, v, residual = layer.project(
            embedding if index == 0 else None, state, cos, sin, query_rows=torch.cat(answers) if is_last else None
        )
        context = (view.axis.gather(k[: len(tokens)]), view.axis.gather(v[: len(tokens)]))  # [N,kv_heads,d] each
        masks = (k[len(tokens) :], v[len(tokens) :])  # [M,kv_heads,d] each
        attention = attend(final if is_last else below, q, context, masks, layer.scale)
        state = layer.combine(attention, residual)  # [n,H] in the last layer, [m+M,H] below
    return module.head_input(state)[upload(torch.argsort(order), device)]  # [n,H]


def parallel_drafts(module: PEagleModule, view: BatchView, steps: int) -> tuple[Predictions, Tensor]:
    """Predictions and states of every draft of ``steps`` tokens within the answers, for the acceptance walk."""
    predictions = counted_predictions(view, steps, "served")
    return predictions, parallel_states(module, view, predictions)
