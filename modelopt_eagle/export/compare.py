"""A head held against another: every tensor, and one forward pass on fixed numbers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from modelopt_eagle.draft import DraftConfig, EagleModule
from modelopt_eagle.errors import ExportError

TOLERANCE = 1e-5
"""Largest difference of draft logits that the read-back comparison allows; both sides compute in float32."""
LENGTH = 6
FAR_POSITION = 1500
"""The last positions lie here, so that rotary tables that differ only far out differ in the result."""


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """``q [S,h,dk], k [S,hkv,dk], v [S,hkv,dv] -> [S, h·dv]``, plain causal attention."""
    groups = q.shape[1] // k.shape[1]
    q, k, v = (t.transpose(0, 1) for t in (q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(0, 1).flatten(1)


@torch.no_grad()
def probe(module: EagleModule, seed: int = 0) -> Tensor:
    """Draft logits ``[2, S, Vd]`` float32 of two chained steps on random features; computed in float32 on the CPU.

    The second step reads :meth:`EagleModule.next_state`, so every flag of the head takes part.
    """
    config = module.config
    with torch.random.fork_rng(devices=[]):
        copy = EagleModule(config, module.vocab)
    copy.load_state_dict({name: tensor.cpu() for name, tensor in module.state_dict().items()})
    copy = copy.float().eval()
    generator = torch.Generator().manual_seed(seed)
    aux = torch.randn(LENGTH, config.fc_input_size, generator=generator)  # [S,A·Ht]
    embeddings = torch.randn(2, LENGTH, config.hidden_size, generator=generator)  # [2,S,H]
    if config.own_embedding:
        ids = torch.randint(config.vocab_size, (2, LENGTH), generator=generator)  # [2,S]
        embeddings = copy.embed(ids)
    positions = torch.arange(LENGTH)
    positions[LENGTH // 2 :] += FAR_POSITION
    cos, sin = copy.rotary(positions)  # [S,d/2]
    state = copy.fuse(aux)  # [S,H]
    logits = []
    for step in range(2):
        hidden = state
        for index, layer in enumerate(copy.layers):
            q, k, v, residual = layer.project(embeddings[step] if index == 0 else None, hidden, cos, sin)
            hidden = layer.combine(causal_attention(q, k, v, layer.scale), residual)  # [S,H]
        logits.append(copy.lm_head(copy.head_input(hidden)))  # [S,Vd]
        state = copy.next_state(hidden)
    return torch.stack(logits)


def rebuilt(module: EagleModule, config: DraftConfig) -> EagleModule:
    """The same tensors under another config (same shapes)."""
    with torch.random.fork_rng(devices=[]):
        other = EagleModule(config, module.vocab)
    other.load_state_dict(module.state_dict(), assign=True)
    return other


def compare(written: EagleModule, module: EagleModule, dtype: torch.dtype) -> float:
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
    difference = float((probe(written) - probe(cast)).abs().max())
    if not difference <= TOLERANCE:
        raise ExportError(f"the exported head computes other logits than the trained one, by {difference:.2e}")
    return difference
