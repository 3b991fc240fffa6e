"""What the other rooms read of a target, as protocols: its tables alone, or the model that runs.

``TableTarget`` is what offline and streamed training need (``Target`` and ``TargetTables`` both are one);
``RunningTarget`` adds the forward pass, for features, decoding and validation. A class of somebody else that has these
members can stand in for ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from modelopt_eagle.target.identity import TargetIdentity

if TYPE_CHECKING:
    from modelopt_eagle.target.capture import LayerCapture
    from modelopt_eagle.target.head import TargetHead
    from modelopt_eagle.target.model import TargetOutput
    from modelopt_eagle.target.parts import TargetParts
    from modelopt_eagle.target.vision import VisionProcessor


@runtime_checkable
class TableTarget(Protocol):
    """The tables of a frozen target: enough to train from features that are stored or streamed.

    Attributes:
        name: to show and to record.
        config: the text config of transformers.
        tokenizer: with the chat template in effect; ``None`` if the model has none.
        vision: of a vision-language model, to read rows with images; else ``None``.
        embedding_weight: [V, Ht] the token table, unscaled.
        final_norm: the norm after the last layer.
        head: post-norm hidden states [..., Ht] to logits [..., V].
        hidden_size, num_layers, vocab_size: Ht, number of decoder layers, V.
        end_token_ids: the ids that end an answer, ascending.
    """

    @property
    def name(self) -> str: ...
    @property
    def config(self) -> Any: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def vision(self) -> VisionProcessor | None: ...
    @property
    def embedding_weight(self) -> Tensor: ...
    @property
    def final_norm(self) -> nn.Module: ...
    @property
    def head(self) -> TargetHead: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def end_token_ids(self) -> tuple[int, ...]: ...

    def identity(self) -> TargetIdentity:
        """What features and heads of this target are recorded with."""
        ...


@runtime_checkable
class RunningTarget(TableTarget, Protocol):
    """A frozen target that can be run.

    Attributes:
        model: the transformers model.
        parts: its modules and their names.
        layers: the decoder layers.
        embedding: [V, Ht], as a module.
        device, dtype: of the embedding, so of token ids and features.
    """

    @property
    def model(self) -> Any: ...
    @property
    def parts(self) -> TargetParts: ...
    @property
    def layers(self) -> nn.ModuleList: ...
    @property
    def embedding(self) -> nn.Embedding: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...

    def default_aux_layer_ids(self) -> tuple[int, ...]:
        """The layers that are captured where none are named."""
        ...

    def capture(
        self,
        aux_layer_ids: Sequence[int] | None = None,
        *,
        gradient: bool = False,
        into: Any = None,
        next_input: bool = False,
    ) -> LayerCapture:
        """A context in which each forward of the model fills ``.aux_hidden`` [B, S, A·Ht]."""
        ...

    def features(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        aux_layer_ids: Sequence[int] | None = None,
        *,
        gradient: bool = False,
        images: dict[str, Tensor] | None = None,
    ) -> TargetOutput:
        """Auxiliary states [B, S, A·Ht] and final states [B, S, Ht] of token ids [B, S]."""
        ...

    def image_arguments(self, images: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the model's forward takes of the tensors that its processor made of images."""
        ...

    def logits(self, final_hidden: Tensor) -> Tensor:
        """Logits [..., V] of post-norm hidden states [..., Ht]."""
        ...

    def check_parity(self, input_ids: Tensor) -> None:
        """Compare the logits rebuilt from ``features`` with the model's own on token ids [B, S]."""
        ...
