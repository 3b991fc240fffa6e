"""A round of Medusa heads: the final state of the last accepted token is all that they read, and nothing is kept."""

from __future__ import annotations

import torch
from torch import Tensor

from modelopt_eagle.draft.medusa.module import MedusaModule
from modelopt_eagle.draft.plan import DraftPlan
from modelopt_eagle.draft.trees import RoundTree, build_round_tree, history_of_marginals
from modelopt_eagle.errors import DecodingError


class MedusaLoop:
    """Chains of the likeliest tokens, and trees of the K distributions; it serves any number of rows and calls.

    Args:
        module: the heads, in evaluation mode.
        plan: chain or tree, no deeper than there are heads.
    """

    def __init__(self, module: MedusaModule, plan: DraftPlan):
        self.module, self.plan = module, plan
        self.states: Tensor | None = None  # [B,H]

    def loop(self, batch: int, capacity: int) -> MedusaLoop:
        """A loop for a batch."""
        return MedusaLoop(self.module, self.plan)

    def commit(self, tokens: Tensor, final_hidden: Tensor, starts: list[int], counts: list[int]) -> None:
        """Take the final state of each row's last accepted token.

        Args:
            tokens: not read: no drafted or accepted token is.
            final_hidden: ``[B, m, Ht]`` post norm.
            starts, counts: as for :class:`~modelopt_eagle.draft.algorithm.DraftLoop`.
        """
        last = torch.tensor(counts, device=final_hidden.device) - 1  # [B]
        rows = torch.arange(len(last), device=last.device)
        self.states = final_hidden[rows, last].to(self.module.dtype)  # [B,H]

    def keep(self, rows: Tensor) -> None:
        """Nothing is kept: the next round commits anew."""

    def draft(self, lengths: list[int], roots: Tensor) -> Tensor | RoundTree:
        """The tokens of the last :meth:`commit`.

        Raises:
            DecodingError: nothing was committed.
        """
        if self.states is None:
            raise DecodingError("nothing was committed yet: a round begins with commit(...)")
        logits = self.module.logits(self.states, self.plan.depth)  # [B,K,Vd]
        if not self.plan.is_tree:
            return self.module.target_ids[logits.argmax(-1)]
        return build_round_tree(history_of_marginals(logits, self.module.target_ids, self.plan), self.plan, roots)
