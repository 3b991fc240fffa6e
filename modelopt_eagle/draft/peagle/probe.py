"""One forward pass of a P-EAGLE head on fixed numbers, to compare what was trained with what was written."""

from __future__ import annotations

import torch
from torch import Tensor

from modelopt_eagle.draft.build import bare_head
from modelopt_eagle.draft.eagle3.probe import FAR_POSITION, LENGTH, causal_attention
from modelopt_eagle.draft.peagle.module import PEagleModule

MASKS = 3


@torch.no_grad()
def probe(module: PEagleModule, seed: int = 0) -> Tensor:
    """Draft logits ``[S + 3, Vd]`` float32 of rows with random features and of three masks behind them, on the CPU."""
    config = module.config
    tensors = {name: tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()}
    copy = bare_head(PEagleModule, config, module.vocab, tensors).float().eval()
    generator = torch.Generator().manual_seed(seed)
    aux = torch.randn(LENGTH, config.fc_input_size, generator=generator)  # [S,A·Ht]
    table = torch.randn(config.vocab_size, config.hidden_size, generator=generator)  # [V,H]
    ids = torch.randint(config.vocab_size, (LENGTH,), generator=generator)  # [S]
    embed = copy.embed if config.own_embedding else table.__getitem__
    mask_embedding, mask_state = copy.mask_row(embed)  # [1,H] each
    embedding = torch.cat((embed(ids), mask_embedding.expand(MASKS, -1)))  # [S+3,H]
    state = torch.cat((copy.fuse(aux), mask_state.expand(MASKS, -1)))  # [S+3,H]
    positions = torch.arange(LENGTH + MASKS)
    positions[LENGTH // 2 :] += FAR_POSITION
    cos, sin = copy.rotary(positions)  # [S+3,d/2]
    distance = positions[:, None] - positions  # [S+3,S+3]
    visible = (distance >= 0) & (distance < (config.sliding_window or distance.max() + 1))
    for index, layer in enumerate(copy.layers):
        q, k, v, residual = layer.project(embedding if index == 0 else None, state, cos, sin)
        state = layer.combine(causal_attention(q, k, v, layer.scale, visible), residual)  # [S+3,H]
    return copy.lm_head(copy.head_input(state))
