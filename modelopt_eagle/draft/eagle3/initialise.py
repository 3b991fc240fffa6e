"""Starting weights taken from the target: its last layer, final norm and head rows.

The untrained head does roughly what the target's last layer would: ``fc`` passes the last captured
layer through, the halves of q, k and v that read the state are the last layer's own, and norm and head rows are the
target's. That head would name the token already known with great confidence, so the other weights (``fc`` of the other
layers, the embedding halves) start random but small, and the final norm starts small: the first logits are soft.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from modelopt_eagle.draft.decoders import DECODERS
from modelopt_eagle.draft.module import EagleModule
from modelopt_eagle.errors import RecipeError

SMALL = 0.3
"""Factor on the weights that are not copied."""

SOFT = 0.3
"""Factor on the final norm, so on the first logits."""


@torch.no_grad()
def start_from_target(module: EagleModule, target) -> None:
    """Copy the target's last layers (one for each of the head's), final norm and head rows into a head.

    Raises:
        RecipeError: the target's layer is not built like the head's (names or shapes differ).
    """
    config, width = module.config, module.config.hidden_size
    if not DECODERS[config.decoder_type].copies_target or config.norm_before_fc or config.fc_norm:
        raise RecipeError(
            "eagle.init: target needs decoder_type: llama without norm_before_fc and fc_norm: set eagle.init: random"
        )
    module.fc.weight.mul_(SMALL)
    module.fc.weight[:, -config.target_hidden_size :] += torch.eye(width, device=module.fc.weight.device)
    if isinstance(module.norm, nn.RMSNorm):
        module.norm.weight.copy_(norm_weight(target.final_norm, width) * SOFT)
    module.lm_head.weight.copy_(target.head.rows(module.target_ids) * target.head.scale)
    count = len(module.layers)
    for index, (layer, source) in enumerate(zip(module.layers, target.layers[-count:], strict=True)):
        _copy_layer(layer, source, width, first=index == 0)


def _copy_layer(layer, source: nn.Module, width: int, first: bool) -> None:
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        own, theirs = getattr(layer.self_attn, name), _part(source, f"self_attn.{name}")
        weight = own.weight
        if first and name != "o_proj":
            weight[:, :width].mul_(SMALL)  # reads the token embedding
            weight = weight[:, width:]
        _copy(weight, theirs.weight, name)
        norm = getattr(layer.self_attn, f"{name[0]}_norm", None)
        if isinstance(norm, nn.RMSNorm):
            norm.weight.copy_(norm_weight(_part(source, f"self_attn.{name[0]}_norm"), len(norm.weight)))
        if own.bias is not None:
            _copy(own.bias, torch.zeros_like(own.bias) if theirs.bias is None else theirs.bias, name)
    for name in ("gate_proj", "up_proj", "down_proj"):
        _copy(getattr(layer.mlp, name).weight, _part(source, f"mlp.{name}").weight, name)
    before = norm_weight(_part(source, "input_layernorm"), width)
    (layer.hidden_norm if first else layer.input_layernorm).weight.copy_(before)
    layer.post_attention_layernorm.weight.copy_(norm_weight(_part(source, "post_attention_layernorm"), width))


def norm_weight(norm: nn.Module, width: int) -> Tensor:
    """``[H]`` factor that a root-mean-square norm applies, however its parameter is written (``w`` or ``1 + w``)."""
    reference = next(norm.parameters())
    return norm(torch.ones(1, width, device=reference.device, dtype=reference.dtype)).squeeze(0).float().cpu()


def _part(source: nn.Module, path: str) -> Any:
    """A module of the target's layer; its class is the target's own."""
    try:
        return source.get_submodule(path)
    except AttributeError:
        raise RecipeError(
            f"eagle.init: target looks for {path} in the target's last layer ({type(source).__name__}) and finds "
            "none: set eagle.init: random"
        ) from None


def _copy(own: Tensor, theirs: Tensor, name: str) -> None:
    if own.shape != theirs.shape:
        raise RecipeError(
            f"eagle.init: target: {name} is {list(theirs.shape)} in the target, the head's is {list(own.shape)}: leave "
            "the head's sizes at null, or set eagle.init: random"
        )
    own.copy_(theirs)
