"""Projections of attention: what a decoder type does between its input and ``q·k``."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from modelopt_eagle.draft.fused import product_dtype, trains_by_kernel
from modelopt_eagle.errors import CheckpointError
from modelopt_eagle.kernels.rotate_heads import rotate_heads, supported


class AttentionSizes(Protocol):
    """What projections read of a draft configuration."""

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_scaling: dict[str, Any] | None
    attention_bias: bool
    qk_norm: bool
    q_lora_rank: int | None
    kv_lora_rank: int | None
    qk_nope_head_dim: int | None
    qk_rope_head_dim: int | None
    v_head_dim: int | None


class Projections(nn.Module, ABC):
    """What every decoder type gives to the attention between the halves of a layer.

    Attributes:
        heads, kv_heads: query heads; key and value heads.
        key_dim, value_dim: width of a head's keys and of its values.
        scale: factor on ``q·k``.
        o_proj: ``[..., heads·value_dim] -> [..., H]``.
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    o_proj: nn.Linear

    @abstractmethod
    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``[..., input] -> [..., heads, key_dim]``, rotated."""

    @abstractmethod
    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """``[..., input] -> [..., kv_heads, key_dim], [..., kv_heads, value_dim]``, keys rotated."""


class GroupedAttention(Projections):
    """Projections of grouped-query attention (Llama; with ``qk_norm`` Qwen3)."""

    def __init__(self, config: AttentionSizes, input_size: int):
        super().__init__()
        self.heads, self.kv_heads, self.dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.key_dim = self.value_dim = self.dim
        self.scale = self.dim**-0.5
        bias = config.attention_bias
        self.q_proj = nn.Linear(input_size, self.heads * self.dim, bias=bias)
        self.k_proj = nn.Linear(input_size, self.kv_heads * self.dim, bias=bias)
        self.v_proj = nn.Linear(input_size, self.kv_heads * self.dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.dim, config.hidden_size, bias=False)
        eps = config.rms_norm_eps
        self.q_norm = nn.RMSNorm(self.dim, eps=eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(self.dim, eps=eps) if config.qk_norm else nn.Identity()

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``[..., input] -> [..., heads, d]``, rotated."""
        return rotate(self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, self.dim))), cos, sin)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """``[..., input] -> [..., kv_heads, d]`` twice, keys rotated."""
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, self.dim))
        return rotate(self.k_norm(k), cos, sin), self.v_proj(x).unflatten(-1, (self.kv_heads, self.dim))


class LatentAttention(Projections):
    """Projections of multi-head latent attention (DeepSeek-V2/V3, Kimi-K2), keys and values expanded a head each.

    Source: DeepSeek-V2 report, section 2.1; names as in the DeepSeek-V3 checkpoints that engines load.
    """

    def __init__(self, config: AttentionSizes, input_size: int):
        super().__init__()
        self.heads = self.kv_heads = config.num_attention_heads
        self.nope, self.rope = needed(config.qk_nope_head_dim), needed(config.qk_rope_head_dim)
        self.rank, self.value_dim = needed(config.kv_lora_rank), needed(config.v_head_dim)
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
        return rotate(q.unflatten(-1, (self.heads, self.key_dim)), cos, sin, interleaved=True)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """``[..., input] -> [..., heads, nope + rope], [..., heads, v]``; the rotated part is shared by all heads."""
        latent, turned = self.kv_a_proj_with_mqa(x).split((self.rank, self.rope), dim=-1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.heads, self.nope + self.value_dim))
        plain, values = expanded.split((self.nope, self.value_dim), dim=-1)
        turned = rotate(turned.unsqueeze(-2), cos, sin, interleaved=True)  # [...,1,rope]
        return torch.cat((plain, turned.expand(*plain.shape[:-1], self.rope)), dim=-1), values


def needed(size: int | None) -> int:
    """A size of latent attention, which has no default.

    Raises:
        CheckpointError: it is not given.
    """
    if size is None:
        raise CheckpointError(
            "latent attention needs kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim and v_head_dim, and one is missing"
        )
    return size


def latent_scale(rope_scaling: dict | None) -> float:
    """Factor on the scale that YaRN asks of latent attention: ``(0.1 · mscale_all_dim · ln(factor) + 1)²``."""
    if not rope_scaling or rope_scaling.get("rope_type") != "yarn" or not rope_scaling.get("mscale_all_dim"):
        return 1.0
    factor = float(rope_scaling["factor"])
    return 1.0 if factor <= 1 else (0.1 * float(rope_scaling["mscale_all_dim"]) * math.log(factor) + 1.0) ** 2


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate pairs of the last ``2r`` dimensions of a head; what stands before them goes through as it is.

    On a GPU one kernel does it in training, see :mod:`modelopt_eagle.kernels.rotate_heads`.

    Args:
        x: ``[..., heads, d]``.
        cos, sin: ``[..., r]``; for Llama ``2r`` is ``d``.
        interleaved: pairs are neighbours ``(0,1), (2,3), ...`` (DeepSeek) rather than halves ``(i, i + r)`` (Llama).
            The interleaved result comes out as halves, the same for queries and keys, so products are unchanged.

    Returns:
        ``[..., heads, d]`` in the dtype of ``x``; by the kernel in that of products.
    """
    if trains_by_kernel(x):
        dtype = product_dtype(x)
        if supported(x, cos, sin, dtype):
            return rotate_heads(x, cos, sin, interleaved, dtype)
    cos, sin = cos.unsqueeze(-2).to(x.dtype), sin.unsqueeze(-2).to(x.dtype)  # [...,1,r]
    whole = 2 * cos.shape[-1]
    turning = x[..., -whole:]  # [...,heads,2r]
    a, b = (turning[..., 0::2], turning[..., 1::2]) if interleaved else turning.chunk(2, dim=-1)  # [...,heads,r] each
    parts = [a * cos - b * sin, b * cos + a * sin]
    return torch.cat(parts if whole == x.shape[-1] else [x[..., :-whole], *parts], dim=-1)
