"""``EagleModule``: the draft head itself. It knows nothing of training, files or servers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from modelopt_eagle.draft.base import DraftModule
from modelopt_eagle.draft.config import DraftConfig
from modelopt_eagle.draft.layers import DecoderLayers
from modelopt_eagle.draft.rotary import Rotary
from modelopt_eagle.draft.vocab import DraftVocab


class EagleModule(DraftModule):
    """EAGLE-3 draft head.

    ``fuse`` turns the target's captured features into a state; each step then reads a token embedding and a state,
    and ``lm_head(norm(output))`` gives logits over the draft vocabulary. How steps attend to each other is the
    caller's (``training.rollout``, ``decoding``), through the two halves of a layer.

    Args:
        config: sizes and flags.
        vocab: the draft vocabulary, see :class:`~modelopt_eagle.draft.base.DraftModule`.

    Source: EAGLE-3 (arXiv 2503.01840) section 3; placement of norms and residuals as in vLLM's ``llama_eagle3.py``.
    """

    def __init__(self, config: DraftConfig, vocab: DraftVocab | None = None):
        super().__init__(config, vocab)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(config.fc_input_size, width, bias=False)
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(config.fc_input_size, eps=eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(config.target_hidden_size, eps=eps) for _ in config.aux_layer_ids)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.layers = DecoderLayers(config)
        self.norm = nn.RMSNorm(width, eps=eps) if config.last_norm else nn.Identity()
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        self.rotary = Rotary(config)

    def fuse(self, aux_hidden: Tensor) -> Tensor:
        """``[..., A·Ht] -> [..., H]``: the concatenated layer outputs through ``fc`` and its optional norms."""
        if self.config.norm_before_fc:
            aux_hidden = self.input_norm(aux_hidden)
        if self.config.fc_norm:
            parts = aux_hidden.chunk(self.config.num_aux, dim=-1)
            aux_hidden = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(aux_hidden)

    def head_input(self, output: Tensor) -> Tensor:
        """``[..., H] -> [..., H]``: what ``lm_head`` reads, after the final norm (if the head has one)."""
        return self.norm(output)

    def next_state(self, output: Tensor) -> Tensor:
        """``[..., H] -> [..., H]``: the state that the next step takes over."""
        return self.norm(output) if self.config.norm_output else output

    def compile_layers(self, backend: str = "inductor") -> None:
        """Compile the two halves of every decoder layer and the fusion of the features, for inputs of any length.

        What lies between them (which rows see which keys) has shapes that depend on the data and stays as it is. The
        module's parameters and their names do not change.
        """
        halves = [(layer, name) for layer in self.layers for name in ("project", "combine")]
        for owner, name in [(self, "fuse"), *halves]:
            setattr(owner, name, torch.compile(getattr(owner, name), dynamic=True, backend=backend))
