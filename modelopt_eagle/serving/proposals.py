"""The tokens that an engine drafted, one by one, held against what the head drafts here from the same text.

Acceptance alone would not show a head that is computed wrongly where the target refuses the draft anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from modelopt_eagle.common.modes import evaluating
from modelopt_eagle.draft.algorithm import algorithm_of
from modelopt_eagle.draft.base import DraftModule
from modelopt_eagle.draft.plan import DraftPlan


@dataclass(frozen=True)
class ProposalCount:
    """Drafted tokens that were compared, and those that are equal."""

    compared: int
    equal: int

    @property
    def share(self) -> float:
        """Equal ones; 1 when nothing was compared."""
        return self.equal / self.compared if self.compared else 1.0


@torch.inference_mode()
def compare_proposals(
    target: Any, head: DraftModule, texts: list[list[int]], proposals: list[list[Any]], steps: int
) -> ProposalCount:
    """Draft anew at each place where the engine drafted: everything before it in one pass, nothing kept from before.

    Args:
        target: whose features the head reads.
        head: in any mode.
        texts: token ids of each prompt and its answer.
        proposals: ``(text, tokens known, drafted tokens)`` of each draft of the engine.
        steps: K.
    """
    algorithm = algorithm_of(head.config)
    drafter = algorithm.drafter(head, target.embedding, DraftPlan.chain(steps), None)
    compared = equal = 0
    with evaluating(head):
        for number, text in enumerate(texts):
            own = [(known, drafted) for place, known, drafted in proposals if place == number]
            if not own:
                continue
            ids = torch.tensor([text], device=target.device)  # [1,S]
            aux = target.features(ids, None, head.config.aux_layer_ids).aux_hidden  # [1,S,A·Ht]
            if algorithm.final_state:
                aux = target.final_norm(aux)  # [1,S,Ht]
            for known, drafted in own:
                read = known - 1  # the newest token has not been read by the target yet
                loop = drafter.loop(1, read)
                loop.commit(ids[:, 1:known], aux[:, :read], [0], [read])
                ours = loop.draft([read], ids[:, read])[0].tolist()
                compared += len(drafted)
                equal += sum(a == b for a, b in zip(ours, drafted, strict=False))
    return ProposalCount(compared, equal)
