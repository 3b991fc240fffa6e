"""A head held against another: every tensor, and one forward pass on fixed numbers."""

from __future__ import annotations

import torch

from modelopt_eagle.draft import DraftConfig
from modelopt_eagle.draft.algorithm import algorithm_of
from modelopt_eagle.draft.base import DraftModule
from modelopt_eagle.draft.build import bare_head
from modelopt_eagle.errors import ExportError

TOLERANCE = 1e-5
"""Largest difference of draft logits that the read-back comparison allows; both sides compute in float32."""


def rebuilt(module: DraftModule, config: DraftConfig) -> DraftModule:
    """The same tensors under another config (same shapes)."""
    return bare_head(type(module), config, module.vocab, module.state_dict())


def compare(written: DraftModule, module: DraftModule, dtype: torch.dtype) -> float:
    """Hold the reloaded head against the trained one, cast to the written dtype: every tensor, then a forward pass.

    Returns:
        The largest difference of logits.

    Raises:
        ExportError: a config, tensor or result that differs.
    """
    if written.config != module.config:
        mine, theirs = module.config.to_dict(), written.config.to_dict()
        differing = {k: (mine[k], theirs[k]) for k in mine if mine[k] != theirs[k]}
        raise ExportError(f"the exported config reads back differently (trained, exported): {differing}")
    trained = {
        name: tensor.cpu().to(dtype) if tensor.is_floating_point() else tensor.cpu()
        for name, tensor in module.state_dict().items()
    }
    for name, tensor in written.state_dict().items():
        if not torch.equal(tensor, trained[name]):
            raise ExportError(f"the exported tensor {name} differs from the trained one: the folder was not kept")
    cast = rebuilt(module, module.config)
    cast.load_state_dict(trained, assign=True)
    probe = algorithm_of(module.config).probe
    difference = float((probe(written) - probe(cast)).abs().max())
    if not difference <= TOLERANCE:
        raise ExportError(f"the exported head computes other logits than the trained one, by {difference:.2e}")
    return difference
