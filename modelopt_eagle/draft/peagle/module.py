"""``PEagleModule``: the parts of an EAGLE-3 head, and one learned row that stands where features are not known yet."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from modelopt_eagle.draft.module import EagleModule
from modelopt_eagle.draft.peagle.config import PEagleConfig
from modelopt_eagle.draft.vocab import DraftVocab


class PEagleModule(EagleModule):
    """P-EAGLE draft head.

    Beside the parts of :class:`~modelopt_eagle.draft.module.EagleModule` it has ``mask_hidden [A·Ht]``, in the space of
    the captured features: a row of the draft that has no features of the target reads it, through the same norms and
    ``fc``, with the embedding of the mask token.

    Args:
        config: sizes and flags.
        vocab: the draft vocabulary.

    Source: P-EAGLE (arXiv 2602.01469); names as in vLLM's ``llama_eagle3.py``.
    """

    def __init__(self, config: PEagleConfig, vocab: DraftVocab | None = None):
        super().__init__(config, vocab)
        self.mask_hidden = nn.Parameter(torch.randn(config.fc_input_size))

    def mask_row(self, embed_ids: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """``([1, H], [1, H])``: embedding and state that every mask row begins with.

        Args:
            embed_ids: token ids ``[1]`` to embeddings ``[1, H]``.

        Raises:
            CheckpointError: the head names no mask token.
        """
        ids = torch.full((1,), self.config.mask(), device=self.mask_hidden.device)
        return embed_ids(ids), self.fuse(self.mask_hidden[None])
