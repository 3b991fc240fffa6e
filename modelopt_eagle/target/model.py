"""``Target``: a frozen causal language model with its parts at hand."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from modelopt_eagle.common.dtypes import logit_tolerance
from modelopt_eagle.common.layers import check_layer_ids, default_layer_ids
from modelopt_eagle.common.text import first_line
from modelopt_eagle.errors import TargetError
from modelopt_eagle.target import identity
from modelopt_eagle.target.capture import LayerCapture
from modelopt_eagle.target.head import TargetHead
from modelopt_eagle.target.identity import TargetIdentity
from modelopt_eagle.target.parts import find_parts
from modelopt_eagle.target.shards import Shards, for_another, lockstep_of
from modelopt_eagle.target.stops import find_end_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class TargetOutput:
    """Features of one batch, in the target's dtype.

    ``aux_hidden`` [B, S, A·Ht]: outputs of the auxiliary layers, ascending; ``final_hidden`` [B, S, Ht]: after the
    final norm. Values at padded positions are meaningless.
    """

    aux_hidden: Tensor
    final_hidden: Tensor


class Target:
    """A frozen target in evaluation mode.

    Attributes:
        model: the transformers model; no parameter requires a gradient.
        config: its text config.
        tokenizer: with the chat template in effect; None if the model has none.
        embedding: plain ``nn.Embedding`` [V, Ht] over the token table, without the scaling some models apply after
            it, as engines hand the bare table to the draft.
        layers, final_norm: the decoder layers and the norm after them.
        lm_head_weight: [V, Ht].
        head: ``TargetHead``, post-norm hidden states to logits.
        num_layers, hidden_size (Ht), vocab_size (V), name, device, dtype.
        shards: the processes that hold it together, ``None`` where it is whole here.
        lockstep: keeps their forward passes in step, see :func:`~modelopt_eagle.target.shards.together`.

    Args:
        model: a transformers causal language model, or a wrapper with one inside.
        tokenizer: its tokenizer or None.
        name: name to show and to record.
        source: local folder that the weights came from, for the fingerprint.
        vision: the ``VisionProcessor`` of a vision-language model, None for a model of text.
        revision: commit hash on the hub; without it a fingerprint of the content is used.
        shards: of a model that is split already.

    Raises:
        TargetError: a part of the model was not found.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer,
        *,
        name: str,
        source=None,
        revision: str | None = None,
        vision=None,
        shards: Shards | None = None,
    ):
        self.model = model.eval().requires_grad_(False)
        self.config = model.config.get_text_config(decoder=True)
        self.tokenizer = tokenizer
        self.name, self.vision = name, vision
        self._source = None if source is None else Path(source)
        self._revision = revision
        self.parts = find_parts(model, self.config)
        self.layers, self.final_norm = self.parts.layers, self.parts.final_norm
        table = self._materialised("embedding", self.parts.embedding)
        self.embedding = nn.Embedding.from_pretrained(table, freeze=True)
        self.lm_head_weight = self._materialised("output head", self.parts.head)
        self.head = TargetHead.from_config(self.config, self.lm_head_weight, getattr(self.parts.head, "bias", None))
        self.num_layers = len(self.layers)
        self.hidden_size = self.config.hidden_size
        self.vocab_size = self.lm_head_weight.shape[0]
        self.shards = shards
        self.lockstep = None if shards is None else lockstep_of(self.parts.backbone, shards, self.device)
        self._final_checked = self._usable = False

    def __repr__(self) -> str:
        return f"Target({self.name!r}, {self.num_layers} layers of {self.hidden_size}, {self.vocab_size} tokens)"

    @property
    def device(self) -> torch.device:
        """Where token ids go in: the device of the embedding."""
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the embedding, and of the features."""
        return self.embedding.weight.dtype

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """The ids that end an answer, ascending; see :mod:`modelopt_eagle.target.stops`."""
        generation = getattr(self.model, "generation_config", None)
        return find_end_token_ids(self.tokenizer, generation, self.model.config, self.config)

    def default_aux_layer_ids(self) -> tuple[int, ...]:
        """EAGLE-3's three layers of this target; TargetError below 6 layers. See ``common/layers.py``."""
        return default_layer_ids(self.num_layers)

    def capture(
        self,
        aux_layer_ids: Sequence[int] | None = None,
        *,
        gradient: bool = False,
        into=None,
        next_input: bool = False,
    ) -> LayerCapture:
        """Hooks as a context manager: each forward of the model inside fills ``.aux_hidden`` [B, S, A·Ht].

        Args:
            aux_layer_ids: ids of the captured layers; None: the default three.
            gradient: keep the values in the graph.
            into: a ``CaptureBuffer`` that takes the values, see :class:`LayerCapture`.
            next_input: what the next layer gets, for passes over images, see :class:`LayerCapture`.

        Raises:
            TargetError: ids repeated or out of range; no ids and fewer than 6 layers.
        """
        ids = self.default_aux_layer_ids() if aux_layer_ids is None else aux_layer_ids
        ids = check_layer_ids(ids, self.num_layers)
        return LayerCapture(self.parts.backbone, self.layers, ids, self.hidden_size, gradient, into, next_input)

    def features(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        aux_layer_ids: Sequence[int] | None = None,
        *,
        gradient: bool = False,
        images: dict[str, Tensor] | None = None,
    ) -> TargetOutput:
        """Run the backbone, without its output head.

        Args:
            input_ids: [B, S] int64.
            attention_mask: [B, S], 1 at real tokens; None: no padding. Rows padded on the left get positions that
                count from their first real token, as in ``generate``.
            aux_layer_ids: ids of the captured layers, 0-based outputs; None: the default three.
            gradient: keep the graph, through which a gradient reaches the adapters of the target.
            images: what ``vision.inputs`` made of the images of these rows. The whole model is run then, as its own
                forward puts images and text together, and a captured state is what the next layer gets: with the
                features of the images that some models add between layers, as vLLM captures it.

        Returns:
            ``aux_hidden`` [B, S, A·Ht] and ``final_hidden`` [B, S, Ht] after the final norm.

        Raises:
            TargetError: bad layer ids, or a backbone whose output is not that of its final norm.
        """
        if images is not None:
            return self._features_with_images(input_ids, images, aux_layer_ids, gradient)
        arguments = {"input_ids": input_ids.to(self.device), "use_cache": False}
        if attention_mask is not None:
            left = not bool(attention_mask[:, 0].all())  # a mask on the CPU saves asking the device
            mask = attention_mask.to(self.device)  # [B,S]
            arguments["attention_mask"] = mask
            if left:
                arguments["position_ids"] = (mask.long().cumsum(-1) - 1).clamp_min(0)  # [B,S]
        with torch.set_grad_enabled(gradient), self.capture(aux_layer_ids, gradient=gradient) as captured:
            final_hidden = self._run_backbone(arguments)  # [B,S,Ht]
        return TargetOutput(captured.aux_hidden.to(final_hidden.device), final_hidden)

    def image_arguments(self, images: dict[str, Tensor]) -> dict[str, Tensor]:
        """Those of the tensors that ``vision.inputs`` made that the model's forward takes, on its device."""
        known = inspect.signature(self.model.forward).parameters
        return {
            name: value.to(self.device, self.dtype if value.is_floating_point() else None)
            for name, value in images.items()
            if name in known
        }

    def _features_with_images(self, input_ids, images, aux_layer_ids, gradient: bool) -> TargetOutput:
        """Features of rows of one length without padding, by the whole model; its head runs on the last token only."""
        arguments: dict[str, Any] = {**self.image_arguments(images)}
        if "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            arguments["logits_to_keep"] = 1
        input_ids = input_ids.to(self.device)
        outputs: list[Tensor] = []
        handle = self.parts.backbone.register_forward_hook(lambda module, inputs, output: outputs.append(output[0]))
        capture = self.capture(aux_layer_ids, gradient=gradient, next_input=True)
        try:
            with torch.set_grad_enabled(gradient), capture as captured:
                self.model(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), use_cache=False, **arguments)
        except (ValueError, RuntimeError, IndexError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise TargetError(f"{self.name} refused the images that its own processor made: {error}") from error
        finally:
            handle.remove()
        return TargetOutput(captured.aux_hidden.to(outputs[-1].device), outputs[-1])  # [B,S,A·Ht], [B,S,Ht]

    def logits(self, final_hidden: Tensor) -> Tensor:
        """Logits [..., V] of post-norm hidden states [..., Ht]."""
        return self.head(final_hidden)

    @torch.no_grad()
    def check_parity(self, input_ids: Tensor) -> None:
        """Compare the logits rebuilt from ``features`` with the model's own on a sample of token ids [B, S].

        The argmax must agree at every position (a tie within rounding aside) and so must the values, as the
        distillation loss depends on their scale.

        Raises:
            TargetError: they differ; the message says where and by how much.
        """
        input_ids = input_ids.to(self.device)
        own = self.model(input_ids=input_ids, use_cache=False).logits.float()  # [B,S,V]
        layer = [self.num_layers - 1]
        rebuilt = self.logits(self.features(input_ids, None, layer).final_hidden).to(own.device).float()  # [B,S,V]
        tolerance = logit_tolerance(self.lm_head_weight.dtype) * float(own.abs().max())
        chosen = rebuilt.argmax(-1, keepdim=True)  # [B,S,1]
        behind = own.max(-1).values - own.gather(-1, chosen).squeeze(-1)  # [B,S] what the choice costs in own logits
        wrong = behind > tolerance
        difference = float((own - rebuilt).abs().max())
        if not bool(wrong.any()) and difference <= tolerance:
            return
        raise TargetError(
            f"{self.name}: teacher parity broken: logits rebuilt from the post-norm hidden state and the output head "
            f"should equal the model's own; {int(wrong.sum())} of {wrong.numel()} argmax tokens differ, the largest "
            f"difference is {difference:.3g} (allowed {tolerance:.3g}). Contract: norm "
            f"'{self.parts.names['final_norm']}', head '{self.parts.names['head']}', scale {self.head.scale:g}, cap "
            f"{self.head.cap}. A model that changes its logits in another way after its head is not supported."
        )

    def check_usable(self) -> None:
        """Run a few tokens once, when the target is loaded, and hold what a draft head needs of it against them.

        Raises:
            TargetError: the model's code fails, a layer has no residual stream of the model's width, a state is no
                number, or it changes with later tokens.
        """
        if self._usable:
            return
        try:
            self.check_causal()
        except torch.OutOfMemoryError:
            raise
        except TargetError as error:
            named = str(error) if str(error).startswith(self.name) else f"{self.name}: {error}"
            raise TargetError(named) from error
        except Exception as error:  # code of any model; each kind means the same here
            raise TargetError(
                f"{self.name}: {type(self.model).__name__} cannot be run on a few tokens: {type(error).__name__}: "
                f"{first_line(error)}; check that its configuration belongs to this version of transformers"
            ) from error
        self._usable = True

    def check_causal(self, length: int = 12) -> None:
        """Hold the states of a text against those of the same text with other ends, from every token on.

        A draft head is trained at every position of a whole text and served at the end of a growing one, so no state
        may depend on a later token. Prefix language models, encoders in disguise and wrappers with a bidirectional mask
        do, and everything else about them looks as it should.

        Args:
            length: S tokens of the text; S rows of them are run in one pass.

        Raises:
            TargetError: a state that is no number, or that a later token changes, with its layer.
        """
        generator = torch.Generator().manual_seed(0)
        text, other = torch.randint(0, self.vocab_size, (2, 1, length), generator=generator)  # [1,S] each
        place, begin = torch.arange(length), torch.arange(length)[:, None]  # [S], [S,1]
        ids = torch.where((place >= begin) & (begin > 0), other, text)  # [S,S] row 0 is the text, row r changes from r
        kept = (place < begin).to(self.device)  # [S,S] what must be as in the text
        layers = list(range(self.num_layers))
        found = self.features(ids, None, layers)
        for layer, states in enumerate([*found.aux_hidden.chunk(len(layers), -1), found.final_hidden]):
            states = states.float()  # [S,S,Ht]
            where = f"layer {layer}" if layer < len(layers) else "the final norm"
            if not bool(torch.isfinite(states).all()):
                raise TargetError(
                    f"{self.name}: the output of {where} is not finite on a few tokens: the weights hold numbers that "
                    f"are none, or the states are too large for {self.lm_head_weight.dtype} (another dtype mends it)"
                )
            changed = (states - states[:1]).abs().amax(-1).masked_fill(~kept.to(states.device), 0)  # [S,S]
            size = float(states[0].abs().max())
            wrong = (changed > (1e-4 if self.lm_head_weight.dtype == torch.float32 else 5e-2) * size).nonzero()  # [n,2]
            if len(wrong):
                row, token = wrong[0].tolist()
                difference = float(changed[row, token])
                raise TargetError(
                    f"{self.name} is not causal: the output of {where} at token {token + 1} of {length} changes by "
                    f"{difference:.3g} (of {size:.3g}) when only tokens after the first {row} change. A draft head "
                    "needs a target whose states depend on earlier tokens alone, which prefix and bidirectional "
                    "language models lack"
                )

    @property
    def embedding_weight(self) -> Tensor:
        """[V, Ht] the token table, unscaled."""
        return self.embedding.weight

    def identity(self) -> TargetIdentity:
        """What features of this target are recorded with: model, revision, hashes and sizes."""
        if self._revision is None:
            if self._source is not None:
                self._revision = identity.folder_fingerprint(self._source)
            else:
                self._revision = identity.memory_fingerprint(self.config, self.model.parameters())
        return TargetIdentity(
            model=self.name if self._source is None else identity.local_name(self._source),
            revision=self._revision,
            tokenizer_hash=identity.tokenizer_hash(self.tokenizer),
            template_hash=identity.template_hash(self.tokenizer),
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            vocab_size=self.vocab_size,
        )

    def _run_backbone(self, arguments: dict) -> Tensor:
        """The backbone's last hidden state [B,S,Ht]; at the first call it is compared with the final norm's output."""
        normed: list[Tensor] = []
        handle = None
        if not self._final_checked:
            handle = self.final_norm.register_forward_hook(
                lambda module, inputs, output: None if for_another() else normed.append(output)
            )
        try:
            final_hidden = self.parts.backbone(**arguments)[0]  # [B,S,Ht]
        finally:
            if handle is not None:
                handle.remove()
        if handle is not None:
            same = normed and normed[-1].shape == final_hidden.shape
            if not same or not torch.equal(normed[-1].nan_to_num(), final_hidden.nan_to_num()):  # NaN is told apart
                raise TargetError(
                    f"{self.name}: expected the last hidden state of '{self.parts.names['backbone'] or 'the model'}' "
                    f"to be the output of its final norm '{self.parts.names['final_norm']}'; it is not, so the "
                    "teacher's logits cannot be rebuilt. This model family is not supported."
                )
            self._final_checked = True
        return final_hidden

    def _materialised(self, what: str, module: nn.Module) -> Tensor:
        """A module's weight, after checking that it lies in memory as floating-point numbers."""
        weight = module.weight
        if not isinstance(weight, Tensor):
            raise TargetError(f"{self.name}: the {what} must have a table as its weight, found {type(weight).__name__}")
        if weight.is_meta or not weight.is_floating_point():
            state = "offloaded to another place" if weight.is_meta else f"stored as {weight.dtype}"
            raise TargetError(
                f"{self.name}: the {what} must be a floating-point table in memory, found it {state}; "
                "choose a device with room for the model, or a checkpoint that leaves this table unquantised"
            )
        return weight.detach()
