"""One round of a P-EAGLE head: a single pass takes over what was accepted and drafts all tokens.

Rows of a pass: each newly accepted position with its true features and the token after it, then K-1 mask rows at the
positions behind. The output at the last accepted position is draft 1, those of the mask rows are drafts 2 to K. Plain
causal attention; rows of masks are overwritten in the next round, so no key of theirs stays.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from modelopt_eagle.draft.cache import DraftCache
from modelopt_eagle.draft.peagle.module import PEagleModule
from modelopt_eagle.draft.plan import DraftPlan
from modelopt_eagle.draft.trees import RoundTree, build_round_tree, history_of_marginals
from modelopt_eagle.errors import DecodingError


class ParallelDrafter:
    """Gives a new loop, with its own cache, for each call of the generator.

    Args:
        module: the head, in evaluation mode.
        embedding: the target's embedding (unused by a head with its own).
        plan: chain or tree.
    """

    def __init__(self, module: PEagleModule, embedding: nn.Module, plan: DraftPlan):
        self.module, self.embedding, self.plan = module, embedding, plan

    def loop(self, batch: int, capacity: int) -> ParallelLoop:
        """A loop for ``batch`` rows of at most ``capacity`` committed positions."""
        return ParallelLoop(self.module, self.embedding, self.plan, batch, capacity)


class ParallelLoop:
    """Drafts for a batch of rows; arguments as for :class:`ParallelDrafter`.

    Args:
        batch: rows.
        capacity: positions a row can have.
    """

    def __init__(self, module: PEagleModule, embedding: nn.Module, plan: DraftPlan, batch: int, capacity: int):
        self.module, self.embedding, self.plan = module, embedding, plan
        self.room = capacity + plan.depth - 1
        self.cache = DraftCache.allocate(module, batch, self.room)
        self.states: Tensor | None = None  # [B,K,H] after the final norm

    def keep(self, rows: Tensor) -> None:
        """Keep the rows ``[b]`` int64."""
        self.cache.keep(rows)

    def commit(self, tokens: Tensor, aux_hidden: Tensor, starts: list[int], counts: list[int]) -> None:
        """The pass of a round; arguments as for :class:`~modelopt_eagle.draft.algorithm.DraftLoop`."""
        module, device = self.module, tokens.device
        batch, most = tokens.shape
        masks = self.plan.depth - 1
        start, count = (torch.tensor(numbers, device=device)[:, None] for numbers in (starts, counts))  # [B,1]
        real, behind = torch.arange(most, device=device), torch.arange(masks, device=device)
        # slot = rotary position; the padding of short rows is kept inside the tables and never written
        positions = torch.cat(((start + real).clamp(max=self.room - 1), start + count + behind), 1)  # [B,m+K-1]
        embedding, state = self._inputs(tokens, aux_hidden, masks)  # [B*(m+K-1),H] each
        cos, sin = module.rotary(positions.flatten(), self.room)
        width = most + masks
        asked = torch.cat((count - 1, (most + behind).expand(batch, -1)), 1)  # [B,K] rows whose outputs are drafts
        asked_rows = (asked + torch.arange(batch, device=device)[:, None] * width).flatten()  # [B*K]
        seen = int((start + count).max()) + masks
        slots = torch.arange(seen, device=device)  # [W]
        for index, layer in enumerate(module.layers):
            last = index == len(module.layers) - 1
            q, k, v, residual = layer.project(
                embedding if index == 0 else None, state, cos, sin, query_rows=asked_rows if last else None
            )
            self._write(index, k.unflatten(0, (batch, width)), v.unflatten(0, (batch, width)), starts, counts, most)
            queries = q.unflatten(0, (batch, -1))  # [B,n,h,d]
            at = positions.gather(1, asked) if last else positions  # [B,n]
            visible = slots <= at[..., None]  # [B,n,W]
            if module.config.sliding_window is not None:
                visible &= slots > at[..., None] - module.config.sliding_window
            attention = self.cache.attend(index, queries, visible, seen, layer.scale)  # [B,n,h*dv]
            state = layer.combine(attention.flatten(0, 1), residual)  # [B*n,H]
        self.states = module.head_input(state).unflatten(0, (batch, -1))  # [B,K,H]

    def _inputs(self, tokens: Tensor, aux_hidden: Tensor, masks: int) -> tuple[Tensor, Tensor]:
        """Embeddings and states of all rows of the pass, ``[B*(m+K-1), H]`` each."""
        module, batch, dtype = self.module, len(tokens), self.module.dtype
        mask_embedding, mask_state = module.mask_row(lambda ids: module.embed(ids, self.embedding))  # [1,H] each
        embedding = module.embed(tokens, self.embedding)  # [B,m,H]
        embedding = torch.cat((embedding, mask_embedding.expand(batch, masks, -1)), 1).to(dtype)
        state = torch.cat((module.fuse(aux_hidden.to(dtype)), mask_state.expand(batch, masks, -1)), 1)
        return embedding.flatten(0, 1), state.flatten(0, 1)

    def _write(self, layer: int, k: Tensor, v: Tensor, starts: list[int], counts: list[int], most: int) -> None:
        """Write each row's accepted positions and, behind them, its masks; padding never reaches the buffer."""
        if len(set(starts)) == 1 and set(counts) == {most}:
            self.cache.write(layer, k, v, starts[0])
            return
        for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
            for buffer, new in ((self.cache.keys[layer], k), (self.cache.values[layer], v)):
                written = torch.cat((new[row, :count], new[row, most:])).transpose(0, 1)  # [kv_heads,count+K-1,d]
                buffer[row, :, start : start + written.shape[1]] = written

    def draft(self, lengths: list[int], roots: Tensor) -> Tensor | RoundTree:
        """The tokens of the last :meth:`commit`: a chain ``[B, K]``, or the tree of the K distributions.

        Raises:
            DecodingError: nothing was committed.
        """
        if self.states is None:
            raise DecodingError("nothing was committed yet: a round begins with commit(...)")
        logits = self.module.lm_head(self.states)  # [B,K,Vd]
        if not self.plan.is_tree:
            return self.module.target_ids[logits.argmax(-1)]
        return build_round_tree(history_of_marginals(logits, self.module.target_ids, self.plan), self.plan, roots)
