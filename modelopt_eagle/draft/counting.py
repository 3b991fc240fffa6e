"""Which positions count where every anchor drafts: depth k of anchor i has its teacher at token ``i+1+k``."""

from __future__ import annotations

import torch
from torch import Tensor

from modelopt_eagle.draft.conventions import convention_named
from modelopt_eagle.draft.documents import Documents
from modelopt_eagle.draft.predictions import BatchView, Predictions


def counted_anchors(documents: Documents, supervised: Tensor, step: int, convention: str, rows: Tensor) -> Tensor:
    """``[n]`` bool: which anchors count at a depth, by the convention's mask.

    Args:
        supervised: ``[N]`` bool, the tokens to be learned.
        rows: ``[n]`` flat anchors.
    """
    shift = step + convention_named(convention).counted_token
    masked = supervised[(rows + shift).clamp(max=len(supervised) - 1)]
    return documents.exists(rows, step + 1) & documents.exists(rows, shift) & masked


def counted_predictions(view: BatchView, depths: int, convention: str) -> Predictions:
    """All that the convention counts in a batch, by depth and then by anchor; found on the CPU, moved to the view's."""
    host = view.on_host()
    everyone = torch.arange(len(host.input_ids))  # [N]
    masks = [counted_anchors(host.documents, host.supervised, step, convention, everyone) for step in range(depths)]
    depth, anchor = torch.stack(masks).nonzero(as_tuple=True)  # [n] each
    return Predictions(anchor, depth, anchor + 1 + depth, depths).to(view.input_ids.device)
