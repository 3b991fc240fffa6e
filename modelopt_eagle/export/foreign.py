"""Heads of other tools as a :class:`DraftConfig`: which tool wrote a folder, and what its config means.

| layout | told by | captured layers |
|---|---|---|
| training | ``draft_config.json`` | canonical |
| speculators | ``speculators_model_type`` | top level, layer inputs |
| universal | a ``modelopt_eagle`` entry | both, checked against each other |
| modelopt | ``layers.0.*`` tensors | nested, canonical |
| specforge | ``midlayer.*`` and ids | nested, canonical |
| eagle | ``midlayer.*`` and no ids (SafeAILab) | from code: layer inputs 2, n//2, n-3 |

Ids at top level (layer inputs, as vLLM reads them) and nested ones (outputs) may stand side by side in any folder. What
a folder does not say is asked for by a flag, never guessed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from modelopt_eagle.common.layers import check_layer_ids, default_layer_ids
from modelopt_eagle.draft import DraftConfig
from modelopt_eagle.draft.algorithm import find_algorithm
from modelopt_eagle.draft.decoders import decoder_of
from modelopt_eagle.errors import CheckpointError, TargetError
from modelopt_eagle.export.tensors import module_name
from modelopt_eagle.export.universal import (
    FLAGS,
    NESTED_NORMS,
    aux_ids_of,
    check_effects,
    check_recipe,
    drafter_values,
    parse_rope,
    window_of,
)

LAYOUTS = ("training", "universal", "speculators", "modelopt", "specforge", "eagle")
SPECULATORS_KINDS = ("eagle3", "peagle")
"""``speculators_model_type`` of the heads that are read."""
LLAMA_DRAFT = "LlamaForCausalLMEagle3"
"""A draft of this architecture has a Llama layer, whatever ``model_type`` it took from its target (``kimi_k2``)."""
LLAMA_KINDS = {"llama", "qwen2", "qwen3", "eagle", "mistral", None}
"""``model_type`` values whose draft is a Llama layer, with norms of queries and keys if its tensors hold them."""


@dataclass(frozen=True)
class ReadOptions:
    """Answers to what a foreign folder leaves open.

    Attributes:
        layout: which tool wrote it, one of :data:`LAYOUTS`.
        aux_layer_ids: canonical ids of the captured layers.
        target_layers: number of layers of the target, for heads whose ids follow from it.
        norm_before_residual: for heads of tools that do not say.
        d2t_convention: ``offset`` or ``absolute``.
        sliding_window: positions that a query sees, 0 for all, for heads that do not say.
        layers: of the head, for a config that names another number than the file holds.
        lm_head: ``[V, Ht]`` of the target, for heads that propose by its rows.
        target_dtype: of the target's numbers, which engines cast a head to.
        target_architecture: its model class, by which engines tell whether they draft for it.
    """

    layout: str | None = None
    aux_layer_ids: tuple[int, ...] | None = None
    target_layers: int | None = None
    norm_before_residual: bool | None = None
    d2t_convention: str | None = None
    sliding_window: int | None = None
    layers: int | None = None
    lm_head: Tensor | None = field(default=None, repr=False, compare=False)
    target_dtype: torch.dtype | None = None
    target_architecture: str | None = None


def detect_layout(config: dict[str, Any], tensors: dict[str, Tensor], where: str) -> str:
    """Which of :data:`LAYOUTS` a folder with a ``config.json`` has.

    Raises:
        CheckpointError: none of them, with what was looked for.
    """
    if config.get("speculators_model_type") or "transformer_layer_config" in config:
        return "speculators"
    nested = config.get("eagle_config")
    top_ids = config.get("eagle_aux_hidden_state_layer_ids")
    if "modelopt_eagle" in config:
        return "universal"
    names = [module_name(name) for name in tensors]
    check_draft(dict(zip(names, tensors.values(), strict=True)), config, where)
    names = [name.removeprefix("model.") for name in tensors]
    if any(name.startswith("layers.") for name in names):
        return "modelopt"
    if any(name.startswith("midlayer.") for name in names):
        return "specforge" if isinstance(nested, dict) or top_ids else "eagle"
    raise CheckpointError(
        f"{where} is no EAGLE-3 head that is known here: expected tensors named midlayer.* or layers.N.*, found "
        f"{', '.join(sorted(tensors)[:4]) or 'none'}"
    )


def check_draft(tensors: dict[str, Tensor], config: dict[str, Any], where: str) -> None:
    """Refuse a folder that holds something else than an EAGLE-3 head.

    Args:
        tensors: under the module's names.

    Raises:
        CheckpointError: a whole language model, or a head that reads the target's final state.
    """
    if any(name.startswith("fc.") for name in tensors) or not any(name.startswith("layers.") for name in tensors):
        return
    check_recipe(config, where)
    first = tensors.get("layers.0.self_attn.q_proj.weight")
    reads = f", whose first layer reads {first.shape[1]} numbers" if first is not None and first.dim() == 2 else ""
    raise CheckpointError(
        f"{where} holds layers and no fc{reads}: it is a language model ({config.get('architectures')}) or a draft of "
        "another kind; an EAGLE-3 head fuses the target's layers by fc: name the folder of the head"
    )


def layer_count(tensors: dict[str, Tensor], layer: dict[str, Any], options: ReadOptions, where: str) -> int:
    """Layers of a head; ``tensors`` under the module's names.

    Raises:
        CheckpointError: the config says another number than the file holds, and nobody answers.
    """
    said = options.layers or layer.get("num_hidden_layers") or 1
    held = {int(name.split(".")[1]) for name in tensors if name.startswith("layers.")}
    if held and said != len(held) and options.layers is None:
        raise CheckpointError(
            f"{where}: num_hidden_layers is {said}, the file holds the layers {', '.join(map(str, sorted(held)))} (the "
            "target's depth left in the config, or tensors cut away): how many has the head? answer with --draft-layers"
        )
    return int(said)


def with_head_rows(
    tensors: dict[str, Tensor], config: dict[str, Any], options: ReadOptions, where: str
) -> dict[str, Tensor]:
    """The tensors, completed by the rows of ``lm_head`` that a head shares with its target or with its own embedding.

    Args:
        tensors: under the module's names; the map tells which rows.

    Raises:
        CheckpointError: the target is not given, or has no such rows.
    """
    if "lm_head.weight" in tensors or "fc.weight" not in tensors:
        return tensors
    table = tensors.get("embed_tokens.weight") if config.get("tie_word_embeddings") else None
    if table is None and options.lm_head is None:
        raise CheckpointError(
            f"{where} holds no lm_head.weight: it proposes by the rows of its target's; which target? answer with "
            "--base-model"
        )
    table = options.lm_head if table is None else table
    if "d2t" in tensors:
        ids = tensors["d2t"].long()  # [Vd]
        ids = ids if options.d2t_convention == "absolute" else ids + torch.arange(len(ids))
        if bool((ids < 0).any()) or int(ids.max()) >= len(table):
            raise CheckpointError(f"{where}: d2t names tokens outside the {len(table)} rows of its target's lm_head")
        table = table[ids.to(table.device)]
    return {**tensors, "lm_head.weight": table.detach().to("cpu", tensors["fc.weight"].dtype)}


def speculators_kind(config: dict[str, Any], where: str) -> None:
    """Refuse speculators checkpoints of other algorithms."""
    kind = config.get("speculators_model_type")
    if kind not in SPECULATORS_KINDS:
        raise CheckpointError(
            f"{where}: speculators_model_type is {kind!r}; heads of {' and '.join(SPECULATORS_KINDS)} are read"
        )
    if not isinstance(config.get("transformer_layer_config"), dict):
        raise CheckpointError(f"{where}: transformer_layer_config is missing")


def foreign_ids(config: dict[str, Any], num_aux: int, options: ReadOptions, where: str) -> tuple[int, ...]:
    """Canonical ids of the captured layers, from the flag, the config, or the target's depth.

    Raises:
        CheckpointError: not said anywhere, or another number than ``fc`` is wide.
    """
    ids = options.aux_layer_ids or aux_ids_of(config, where)
    if ids is None:
        if options.target_layers is None:
            raise CheckpointError(
                f"{where} does not say which layers of the target it reads. How many layers has the target (the usual "
                "three follow from it)? answer with --base-model or --target-layers, or name them: --aux-layer-ids "
                "(output of layer k, 0-based)"
            )
        ids = default_layer_ids(options.target_layers)
    elif options.target_layers is not None:
        try:
            ids = check_layer_ids(ids, options.target_layers)
        except TargetError as error:
            raise CheckpointError(f"{where}: {error}") from error
    if len(ids) != num_aux:
        raise CheckpointError(f"{where}: fc reads {num_aux} layers, and {len(ids)} are named: {list(ids)}")
    return tuple(ids)


def count_aux(
    fc_width: int, target_hidden: int | None, hidden: int, config: dict[str, Any], where: str
) -> tuple[int, int]:
    """``(A, Ht)`` from the width of ``fc`` and what the config says.

    Raises:
        CheckpointError: widths that do not divide.
    """
    named = config.get("eagle_aux_hidden_state_layer_ids") or (config.get("eagle_config") or {}).get(
        "eagle_aux_hidden_state_layer_ids"
    )
    if target_hidden is None:
        target_hidden = hidden if fc_width % hidden == 0 else fc_width // (len(named) if named else 3)
    if target_hidden < 1 or fc_width % target_hidden:
        raise CheckpointError(
            f"{where}: fc reads {fc_width} numbers, no multiple of the target's width {target_hidden}"
        )
    return fc_width // target_hidden, target_hidden


def foreign_config(
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    layout: str,
    options: ReadOptions,
    where: str,
    strict: bool = True,
    drafter: str = "eagle3",
) -> DraftConfig:
    """The :class:`DraftConfig` of another tool's head.

    Args:
        config: its ``config.json``.
        tensors: under the module's names.
        strict: refuse keys that change the numbers and that nothing here reads.
        drafter: from :func:`~modelopt_eagle.export.universal.drafter_of`.

    Raises:
        CheckpointError: a key or tensor missing, a convention that is not told, another architecture.
    """
    outer, layer = config, config
    if layout == "speculators":
        speculators_kind(config, where)
        layer = config["transformer_layer_config"]
    check_recipe(outer, where)
    qk_norm = all(f"layers.0.self_attn.{name}.weight" in tensors for name in ("q_norm", "k_norm"))
    if strict:
        check_effects(outer, layer, where)
        if not qk_norm and (layer.get("use_qk_norm") or layer.get("qk_norm")):
            raise CheckpointError(f"{where}: its config asks for norms of queries and keys, and the file holds none")
    missing = [name for name in ("fc.weight", "lm_head.weight") if name not in tensors]
    if missing:
        raise CheckpointError(f"{where} holds no {' and no '.join(missing)}; an EAGLE-3 head has both")
    layers = layer_count(tensors, layer, options, where)
    window = options.sliding_window
    window = window_of(layer, layers, where) if window is None else window or None
    llama = layer.get("model_type") in LLAMA_KINDS or LLAMA_DRAFT in (outer.get("architectures") or ())
    if not llama and not decoder_of(layer).sizes:
        raise CheckpointError(f"{where}: model_type {layer.get('model_type')!r} is no draft layer that is known here")
    heads, hidden = layer.get("num_attention_heads"), layer.get("hidden_size")
    if not heads or not hidden or not layer.get("intermediate_size"):
        raise CheckpointError(f"{where}: hidden_size, intermediate_size and num_attention_heads must be in its config")
    num_aux, target_hidden = count_aux(
        tensors["fc.weight"].shape[1], outer.get("target_hidden_size"), hidden, outer, where
    )
    draft_size = int(tensors["lm_head.weight"].shape[0])
    vocab_size = int(layer.get("vocab_size") or draft_size)
    if "t2d" in tensors and vocab_size <= draft_size:
        vocab_size = len(tensors["t2d"])  # its config repeats the draft's size; the table tells the target's
    flags = {name: bool(outer.get(name, layer.get(name, False))) for name in FLAGS}
    nested = outer.get("eagle_config") or {}
    flags["norm_before_fc"] = bool(nested.get("norm_before_fc", flags["norm_before_fc"]))
    flags["norm_output"] = flags["norm_output"] or bool(nested.get("return_hidden_post_norm"))  # TensorRT-LLM's name
    if options.norm_before_residual is not None:
        flags["norm_before_residual"] = options.norm_before_residual
    elif layout == "speculators" and "norm_before_residual" not in outer:
        flags["norm_before_residual"] = True  # what vLLM takes when the key is absent
    decoder = decoder_of(layer)
    theta, scaling = parse_rope(layer, where)
    values: dict[str, Any] = {
        "hidden_size": hidden,
        "target_hidden_size": target_hidden,
        "intermediate_size": layer["intermediate_size"],
        "num_attention_heads": heads,
        "num_key_value_heads": layer.get("num_key_value_heads") or heads,
        "head_dim": layer.get("head_dim") or hidden // heads,
        "num_hidden_layers": layers,
        "rms_norm_eps": layer.get("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_position_embeddings": layer.get("max_position_embeddings") or 2048,
        "vocab_size": vocab_size,
        "draft_vocab_size": draft_size,
        "aux_layer_ids": foreign_ids(outer, num_aux, options, where),
        "decoder_type": decoder.name,
        "hidden_act": layer.get("hidden_act", "silu"),
        "attention_bias": "layers.0.self_attn.q_proj.bias" in tensors,
        "mlp_bias": "layers.0.mlp.gate_proj.bias" in tensors,
        "own_embedding": "embed_tokens.weight" in tensors,
        "qk_norm": qk_norm,
        "sliding_window": window,
        **flags,
        **{name: bool(nested.get(key, True)) for key, name in NESTED_NORMS.items()},
        **{name: layer.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }
    values.update({name: layer.get(name) for name in decoder.sizes})
    if layout == "speculators":
        verifier = ((outer.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
        values["target_name"] = verifier
    values.update(drafter_values(drafter, outer, where))
    return find_algorithm(drafter).config.from_dict(values)
