"""``DFlashConfig``: a draft layer's sizes, the block, and the token that stands where nothing is known yet."""

from __future__ import annotations

from dataclasses import dataclass

from modelopt_eagle.draft.config import DraftConfig
from modelopt_eagle.errors import CheckpointError


@dataclass
class DFlashConfig(DraftConfig):
    """Sizes and flags of a DFlash head.

    Attributes:
        block_size: B, tokens of a trained block with the known one in front: B−1 are drafted.
        causal: a slot of the block sees the slots before it only; otherwise all of them.
        mask_token_id: the token of the slots that are to be drafted; ``None`` until the data is known.
        shares_head: the output layer is the target's own, frozen and not exported.
    """

    qk_norm: bool = True
    block_size: int = 8
    causal: bool = False
    mask_token_id: int | None = None
    shares_head: bool = False
    algorithm: str = "dflash"

    def validate(self) -> None:
        """Raise :class:`CheckpointError` when the sizes contradict each other."""
        super().validate()
        if self.block_size < 2:
            raise CheckpointError(f"block_size counts the known token in front, so it is at least 2: {self.block_size}")
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            raise CheckpointError(
                f"mask_token_id is {self.mask_token_id}, the target has {self.vocab_size} tokens: name one of them "
                "that its text does not use (dflash.mask_token_id)"
            )
        if self.decoder_type != "llama" or not self.qk_norm:
            raise CheckpointError("DFlash heads have grouped-query attention with query and key norms, as engines do")
        if self.shares_head and self.hidden_size != self.target_hidden_size:
            raise CheckpointError(
                f"a head {self.hidden_size} wide cannot share the output layer of a target {self.target_hidden_size} "
                "wide: set dflash.head: own"
            )

    def mask(self) -> int:
        """The mask token.

        Raises:
            CheckpointError: it is not known.
        """
        if self.mask_token_id is None:
            raise CheckpointError("this DFlash head names no mask_token_id: which token was it trained with?")
        return self.mask_token_id

    def describe(self) -> str:
        """The resolved architecture in words."""
        order = "causal" if self.causal else "bidirectional"
        head = "the target's output layer" if self.shares_head else "an output layer of its own"
        return f"{super().describe()}, {order} blocks of {self.block_size}, {head}"
