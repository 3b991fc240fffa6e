"""The universal checkpoint of an EAGLE-3 head: the names and keys that engines read, each with one meaning.

One-layer heads are written as ``midlayer.*``: vLLM and TensorRT-LLM rename it, SGLang before 0.5.12 reads only this
name and drops ``layers.0.*`` without a word. Above layer 0 the same norm is called ``input_layernorm`` by vLLM and
``hidden_norm`` by TensorRT-LLM, so the tensor is written under both names.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from typing import Any

import torch
from torch import Tensor

from modelopt_eagle.common.dtypes import dtype_name
from modelopt_eagle.draft import DraftConfig, EagleModule
from modelopt_eagle.draft.algorithm import algorithm_of, find_algorithm
from modelopt_eagle.draft.decoders import DECODERS, decoder_of
from modelopt_eagle.errors import CheckpointError

FORMAT_VERSION = 1
LAYER_NAMES = ("midlayer", "layers")
ARCHITECTURES = {name: decoder.architecture for name, decoder in DECODERS.items()}
OWN_SIZES = tuple(name for decoder in DECODERS.values() for name in decoder.sizes)
"""Sizes that only some decoder types have."""
SAME_NAME = (
    "hidden_size", "target_hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "num_hidden_layers", "rms_norm_eps", "max_position_embeddings", "vocab_size", "draft_vocab_size", "hidden_act",
    "attention_bias", "mlp_bias", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
RECORD = ("target_name", "target_model_type", "tokenizer_hash", "training_length", "extra")
"""What no engine reads; kept under ``modelopt_eagle``."""
IGNORED = (
    "architectures", "model_type", "torch_dtype", "dtype", "tie_word_embeddings", "transformers_version", "use_cache",
    "initializer_range", "attention_dropout", "pretraining_tp", "quantization_config", "modelopt_eagle", "rope_theta",
    "rope_scaling", "rope_parameters", "eagle_config", "eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states",
    "_name_or_path", "unk_token_id",
)  # fmt: skip
"""Read elsewhere, or of no effect on a head's numbers."""
MASK = "mask_hidden"
"""Tensor of P-EAGLE heads; a folder that holds it is one."""
MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Names of its mask token in the configurations of several tools; vLLM reads each of them."""
NESTED = (
    "eagle_aux_hidden_state_layer_ids", "use_aux_hidden_state", "next_layer_regular",
    "use_input_layernorm_in_first_layer", "use_last_layernorm", "norm_before_fc",
)  # fmt: skip
NESTED_WITHOUT_EFFECT = ("parallel_draft_heads_num_layers", "has_lm_head")
EFFECTS_NOT_HERE = (
    "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling", "logit_scale",
    "final_logit_softcapping", "attn_logit_softcapping", "query_pre_attn_scalar", "clip_qkv",
)  # fmt: skip
"""Keys of other decoder layers that change a head's numbers and that no head here has."""
NEUTRAL = (None, False, 1)
"""Values of such keys that change nothing; ``True`` does, though it equals 1."""
NESTED_ALWAYS = {
    "use_aux_hidden_state": "the head takes the target's final state as it is, and heads here read captured layers "
    "through fc: vLLM serves such a head as it is; to train one for this target, start a new one",
    "next_layer_regular": "every layer of the head reads the token embedding, and here only the first does: serve it "
    "with the tool that made it, or start a new one",
}
"""Parts of ``eagle_config`` that are true in every head here; what a head without them is, and the way out."""
NESTED_NORMS = {"use_input_layernorm_in_first_layer": "embedding_norm", "use_last_layernorm": "last_norm"}
"""Norms that a head may do without: key in ``eagle_config`` to the field."""
WINDOW_KEYS = ("sliding_window", "use_sliding_window", "layer_types")
BASES = ("rope_theta", "rotary_emb_base", "rotary_base", "rope_base")
"""Names of the rotary base; engines read the first alone."""
QWEN3 = ("Eagle3Qwen3ForCausalLM", "qwen3")
"""Architecture and type of a Llama layer with norms of queries and keys."""


def file_tensors(module: EagleModule, dtype: torch.dtype, layer_names: str = "midlayer") -> dict[str, Tensor]:
    """The module's tensors under the names that engines read, floating ones in ``dtype``, contiguous, on the CPU.

    Args:
        layer_names: ``midlayer`` (one-layer heads) or ``layers``; heads of more layers are always ``layers.N``.

    Raises:
        CheckpointError: the vocabulary map is unset or breaks an invariant.
    """
    config, vocab = module.config, module.vocab
    tensors: dict[str, Tensor] = {}
    for name, tensor in module.state_dict().items():
        if name in ("d2t", "t2d"):
            continue
        tensors[name] = tensor
        if re.match(r"layers\.[1-9]\d*\.input_layernorm\.", name):
            tensors[name.replace("input_layernorm", "hidden_norm")] = tensor
    if config.attention_bias and not config.qk_norm:  # engines' Llama layers give o_proj one too; the head has none
        for index in range(config.num_hidden_layers):
            name = f"layers.{index}.self_attn.o_proj.bias"
            tensors[name] = torch.zeros(config.hidden_size)
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous().clone() for name, tensor in tensors.items()}
    if not vocab.is_identity:
        tensors["d2t"] = vocab.d2t.cpu().clone()
        tensors["t2d"] = vocab.t2d.cpu().clone()
    if layer_names == "midlayer" and config.num_hidden_layers == 1:
        tensors = {re.sub(r"^layers\.0\.", "midlayer.", name): tensor for name, tensor in tensors.items()}
    return tensors


def universal_config(config: DraftConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The content of ``config.json`` for a head whose tensors are written in ``dtype``.

    The captured layers are named twice: under ``eagle_config`` canonically (output of layer k; SGLang adds one,
    TensorRT-LLM counts the same way), at top level one higher (layer inputs, which vLLM reads raw).
    """
    theta, scaling, decoder = float(config.rope_theta), config.rope_scaling, DECODERS[config.decoder_type]
    rope = {"rope_theta": theta, **(scaling or {"rope_type": "default"})}
    architecture, model_type = QWEN3 if config.qk_norm else (decoder.architecture, decoder.model_type)
    data: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "torch_dtype": dtype_name(dtype),
        "dtype": dtype_name(dtype),
        "tie_word_embeddings": False,
    }
    data.update({name: getattr(config, name) for name in SAME_NAME})
    data.update({name: getattr(config, name) for name in decoder.sizes})
    data.update({"rope_theta": theta, "rope_scaling": dict(scaling) if scaling else None, "rope_parameters": rope})
    data.update({name: True for name in FLAGS if getattr(config, name)})
    data["eagle_aux_hidden_state_layer_ids"] = [i + 1 for i in config.aux_layer_ids]
    data["eagle_config"] = {
        "eagle_aux_hidden_state_layer_ids": list(config.aux_layer_ids),
        **dict.fromkeys(NESTED_ALWAYS, True),
        **{key: getattr(config, name) for key, name in NESTED_NORMS.items()},
    }
    if config.sliding_window:
        kinds = ["sliding_attention"] * config.num_hidden_layers
        data.update({"sliding_window": config.sliding_window, "use_sliding_window": True, "layer_types": kinds})
    if config.norm_before_fc:
        data["eagle_config"]["norm_before_fc"] = True
    data.update({name: getattr(config, name) for name in algorithm_of(config).file_keys})
    record = {name: getattr(config, name) for name in RECORD if getattr(config, name)}
    record |= {name: getattr(config, name) for name in own_record(type(config)) if getattr(config, name) is not None}
    if config.algorithm != "eagle3":
        record["algorithm"] = config.algorithm
    data["modelopt_eagle"] = {"format": FORMAT_VERSION, "decoder_type": config.decoder_type, **record}
    return data


def own_record(kind: type[DraftConfig]) -> list[str]:
    """Fields of a drafter's configuration that EAGLE-3 has not and no engine reads; kept under ``modelopt_eagle``."""
    common = {part.name for part in dataclasses.fields(DraftConfig)}
    drafter = kind.__dataclass_fields__["algorithm"].default
    return [
        part.name
        for part in dataclasses.fields(kind)
        if part.name not in common and part.name not in find_algorithm(str(drafter)).file_keys
    ]


def drafter_of(data: dict[str, Any], tensors: dict[str, Tensor], where: str) -> str:
    """The drafter of a folder whose head is EAGLE-3 or built on it: named by our record, or told by its tensors.

    Args:
        tensors: under the module's names.

    Raises:
        CheckpointError: a mask token without the row that stands for unknown features, or the reverse.
    """
    token = mask_token_of(data, where)
    if (MASK in tensors) != (token is not None):
        has, lacks = (MASK, "a mask token") if MASK in tensors else ("a mask token", f"the tensor {MASK}")
        raise CheckpointError(
            f"{where} has {has} and not {lacks}: a P-EAGLE head needs both (config.json names its token as "
            f"{' or '.join(MASK_KEYS)})"
        )
    named = (data.get("modelopt_eagle") or {}).get("algorithm")
    return named or ("peagle" if MASK in tensors else "eagle3")


def mask_token_of(data: dict[str, Any], where: str) -> int | None:
    """The mask token that a ``config.json`` names under any of :data:`MASK_KEYS`.

    Raises:
        CheckpointError: two of them, with different tokens.
    """
    named = {key: data[key] for key in MASK_KEYS if data.get(key) is not None}
    if len(set(named.values())) > 1:
        raise CheckpointError(f"{where} names several mask tokens: {named}; keep the one it was trained with")
    return next(iter(named.values()), None)


def universal_files(
    module: EagleModule, dtype: torch.dtype, layer_names: str = "midlayer"
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and ``config.json`` of a head as every engine reads it; arguments and errors as :func:`file_tensors`."""
    return file_tensors(module, dtype, layer_names), universal_config(module.config, dtype)


def parse_rope(data: dict[str, Any], where: str) -> tuple[float, dict[str, Any] | None]:
    """Rotary base and scaling from either layout, or both if they agree.

    Raises:
        CheckpointError: two bases or two types, or only part of each head rotated.
    """
    new = without_sections(data.get("rope_parameters") or {})
    old = without_sections(data.get("rope_scaling") or {})
    third = data.get("rope") or {}
    if not isinstance(third, dict) or set(third) - {"theta", "base", "rope_theta"}:
        raise CheckpointError(f"{where}: the key rope holds {third!r}; a base is read of it and nothing else")
    for block in (new, old, data):
        if "proportional" in (block.get("rope_type"), block.get("type")):
            continue  # there it is part of the type, and whole heads are rotated
        share = block.get("partial_rotary_factor")
        if share not in (None, 1):
            raise CheckpointError(f"{where}: partial_rotary_factor is {share}; heads here rotate whole attention heads")
        if block is not data:
            block.pop("partial_rotary_factor", None)
    named = [new.pop("rope_theta", None), old.pop("rope_theta", None), *third.values()]
    bases = {float(base) for base in (*named, *(data.get(name) for name in BASES)) if base}
    if len(bases) > 1:
        raise CheckpointError(
            f"{where} declares several rotary bases: {sorted(bases)}; keep the one it was trained with"
        )
    for block in (new, old):
        kind = block.pop("type", None)
        if kind is not None:
            block.setdefault("rope_type", kind)
        if block.get("rope_type") == "default":
            block.clear()
    if new and old and new != old:
        raise CheckpointError(f"{where}: rope_parameters {new} and rope_scaling {old} differ; keep one")
    scaling = new or old or None
    return (bases.pop() if bases else 10000.0), scaling


def without_sections(block: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters without the sections of a multimodal embedding (Qwen-VL).

    Sections spread the three positions of an image's patches over a head's frequencies; a head here, as in engines, is
    given the one position of each token, for which every section says the same. ``mrope`` is an old name of plain
    frequencies with sections.
    """
    block = {key: value for key, value in block.items() if key not in ("mrope_section", "mrope_interleaved")}
    for key in ("type", "rope_type"):
        if block.get(key) == "mrope":
            block[key] = "default"
    return block


def check_known_keys(data: dict[str, Any], where: str) -> None:
    """Refuse keys that nothing reads: a flag that the graph ignores serves other numbers than were trained.

    Raises:
        CheckpointError: an unknown key, top level or under ``eagle_config``, with the nearest known one.
    """
    known = {*SAME_NAME, *FLAGS, *OWN_SIZES, *WINDOW_KEYS, *IGNORED, *MASK_KEYS}
    nested = data.get("eagle_config") or {}
    for key, names in [*((k, known) for k in data), *((k, set(NESTED)) for k in nested)]:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            raise CheckpointError(
                f"{where}: nothing reads the key {key!r}"
                + (f"; did you mean {near[0]!r}?" if near else "")
                + "; remove it, or load with strict=False (--no-strict)"
            )


def check_recipe(data: dict[str, Any], where: str) -> None:
    """Refuse an ``eagle_config`` whose fixed parts are not those of the heads here, such as "last state only".

    Raises:
        CheckpointError: the first one that differs, with what it means.
    """
    nested = data.get("eagle_config") or {}
    for key, meaning in NESTED_ALWAYS.items():
        if not nested.get(key, True):
            raise CheckpointError(f"{where}: eagle_config.{key} is {nested[key]!r}: {meaning}")


def check_effects(outer: dict[str, Any], layer: dict[str, Any], where: str) -> None:
    """Refuse keys of another tool's config that change a head's numbers and that nothing here reads.

    Its other unknown keys are left alone: they are those of a whole language model's config.

    Args:
        outer: the whole ``config.json``; ``layer``: the part that describes the decoder layer.

    Raises:
        CheckpointError: a key with an effect, with its value.
    """
    nested = outer.get("eagle_config") or {}
    found = {key: layer[key] for key in EFFECTS_NOT_HERE if layer.get(key) is True or layer.get(key) not in NEUTRAL}
    for key, value in nested.items():
        harmless = value in (None, False) or (key == "parallel_draft_step" and value == 1)
        if key not in (*NESTED, *NESTED_WITHOUT_EFFECT, "return_hidden_post_norm") and not harmless:
            found[f"eagle_config.{key}"] = value
    if found:
        shown = ", ".join(f"{key} {value!r}" for key, value in found.items())
        raise CheckpointError(
            f"{where}: nothing here does what its config asks for: {shown}; load it with strict=False (--no-strict) if "
            "it has no effect on the head"
        )


def aux_ids_of(data: dict[str, Any], where: str) -> tuple[int, ...] | None:
    """Canonical layer ids from the two places that carry them; ``None`` if neither does.

    Raises:
        CheckpointError: the two disagree, or a top-level id has no layer output (0 is the embedding).
    """
    nested = (data.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    top = data.get("eagle_aux_hidden_state_layer_ids")
    if top and min(top) < 1:
        raise CheckpointError(f"{where}: top-level ids {list(top)} are layer inputs; 0 would be the embedding")
    if nested and top and [i + 1 for i in nested] != list(top):
        raise CheckpointError(
            f"{where}: eagle_config names layers {list(nested)} (outputs, 0-based), the top level {list(top)} (inputs, "
            f"so outputs {[i - 1 for i in top]}); which were captured in training? answer with --aux-layer-ids"
        )
    ids = nested or ([i - 1 for i in top] if top else None)
    return tuple(int(i) for i in ids) if ids else None


def window_of(data: dict[str, Any], layers: int, where: str) -> int | None:
    """The sliding window of a head, in positions; ``None`` for none.

    Args:
        data: the part of a config that describes the decoder layer.
        layers: of the head.

    Raises:
        CheckpointError: windows in some layers only, or a window of which the config does not say whether it is used.
    """
    window, kinds = data.get("sliding_window"), list(data.get("layer_types") or ())[:layers]
    if not window:
        return None
    if not kinds:
        used = data.get("use_sliding_window", True if data.get("model_type") == "mistral" else None)
        if used is None:
            raise CheckpointError(
                f"{where}: sliding_window is {window}, and neither layer_types nor use_sliding_window says whether the "
                "head was trained with it; which? answer with --sliding-window N (0: none)"
            )
        return int(window) if used else None
    sliding = [kind == "sliding_attention" for kind in kinds]
    if any(sliding) and not all(sliding):
        raise CheckpointError(
            f"{where}: layer_types {kinds} has a window in some layers only, and a head here has it in all or none: "
            "serve it with the tool that made it, or start a new one with eagle.sliding_window"
        )
    return int(window) if all(sliding) else None


def parse_universal(
    data: dict[str, Any],
    *,
    strict: bool,
    own_embedding: bool,
    where: str,
    aux_layer_ids: tuple[int, ...] | None = None,
    drafter: str = "eagle3",
) -> DraftConfig:
    """Inverse of :func:`universal_config`.

    Args:
        aux_layer_ids: the captured layers, where the caller answers for them.
        drafter: from :func:`drafter_of`.

    Raises:
        CheckpointError: missing, unknown or contradicting keys.
    """
    if strict:
        check_known_keys(data, where)
    check_recipe(data, where)
    record = data.get("modelopt_eagle") or {}
    decoder = record.get("decoder_type") or decoder_of(data).name
    qk_norm = data.get("architectures") == [QWEN3[0]]
    if decoder not in ARCHITECTURES or not (qk_norm or data.get("architectures") == [ARCHITECTURES[decoder]]):
        raise CheckpointError(
            f"{where}: architectures {data.get('architectures')} is not what a {decoder} head has: "
            f"{[ARCHITECTURES.get(decoder)]}"
        )
    ids = aux_layer_ids or aux_ids_of(data, where)
    if ids is None:
        raise CheckpointError(f"{where} names no auxiliary layers; which? answer with --aux-layer-ids")
    theta, scaling = parse_rope(data, where)
    values = {name: data[name] for name in SAME_NAME if name in data}
    values.update({name: bool(data.get(name, False)) for name in FLAGS})
    nested = data.get("eagle_config") or {}
    values.update({name: bool(nested.get(key, True)) for key, name in NESTED_NORMS.items()})
    values.update({name: data.get(name) for name in DECODERS[decoder].sizes})
    kind = find_algorithm(drafter).config
    values.update({name: record[name] for name in (*RECORD, *own_record(kind)) if name in record})
    values.update(drafter_values(drafter, data, where))
    return kind.from_dict(
        {
            **values,
            "decoder_type": decoder,
            "aux_layer_ids": ids,
            "rope_theta": theta,
            "rope_scaling": scaling,
            "own_embedding": own_embedding,
            "qk_norm": qk_norm,
            "sliding_window": window_of(data, int(data.get("num_hidden_layers") or 1), where),
        }
    )


def drafter_values(drafter: str, data: dict[str, Any], where: str) -> dict[str, Any]:
    """What a drafter's configuration takes from a ``config.json`` of any tool, beside the fields of EAGLE-3."""
    if drafter != "peagle":
        return {}
    return {"mask_token_id": mask_token_of(data, where), "norm_output": False}  # it has no next step to shape
