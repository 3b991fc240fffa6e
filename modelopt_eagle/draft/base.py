"""What every draft head has, whatever its kind: a configuration, a vocabulary map and, perhaps, its own embedding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_eagle.draft.vocab import UNSET, DraftVocab
from modelopt_eagle.errors import CheckpointError


class DraftModule(nn.Module):
    """Base of the draft heads.

    A head of any kind hands the loss states ``[n, H]`` after its last norm, and the matrices that turn a state into
    logits over the draft vocabulary. How the states are made is the kind's own, see
    :class:`~modelopt_eagle.draft.algorithm.Algorithm`.

    Args:
        config: with ``vocab_size`` V, ``draft_vocab_size`` Vd, ``own_embedding`` and ``algorithm``.
        vocab: the draft vocabulary. Without one, a full-size head gets the identity, and a reduced head a map of
            invalid entries that every later reading refuses until :meth:`set_vocab` is called.

    Buffers: ``d2t [Vd]`` int64 offsets, ``t2d [V]`` bool.
    """

    d2t: Tensor
    t2d: Tensor
    lm_head: nn.Linear
    embed_tokens: nn.Embedding

    def __init__(self, config: Any, vocab: DraftVocab | None = None):
        super().__init__()
        self.config = config
        self.register_buffer("d2t", torch.full((config.draft_vocab_size,), UNSET, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        if vocab is None and config.draft_vocab_size == config.vocab_size and not self.d2t.is_meta:
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

    @property
    def dtype(self) -> torch.dtype:
        """Of the head's numbers."""
        return next(self.parameters()).dtype

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

    def output_weights(self, depths: int) -> Sequence[Tensor]:
        """Of each depth the matrix ``[Vd, H]`` that makes logits of a state; here one ``lm_head`` for all of them."""
        return [self.lm_head.weight] * depths

    def meet_target(self, rows: Callable[[Tensor], Tensor]) -> None:
        """Take over what the head shares with its target; nothing here. Called whenever the two come together.

        Args:
            rows: target ids ``[n]`` to the target's output rows ``[n, Ht]``.
        """

    def compile_layers(self, backend: str = "inductor") -> None:
        """Compile what has a fixed shape of computation with ``torch.compile``; nothing here.

        Parameters and their names do not change.
        """
