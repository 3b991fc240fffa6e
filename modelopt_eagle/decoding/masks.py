"""Attention masks of the target for nodes that follow prefixes of different lengths.

A node sees the whole prefix of its row, and among the new nodes those it is told to (its ancestors and itself).
Windows and chunks count positions: a prefix token stands at its slot, a node at prefix length plus depth.
"""

from __future__ import annotations

import torch
from torch import Tensor

from modelopt_eagle.errors import DecodingError

STATES, BOTH, NONE = ("linear_attention", "conv"), ("hybrid",), ("moe", "mlp", "dummy")
"""Layers with a recurrent state, with one beside attention, and with neither (``recurrent.py``)."""
_NOT_READ = {
    "indexed_attention": "sparse attention, whose tokens read the keys that an index of their own chooses",
    "hybrid_sliding": "a recurrent state beside a window of attention",
}
"""Why layers that transformers knows by name are none of ours."""
_KINDS = ("full_attention", "sliding_attention", "chunked_attention")


def attention_kinds(config) -> dict[str, int | None]:
    """Kinds of attention a model has, with the window of each.

    Args:
        config: text config of a transformers model; ``layer_types`` is read if it is there.

    Returns:
        ``{"full_attention": None, "sliding_attention": window, "chunked_attention": chunk}``, those that occur.

    Raises:
        DecodingError: a layer keeps more than keys and values of each token, or something else.
    """
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    types = getattr(config, "layer_types", None)
    if not types:
        return {"sliding_attention": window} if window else {"full_attention": None}
    types = [kind for kind in types if kind not in (*STATES, *BOTH, *NONE)] + [
        "full_attention" for kind in types if kind in BOTH
    ]
    if not types:
        return {"full_attention": None}  # recurrent layers only
    unknown = sorted(set(types) - set(_KINDS))
    if unknown:
        named = ", ".join(f"{kind} ({why})" if (why := _NOT_READ.get(kind)) else kind for kind in unknown)
        raise DecodingError(
            f"layers of type {named} are not among those that drafts are verified with here: "
            f"{', '.join((*_KINDS, *STATES, *BOTH))}. A head for it can be trained and exported unmeasured"
        )
    sizes = {"full_attention": None, "sliding_attention": window, "chunked_attention": chunk}
    return {kind: sizes[kind] for kind in _KINDS if kind in types}


def layer_kinds(config, kinds: dict[str, int | None], num_layers: int) -> list[str]:
    """The kind of each layer's attention."""
    types = getattr(config, "layer_types", None) or [next(iter(kinds))] * num_layers
    return [kind if kind in _KINDS else "full_attention" for kind in types]


def one_shape(config) -> bool:
    """Whether the layers' keys have one shape, as far as the config says: none names heads or widths of some layers."""
    usual = {"head_dim", "num_key_value_heads", "num_attention_heads", "v_head_dim", "qk_head_dim"}
    usual |= {"qk_rope_head_dim", "qk_nope_head_dim"}
    named = {key: value for key, value in vars(config).items() if "head_dim" in key or "key_value_heads" in key}
    return not any(value for key, value in named.items() if key not in usual and not key.startswith("linear_"))


def first_slots(kinds: dict[str, int | None], lengths: list[int]) -> dict[str, int]:
    """The first slot that any node behind ``lengths`` can see, by kind: older keys need not be read."""
    least = min(lengths)
    first = {"full_attention": 0}
    for kind, size in kinds.items():
        if kind == "sliding_attention":
            first[kind] = max(0, least - size + 1)
        elif kind == "chunked_attention":
            first[kind] = least // size * size
    return first


def kind_masks(
    kinds: dict[str, int | None],
    lengths: list[int],
    sees: Tensor,
    depths: Tensor,
    dtype: torch.dtype,
    first: dict[str, int] | None = None,
    groups: int = 1,
):
    """What a model takes as ``attention_mask``: one tensor, or one a kind when it has several.

    Args:
        kinds: of :func:`attention_kinds`.
        lengths: B prefix lengths.
        sees: ``[B or 1, N, N]`` bool.
        depths: ``[B or 1, N]`` int64.
        dtype: of the additive masks.
        first: of :func:`first_slots`, if keys are read from there on; ``None``: all of them.
        groups: query heads that stand beside the rows (``grouped_attention.py``).

    Returns:
        ``[B, 1, groups·N, max(lengths) + N - first]`` with 0 where a node sees a slot and the lowest number elsewhere;
        or a dict. One token a row of equal lengths sees all that is read from ``first`` on: ``None`` in the dict.
    """
    if first is None:
        first = dict.fromkeys(kinds, 0)
    elif len(kinds) > 1 and sees.shape[-1] == 1 and len(set(lengths)) == 1:
        return dict.fromkeys(kinds)
    masks = {
        kind: beside(additive(visible_slots(lengths, sees, depths, kind, size, first[kind]), dtype), groups)
        for kind, size in kinds.items()
    }
    return masks if len(masks) > 1 else next(iter(masks.values()))


def fixed_masks(
    kinds: dict[str, int | None],
    lengths: Tensor,
    sees: Tensor,
    depths: Tensor,
    dtype: torch.dtype,
    width: int,
    groups: int = 1,
):
    """:func:`kind_masks` over the first ``width`` slots, lengths ``[B]`` int64 as a tensor: shapes never change.

    Returns:
        ``[B, 1, groups·N, width]``, or a dict of them.
    """
    masks = {
        kind: beside(additive(_visible(lengths[:, None], sees, depths, kind, size, 0, width), dtype), groups)
        for kind, size in kinds.items()
    }
    return masks if len(masks) > 1 else next(iter(masks.values()))


def beside(mask: Tensor, groups: int) -> Tensor:
    """A mask ``[B, 1, n, W]`` for the query heads of a group beside the rows, ``[B, 1, groups·n, W]``."""
    return mask if groups == 1 else mask.repeat(1, 1, groups, 1)


def visible_slots(
    lengths: list[int], sees: Tensor, depths: Tensor, kind: str, size: int | None, first: int = 0
) -> Tensor:
    """``[B, N, max(lengths) + N - first]`` bool: which slots from ``first`` on each node sees."""
    length = torch.tensor(lengths, device=sees.device)[:, None]  # [B,1]
    return _visible(length, sees, depths, kind, size, first, max(lengths) + sees.shape[-1])


def _visible(
    length: Tensor, sees: Tensor, depths: Tensor, kind: str, size: int | None, first: int, width: int
) -> Tensor:
    """``[B, N, width - first]`` bool of lengths ``[B, 1]`` int64."""
    batch, count, device = len(length), sees.shape[-1], sees.device
    slots = length - first + torch.arange(count, device=device)  # [B,N] where the nodes lie, counted from the first
    every = torch.arange(first, width, device=device)  # [W]
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
