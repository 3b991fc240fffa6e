"""A draft folder held against the rules of an engine, without the engine.

:func:`engine_reasons` loads a folder the way the engine would (its names, keys and defaults, see ``profile.py``) and
lists everything by which the served head would differ from the trained one. An engine that has a runner can also be
run, see the room ``serving``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch import Tensor

from modelopt_eagle.draft import DraftConfig
from modelopt_eagle.draft.decoders import DECODERS
from modelopt_eagle.errors import CheckpointError, ExportError
from modelopt_eagle.export.engines import ENGINES, engine_of
from modelopt_eagle.export.engines.profile import LoadRules, kind_of
from modelopt_eagle.export.engines.quantisation import quant_reasons
from modelopt_eagle.export.engines.versions import drafter_reasons
from modelopt_eagle.export.foreign import ReadOptions
from modelopt_eagle.export.load import read_config, read_head
from modelopt_eagle.export.quant_formats import is_quantised, plain_shapes
from modelopt_eagle.export.tensors import module_shapes, read_json, read_tensors
from modelopt_eagle.export.universal import FLAGS, without_sections

SIZES = (
    "num_hidden_layers", "hidden_size", "target_hidden_size", "intermediate_size", "num_attention_heads",
    "rms_norm_eps", "num_key_value_heads", "head_dim", "vocab_size", "draft_vocab_size",
    "max_position_embeddings", "hidden_act",
)  # fmt: skip
"""Keys that every engine reads under the same name."""


def engine_name(name: str, rules: LoadRules, layers: int) -> str:
    """A file's tensor name as the engine says it, after its own renaming."""
    for pattern, replacement in rules.rename if layers == 1 else rules.rename_several:
        name = re.sub(pattern, replacement, name)
    return name


def expected_tensors(
    config: DraftConfig, rules: LoadRules, shapes: dict[str, tuple[int, ...]]
) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """``({engine's parameter: shape}, those it can do without)`` for a head of these :func:`module_shapes`."""
    expected: dict[str, tuple[int, ...]] = {}
    optional: set[str] = set()
    first = rules.first_layer if config.num_hidden_layers == 1 else rules.first_of_several
    for name, shape in shapes.items():
        found = re.match(r"layers\.(\d+)\.(.*)", name)
        if found:
            n, rest = int(found.group(1)), found.group(2)
            if n == 0:
                name = f"{first}.{rest}"
            else:
                above = rules.next_layers.format(n=n)
                other = {"input_layernorm": "hidden_norm", "hidden_norm": "input_layernorm"}[rules.norm_above_first]
                if rest.startswith("input_layernorm"):
                    optional.add(f"{above}.{other}.weight")  # made and never used
                    rest = rest.replace("input_layernorm", rules.norm_above_first)
                name = f"{above}.{rest}"
        expected[name] = shape
    if config.attention_bias and kind_of(config) in rules.output_bias:
        for n in range(config.num_hidden_layers):
            layer = first if n == 0 else rules.next_layers.format(n=n)
            expected[f"{layer}.self_attn.o_proj.bias"] = (config.hidden_size,)
    if config.draft_vocab_size != config.vocab_size:
        expected["d2t"] = (config.draft_vocab_size,)
    return expected, optional


def tensor_reasons(
    found: dict[str, tuple[int, ...]],
    config: DraftConfig,
    rules: LoadRules,
    shapes: dict[str, tuple[int, ...]] | None = None,
) -> list[str]:
    """What is wrong with the tensors, in the engine's names; ``shapes``: :func:`module_shapes`, if known."""
    given = {engine_name(n, rules, config.num_hidden_layers): shape for n, shape in found.items() if n != "t2d"}
    expected, optional = expected_tensors(config, rules, shapes or module_shapes(config))
    if config.draft_vocab_size == config.vocab_size and "d2t" in given and rules.map_if_full == "read":
        optional.add("d2t")
    reasons = [f"does not find {n} {list(s)}" for n, s in expected.items() if n not in given]
    fate = "drops it without a word" if rules.drops_unknown else "fails on it"
    reasons += [f"does not know {name} and {fate}" for name in given if name not in expected and name not in optional]
    reasons += [
        f"reads {name} as {list(shape)}, the folder has {list(given[name])}"
        for name, shape in expected.items()
        if name in given and given[name] != shape
    ]
    return reasons


def flag_seen(data: dict[str, Any], flag: str, where: str) -> bool:
    """A flag's value where an engine looks for it."""
    nested = data.get("eagle_config") or {}
    if where == "nested":
        return bool(nested.get(flag, False))
    return bool(nested[flag] if where == "both" and flag in nested else data.get(flag, False))


def captures_counted(data: dict[str, Any]) -> int:
    """For how many captured layers an engine makes ``fc`` that counts the ids under ``eagle_config``."""
    nested = (data.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return data.get("num_aux_hidden_states") or (len(nested) if nested else 3)


def config_reasons(
    data: dict[str, Any], config: DraftConfig, rules: LoadRules, target_layers: int | None = None
) -> list[str]:
    """What the engine would build differently from the trained ``config``; ``target_layers``: if it is known."""
    reasons = [f"needs the key {key}: {effect}" for key, effect in rules.required_keys.items() if key not in data]
    kind = kind_of(config)
    allowed = rules.architectures.get(kind, ())
    if not allowed:
        reasons.append(f"has no {kind} head" if not config.qk_norm else "has no head with norms of queries and keys")
    elif not set(data.get("architectures") or ()) & set(allowed):
        reasons.append(f"routes {' or '.join(allowed)} to this decoder, the config says {data.get('architectures')}")
    if data.get("model_type") in rules.rewrites:
        reasons.append(f"{rules.rewrites[data['model_type']]}, as its model_type is {data['model_type']}")
    for flag in FLAGS:
        where, kinds = rules.flags[flag]
        wanted = getattr(config, flag)
        seen = kind in kinds and flag_seen(data, flag, where)
        if wanted != seen:
            state = "has no" if kind not in kinds else f"reads {where} level and finds {seen} for"
            reasons.append(f"{state} {flag}, which the head was trained with" if wanted else f"turns {flag} on")
    counted = captures_counted(data) if rules.counts_captures_by == "nested" else config.num_aux
    if counted != config.num_aux:
        reasons.append(f"builds fc for {counted} captured layers, the head has {config.num_aux}")
    if rules.captures not in (None, config.num_aux):
        reasons.append(f"serves heads of {rules.captures} captured layers, this one reads {config.num_aux}")
    if rules.activations is not None and config.hidden_act not in rules.activations:
        reasons.append(f"computes {' or '.join(rules.activations)}, the head was trained with {config.hidden_act}")
    if target_layers and not rules.captures_last and target_layers - 1 in config.aux_layer_ids:
        reasons.append(f"does not capture the output of the target's last layer ({target_layers - 1})")
    if config.norm_before_fc and config.fc_norm and not rules.norms_both:
        reasons.append("applies one of norm_before_fc and fc_norm, the head was trained with both")
    narrow = {"one_layer": config.num_aux == 1, "equal_widths": config.fc_input_size == config.hidden_size}
    if any(narrow[kind] for kind in rules.skips_fc):
        reasons.append("leaves out fc, and takes the captured state as it is")
    if config.num_hidden_layers > 1 and config.decoder_type in rules.single_layer:
        reasons.append(f"serves heads of one layer, this one has {config.num_hidden_layers}")
    fate = " and drops it without a word" if rules.drops_unknown else ""
    if config.attention_bias and kind not in rules.qkv_bias:
        reasons.append(f"has no attention bias{fate}")
    if config.mlp_bias and kind not in rules.mlp_bias:
        reasons.append(f"has no bias in the feed-forward part{fate}")
    if config.own_embedding and config.hidden_size == config.target_hidden_size and rules.shares_embedding:
        reasons.append("puts the target's embedding in place of the head's own")
    if DECODERS[config.decoder_type].latent and not config.q_lora_rank and rules.needs_q_lora_rank:
        reasons.append("needs q_lora_rank in latent attention")
    if not config.last_norm:
        reasons.append("norms the output before lm_head, the head was trained without that norm")
    if not config.embedding_norm:
        reasons.append("norms the token embedding, the head was trained without that norm")
    if data.get("tie_word_embeddings") and rules.ties:
        reasons.append("is told to tie lm_head to the embedding; the head has its own")
    for key in SIZES:
        if data.get(key) is not None and data[key] != getattr(config, key):
            reasons.append(f"takes {key} {data[key]}, the head was trained with {getattr(config, key)}")
    reasons += window_reasons(data, config, rules)
    return reasons + id_reasons(data, config, rules) + rope_reasons(data, config, rules)


def window_reasons(data: dict[str, Any], config: DraftConfig, rules: LoadRules) -> list[str]:
    """Whether the engine would let a query see the keys that the head was trained to see."""
    told = rules.window.get(kind_of(config))
    if told == "serving":
        return []  # named in its serving options; the model card prints them
    kinds = list(data.get("layer_types") or ())[: config.num_hidden_layers]
    seen = data.get("sliding_window") if told == "config" and "sliding_attention" in kinds else None
    if seen == config.sliding_window:
        return []
    shown = [f"{window} positions back" if window else "everything before" for window in (seen, config.sliding_window)]
    return [f"lets a query see {shown[0]}, the head was trained to see {shown[1]}"]


def id_reasons(data: dict[str, Any], config: DraftConfig, rules: LoadRules) -> list[str]:
    """Whether the engine would capture the trained layers."""
    if rules.ids_key == "serving":
        return []  # named in its serving options; the model card prints them
    nested = (data.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    read = data.get("eagle_aux_hidden_state_layer_ids") if rules.ids_key == "top" else nested
    if read is None:
        return [] if rules.ids_key == "top" else ["finds no nested layer ids and captures its default triple"]
    outputs = [int(i) + rules.ids_offset for i in read]
    if tuple(outputs) != config.aux_layer_ids:
        return [f"captures the outputs of layers {outputs}, the head was trained on {list(config.aux_layer_ids)}"]
    return []


def rope_reasons(data: dict[str, Any], config: DraftConfig, rules: LoadRules) -> list[str]:
    """Whether the engine would build the trained rotary table."""
    base, scaling = 10000.0, None
    for layout in rules.rope_keys:
        if layout == "rope_parameters" and data.get("rope_parameters"):
            block = without_sections(data["rope_parameters"])
            base = float(block.pop("rope_theta", data.get("rope_theta") or base))
            scaling = None if block.get("rope_type", "default") == "default" else block
            break
        if layout == "rope_theta" and data.get("rope_theta"):
            base, block = float(data["rope_theta"]), without_sections(data.get("rope_scaling") or {})
            block["rope_type"] = block.pop("type", None) or block.get("rope_type", "default")
            scaling = None if block["rope_type"] == "default" else block
            break
    reasons = []
    trained, latent = config.rope_scaling or {}, DECODERS[config.decoder_type].latent
    kind = trained.get("rope_type")
    if latent and kind not in (None, "yarn"):
        reasons.append(f"takes every scaled rotary table of latent attention for yarn, this one is {kind}")
    if latent and rules.rounds_latent_yarn and trained.get("truncate") is False:
        reasons.append("rounds the bounds of YaRN in latent attention, the head was trained with truncate false")
    if base != config.rope_theta:
        reasons.append(f"takes the rotary base {base:g}, the head was trained with {config.rope_theta:g}")
    if (scaling or None) != (config.rope_scaling or None):
        reasons.append(f"takes the rope scaling {scaling}, the head was trained with {config.rope_scaling}")
    return reasons


def engine_reasons(
    folder: str | Path, engine: str, config: DraftConfig | None = None, options: ReadOptions | None = None
) -> list[str]:
    """Everything by which an engine would serve something else than was trained; empty if it serves the head.

    Args:
        folder: a draft folder, of whatever tool.
        engine: a key or alias of ``ENGINES``.
        config: what the head was trained with; default what the folder itself says, read without strictness.
        options: for a folder that does not say everything.

    Raises:
        ExportError: unknown engine.
    """
    known, folder = engine_of(engine), Path(folder)
    try:
        data, tensors = read_json(folder / "config.json"), read_tensors(folder)
        legacy = folder / "hf_quant_config.json"
        legacy = read_json(legacy) if legacy.is_file() else None
        if config is None and is_quantised(tensors):
            config = read_config(folder, tensors, options or ReadOptions(), strict=False)[0]
        config = config or read_head(folder, strict=False, options=options).config
    except CheckpointError as error:
        return [f"cannot read it: {error}"]
    depth = options.target_layers if options else None
    if (reasons := drafter_reasons(known, config)) is not None:
        return reasons
    reasons = config_reasons(data, config, known.loads, depth)
    reasons += tensor_reasons(plain_shapes(tensors), config, known.loads)
    return reasons + quant_reasons(data, legacy, tensors, config, known.quantised)


def engine_notes(*given, **named) -> list[str]:
    """The lines of :func:`engine_faults`, for the export and its card."""
    return list(engine_faults(*given, **named).values())


def engine_faults(
    data: dict[str, Any],
    tensors: dict[str, Tensor],
    config: DraftConfig,
    legacy: dict[str, Any] | None = None,
    target_layers: int | None = None,
) -> dict[str, str]:
    """A line for each engine that would not serve a head as trained.

    Args:
        data: the content of ``config.json``.
        tensors: by their names in the file.
        config: what the head was trained with.
        legacy: the content of ``hf_quant_config.json``, for a quantised head.
        target_layers: of the target, if it is known.
    """
    faults = {}
    for key, engine in ENGINES.items():
        reasons = drafter_reasons(engine, config)
        if reasons is None:
            reasons = config_reasons(data, config, engine.loads, target_layers)
            reasons += tensor_reasons(plain_shapes(tensors), config, engine.loads)
            reasons += quant_reasons(data, legacy, tensors, config, engine.quantised)
        if reasons:
            faults[key] = f"{key} {engine.version} would not serve this head as trained: it " + "; it ".join(reasons)
    return faults


def check_engine(folder: str | Path, engine: str, config: DraftConfig | None = None) -> None:
    """Raise :class:`ExportError` with every reason of :func:`engine_reasons`, if there is one."""
    reasons = engine_reasons(folder, engine, config)
    if reasons:
        known = engine_of(engine)
        raise ExportError(
            f"{known.key} {known.version} would not serve {folder} as trained: it " + "; it ".join(reasons)
        )
