"""``PEagleConfig``: an EAGLE-3 head's configuration, and the token that stands where nothing is known yet."""

from __future__ import annotations

from dataclasses import dataclass

from modelopt_eagle.draft.config import DraftConfig
from modelopt_eagle.errors import CheckpointError


@dataclass
class PEagleConfig(DraftConfig):
    """Sizes and flags of a P-EAGLE head.

    Attributes:
        mask_token_id: the token that the rows of depth 1 and beyond read; ``None`` until the data is known.
        trained_depth: K, drafted tokens that it was trained for, for the record; never a limit.
    """

    mask_token_id: int | None = None
    trained_depth: int | None = None
    algorithm: str = "peagle"

    def validate(self) -> None:
        """Raise :class:`CheckpointError` when the sizes contradict each other."""
        super().validate()
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            raise CheckpointError(
                f"mask_token_id is {self.mask_token_id}, the target has {self.vocab_size} tokens: name one of them "
                "that its text does not use (peagle.mask_token_id)"
            )
        if self.norm_output:
            raise CheckpointError("norm_output shapes the state of a next step, and a P-EAGLE head has none: unset it")

    def mask(self) -> int:
        """The mask token.

        Raises:
            CheckpointError: it is not known.
        """
        if self.mask_token_id is None:
            raise CheckpointError("this P-EAGLE head names no mask_token_id: which token was it trained with?")
        return self.mask_token_id
