"""``EagleModule``: the draft head itself. It knows nothing of training, files or servers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from modelopt_eagle.draft.config import DraftConfig
from modelopt_eagle.draft.layers import DecoderLayer
from modelopt_eagle.draft.rotary import Rotary
from modelopt_eagle.draft.vocab import UNSET, DraftVocab
from modelopt_eagle.errors import CheckpointError


class EagleModule(nn.Module):
    """EAGLE-3 draft head.

    ``fuse`` turns the target's captured features into a state; each step then reads a token embedding and a state,
    and ``lm_head(norm(output))`` gives logits over the draft vocabulary. How steps attend to each other is the
    caller's (``training.rollout``, ``decoding``), through the two halves of a layer.

    Args:
        config: sizes and flags.
        vocab: the draft vocabulary. Without one, a full-size head gets the identity, and a reduced head a map of
            invalid entries that every later reading refuses until :meth:`set_vocab` is called.

    Buffers: ``d2t [Vd]`` int64 offsets, ``t2d [V]`` bool.
    Source: EAGLE-3 (arXiv 2503.01840) section 3; placement of norms and residuals as in vLLM's ``llama_eagle3.py``.
    """

    def __init__(self, config: DraftConfig, vocab: DraftVocab | None = None):
        super().__init__()
        self.config = config
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(config.fc_input_size, width, bias=False)
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(config.fc_input_size, eps=eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(config.target_hidden_size, eps=eps) for _ in config.aux_layer_ids)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(width, eps=eps)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        self.rotary = Rotary(config)
        self.register_buffer("d2t", torch.full((config.draft_vocab_size,), UNSET, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        if vocab is None and config.draft_vocab_size == config.vocab_size:
            vocab = DraftVocab.identity(config.vocab_size)
        if vocab is not None:
            self.set_vocab(vocab)

    def set_vocab(self, vocab: DraftVocab) -> None:
        """Give the head its vocabulary map.

        Raises:
            CheckpointError: sizes that differ from the config's.
        """
        if vocab.size != self.config.draft_vocab_size or vocab.t2d.numel() != self.config.vocab_size:
            raise CheckpointError(
                f"the vocabulary map is {vocab.size} of {vocab.t2d.numel()} tokens, the head is built for "
                f"{self.config.draft_vocab_size} of {self.config.vocab_size}"
            )
        self.d2t.copy_(vocab.d2t)
        self.t2d.copy_(vocab.t2d)

    @property
    def vocab(self) -> DraftVocab:
        """The map as a checked :class:`DraftVocab` (raises while it is unset)."""
        return DraftVocab(self.d2t, self.t2d)

    @property
    def target_ids(self) -> Tensor:
        """``[Vd]`` int64: target id of each draft id, unchecked."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def embed(self, token_ids: Tensor, target_embedding: nn.Module | None = None) -> Tensor:
        """``[...] -> [..., H]``: the head's own table if it has one, else the target's.

        Raises:
            CheckpointError: neither was given.
        """
        if self.config.own_embedding:
            return self.embed_tokens(token_ids)
        if target_embedding is None:
            raise CheckpointError("this head reads the target's embedding table: pass it")
        return target_embedding(token_ids)

    def fuse(self, aux_hidden: Tensor) -> Tensor:
        """``[..., A·Ht] -> [..., H]``: the concatenated layer outputs through ``fc`` and its optional norms."""
        if self.config.norm_before_fc:
            aux_hidden = self.input_norm(aux_hidden)
        if self.config.fc_norm:
            parts = aux_hidden.chunk(self.config.num_aux, dim=-1)
            aux_hidden = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(aux_hidden)

    def head_input(self, output: Tensor) -> Tensor:
        """``[..., H] -> [..., H]``: the final norm, what ``lm_head`` reads."""
        return self.norm(output)

    def next_state(self, output: Tensor) -> Tensor:
        """``[..., H] -> [..., H]``: the state that the next step takes over."""
        return self.norm(output) if self.config.norm_output else output
