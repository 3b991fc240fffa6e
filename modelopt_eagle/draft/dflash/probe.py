"""One pass of a head on fixed numbers, to compare what was trained with what was written."""

from __future__ import annotations

import torch
from torch import Tensor

from modelopt_eagle.draft.dflash.block import run_blocks
from modelopt_eagle.draft.dflash.module import DFlashModule
from modelopt_eagle.draft.documents import Documents, WholeAxis
from modelopt_eagle.draft.predictions import BatchView

LENGTH = 6


@torch.no_grad()
def probe(module: DFlashModule, seed: int = 0) -> Tensor:
    """Draft logits ``[2, B, Vd]`` float32 of two blocks on random features; computed in float32 on the CPU."""
    config = module.config
    with torch.random.fork_rng(devices=[]):
        copy = DFlashModule(config, module.vocab)
    copy.load_state_dict({name: tensor.cpu() for name, tensor in module.state_dict().items()})
    copy = copy.float().eval()
    generator = torch.Generator().manual_seed(seed)
    aux = torch.randn(LENGTH, config.fc_input_size, generator=generator)  # [S,A·Ht]
    table = torch.randn(LENGTH + 1, config.hidden_size, generator=generator)  # [S+1,H] tokens, and the mask
    own = copy.embed if config.own_embedding else lambda ids: table[-1].expand(*ids.shape, -1)
    view = BatchView(
        input_ids=torch.zeros(LENGTH, dtype=torch.int64),
        supervised=torch.ones(LENGTH, dtype=torch.bool),
        documents=Documents.make(1, LENGTH, None, "cpu"),
        aux_hidden=aux,
        final_hidden=None,
        embed=table.__getitem__,
        length=LENGTH,
        axis=WholeAxis(LENGTH, "cpu"),
        embed_ids=own,
    )
    return copy.lm_head(run_blocks(copy, view, torch.tensor([1, LENGTH - 2]), config.block_size))
