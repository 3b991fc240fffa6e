"""Attention masks of the target for nodes that follow prefixes of different lengths.

A node sees the whole prefix of its row, and among the new nodes those it is told to (its ancestors and itself).
Windows and chunks count positions: a prefix token stands at its slot, a node at prefix length plus depth.
"""

from __future__ import annotations

import torch
from torch import Tensor

from modelopt_eagle.errors import DecodingError

_KINDS = ("full_attention", "sliding_attention", "chunked_attention")


def attention_kinds(config) -> dict[str, int | None]:
    """Kinds of attention a model has, with the window of each.

    Args:
        config: text config of a transformers model; ``layer_types`` is read if it is there.

    Returns:
        ``{"full_attention": None, "sliding_attention": window, "chunked_attention": chunk}``, those that occur.

    Raises:
        DecodingError: a layer keeps another kind of state than keys and values of each token.
    """
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    types = getattr(config, "layer_types", None)
    if not types:
        return {"sliding_attention": window} if window else {"full_attention": None}
    unknown = sorted(set(types) - set(_KINDS))
    if unknown:
        raise DecodingError(
            f"layers of type {', '.join(unknown)} keep no key and value a token, so drafts cannot be taken back: "
            f"the target may have {', '.join(_KINDS)} only"
        )
    sizes = {"full_attention": None, "sliding_attention": window, "chunked_attention": chunk}
    return {kind: sizes[kind] for kind in _KINDS if kind in types}


def kind_masks(kinds: dict[str, int | None], lengths: list[int], sees: Tensor, depths: Tensor, dtype: torch.dtype):
    """What a model takes as ``attention_mask``: one tensor, or one a kind when it has several.

    Args:
        kinds: of :func:`attention_kinds`.
        lengths: B prefix lengths.
        sees: ``[B or 1, N, N]`` bool.
        depths: ``[B or 1, N]`` int64.
        dtype: of the additive masks.

    Returns:
        ``[B, 1, N, max(lengths) + N]`` with 0 where a node sees a slot and the lowest number elsewhere, or a dict.
    """
    masks = {kind: additive(visible_slots(lengths, sees, depths, kind, size), dtype) for kind, size in kinds.items()}
    return masks if len(masks) > 1 else next(iter(masks.values()))


def visible_slots(lengths: list[int], sees: Tensor, depths: Tensor, kind: str, size: int | None) -> Tensor:
    """``[B, N, max(lengths) + N]`` bool: which slots each node sees."""
    batch, count, device = len(lengths), sees.shape[-1], sees.device
    width = max(lengths) + count
    length = torch.tensor(lengths, device=device)[:, None]  # [B,1]
    slots = length + torch.arange(count, device=device)  # [B,N] where the nodes lie
    every = torch.arange(width, device=device)  # [W]
    visible = (every < length)[:, None].repeat(1, count, 1)  # [B,N,W] the prefix
    visible.scatter_(2, slots[:, None].expand(batch, count, count), sees.expand(batch, count, count))
    if size is not None:
        position = every.repeat(batch, 1)  # [B,W]
        own = (length + depths).expand(batch, count)  # [B,N]
        position.scatter_(1, slots, own)
        if kind == "sliding_attention":
            visible &= position[:, None] > own[..., None] - size
        else:
            visible &= position[:, None] // size == own[..., None] // size
    return visible


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """``[B, N, W]`` bool to ``[B, 1, N, W]``: 0 where visible, the lowest finite number elsewhere."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]


def causal(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A chain as ``(sees [1, N, N], depths [1, N])``."""
    sees = torch.ones(1, count, count, dtype=torch.bool, device=device).tril()
    return sees, torch.arange(count, device=device)[None]
