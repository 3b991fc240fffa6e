"""Rounds of a DFlash head: context keys of what was accepted are kept, the block is run and forgotten."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from modelopt_eagle.draft.cache import DraftCache
from modelopt_eagle.draft.dflash.block import mask_rows
from modelopt_eagle.draft.dflash.module import DFlashModule
from modelopt_eagle.draft.plan import DraftPlan
from modelopt_eagle.draft.trees import RoundTree, build_round_tree, history_of_marginals


class BlockDrafter:
    """Gives a new loop, with its own cache, for each call of the generator.

    Args:
        module: the head, in evaluation mode.
        embedding: the target's embedding (unused by a head with its own).
        plan: chain or tree.
    """

    def __init__(self, module: DFlashModule, embedding: nn.Module, plan: DraftPlan):
        self.module, self.embedding, self.plan = module, embedding, plan

    def loop(self, batch: int, capacity: int) -> BlockLoop:
        """A loop for ``batch`` rows of at most ``capacity`` committed positions."""
        return BlockLoop(self.module, self.embedding, self.plan, batch, capacity)


class BlockLoop:
    """Drafts for a batch of rows; arguments as for :class:`BlockDrafter`.

    Slot j of the cache holds the context key of position j; the slots behind hold this round's block and are
    overwritten in the next, so that rolling back costs nothing.

    Args:
        batch: rows.
        capacity: positions a row can have.
    """

    def __init__(self, module: DFlashModule, embedding: nn.Module, plan: DraftPlan, batch: int, capacity: int):
        self.module, self.embedding, self.plan = module, embedding, plan
        self.size = plan.depth + 1  # the last known token and the masks
        self.room = capacity + self.size
        self.cache = DraftCache.allocate(module, batch, self.room)

    def keep(self, rows: Tensor) -> None:
        """Keep the rows ``[b]`` int64."""
        self.cache.keep(rows)

    def commit(self, tokens: Tensor, aux_hidden: Tensor, starts: list[int], counts: list[int]) -> None:
        """Context keys of what was accepted; arguments as for :class:`~modelopt_eagle.draft.algorithm.DraftLoop`."""
        most = tokens.shape[1]
        start = torch.tensor(starts, device=tokens.device)[:, None]  # [B,1]
        positions = (start + torch.arange(most, device=tokens.device)).clamp(max=self.room - 1)  # [B,m]
        cos, sin = self.module.rotary(positions, self.room)  # [B,m,d/2]
        context = self.module.context(aux_hidden.to(self.module.dtype))  # [B,m,H]
        for index, layer in enumerate(self.module.layers):
            k, v = layer.context(context, cos, sin)  # [B,m,hkv,d]
            for row, (first, count) in enumerate(zip(starts, counts, strict=True)):
                self.cache.keys[index][row, :, first : first + count] = k[row, :count].transpose(0, 1)
                self.cache.values[index][row, :, first : first + count] = v[row, :count].transpose(0, 1)

    def draft(self, lengths: list[int], roots: Tensor) -> Tensor | RoundTree:
        """One pass over the block behind ``lengths``: a chain ``[B, K]``, or the tree of the K distributions."""
        module, device = self.module, roots.device
        length = torch.tensor(lengths, device=device)[:, None]  # [B,1]
        slots = length + torch.arange(self.size, device=device)  # [B,K+1] = rotary positions
        cos, sin = module.rotary(slots, self.room + 1)  # [B,K+1,d/2]

        def embed(ids: Tensor) -> Tensor:
            return module.embed(ids, self.embedding).to(module.dtype)

        state = torch.cat((embed(roots)[:, None], mask_rows(module, embed, len(roots), self.size - 1)), 1)  # [B,K+1,H]
        width = max(lengths) + self.size
        column = torch.arange(width, device=device)  # [W]
        last = slots if module.config.causal else slots[:, -1:].expand(-1, self.size)  # [B,K+1] last slot that is seen
        visible = column <= last[..., None]  # [B,K+1,W]
        for index, layer in enumerate(module.layers):
            q, k, v = layer.project(state, cos, sin)
            self.cache.write(index, k, v, slots)
            state = layer.combine(self.cache.attend(index, q, visible, width, layer.scale), state)
        logits = module.lm_head(module.norm(state[:, 1:]))  # [B,K,Vd]
        if not self.plan.is_tree:
            return module.target_ids[logits.argmax(-1)]
        return build_round_tree(history_of_marginals(logits, module.target_ids, self.plan), self.plan, roots)
