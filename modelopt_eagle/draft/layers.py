"""Decoder layers of a draft head, cut at the attention: training, chain and tree drafting share every other line.

A layer is two halves::

    q, k, v, residual = layer.project(embedding, state, cos, sin)      # norms, projections, rotary
    state = layer.combine(attention(q, k, v), residual)                # output projection, residual, feed-forward

What lies between (which rows see which keys) belongs to the caller.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from modelopt_eagle.draft.config import DraftConfig
from modelopt_eagle.draft.rotary import rotate


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


class GroupedAttention(nn.Module):
    """Projections of grouped-query attention (Llama)."""

    def __init__(self, config: DraftConfig, input_size: int):
        super().__init__()
        self.heads, self.kv_heads, self.dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.key_dim = self.value_dim = self.dim
        self.scale = self.dim**-0.5
        bias = config.attention_bias
        self.q_proj = nn.Linear(input_size, self.heads * self.dim, bias=bias)
        self.k_proj = nn.Linear(input_size, self.kv_heads * self.dim, bias=bias)
        self.v_proj = nn.Linear(input_size, self.kv_heads * self.dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.dim, config.hidden_size, bias=False)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``[..., input] -> [..., heads, d]``, rotated."""
        return rotate(self.q_proj(x).unflatten(-1, (self.heads, self.dim)), cos, sin)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """``[..., input] -> [..., kv_heads, d]`` twice, keys rotated."""
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, self.dim))
        return rotate(k, cos, sin), self.v_proj(x).unflatten(-1, (self.kv_heads, self.dim))


class LatentAttention(nn.Module):
    """Projections of multi-head latent attention (DeepSeek-V2/V3, Kimi-K2), keys and values expanded a head each.

    Source: DeepSeek-V2 report, section 2.1; names as in the DeepSeek-V3 checkpoints that engines load.
    """

    def __init__(self, config: DraftConfig, input_size: int):
        super().__init__()
        self.heads = self.kv_heads = config.num_attention_heads
        self.nope, self.rope = int(config.qk_nope_head_dim), int(config.qk_rope_head_dim)
        self.rank, self.value_dim = int(config.kv_lora_rank), int(config.v_head_dim)
        self.key_dim = self.nope + self.rope
        self.scale = self.key_dim**-0.5 * latent_scale(config.rope_scaling)
        if config.q_lora_rank:
            self.q_a_proj = nn.Linear(input_size, config.q_lora_rank, bias=False)
            self.q_a_layernorm = nn.RMSNorm(config.q_lora_rank, eps=config.rms_norm_eps)
            self.q_b_proj = nn.Linear(config.q_lora_rank, self.heads * self.key_dim, bias=False)
        else:
            self.q_proj = nn.Linear(input_size, self.heads * self.key_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(input_size, self.rank + self.rope, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(self.rank, eps=config.rms_norm_eps)
        self.kv_b_proj = nn.Linear(self.rank, self.heads * (self.nope + self.value_dim), bias=False)
        self.o_proj = nn.Linear(self.heads * self.value_dim, config.hidden_size, bias=False)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``[..., input] -> [..., heads, nope + rope]``, the rope part rotated."""
        q = self.q_proj(x) if hasattr(self, "q_proj") else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        plain, turned = q.unflatten(-1, (self.heads, self.key_dim)).split((self.nope, self.rope), dim=-1)
        return torch.cat((plain, rotate(turned, cos, sin, interleaved=True)), dim=-1)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """``[..., input] -> [..., heads, nope + rope], [..., heads, v]``; the rotated part is shared by all heads."""
        latent, turned = self.kv_a_proj_with_mqa(x).split((self.rank, self.rope), dim=-1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.heads, self.nope + self.value_dim))
        plain, values = expanded.split((self.nope, self.value_dim), dim=-1)
        turned = rotate(turned.unsqueeze(-2), cos, sin, interleaved=True)  # [...,1,rope]
        return torch.cat((plain, turned.expand(*plain.shape[:-1], self.rope)), dim=-1), values


def latent_scale(rope_scaling: dict | None) -> float:
    """Factor on the scale that YaRN asks of latent attention: ``(0.1 · mscale_all_dim · ln(factor) + 1)²``."""
    if not rope_scaling or rope_scaling.get("rope_type") != "yarn" or not rope_scaling.get("mscale_all_dim"):
        return 1.0
    factor = float(rope_scaling["factor"])
    return 1.0 if factor <= 1 else (0.1 * float(rope_scaling["mscale_all_dim"]) * math.log(factor) + 1.0) ** 2


class DecoderLayer(nn.Module):
    """One layer of the head; layer 0 also reads the token embedding, so its projections are 2H wide."""

    def __init__(self, config: DraftConfig, index: int):
        super().__init__()
        self.index = index
        self.norm_before_residual = config.norm_before_residual
        width, eps = config.hidden_size, config.rms_norm_eps
        attention = LatentAttention if config.decoder_type == "kimik2" else GroupedAttention
        self.self_attn = attention(config, 2 * width if index == 0 else width)
        self.mlp = GatedMLP(config)
        self.input_layernorm = nn.RMSNorm(width, eps=eps)
        if index == 0:
            self.hidden_norm = nn.RMSNorm(width, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=eps)

    @property
    def scale(self) -> float:
        """Factor on ``q·k``."""
        return self.self_attn.scale

    def attention_input(self, embedding: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
        """``(input [..., 2H or H], residual [..., H])``. Each norm is applied once, as serving engines do."""
        if self.index > 0:
            return self.input_layernorm(state), state
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
