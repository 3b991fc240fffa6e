"""The decoder types of a draft head: one table that says of each what is its own.

A new type is a class of projections (:mod:`modelopt_eagle.draft.projections`) and an entry in :data:`DECODERS`; which
engines build it stands in the engines' own files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from modelopt_eagle.draft.projections import AttentionSizes, GroupedAttention, LatentAttention, Projections


@dataclass(frozen=True)
class Decoder:
    """What tells one decoder type from the others.

    Attributes:
        name: value of ``decoder_type``.
        attention: its projections, built as ``attention(config, input_size)``.
        sizes: fields of the configuration that only this type reads; taken from the target, written at export.
        required: those of them without which it cannot be built.
        latent: whether keys and values come from a shared latent (multi-head latent attention).
        rotary: the field that holds the width of the rotated part of a head.
        shares_keys: whether several query heads may share a key head (``num_key_value_heads`` is read).
        attention_bias: whether its projections may have a bias; ``qk_norm``: norms of queries and keys.
        copies_target: whether a head can start from a layer of a target built the same way.
        architecture, model_type: of the exported ``config.json``. vLLM rewrites every draft of type ``deepseek_v3``
            into a multi-token-prediction model and keeps ``deepseek_v2`` as it is.
        tool_formats: whether the formats of other tools have it.
    """

    name: str
    attention: Callable[[AttentionSizes, int], Projections]
    sizes: tuple[str, ...]
    required: tuple[str, ...]
    latent: bool
    rotary: str
    shares_keys: bool
    attention_bias: bool
    qk_norm: bool
    copies_target: bool
    architecture: str
    model_type: str
    tool_formats: bool


LLAMA = Decoder(
    name="llama",
    attention=GroupedAttention,
    sizes=(),
    required=(),
    latent=False,
    rotary="head_dim",
    shares_keys=True,
    attention_bias=True,
    qk_norm=True,
    copies_target=True,
    architecture="LlamaForCausalLMEagle3",
    model_type="llama",
    tool_formats=True,
)

KIMIK2 = Decoder(
    name="kimik2",
    attention=LatentAttention,
    sizes=("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    required=("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    latent=True,
    rotary="qk_rope_head_dim",
    shares_keys=False,
    attention_bias=False,
    qk_norm=False,
    copies_target=False,
    architecture="Eagle3DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    tool_formats=False,
)

DECODERS = {decoder.name: decoder for decoder in (LLAMA, KIMIK2)}
"""``decoder_type`` → its facts."""


def decoder_of(config: dict) -> Decoder:
    """The decoder that another tool's ``config.json`` describes, told by the sizes that only one type has."""
    return next((decoder for decoder in DECODERS.values() if decoder.sizes and config.get(decoder.required[0])), LLAMA)
