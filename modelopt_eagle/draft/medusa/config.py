"""``MedusaConfig``: how many heads, how deep, and whether they share their output layer."""

from __future__ import annotations

from dataclasses import dataclass

from modelopt_eagle.draft.config import MOST_LAYERS, DraftConfig
from modelopt_eagle.errors import CheckpointError


@dataclass
class MedusaConfig(DraftConfig):
    """Sizes of Medusa heads. Of the fields of a decoder layer none is read; ``aux_layer_ids`` is the last layer.

    Attributes:
        heads: K, drafted tokens.
        blocks: residual blocks of each head.
        shared_output: one output layer for all heads; otherwise one for each.
    """

    heads: int = 4
    blocks: int = 1
    shared_output: bool = True
    algorithm: str = "medusa"

    def validate(self) -> None:
        """Raise :class:`CheckpointError` when the sizes contradict each other."""
        super().validate()
        if self.hidden_size != self.target_hidden_size:
            raise CheckpointError(
                f"Medusa heads are as wide as their target ({self.target_hidden_size}), found {self.hidden_size}"
            )
        if min(self.heads, self.blocks) < 1:
            raise CheckpointError(f"Medusa needs a head and a block at least, found {self.heads} and {self.blocks}")
        if self.heads * self.blocks > MOST_LAYERS:
            raise CheckpointError(
                f"{self.heads} Medusa heads of {self.blocks} blocks: at most {MOST_LAYERS} blocks are read"
            )
        if self.num_aux != 1:
            raise CheckpointError(f"Medusa reads the last layer alone, found layers {list(self.aux_layer_ids)}")

    def describe(self) -> str:
        """The resolved architecture in words."""
        output = "a shared output layer" if self.shared_output else "an output layer each"
        return f"{self.heads} Medusa heads of {self.hidden_size}, {self.blocks} residual blocks each, {output}"
