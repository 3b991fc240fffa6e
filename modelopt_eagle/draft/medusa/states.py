"""Training and walking: each counted prediction is one head over the final state of its anchor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modelopt_eagle.draft.counting import counted_predictions
from modelopt_eagle.draft.documents import upload
from modelopt_eagle.draft.medusa.module import MedusaModule
from modelopt_eagle.draft.predictions import BatchView, Predictions


@dataclass(frozen=True)
class MedusaSettings:
    """What training reads of a recipe: ``heads`` K, and the convention of what counts."""

    heads: int
    convention: str = "served"


def plan_heads(view: BatchView, settings: MedusaSettings, generator: torch.Generator | None = None) -> Predictions:
    """All that the convention counts from anchors a decoder could stand at; nothing is drawn."""
    return from_answers(view, counted_predictions(view, settings.heads, settings.convention))


def from_answers(view: BatchView, predictions: Predictions) -> Predictions:
    """Those whose anchor is followed by a token to be learned: only there do stores hold the final state.

    A decoder drafts from no other place, since the last token of a prompt is the first anchor.
    """
    host, anchor = view.on_host(), predictions.on_host().anchor
    following = (anchor + 1).clamp(max=len(host.supervised) - 1)
    return predictions.select(host.documents.exists(anchor, 1) & host.supervised[following])


def head_states(
    module: MedusaModule, view: BatchView, predictions: Predictions, settings: Any = None, generator: Any = None
) -> Tensor:
    """``[n, H]`` in the order of the predictions: depth k by head k, over the target's final state at the anchor.

    Raises:
        ValueError: a batch without the final states of its tokens.
    """
    if view.final_hidden is None:
        raise ValueError("Medusa reads the target's final states, and this batch does not hold them for its tokens")
    final = view.final_hidden.to(module.dtype)[predictions.anchor]  # [n,H]
    depths, parts, places = predictions.on_host().depth, [], []
    for depth in range(predictions.depths):
        own = (depths == depth).nonzero().squeeze(1)  # [m], on the CPU
        places.append(own)
        parts.append(module.blocks[depth](final[upload(own, final.device)]))  # [m,H]
    return torch.cat(parts)[upload(torch.cat(places).argsort(), final.device)]  # [n,H]


def head_drafts(module: MedusaModule, view: BatchView, steps: int) -> tuple[Predictions, Tensor]:
    """Predictions and states of every draft within the answers, as many tokens as there are heads at most."""
    predictions = from_answers(view, counted_predictions(view, min(steps, module.config.heads), "served"))
    return predictions, head_states(module, view, predictions)
