"""``MedusaModule``: residual blocks over one state, and their output layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from modelopt_eagle.draft.base import DraftModule
from modelopt_eagle.draft.medusa.config import MedusaConfig
from modelopt_eagle.draft.vocab import DraftVocab


class ResidualBlocks(nn.Module):
    """``x + silu(W x)``, as often as there are blocks."""

    def __init__(self, width: int, blocks: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        """``[..., H] -> [..., H]``."""
        for layer in self.layers:
            x = x + nn.functional.silu(layer(x))
        return x


class MedusaModule(DraftModule):
    """Medusa heads.

    Head k reads the target's final state after a token, post norm, and gives logits of the token k + 2 places on: the
    next one is the target's own.

    Args:
        config: sizes.
        vocab: the draft vocabulary.

    Source: Medusa (arXiv 2401.10774), section 2.1; names as in vLLM's ``medusa.py``.
    """

    def __init__(self, config: MedusaConfig, vocab: DraftVocab | None = None):
        super().__init__(config, vocab)
        width, size = config.hidden_size, config.draft_vocab_size
        self.blocks = nn.ModuleList(ResidualBlocks(width, config.blocks) for _ in range(config.heads))
        if config.shared_output:
            self.lm_head = nn.Linear(width, size, bias=False)
        else:
            self.lm_heads = nn.ModuleList(nn.Linear(width, size, bias=False) for _ in range(config.heads))

    def output_weights(self, depths: int) -> Sequence[Tensor]:
        """Of each depth the matrix ``[Vd, H]`` that makes logits of a state; fewer than asked where heads end."""
        if self.config.shared_output:
            return super().output_weights(depths)
        return [self.get_parameter(f"lm_heads.{head}.weight") for head in range(min(depths, self.config.heads))]

    def logits(self, states: Tensor, depths: int) -> Tensor:
        """``[..., H]`` final states of the target to ``[..., K, Vd]`` logits of the first ``depths`` heads."""
        pairs = zip(self.blocks[:depths], self.output_weights(depths), strict=True)
        return torch.stack([block(states) @ weight.T for block, weight in pairs], -2)
