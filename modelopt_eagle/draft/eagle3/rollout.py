"""The K-step rollout (training-time test), indexed by anchor and never rolled.

At anchor ``i``, step ``k``: embedding of ``x_{i+1+k}``, state ``fuse(a_i)`` at step 0 and the layer output of
``(i, k-1)`` afterwards, rotary position ``i + k``; seen are the step-0 rows ``j <= i`` of the document and the own
column. The teacher of ``(i, k)`` is the target's distribution after reading ``x_{i+1+k}``. See ``docs/design.md``.

Tokens are flattened to one axis of N = B·S; only the anchors that some step counts are computed beyond step 0's keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modelopt_eagle.draft.attention import column_attention, plan_queries
from modelopt_eagle.draft.counting import counted_anchors, counted_predictions
from modelopt_eagle.draft.documents import Documents, WholeAxis, upload
from modelopt_eagle.draft.module import EagleModule
from modelopt_eagle.draft.predictions import BatchView, Predictions, TokenAxis


@dataclass
class RolloutOutput:
    """What a rollout computed, kept for the anchors that were asked for.

    Attributes:
        states: K tensors ``[n, H]``, after the final norm.
        rows: ``[n]`` int64 flat anchors ``b·S + i``, ascending.
        documents: layout of the flat token axis.
        batch, length: B and S.
    """

    module: EagleModule
    states: list[Tensor]
    rows: Tensor
    documents: Documents
    batch: int
    length: int

    @property
    def steps(self) -> int:
        """K."""
        return len(self.states)

    @property
    def hidden(self) -> Tensor:
        """``[K, B, S, H]`` after the final norm; row ``i`` of step ``k`` is anchor ``i``; zero where no row exists."""
        dense = self.states[0].new_zeros(self.steps, self.batch * self.length, self.states[0].shape[-1])
        for step, state in enumerate(self.states):
            exists = self.documents.exists(self.rows, step + 1)  # [n]
            dense = dense.index_put(
                (torch.full_like(self.rows[exists], step), self.rows[exists]), state[exists].to(dense.dtype)
            )
        return dense.unflatten(1, (self.batch, self.length))

    def logits(self, step: int) -> Tensor:
        """``[B, S, Vd]`` draft logits of a step, for inspection: the loss never builds them. Zero without a row."""
        exists = self.documents.exists(self.rows, step + 1)
        logits = self.module.lm_head(self.states[step][exists])  # [m,Vd]
        dense = logits.new_zeros(self.batch * self.length, logits.shape[-1])
        return dense.index_put((self.rows[exists],), logits).unflatten(0, (self.batch, self.length))


def rollout(
    module: EagleModule,
    token_embeddings: Tensor,
    aux_hidden: Tensor,
    steps: int = 3,
    document_ids: Tensor | None = None,
    *,
    supervised: Tensor | None = None,
    convention: str = "served",
    mix_hidden_states: float = 0.0,
    generator: torch.Generator | None = None,
) -> RolloutOutput:
    """Run the head K steps from every anchor.

    Args:
        module: the head.
        token_embeddings: ``[B, S, H]`` embeddings of ``x_0 .. x_{S-1}``.
        aux_hidden: ``[B, S, A·Ht]`` concatenated layer outputs in ascending layer order.
        steps: K.
        document_ids: ``[B, S]`` ids of packed documents, negative for padding; ``None``: one document a row.
        supervised: ``[B, S]`` bool; with it only the anchors that some step counts are computed.
        convention: whose counting mask ``supervised`` is read by.
        mix_hidden_states: share of anchors that take the fused true feature of position ``i + k`` instead of the
            head's own state at steps k >= 1.
        generator: source of that choice.

    Returns:
        :class:`RolloutOutput`, row ``i`` of step ``k`` being anchor ``i``.

    Raises:
        ValueError: shapes that do not belong together, or fewer than one step.
    """
    batch, length = _check_shapes(module, token_embeddings, aux_hidden, steps, document_ids, supervised)
    embeddings = token_embeddings.flatten(0, 1)  # [N,H]
    documents = Documents.make(batch, length, document_ids, embeddings.device)
    rows = active_anchors(documents, supervised, steps, convention)  # [n]
    states = run_steps(
        module, embeddings.__getitem__, aux_hidden.flatten(0, 1), documents.to("cpu"), rows.cpu(), steps, length,
        mix_hidden_states=mix_hidden_states, generator=generator,
    )  # fmt: skip
    return RolloutOutput(module, states, rows, documents, batch, length)


def run_steps(
    module: EagleModule,
    embed: Callable[[Tensor], Tensor],
    aux_hidden: Tensor,
    documents: Documents,
    rows: Tensor,
    steps: int,
    length: int,
    axis: TokenAxis | None = None,
    *,
    mix_hidden_states: float = 0.0,
    generator: torch.Generator | None = None,
) -> list[Tensor]:
    """K tensors ``[n, H]``, after the final norm: the steps from the given anchors.

    Args:
        embed: flat token indices ``[n]`` to embeddings ``[n, H]``.
        aux_hidden: ``[m, A·Ht]`` of the tokens of ``axis``.
        documents: on the CPU, where the steps are planned.
        rows: ``[n]`` flat anchors on the CPU, ascending, among the tokens of ``axis``.
        length: longest position that can occur, for the rotary tables.
        axis: which tokens' step-0 rows are computed here; default all.
    """
    window = module.config.sliding_window
    if window is not None and steps > window:
        raise ValueError(f"{steps} steps do not fit into the head's window of {window} positions")
    device, on_host = aux_hidden.device, rows
    plan = plan_queries(on_host, documents, window).to(device)
    rows, positions = plan.rows, upload(documents.positions, device)  # [n], [N]
    last = len(positions) - 1
    axis = WholeAxis(len(positions), device) if axis is None else axis

    fused = module.fuse(aux_hidden)  # [m,H]
    output, keys, values = _first_step(
        module, embed((axis.tokens + 1).clamp(max=last)), fused, module.rotary(positions[axis.tokens], length),
        documents, plan, axis,
    )  # fmt: skip
    if mix_hidden_states > 0:
        fused = axis.gather(fused)  # [N,H]
    states = [module.head_input(output)]
    columns: list[tuple[Tensor, Tensor]] = [
        (k.new_empty(len(rows), 0, *k.shape[1:]), v.new_empty(len(rows), 0, *v.shape[1:]))
        for k, v in zip(keys, values, strict=True)
    ]
    for step in range(1, steps):
        state = module.next_state(output)  # [n,H]
        if mix_hidden_states > 0:
            chosen = torch.rand(len(rows), generator=generator, device=state.device) < mix_hidden_states  # [n]
            state = torch.where(chosen[:, None], fused[(rows + step).clamp(max=last)], state)
        embedding = embed((rows + 1 + step).clamp(max=last))  # [n,H]
        cos, sin = module.rotary(positions[rows] + step, length + steps)
        if window is not None:
            plan = plan_queries(on_host, documents, window, step).to(device)
        for index, layer in enumerate(module.layers):
            q, k, v, residual = layer.project(embedding if index == 0 else None, state, cos, sin)
            own_k, own_v = columns[index]
            columns[index] = own_k, own_v = torch.cat((own_k, k[:, None]), 1), torch.cat((own_v, v[:, None]), 1)
            attention = column_attention(q, keys[index], values[index], own_k, own_v, plan, layer.scale)
            state = layer.combine(attention.flatten(-2), residual)  # [n,H]
        output = state
        states.append(module.head_input(output))
    return states


def _first_step(module, embeddings, state, tables, documents, plan, axis):
    """Step 0: keys and values of every token, outputs of the anchors.

    Below the last layer every token needs its output, since the next layer's keys are made of it.
    """
    several = len(module.layers) > 1
    everywhere = None
    if several:
        everywhere = plan_queries(axis.host_tokens, documents, module.config.sliding_window).to(state.device)
    queries = axis.local(plan.rows)  # [n]
    keys, values = [], []
    for index, layer in enumerate(module.layers):
        final = index == len(module.layers) - 1
        embedding = embeddings if index == 0 else None
        q, k, v, residual = layer.project(embedding, state, *tables, query_rows=queries if final else None)
        k, v = axis.gather(k), axis.gather(v)  # [N,hkv,d]
        keys.append(k)
        values.append(v)
        own = k.new_empty(len(q), 0, *k.shape[1:]), v.new_empty(len(q), 0, *v.shape[1:])
        attention = column_attention(q, k, v, *own, plan if final else everywhere, layer.scale)  # [n,h,dv]
        state = layer.combine(attention.flatten(-2), residual)  # [n,H]
    return state, keys, values


def active_anchors(documents: Documents, supervised: Tensor | None, steps: int, convention: str) -> Tensor:
    """``[n]`` flat anchors: those that some step counts, or every anchor whose next token exists."""
    everyone = torch.arange(len(documents.starts), device=documents.starts.device)  # [N]
    if supervised is None:
        return everyone[documents.exists(everyone, 1)]
    flat = supervised.reshape(-1).bool().to(everyone.device)
    active = torch.zeros_like(flat)
    for step in range(steps):
        active |= counted_anchors(documents, flat, step, convention, everyone)
    return everyone[active]


def plan_rollout(view: BatchView, eagle: Any, generator: torch.Generator | None = None) -> Predictions:
    """The predictions of a batch that the convention counts, by step and then by anchor.

    Args:
        view: of the batch.
        eagle: with ``ttt_steps`` (K) and ``convention``.
        generator: not used: nothing is drawn.
    """
    return counted_predictions(view, eagle.ttt_steps, eagle.convention)


def rollout_states(
    module: EagleModule,
    view: BatchView,
    predictions: Predictions,
    eagle: Any = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """``[n, H]`` after the final norm: the steps from the anchors of the predictions.

    Args:
        eagle: with ``mix_hidden_states``; ``None``: nothing is mixed.
        generator: source of the mixed hidden states.
    """
    host = predictions.on_host()
    rows, place = host.anchor.unique(return_inverse=True)  # [r] ascending, [n], on the CPU
    states = run_steps(
        module, view.embed, view.aux_hidden, view.on_host().documents, rows, predictions.depths, view.length, view.axis,
        mix_hidden_states=0.0 if eagle is None else eagle.mix_hidden_states, generator=generator,
    )  # fmt: skip
    taken = upload(host.depth * len(rows) + place, view.aux_hidden.device)  # [n]
    return torch.cat(states).index_select(0, taken)  # [n,H]


def rollout_drafts(module: EagleModule, view: BatchView, steps: int) -> tuple[Predictions, Tensor]:
    """Predictions and states of every draft of ``steps`` tokens within the answers, for the acceptance walk."""
    predictions = counted_predictions(view, steps, "served")
    return predictions, rollout_states(module, view, predictions)


def _check_shapes(module, token_embeddings, aux_hidden, steps, document_ids, supervised) -> tuple[int, int]:
    """B and S, or an error that says which shape is off."""
    if steps < 1:
        raise ValueError(f"a rollout has at least one step, found steps={steps}")
    if token_embeddings.dim() != 3 or token_embeddings.shape[-1] != module.config.hidden_size:
        raise ValueError(
            f"token_embeddings must be [B, S, {module.config.hidden_size}], found {list(token_embeddings.shape)}"
        )
    batch, length = token_embeddings.shape[:2]
    wanted = (batch, length, module.config.fc_input_size)
    if tuple(aux_hidden.shape) != wanted:
        raise ValueError(
            f"aux_hidden must be {list(wanted)} ({module.config.num_aux} layers of "
            f"{module.config.target_hidden_size}), found {list(aux_hidden.shape)}"
        )
    for name, tensor in (("document_ids", document_ids), ("supervised", supervised)):
        if tensor is not None and tuple(tensor.shape) != (batch, length):
            raise ValueError(f"{name} must be {[batch, length]}, found {list(tensor.shape)}")
    return batch, length
