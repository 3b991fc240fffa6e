"""``DraftConfig``: everything that fixes the computation of a draft head, and nothing about how it was trained."""

from __future__ import annotations

import difflib
import statistics
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from modelopt_eagle.common.layers import check_layer_ids, default_layer_ids
from modelopt_eagle.draft.decoders import DECODERS
from modelopt_eagle.errors import CheckpointError, TargetError

if TYPE_CHECKING:
    from typing_extensions import Self

MOST_LAYERS = 1024
"""Layers beyond any head's: a config that names more is damaged, and building them would fill the memory."""
PER_LAYER = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
"""Sizes that some targets have one of for each layer (Gemma 3n, Gemma 4); a head takes that of most layers."""
LARGEST_SIZE = 2**24
"""A width and a vocabulary beyond any target's; maps and rotary tables are as long as they."""


@dataclass
class DraftConfig:
    """Sizes and flags of a draft head.

    Attributes:
        hidden_size: width H of the head.
        target_hidden_size: width Ht of the target's hidden states.
        rope_theta: rotary base truly used.
        rope_scaling: ``None``, or the parameters of one of transformers' rope types (``rope_type``, ``factor``, ...).
        vocab_size: the target's vocabulary V; ``draft_vocab_size``: the head's own, Vd.
        aux_layer_ids: canonical ids of the captured layers, output of layer k, 0-based, ascending.
        decoder_type: ``llama`` (grouped-query attention) or ``kimik2`` (multi-head latent attention).
        norm_before_residual: the residual of layer 0 is the normed state.
        norm_before_fc: one RMSNorm over the concatenated features before ``fc``.
        fc_norm: one RMSNorm for each captured layer before ``fc``.
        norm_output: the state handed to the next step is taken after the final norm.
        qk_norm: queries and keys are normed head by head before they are rotated, as in Qwen3.
        sliding_window: a query sees the keys of its own and the ``sliding_window - 1`` positions before; ``None``: all.
        embedding_norm: the token embedding is normed before layer 0 reads it.
        last_norm: the output is normed before ``lm_head``.
        own_embedding: the head carries its own embedding table ``[V, H]`` (forced where H differs from Ht).
        training_length: longest row seen in training, for the record; never a limit.
        algorithm: the drafter that this is a head of, see :mod:`modelopt_eagle.draft.algorithm`.
    """

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_hidden_layers: int = 1
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    max_position_embeddings: int = 2048
    vocab_size: int = 0
    draft_vocab_size: int = 0
    aux_layer_ids: tuple[int, ...] = ()
    decoder_type: str = "llama"
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    embedding_norm: bool = True
    last_norm: bool = True
    own_embedding: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    target_name: str | None = None
    target_model_type: str | None = None
    tokenizer_hash: str | None = None
    training_length: int | None = None
    algorithm: str = "eagle3"
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        self.aux_layer_ids = tuple(int(i) for i in self.aux_layer_ids)
        self.draft_vocab_size = self.draft_vocab_size or self.vocab_size
        if self.hidden_size != self.target_hidden_size:
            self.own_embedding = True
        if self.rope_scaling is not None and self.rope_scaling.get("rope_type") == "default":
            self.rope_scaling = None
        self.validate()

    def validate(self) -> None:
        """Raise :class:`CheckpointError` when the sizes contradict each other."""
        if self.decoder_type not in DECODERS:
            raise CheckpointError(f"decoder_type is {self.decoder_type!r}; known are {', '.join(DECODERS)}")
        for name in ("hidden_size", "target_hidden_size", "intermediate_size", "num_attention_heads",
                     "num_key_value_heads", "head_dim", "num_hidden_layers", "vocab_size"):  # fmt: skip
            most = MOST_LAYERS if name == "num_hidden_layers" else LARGEST_SIZE
            if not 1 <= int(getattr(self, name)) <= most:
                raise CheckpointError(f"{name} must be between 1 and {most}, found {getattr(self, name)}")
        if self.draft_vocab_size > self.vocab_size:
            raise CheckpointError(
                f"the draft vocabulary ({self.draft_vocab_size}) is larger than the target's ({self.vocab_size}): "
                "set eagle.draft_vocab_size to at most the target's"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise CheckpointError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )
        if not self.aux_layer_ids or len(set(self.aux_layer_ids)) != len(self.aux_layer_ids):
            raise CheckpointError(f"aux_layer_ids must be distinct and not empty, found {list(self.aux_layer_ids)}")
        decoder = DECODERS[self.decoder_type]
        missing = [name for name in decoder.required if not getattr(self, name)]
        if missing:
            raise CheckpointError(
                f"decoder_type {decoder.name} needs {', '.join(missing)}, which a new head takes from its target: for "
                "a target without latent attention give them in the recipe (eagle.kv_lora_rank, ...), or set "
                "decoder_type: llama"
            )
        if self.attention_bias and not decoder.attention_bias:
            raise CheckpointError(f"decoder_type {decoder.name} has no attention bias: no engine loads one; unset it")
        if self.qk_norm and not decoder.qk_norm:
            raise CheckpointError(f"decoder_type {decoder.name} has no qk_norm: its latents are normed; unset it")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise CheckpointError(f"sliding_window must be at least 1 position, found {self.sliding_window}")

    @property
    def num_aux(self) -> int:
        """A, the number of captured layers."""
        return len(self.aux_layer_ids)

    @property
    def fc_input_size(self) -> int:
        """A·Ht, the width of the concatenated features."""
        return self.num_aux * self.target_hidden_size

    @property
    def rotary_dim(self) -> int:
        """Width of the rotated part of a head."""
        return int(getattr(self, DECODERS[self.decoder_type].rotary))

    @classmethod
    def from_target(cls, target_config, draft_vocab_size: int | None = None, aux_layer_ids=None, **overrides) -> Self:
        """The head that suits a target: its width, heads, rotary base and norm epsilon, one layer.

        Args:
            target_config: a transformers configuration; wrappers with a ``text_config`` are looked through.
            draft_vocab_size: Vd, default the target's whole vocabulary.
            aux_layer_ids: canonical ids, default :func:`~modelopt_eagle.common.layers.default_layer_ids`.
            **overrides: any field of this class.

        Raises:
            TargetError: sizes missing, too few layers for the default ids, ids out of range, heads that do not divide.
        """
        text = target_config.get_text_config() if hasattr(target_config, "get_text_config") else target_config

        def read(name: str, default=None):
            try:
                value = getattr(text, name, None)
            except RuntimeError:  # of transformers, where the layers differ: each has a configuration of its own
                value = [getattr(layer, name, None) for layer in text.per_layer_config]
            if isinstance(value, (list, tuple)) and name in PER_LAYER:
                value = statistics.mode(value)
            return default if value is None else value

        needed = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
        missing = [name for name in needed if read(name) is None and not overrides.get(name)]
        if missing:
            mends = ": set eagle.num_attention_heads" if missing == ["num_attention_heads"] else ""
            raise TargetError(
                f"the target's configuration ({type(text).__name__}) does not say {', '.join(missing)}{mends}"
            )
        num_layers = int(text.num_hidden_layers)
        ids = default_layer_ids(num_layers) if aux_layer_ids is None else check_layer_ids(
            aux_layer_ids, num_layers)  # fmt: skip
        target_hidden = int(text.hidden_size)
        hidden = int(overrides.get("hidden_size") or target_hidden)
        heads = int(overrides.get("num_attention_heads") or read("num_attention_heads"))
        theta, scaling = rope_of(text)
        values: dict[str, Any] = dict(
            hidden_size=hidden,
            target_hidden_size=target_hidden,
            intermediate_size=int(read("intermediate_size", 4 * hidden)),
            num_attention_heads=heads,
            num_key_value_heads=int(read("num_key_value_heads", heads)),
            head_dim=int(read("head_dim", target_hidden // int(read("num_attention_heads", heads)))),
            rms_norm_eps=float(read("rms_norm_eps", 1e-5)),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=int(read("max_position_embeddings", 2048)),
            vocab_size=int(text.vocab_size),
            draft_vocab_size=int(draft_vocab_size or text.vocab_size),
            aux_layer_ids=ids,
            bos_token_id=read("bos_token_id"),
            eos_token_id=read("eos_token_id"),
            pad_token_id=read("pad_token_id"),
            target_model_type=read("model_type"),
        )
        decoder = DECODERS.get(overrides.get("decoder_type") or "llama")
        if decoder is not None:
            values.update({name: read(name) for name in decoder.sizes})
            if not decoder.shares_keys:
                values["num_key_value_heads"] = heads
        values.update({name: value for name, value in overrides.items() if value is not None})
        kv_heads = values["num_key_value_heads"]
        if heads % kv_heads:
            if overrides.get("num_attention_heads") or overrides.get("num_key_value_heads"):
                raise TargetError(
                    f"{heads} attention heads are no multiple of {kv_heads} heads of keys and values (what the recipe "
                    "leaves out is the target's): set eagle.num_attention_heads and eagle.num_key_value_heads so that "
                    "the one is a multiple of the other"
                )
            values["num_key_value_heads"] = heads
        return cls.from_dict(values)

    def describe(self) -> str:
        """The resolved architecture in words: its sizes, and every flag that is on."""
        flags = ("attention_bias", "mlp_bias", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output",
                 "qk_norm", "own_embedding")  # fmt: skip
        scaling = "" if self.rope_scaling is None else f" ({self.rope_scaling.get('rope_type')})"
        parts = [
            f"{self.num_hidden_layers} {self.decoder_type} layers of {self.hidden_size}",
            f"{self.num_attention_heads} heads ({self.num_key_value_heads} of keys and values) of {self.head_dim}",
            f"feed-forward {self.intermediate_size}",
            f"rotary base {self.rope_theta:g}{scaling}",
            *([f"window {self.sliding_window}"] if self.sliding_window else []),
            f"flags {', '.join(name for name in flags if getattr(self, name)) or 'none'}",
        ]
        return ", ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        data = asdict(self)
        data["aux_layer_ids"] = list(self.aux_layer_ids)
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Inverse of :meth:`to_dict`.

        Raises:
            CheckpointError: a key that no field carries (with the nearest one that exists), or a missing size.
        """
        known = {f.name for f in fields(cls)}
        for key in data:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                raise CheckpointError(
                    f"unknown key {key!r} in the draft config" + (f"; did you mean {near[0]!r}?" if near else "")
                )
        try:
            return cls(**data)
        except TypeError as error:
            raise CheckpointError(f"the draft config is incomplete: {error}") from error


def rope_of(config) -> tuple[float, dict[str, Any] | None]:
    """Rotary base and scaling of a transformers configuration, from either of its two layouts.

    Returns:
        ``(rope_theta, rope_scaling)``; the scaling is ``None`` for plain rotary embeddings. Where a target uses one
        rotary table per attention type, the one of its full-attention layers is taken. A partial rotary factor of
        the target is not taken over: the head rotates whole heads (but in the type ``proportional``, whose tables are
        as wide as a head and hold it as a parameter). Nor are the sections of a multimodal rotary embedding (Qwen-VL):
        engines give a head the plain position of each token, see ``docs/data.md``.
    """
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    parameters = dict(parameters)
    if parameters and all(value is None or isinstance(value, dict) for value in parameters.values()):
        chosen: dict[str, Any] = parameters.get("full_attention") or next((v for v in parameters.values() if v), {})
        parameters = dict(chosen)
    theta = parameters.pop("rope_theta", None)
    if theta is None:
        theta = getattr(config, "rope_theta", None)
    if theta is None:
        theta = getattr(config, "default_theta", 10000.0)
    kind = parameters.pop("type", None)
    parameters.setdefault("rope_type", kind or "default")
    for key in ("partial_rotary_factor", "mrope_section", "mrope_interleaved"):
        if key != "partial_rotary_factor" or parameters["rope_type"] != "proportional":
            parameters.pop(key, None)
    if parameters["rope_type"] == "mrope":  # an old name of plain frequencies with sections
        parameters["rope_type"] = "default"
    original = getattr(config, "original_max_position_embeddings", None)
    if original is not None and parameters["rope_type"] in ("llama3", "yarn", "longrope"):
        parameters["original_max_position_embeddings"] = original
    return float(theta), None if parameters["rope_type"] == "default" else parameters
