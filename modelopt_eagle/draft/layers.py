"""Decoder layers of a draft head, cut at the attention: training, chain and tree drafting share every other line.

A layer is two halves::

    q, k, v, residual = layer.project(embedding, state, cos, sin)      # norms, projections, rotary
    state = layer.combine(attention(q, k, v), residual)                # output projection, residual, feed-forward

What lies between (which rows see which keys) belongs to the caller.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from modelopt_eagle.draft.config import DraftConfig
from modelopt_eagle.draft.decoders import DECODERS
from modelopt_eagle.draft.fused import product_dtype, trains_by_kernel
from modelopt_eagle.draft.projections import Projections
from modelopt_eagle.kernels.norm_concat import norm_concat, supported


class GatedMLP(nn.Module):
    """``down(act(gate(x)) * up(x))``."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        """``[..., H] -> [..., H]``."""
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """One layer of the head; layer 0 also reads the token embedding, so its projections are 2H wide."""

    def __init__(self, config: DraftConfig, index: int):
        super().__init__()
        self.index = index
        self.norm_before_residual = config.norm_before_residual
        width, eps = config.hidden_size, config.rms_norm_eps
        self.eps = eps
        attention = DECODERS[config.decoder_type].attention
        self.self_attn: Projections = attention(config, 2 * width if index == 0 else width)
        self.mlp = GatedMLP(config)
        normed = index > 0 or config.embedding_norm
        self.input_layernorm = nn.RMSNorm(width, eps=eps) if normed else nn.Identity()
        if index == 0:
            self.hidden_norm = nn.RMSNorm(width, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=eps)

    @property
    def scale(self) -> float:
        """Factor on ``q·k``."""
        return self.self_attn.scale

    def attention_input(self, embedding: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
        """``(input [..., 2H or H], residual [..., H])``. Each norm is applied once, as serving engines do.

        On a GPU one kernel makes the wide input of layer 0 in training, see :mod:`modelopt_eagle.kernels.norm_concat`.
        """
        if self.index > 0:
            return self.input_layernorm(state), state
        if embedding is not None and trains_by_kernel(state):
            weights = getattr(self.input_layernorm, "weight", None), self.hidden_norm.weight  # [H] each
            dtype = product_dtype(embedding, state)
            if supported(dtype, embedding, state, *(weight for weight in weights if weight is not None)):
                wide = norm_concat(embedding, state, *weights, self.eps, dtype)  # [...,2H]
                return wide, wide[..., state.shape[-1] :] if self.norm_before_residual else state
        normed = self.hidden_norm(state)  # [...,H]
        wide = torch.cat((self.input_layernorm(embedding), normed), dim=-1)  # [...,2H]
        return wide, normed if self.norm_before_residual else state

    def project(
        self, embedding: Tensor | None, state: Tensor, cos: Tensor, sin: Tensor, query_rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Norms, projections and rotary embedding.

        Args:
            embedding: ``[..., H]`` of the token read in this step; ``None`` above layer 0.
            state: ``[..., H]`` fused features, or the output of the step or layer before.
            cos, sin: ``[..., d/2]`` from :class:`~modelopt_eagle.draft.rotary.Rotary`.
            query_rows: ``[n]`` int64, for inputs ``[N, H]``: the rows that ask. Keys and values are made for all.

        Returns:
            ``q [..., heads, dk], k [..., kv_heads, dk], v [..., kv_heads, dv], residual [..., H]``; with
            ``query_rows``, ``q`` and ``residual`` have ``n`` rows.
        """
        x, residual = self.attention_input(embedding, state)
        k, v = self.self_attn.keys_values(x, cos, sin)
        if query_rows is not None:
            x, residual, cos, sin = x[query_rows], residual[query_rows], cos[query_rows], sin[query_rows]
        return self.self_attn.queries(x, cos, sin), k, v, residual

    def combine(self, attention: Tensor, residual: Tensor) -> Tensor:
        """``[..., heads·dv], [..., H] -> [..., H]``: output projection, residual, feed-forward, residual."""
        state = residual + self.self_attn.o_proj(attention)  # [...,H]
        return state + self.mlp(self.post_attention_layernorm(state))


class DecoderLayers(nn.ModuleList):
    """The layers of a head, in order."""

    def __init__(self, config: DraftConfig):
        super().__init__(DecoderLayer(config, index) for index in range(config.num_hidden_layers))

    def __iter__(self) -> Iterator[DecoderLayer]:
        return cast(Iterator[DecoderLayer], super().__iter__())
