"""What each engine reads of a draft folder, as data, and a check of a folder against it without the engine.

The three profiles were written from the engines' sources (named in ``source``). :func:`engine_reasons` loads a folder
the way the engine would (its names, keys and defaults) and lists everything by which the served head would differ from
the trained one. vLLM can also be run, see ``serving.py``; the profile is what the tests of every engine share.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from modelopt_eagle.draft import DraftConfig
from modelopt_eagle.errors import CheckpointError, ExportError

from .engine_quant import is_quantised, plain_shapes, quant_reasons
from .loader import read_config, read_head
from .names import module_shapes
from .readers import ReadOptions
from .universal import FLAGS
from .weights import read_json, read_tensors


@dataclass(frozen=True)
class EngineProfile:
    """How an engine reads a draft folder.

    Attributes:
        version, source: of the engine's code that was read.
        architectures: decoder type to the names it routes to an EAGLE-3 head of that type.
        rename: (pattern, replacement) applied to tensor names in turn.
        first_layer: name of layer 0 in the engine; ``next_layers``: pattern of those above (``{n}``), or ``None``.
        norm_above_first: what it calls the norm before attention above layer 0.
        drops_unknown: tensors it does not know are dropped without a word (else loading fails).
        ids_key: where it reads the captured layers: ``top``, ``nested`` or ``serving`` (its own serving options).
        ids_offset: output layer = value read + this.
        captures: numbers of captured layers that ``fc`` may have; ``None``: any.
        required_keys: keys without which it fails or serves something else, with what happens.
        flags: flag to where it is read (``top``, ``nested``, ``both``), decoder types that honour it.
        qkv_bias, mlp_bias: whether biases of the attention and of the feed-forward part are loaded.
        skips_fc: heads whose fc it leaves out: of ``one_layer``, of ``equal_widths`` (features as wide as the head).
        norms_both: with ``norm_before_fc`` and ``fc_norm`` on, it applies both.
        shares_embedding: it replaces the head's own table by the target's when their widths are equal.
        rope_keys: the layouts it reads, in order.
        map_if_full: what a ``d2t`` does beside a full vocabulary: ``fails`` or ``read``.
        needs_q_lora_rank: its latent attention has no plain ``q_proj``.
    """

    name: str
    version: str
    source: str
    architectures: dict[str, tuple[str, ...]]
    rename: tuple[tuple[str, str], ...]
    first_layer: str
    next_layers: str | None
    norm_above_first: str
    drops_unknown: bool
    ids_key: str
    ids_offset: int
    captures: tuple[int, ...] | None
    required_keys: dict[str, str]
    flags: dict[str, tuple[str, tuple[str, ...]]]
    qkv_bias: bool
    mlp_bias: bool
    skips_fc: tuple[str, ...]
    norms_both: bool
    shares_embedding: bool
    rope_keys: tuple[str, ...]
    map_if_full: str
    needs_q_lora_rank: bool


BOTH = ("llama", "kimik2")
SIZES = (
    "num_hidden_layers", "hidden_size", "target_hidden_size", "intermediate_size", "num_attention_heads",
    "rms_norm_eps", "num_key_value_heads", "head_dim", "vocab_size", "draft_vocab_size",
    "max_position_embeddings", "hidden_act",
)  # fmt: skip
"""Keys that every engine reads under the same name."""

VLLM = EngineProfile(
    name="vllm",
    version="0.32.0",
    source="vllm 0.32.0: model_executor/models/{llama,deepseek}_eagle3.py, config/speculative.py, "
    "v1/worker/gpu_model_runner.py, v1/worker/gpu/spec_decode/eagle/eagle3_utils.py",
    architectures={
        "llama": ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"),
        "kimik2": ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"),
    },
    rename=((r"midlayer\.", "layers.0."),),
    first_layer="layers.0",
    next_layers="layers.{n}",
    norm_above_first="input_layernorm",
    drops_unknown=False,
    ids_key="top",
    ids_offset=-1,
    captures=None,
    required_keys={
        "eagle_aux_hidden_state_layer_ids": "one of its runners then takes the default triple, the other "
        "reads the nested ids as layer inputs",
    },
    flags={
        "norm_before_residual": ("top", BOTH),
        "norm_before_fc": ("both", ("llama",)),
        "fc_norm": ("top", BOTH),
        "norm_output": ("top", BOTH),
    },
    qkv_bias=True,
    mlp_bias=True,
    skips_fc=(),
    norms_both=True,
    shares_embedding=False,
    rope_keys=("rope_parameters", "rope_theta"),
    map_if_full="fails",
    needs_q_lora_rank=False,
)

SGLANG = EngineProfile(
    name="sglang",
    version="0.5 (main at 054a1ce)",
    source="sgl-project/sglang: python/sglang/srt/models/llama_eagle3.py at 03d5a77, kimi_k25_eagle3.py at 054a1ce, "
    "eagle_config as read by srt/model_executor/model_runner.py",
    architectures={"llama": ("LlamaForCausalLMEagle3",), "kimik2": ("Eagle3DeepseekV2ForCausalLM",)},
    rename=(),
    first_layer="midlayer",
    next_layers=None,
    norm_above_first="hidden_norm",
    drops_unknown=True,
    ids_key="nested",
    ids_offset=0,
    captures=(3,),
    required_keys={
        "draft_vocab_size": "it reads the attribute and fails without it",
        "eagle_config": "it then captures its default triple",
    },
    flags={
        "norm_before_residual": ("top", ()),
        "norm_before_fc": ("both", ()),
        "fc_norm": ("top", ("kimik2",)),
        "norm_output": ("top", ("kimik2",)),
    },
    qkv_bias=False,
    mlp_bias=False,
    skips_fc=("equal_widths",),
    norms_both=False,
    shares_embedding=True,
    rope_keys=("rope_parameters", "rope_theta"),
    map_if_full="read",
    needs_q_lora_rank=True,
)

TENSORRT_LLM = EngineProfile(
    name="tensorrt_llm",
    version="1.3 (main at 00679c6)",
    source="NVIDIA/TensorRT-LLM: tensorrt_llm/_torch/models/modeling_speculative.py at 00679c6, modeling_auto.py at "
    "01bffee, one-model EAGLE-3 (eagle3_model_arch llama3)",
    architectures={"llama": ("LlamaForCausalLMEagle3", "LlamaForCausalLM"), "kimik2": ("Eagle3DeepseekV2ForCausalLM",)},
    rename=((r"^layers\.0\.", "midlayer."),),
    first_layer="midlayer",
    next_layers="midlayer.{n}",
    norm_above_first="hidden_norm",
    drops_unknown=True,
    ids_key="serving",
    ids_offset=0,
    captures=None,
    required_keys={
        "draft_vocab_size": "it tells an EAGLE-3 head by this key",
        "rope_theta": "it reads the old layout only and takes 10000",
    },
    flags={
        "norm_before_residual": ("top", ()),
        "norm_before_fc": ("nested", BOTH),
        "fc_norm": ("top", BOTH),
        "norm_output": ("top", BOTH),
    },
    qkv_bias=True,
    mlp_bias=True,
    skips_fc=("one_layer", "equal_widths"),
    norms_both=False,
    shares_embedding=True,
    rope_keys=("rope_theta",),
    map_if_full="read",
    needs_q_lora_rank=True,
)

PROFILES = {profile.name: profile for profile in (VLLM, SGLANG, TENSORRT_LLM)}


def engine_name(name: str, profile: EngineProfile, layers: int) -> str:
    """A file's tensor name as the engine says it, after its own renaming."""
    for pattern, replacement in profile.rename:
        if profile is TENSORRT_LLM and layers > 1:
            pattern, replacement = r"^layers\.(\d+)\.", r"midlayer.\1."
        name = re.sub(pattern, replacement, name)
    return name


def expected_tensors(
    config: DraftConfig, profile: EngineProfile, shapes: dict[str, tuple[int, ...]]
) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """``({engine's parameter: shape}, those it can do without)`` for a head of these :func:`module_shapes`."""
    expected: dict[str, tuple[int, ...]] = {}
    optional: set[str] = set()
    first = (
        f"{profile.first_layer}.0" if profile is TENSORRT_LLM and config.num_hidden_layers > 1 else profile.first_layer
    )
    for name, shape in shapes.items():
        found = re.match(r"layers\.(\d+)\.(.*)", name)
        if found:
            n, rest = int(found.group(1)), found.group(2)
            if n == 0:
                name = f"{first}.{rest}"
            elif profile.next_layers is not None:
                above = profile.next_layers.format(n=n)
                other = {"input_layernorm": "hidden_norm", "hidden_norm": "input_layernorm"}[profile.norm_above_first]
                if rest.startswith("input_layernorm"):
                    optional.add(f"{above}.{other}.weight")  # made and never used
                    rest = rest.replace("input_layernorm", profile.norm_above_first)
                name = f"{above}.{rest}"
        expected[name] = shape
    if config.attention_bias and profile.qkv_bias:
        for n in range(config.num_hidden_layers):
            layer = first if n == 0 else (profile.next_layers or "").format(n=n)
            expected[f"{layer}.self_attn.o_proj.bias"] = (config.hidden_size,)
    if config.draft_vocab_size != config.vocab_size:
        expected["d2t"] = (config.draft_vocab_size,)
    return expected, optional


def tensor_reasons(
    found: dict[str, tuple[int, ...]],
    config: DraftConfig,
    profile: EngineProfile,
    shapes: dict[str, tuple[int, ...]] | None = None,
) -> list[str]:
    """What is wrong with the tensors, in the engine's names; ``shapes``: :func:`module_shapes`, if known."""
    given = {engine_name(n, profile, config.num_hidden_layers): shape for n, shape in found.items() if n != "t2d"}
    expected, optional = expected_tensors(config, profile, shapes or module_shapes(config))
    if config.draft_vocab_size == config.vocab_size and "d2t" in given and profile.map_if_full == "read":
        optional.add("d2t")
    reasons = [f"does not find {n} {list(s)}" for n, s in expected.items() if n not in given]
    fate = "drops it without a word" if profile.drops_unknown else "fails on it"
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


def config_reasons(data: dict[str, Any], config: DraftConfig, profile: EngineProfile) -> list[str]:
    """What the engine would build differently from the trained ``config``."""
    reasons = [f"needs the key {key}: {effect}" for key, effect in profile.required_keys.items() if key not in data]
    allowed = profile.architectures.get(config.decoder_type, ())
    if not set(data.get("architectures") or ()) & set(allowed):
        reasons.append(f"routes {' or '.join(allowed)} to this decoder, the config says {data.get('architectures')}")
    for flag in FLAGS:
        where, decoders = profile.flags[flag]
        wanted = getattr(config, flag)
        seen = config.decoder_type in decoders and flag_seen(data, flag, where)
        if wanted != seen:
            state = "has no" if config.decoder_type not in decoders else f"reads {where} level and finds {seen} for"
            reasons.append(f"{state} {flag}, which the head was trained with" if wanted else f"turns {flag} on")
    if profile.captures is not None and config.num_aux not in profile.captures and config.decoder_type == "llama":
        reasons.append(f"builds fc for {profile.captures[0]} captured layers, the head has {config.num_aux}")
    if config.norm_before_fc and config.fc_norm and not profile.norms_both:
        reasons.append("applies one of norm_before_fc and fc_norm, the head was trained with both")
    narrow = {"one_layer": config.num_aux == 1, "equal_widths": config.fc_input_size == config.hidden_size}
    if any(narrow[kind] for kind in profile.skips_fc):
        reasons.append("leaves out fc, and takes the captured state as it is")
    if config.num_hidden_layers > 1 and profile.next_layers is None:
        reasons.append(f"serves heads of one layer, this one has {config.num_hidden_layers}")
    if config.attention_bias and not profile.qkv_bias:
        reasons.append("has no attention bias and drops it without a word")
    if config.mlp_bias and not profile.mlp_bias:
        reasons.append("has no bias in the feed-forward part and drops it without a word")
    if config.own_embedding and config.hidden_size == config.target_hidden_size and profile.shares_embedding:
        reasons.append("puts the target's embedding in place of the head's own")
    if config.decoder_type == "kimik2" and not config.q_lora_rank and profile.needs_q_lora_rank:
        reasons.append("needs q_lora_rank in latent attention")
    if data.get("tie_word_embeddings"):
        reasons.append("is told to tie lm_head to the embedding; the head has its own")
    for key in SIZES:
        if data.get(key) is not None and data[key] != getattr(config, key):
            reasons.append(f"takes {key} {data[key]}, the head was trained with {getattr(config, key)}")
    return reasons + id_reasons(data, config, profile) + rope_reasons(data, config, profile)


def id_reasons(data: dict[str, Any], config: DraftConfig, profile: EngineProfile) -> list[str]:
    """Whether the engine would capture the trained layers."""
    if profile.ids_key == "serving":
        return []  # named in its serving options; the model card prints them
    nested = (data.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    read = data.get("eagle_aux_hidden_state_layer_ids") if profile.ids_key == "top" else nested
    if read is None:
        return [] if profile.ids_key == "top" else ["finds no nested layer ids and captures its default triple"]
    outputs = [int(i) + profile.ids_offset for i in read]
    if tuple(outputs) != config.aux_layer_ids:
        return [f"captures the outputs of layers {outputs}, the head was trained on {list(config.aux_layer_ids)}"]
    return []


def rope_reasons(data: dict[str, Any], config: DraftConfig, profile: EngineProfile) -> list[str]:
    """Whether the engine would build the trained rotary table."""
    base, scaling = 10000.0, None
    for layout in profile.rope_keys:
        if layout == "rope_parameters" and data.get("rope_parameters"):
            block = dict(data["rope_parameters"])
            base = float(block.pop("rope_theta", data.get("rope_theta") or base))
            scaling = None if block.get("rope_type", "default") == "default" else block
            break
        if layout == "rope_theta" and data.get("rope_theta"):
            base, scaling = float(data["rope_theta"]), data.get("rope_scaling")
            break
    reasons = []
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
        engine: ``vllm``, ``sglang`` or ``tensorrt_llm``.
        config: what the head was trained with; default what the folder itself says, read without strictness.
        options: for a folder that does not say everything.

    Raises:
        ExportError: unknown engine.
    """
    if engine not in PROFILES:
        raise ExportError(f"engine {engine!r} is unknown; known are {', '.join(PROFILES)}")
    profile, folder = PROFILES[engine], Path(folder)
    try:
        data, tensors = read_json(folder / "config.json"), read_tensors(folder)
        legacy = folder / "hf_quant_config.json"
        legacy = read_json(legacy) if legacy.is_file() else None
        if config is None and is_quantised(tensors):
            config = read_config(folder, tensors, options or ReadOptions(), strict=False)[0]
        config = config or read_head(folder, strict=False, options=options).config
    except CheckpointError as error:
        return [f"cannot read it: {error}"]
    reasons = config_reasons(data, config, profile) + tensor_reasons(plain_shapes(tensors), config, profile)
    return reasons + quant_reasons(data, legacy, tensors, config, engine)


def engine_notes(
    data: dict[str, Any], tensors: dict[str, Tensor], config: DraftConfig, legacy: dict[str, Any] | None = None
) -> list[str]:
    """A line for each engine that would not serve a head as trained, for the export and its card.

    Args:
        data: the content of ``config.json``.
        tensors: by their names in the file.
        config: what the head was trained with.
        legacy: the content of ``hf_quant_config.json``, for a quantised head.
    """
    notes, trained, shapes = [], module_shapes(config), plain_shapes(tensors)
    for name, profile in PROFILES.items():
        reasons = config_reasons(data, config, profile) + tensor_reasons(shapes, config, profile, trained)
        reasons += quant_reasons(data, legacy, tensors, config, name)
        if reasons:
            notes.append(
                f"{profile.name} {profile.version} would not serve this head as trained: it " + "; it ".join(reasons)
            )
    return notes


def check_engine(folder: str | Path, engine: str, config: DraftConfig | None = None) -> None:
    """Raise :class:`ExportError` with every reason of :func:`engine_reasons`, if there is one."""
    reasons = engine_reasons(folder, engine, config)
    if reasons:
        profile = PROFILES[engine]
        raise ExportError(
            f"{profile.name} {profile.version} would not serve {folder} as trained: it " + "; it ".join(reasons)
        )
