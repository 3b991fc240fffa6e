"""``DFlashModule``: the draft head. It knows nothing of training, files or servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor, nn

from modelopt_eagle.draft.base import DraftModule
from modelopt_eagle.draft.dflash.config import DFlashConfig
from modelopt_eagle.draft.layers import GatedMLP
from modelopt_eagle.draft.projections import GroupedAttention
from modelopt_eagle.draft.rotary import Rotary
from modelopt_eagle.draft.vocab import DraftVocab
from modelopt_eagle.errors import CheckpointError


class DFlashLayer(nn.Module):
    """A pre-norm decoder layer whose keys and values of the context come from the target's features."""

    def __init__(self, config: DFlashConfig):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = GroupedAttention(config, width)
        self.mlp = GatedMLP(config)
        self.input_layernorm = nn.RMSNorm(width, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=eps)

    @property
    def scale(self) -> float:
        """Factor on ``q·k``."""
        return self.self_attn.scale

    def context(self, fused: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[..., kv_heads, d]`` of the context from ``fused [..., H]``, which has no norm before."""
        return self.self_attn.keys_values(fused, cos, sin)

    def project(self, state: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``q [..., heads, d], k [..., kv_heads, d], v`` of the block's own rows ``[..., H]``."""
        x = self.input_layernorm(state)
        return self.self_attn.queries(x, cos, sin), *self.self_attn.keys_values(x, cos, sin)

    def combine(self, attention: Tensor, residual: Tensor) -> Tensor:
        """``[..., heads·d], [..., H] -> [..., H]``: output projection, residual, feed-forward, residual."""
        state = residual + self.self_attn.o_proj(attention)  # [...,H]
        return state + self.mlp(self.post_attention_layernorm(state))


class DFlashLayers(nn.ModuleList):
    """The layers of a head, in order."""

    def __init__(self, config: DFlashConfig):
        super().__init__(DFlashLayer(config) for _ in range(config.num_hidden_layers))

    def __iter__(self) -> Iterator[DFlashLayer]:
        return cast(Iterator[DFlashLayer], super().__iter__())


class DFlashModule(DraftModule):
    """DFlash draft head.

    ``context`` turns captured features into what every layer makes its context keys and values of; a block of rows (the
    last known token, then masks) runs through the layers once, and ``lm_head(norm(row))`` gives the distribution of the
    token **at** a mask's position.

    Args:
        config: sizes and flags.
        vocab: the draft vocabulary, see :class:`~modelopt_eagle.draft.base.DraftModule`.

    Source: DFlash (arXiv 2602.06036); placement of norms as in vLLM's ``qwen3_dflash.py``.
    """

    def __init__(self, config: DFlashConfig, vocab: DraftVocab | None = None):
        super().__init__(config, vocab)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(config.fc_input_size, width, bias=False)
        self.hidden_norm = nn.RMSNorm(width, eps=eps)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.layers = DFlashLayers(config)
        self.norm = nn.RMSNorm(width, eps=eps)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        if config.shares_head:
            nn.init.zeros_(self.lm_head.weight).requires_grad_(False)  # filled when head and target meet
        self.rotary = Rotary(config)

    def meet_target(self, rows: Callable[[Tensor], Tensor]) -> None:
        """Take the target's output rows for the draft vocabulary, if the head shares them.

        Args:
            rows: target ids ``[n]`` to the target's output rows ``[n, Ht]``.

        Raises:
            CheckpointError: rows of another shape.
        """
        if not self.config.shares_head:
            return
        own = rows(self.target_ids)  # [Vd,Ht]
        if own.shape != self.lm_head.weight.shape:
            raise CheckpointError(
                f"the head shares the target's output layer as {list(self.lm_head.weight.shape)}, the target's is "
                f"{list(own.shape)}: it is a head for another target"
            )
        with torch.no_grad():
            self.lm_head.weight.copy_(own)

    def context(self, aux_hidden: Tensor) -> Tensor:
        """``[..., A·Ht] -> [..., H]``: the captured features, fused and normed."""
        return self.hidden_norm(self.fc(aux_hidden))
