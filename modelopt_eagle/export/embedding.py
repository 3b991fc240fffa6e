"""The target's embedding in a head's folder: some tools write a copy of it, and a head here reads the target's own."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from modelopt_eagle.draft import EagleModule
from modelopt_eagle.errors import ExportError

NARROWER = (torch.bfloat16, torch.float16)
"""A copy may have been rounded to one of these when it was saved."""


def table_of(target: Any) -> Tensor | None:
    """``[V, Ht]``: the embedding of a ``Target`` or of its tables; ``None`` for an ``identity()`` or no target."""
    weight = getattr(target, "embedding_weight", None)
    return getattr(getattr(target, "embedding", None), "weight", None) if weight is None else weight


def holds_copy(module: EagleModule, table: Tensor | None) -> bool:
    """Whether the head's own table is the target's ``table [V, Ht]``, as it is or rounded to 16 bits."""
    config = module.config
    if table is None or not config.own_embedding or config.hidden_size != config.target_hidden_size:
        return False
    own, table = module.embed_tokens.weight.detach().cpu().float(), table.detach().cpu()
    if own.shape != table.shape:
        return False
    return any(torch.equal(own, table.to(dtype).float()) for dtype in (table.dtype, *NARROWER))


def with_own_embedding(module: EagleModule, table: Tensor | None) -> EagleModule:
    """The same head with ``table [V, H]`` as its own embedding, or without any for ``None``; ``module`` stays."""
    config = dataclasses.replace(module.config, own_embedding=table is not None)
    with torch.random.fork_rng(devices=[]):  # the initial numbers are thrown away
        other = EagleModule(config, module.vocab)
    state = {name: tensor for name, tensor in module.state_dict().items() if name != "embed_tokens.weight"}
    if table is not None:
        if table.shape != (config.vocab_size, config.hidden_size):
            raise ExportError(
                f"the target's embedding is {list(table.shape)}, the head needs "
                f"[{config.vocab_size}, {config.hidden_size}]: it is a head for another target"
            )
        state["embed_tokens.weight"] = table.detach().to("cpu", module.fc.weight.dtype)
    other.load_state_dict(state, assign=True)
    return other


def without_copy(module: EagleModule, table: Tensor | None) -> EagleModule:
    """The head as it is, or without its own table if that only repeats the target's."""
    return with_own_embedding(module, None) if holds_copy(module, table) else module
