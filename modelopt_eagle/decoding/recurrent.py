"""Targets with recurrent layers (linear attention, state space, convolution), beside attention or alone.

Such a layer keeps one state a row and cannot take a token back. So its state is kept at the start of a round, put back
after the drafts were judged, and led through the accepted tokens again. A layer whose code starts anew with every pass
of several tokens is read token by token instead, and the state after each token is kept: as right, and no faster than
plain decoding. Chains only, one row at a time: states of rejected siblings, or of padding, could not be told apart.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    get_layer_types_and_kwargs,
)

from modelopt_eagle.decoding.masks import BOTH, NONE, STATES
from modelopt_eagle.decoding.row_cache import Placement, RowLayer
from modelopt_eagle.errors import DecodingError
from modelopt_eagle.target.like import RunningTarget

_CONTINUES: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


class RecurrentRowLayer(LinearAttentionLayer, RowLayer):
    """A layer with attention and a recurrent state side by side."""

    is_compileable = False

    def __init__(self, place: Placement, kind: str, number_of_states: int = 1):
        RowLayer.__init__(self, place, kind)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *states: Any, **named: Any) -> None:
        """Keys and values come by place, recurrent states by name."""
        if states:
            RowLayer.lazy_initialization(self, *states)
        else:
            LinearAttentionLayer.lazy_initialization(self, **named)


def is_recurrent(config: Any) -> bool:
    """Whether any layer keeps a recurrent state."""
    return any(kind in STATES + BOTH for kind in getattr(config, "layer_types", None) or ())


def cache_layers(config: Any, place: Placement, kinds: Sequence[str]) -> list[Any]:
    """The cache's layers of a target with recurrent ones; ``kinds`` of their attention."""
    layers: list[Any] = []
    for name, options, kind in zip(*get_layer_types_and_kwargs(config), kinds, strict=True):
        if name in STATES:
            layers.append(LinearAttentionLayer(**options))
        elif name in BOTH:
            layers.append(RecurrentRowLayer(place, kind, options.get("number_of_states", 1)))
        elif name in NONE:
            layers.append(DummyLayer())
        else:
            layers.append(RowLayer(place, kind))
    return layers


State = list[tuple[dict[int, Tensor | None], dict[int, Tensor | None], dict[int, bool]]]


def states_of(cache: Cache) -> State:
    """A copy of all recurrent states."""
    return [
        (_copy(layer.conv_states), _copy(layer.recurrent_states), dict(layer.has_previous_state))
        for layer in cache.layers
        if isinstance(layer, LinearAttentionCacheLayerMixin)
    ]


def put_back(cache: Cache, states: State) -> None:
    """Let all recurrent states be those of :func:`states_of`."""
    layers = [layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
    for layer, (conv, recurrent, known) in zip(layers, states, strict=True):
        layer.conv_states, layer.recurrent_states = _copy(conv), _copy(recurrent)
        layer.has_previous_state = dict(known)


def _copy(states: dict[int, Tensor | None]) -> dict[int, Tensor | None]:
    return {index: None if state is None else state.clone() for index, state in states.items()}


@torch.inference_mode()
def continues(target: RunningTarget, cache_name: str) -> bool:
    """Whether the target's recurrent layers go on from their state when several tokens come at once.

    Found out once a target by reading eight tokens whole and in two parts.

    Raises:
        DecodingError: the model cannot be run with the caches of these layers.
    """
    model = target.model
    if model not in _CONTINUES:
        from transformers import DynamicCache

        ids = torch.arange(8, device=target.device)[None] % target.vocab_size
        try:
            whole = model(ids, use_cache=False).logits[0, -1].float()
            cache = DynamicCache(config=target.config)
            model(ids[:, :5], use_cache=True, **{cache_name: cache})
            parts = model(ids[:, 5:], use_cache=True, **{cache_name: cache}).logits[0, -1].float()
        except (AttributeError, TypeError, ValueError, RuntimeError, IndexError, KeyError) as error:
            kinds = ", ".join(sorted(set(target.config.layer_types)))
            raise DecodingError(
                f"{target.name} ({type(model).__name__}) has layers of type {kinds}, and cannot be run with a cache "
                f"for them: {error}"
            ) from error
        scale = float(whole.abs().max())
        tolerance = 1e-3 if whole.dtype == target.dtype == torch.float32 else 5e-2
        _CONTINUES[model] = bool((whole - parts).abs().max() <= tolerance * max(scale, 1e-6))
    return _CONTINUES[model]
