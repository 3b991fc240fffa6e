"""Attention of a few query tokens over a long cache, keys and values read once a group.

With a mask, transformers' sdpa copies each key and value once a query head, at every step and layer: at 4,096 tokens
of context verifying four nodes so costs three plain steps. Here the query heads of a group stand beside the query rows,
and nothing is copied. :func:`lent` puts this attention in the place of a target's sdpa while it decodes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from modelopt_eagle.target.like import RunningTarget

NAME = "modelopt_eagle_grouped"
PLAIN = {"dropout": (None, 0.0), "softcap": (None,), "position_bias": (None,), "s_aux": (None,)}
"""Arguments that change an attention's result, and the values that leave it alone."""


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **more,
) -> tuple[Tensor, None]:
    """As transformers' sdpa, without copies for one token or for a mask of ``masks.beside``; all else is handed to it.

    Args:
        query: ``[B, h, n, d]``.
        key, value: ``[B, hkv, W, d]``, ``[B, hkv, W, dv]``.
        attention_mask: ``[B or 1, 1, g·n, W]`` additive of ``masks.beside``, any mask that sdpa takes, or ``None``.

    Returns:
        ``[B, n, h, dv]``, and ``None`` for the weights.
    """
    batch, heads, count, _ = query.shape
    groups = heads // key.shape[1]
    mask = attention_mask
    folded = mask is not None and mask.shape[-2] == groups * count
    if mask is not None and mask.shape[-2] != count and not folded:
        mask = mask[..., :count, :]  # laid out for other groups than this layer's: its first rows are the mask
    usual = all(more.get(name) in values for name, values in PLAIN.items())
    if not usual or groups == 1 or not (folded or (count == 1 and mask is None)):
        mask = mask[..., :count, :] if folded else mask
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **more)
    packed = query.reshape(batch, key.shape[1], groups * count, -1)  # [B,hkv,g·n,d]
    out = nn.functional.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(batch, heads, count, -1).transpose(1, 2).contiguous(), None  # [B,n,h,dv]


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


@dataclass
class _Loan:
    """A config whose attention is lent, and to how many runs at once."""

    config: object
    former: str
    users: int = 0


_LOANS: dict[int, _Loan] = {}
_LOCK = threading.Lock()


def query_groups(target: RunningTarget) -> int:
    """Query heads a key head, if the target's layers can be lent this attention; else 1."""
    heads = getattr(target.config, "num_attention_heads", 1)
    kv_heads = getattr(target.config, "num_key_value_heads", None) or heads
    if not isinstance(heads, int) or not isinstance(kv_heads, int) or heads % kv_heads:
        return 1
    if hasattr(target.config, "keep_window_size"):  # Doge: its layers add to the mask before they hand it over
        return 1
    backbone = target.parts.backbone
    lendable = getattr(backbone, "_supports_attention_backend", False) and bool(_configs(target))
    return heads // kv_heads if lendable else 1


@contextmanager
def lent(target: RunningTarget) -> Iterator[None]:
    """Let the target's layers run :func:`grouped_attention`; their own is back on leaving, also after an exception.

    Runs of one target in several threads share the loan, which ends with the last of them.
    """
    taken = _configs(target) if query_groups(target) > 1 else []
    with _LOCK:
        for config in taken:
            loan = _LOANS.setdefault(id(config), _Loan(config, "sdpa"))
            loan.users += 1
            config._attn_implementation = NAME
    try:
        yield
    finally:
        with _LOCK:
            for config in taken:
                loan = _LOANS[id(config)]
                loan.users -= 1
                if loan.users == 0:
                    config._attn_implementation = loan.former
                    del _LOANS[id(config)]


def _configs(target: RunningTarget) -> list:
    """The configs by which the layers choose their attention, those with sdpa (lent out or not)."""
    parts = [target.parts.backbone, *(part for layer in target.layers for part in layer.modules())]
    found = {id(part.config): part.config for part in parts if hasattr(part, "config")}
    return [c for c in found.values() if getattr(c, "_attn_implementation", None) in ("sdpa", NAME)]
