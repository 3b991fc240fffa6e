"""Tokens that all rows begin with (a chat template's system prompt) run through the target once, not once a row.

Their keys and values stay in a cache, which every batch of rows goes on from. It is done only where it is sound: the
cache must be plain (full or sliding-window attention that still holds every token of the prefix), and the longest and
the shortest row must come out the same with and without it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from modelopt_eagle.common.dtypes import STATE_DTYPES, dtype_name
from modelopt_eagle.target.model import TargetOutput
from modelopt_eagle.target.shards import Turns

LEAST_TOKENS = 8
"""A shorter prefix is not worth a cache."""

PLAIN_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer")
"""Cache layers of transformers that hold keys and values of each token and nothing else (no recurrent state)."""


class CommonPrefix:
    """States of a prefix, and the cache to go on from.

    Args:
        target: a loaded target.
        input_ids: the prefix, P tokens.
        aux_layer_ids: canonical ids.

    Attributes:
        aux_hidden, final_hidden: [P, A·Ht] and [P, Ht].
        sound: whether the target's cache is of a kind that rows can go on from.
    """

    @torch.no_grad()
    def __init__(self, target, input_ids: Sequence[int], aux_layer_ids: Sequence[int]):
        self._target, self._layer_ids, self.length = target, aux_layer_ids, len(input_ids)
        ids = torch.tensor([list(input_ids)], device=target.device)  # [1,P]
        with target.capture(aux_layer_ids) as captured:
            output = target.parts.backbone(input_ids=ids, use_cache=True)
        self.final_hidden = output[0][0]
        self.aux_hidden = captured.aux_hidden[0].to(self.final_hidden.device)
        named = dict(output) if hasattr(output, "keys") else {}
        self._cache = named.get("cache", named.get("past_key_values"))
        parameters = inspect.signature(target.parts.backbone.forward).parameters
        names = [name for name in ("cache", "past_key_values") if name in parameters]  # renamed within transformers 5
        self._argument = next(iter(names), None)
        layers = getattr(self._cache, "layers", ())
        self.sound = (
            self._argument is not None
            and len(layers) == target.num_layers
            and all(type(layer).__name__ in PLAIN_LAYERS and layer.keys.shape[-2] == self.length for layer in layers)
        )

    def __len__(self) -> int:
        return self.length

    @torch.no_grad()
    def features(self, input_ids: Tensor, attention_mask: Tensor | None) -> TargetOutput:
        """Features of what follows the prefix; as ``Target.features``.

        Args:
            input_ids: [B, S] after the prefix.
            attention_mask: [B, S], 1 at real tokens, padded on the right; None: no padding.
        """
        rows = input_ids.shape[0]
        cache = copy.deepcopy(self._cache)
        cache.batch_repeat_interleave(rows)
        arguments = {"input_ids": input_ids.to(self._target.device), "use_cache": True, self._argument: cache}
        if attention_mask is not None:
            whole = attention_mask.new_ones(rows, self.length + input_ids.shape[1])  # [B,P+S]
            whole[:, self.length :] = attention_mask
            arguments["attention_mask"] = whole.to(self._target.device)
        with self._target.capture(self._layer_ids) as captured:
            final_hidden = self._target.parts.backbone(**arguments)[0]  # [B,S,Ht]
        return TargetOutput(captured.aux_hidden.to(final_hidden.device), final_hidden)


def common_length(rows: Sequence) -> int:
    """Tokens that all rows begin with, of which each keeps at least one more."""
    shortest, longest = (choose([list(row.input_ids) for row in rows]) for choose in (min, max))  # in dictionary order
    same = 0
    for ours, theirs in zip(shortest, longest, strict=False):
        if ours != theirs:
            break
        same += 1
    return min(same, min(len(row.input_ids) for row in rows) - 1)


@torch.no_grad()
def find_common_prefix(target, rows: Sequence, aux_layer_ids: Sequence[int]) -> CommonPrefix | None:
    """The prefix of some rows, if there is one that is worth it and this target gives the same values with it.

    Args:
        target: a loaded :class:`~modelopt_eagle.target.Target`.
        rows: tokenised rows.
        aux_layer_ids: canonical ids.
    """
    if any(getattr(row, "images", None) is not None for row in rows):
        return None  # the same placeholders stand for other images
    if isinstance(turns := getattr(target, "lockstep", None), Turns) and turns.active:
        return None  # a cache lies in parts in all processes, and each has another prefix
    length = common_length(rows)
    longest = max(rows, key=lambda row: len(row.input_ids))
    if length < LEAST_TOKENS or length * (len(rows) - 1) < 2 * len(longest.input_ids):
        return None
    prefix = CommonPrefix(target, longest.input_ids[:length], aux_layer_ids)
    if not prefix.sound:
        return None
    shortest = min(rows, key=lambda row: len(row.input_ids))
    return prefix if all(_same(target, prefix, [longest, shortest], aux_layer_ids)) else None


def _same(target, prefix: CommonPrefix, rows: Sequence, aux_layer_ids: Sequence[int]) -> Iterator[bool]:
    """Whether rows, run together after the prefix and padded on the right, come out as each alone without it."""
    begun, longest = len(prefix), max(len(row.input_ids) for row in rows)
    ids = torch.zeros(len(rows), longest - begun, dtype=torch.long)  # [B,S]
    mask = torch.zeros_like(ids)  # [B,S]
    for b, row in enumerate(rows):
        ids[b, : len(row.input_ids) - begun] = torch.as_tensor(row.input_ids[begun:])
        mask[b, : len(row.input_ids) - begun] = 1
    together = prefix.features(ids, mask)
    for b, row in enumerate(rows):
        alone, s = target.features(torch.tensor([list(row.input_ids)]), None, aux_layer_ids), len(row.input_ids) - begun
        yield _agree(alone.aux_hidden[0], [prefix.aux_hidden, together.aux_hidden[b, :s]], target.hidden_size)
        yield _agree(alone.final_hidden[0], [prefix.final_hidden, together.final_hidden[b, :s]], target.hidden_size)


def _agree(plain: Tensor, parts: Sequence[Tensor], width: int) -> bool:
    """Whether states [s, groups*width] and those in parts are the same but for rounding, everywhere."""
    tolerance = STATE_DTYPES[dtype_name(plain.dtype)].computed
    plain, shared = (x.float().unflatten(-1, (-1, width)) for x in (plain, torch.cat(list(parts))))  # [s,groups,width]
    return bool(((shared - plain).norm(dim=-1) <= tolerance * plain.norm(dim=-1)).all())
