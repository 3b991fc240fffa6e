"""One forward pass of a head on fixed numbers, to compare what was trained with what was written."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from modelopt_eagle.draft.build import bare_head
from modelopt_eagle.draft.module import EagleModule

LENGTH = 6
FAR_POSITION = 1500
"""The last positions lie here, so that rotary tables that differ only far out differ in the result."""


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor) -> Tensor:
    """``q [S,h,dk], k [S,hkv,dk], v [S,hkv,dv], visible [S,S] -> [S, h·dv]``, plain attention."""
    groups = q.shape[1] // k.shape[1]
    q, k, v = (t.transpose(0, 1) for t in (q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale).transpose(0, 1).flatten(1)


@torch.no_grad()
def probe(module: EagleModule, seed: int = 0) -> Tensor:
    """Draft logits ``[2, S, Vd]`` float32 of two chained steps on random features; computed in float32 on the CPU.

    The second step reads :meth:`EagleModule.next_state`, so every flag of the head takes part.
    """
    config = module.config
    tensors = {name: tensor.cpu().clone() for name, tensor in module.state_dict().items()}
    copy = bare_head(EagleModule, config, module.vocab, tensors).float().eval()
    generator = torch.Generator().manual_seed(seed)
    aux = torch.randn(LENGTH, config.fc_input_size, generator=generator)  # [S,A·Ht]
    embeddings = torch.randn(2, LENGTH, config.hidden_size, generator=generator)  # [2,S,H]
    if config.own_embedding:
        ids = torch.randint(config.vocab_size, (2, LENGTH), generator=generator)  # [2,S]
        embeddings = copy.embed(ids)
    positions = torch.arange(LENGTH)
    positions[LENGTH // 2 :] += FAR_POSITION
    cos, sin = copy.rotary(positions)  # [S,d/2]
    distance = positions[:, None] - positions  # [S,S]
    visible = (distance >= 0) & (distance < (config.sliding_window or distance.max() + 1))
    state = copy.fuse(aux)  # [S,H]
    logits = []
    for step in range(2):
        hidden = state
        for index, layer in enumerate(copy.layers):
            q, k, v, residual = layer.project(embeddings[step] if index == 0 else None, hidden, cos, sin)
            hidden = layer.combine(causal_attention(q, k, v, layer.scale, visible), residual)  # [S,H]
        logits.append(copy.lm_head(copy.head_input(hidden)))  # [S,Vd]
        state = copy.next_state(hidden)
    return torch.stack(logits)
