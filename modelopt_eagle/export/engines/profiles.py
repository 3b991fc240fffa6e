"""How each engine reads a draft folder, as data, from its sources (named in ``source``)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineProfile:
    """How an engine reads a draft folder.

    Attributes:
        version, source: of the engine's code that was read.
        architectures: decoder type to the names it routes to an EAGLE-3 head of that type.
        rename: (pattern, replacement) applied to tensor names in turn.
        first_layer: name of layer 0 in the engine; ``next_layers``: pattern of those above (``{n}``).
        norm_above_first: what it calls the norm before attention above layer 0.
        drops_unknown: tensors it does not know are dropped without a word (else loading fails).
        ids_key: where it reads the captured layers: ``top``, ``nested`` or ``serving`` (its own serving options).
        ids_offset: output layer = value read + this.
        required_keys: keys without which it fails or serves something else, with what happens.
        flags: flag to where it is read (``top``, ``nested``, ``both``), decoder types that honour it.
        qkv_bias, mlp_bias: whether biases of the attention and of the feed-forward part are loaded.
        skips_fc: heads whose fc it leaves out: of ``one_layer``, of ``equal_widths`` (features as wide as the head).
        norms_both: with ``norm_before_fc`` and ``fc_norm`` on, it applies both.
        shares_embedding: it replaces the head's own table by the target's when their widths are equal.
        rope_keys: the layouts it reads, in order.
        map_if_full: what a ``d2t`` does beside a full vocabulary: ``fails`` or ``read``.
        needs_q_lora_rank: its latent attention has no plain ``q_proj``.
        single_layer: decoder types of which it serves heads of one layer only.
        counts_captures_by: ``nested``: it makes ``fc`` for as many layers as ``eagle_config`` names, else for 3.
        captures_last: whether it can capture the output of the target's last layer.
    """

    name: str
    version: str
    source: str
    architectures: dict[str, tuple[str, ...]]
    rename: tuple[tuple[str, str], ...]
    first_layer: str
    next_layers: str
    norm_above_first: str
    drops_unknown: bool
    ids_key: str
    ids_offset: int
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
    single_layer: tuple[str, ...] = ()
    counts_captures_by: str | None = None
    captures_last: bool = True


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
    counts_captures_by="nested",
)

SGLANG = EngineProfile(
    name="sglang",
    version="0.5.23",
    source="sglang 0.5.23: srt/models/{llama_eagle3,kimi_k25_eagle3,llama}.py, srt/speculative/eagle_utils.py, "
    "srt/model_executor/model_runner_components/spec_aux_hidden_state.py",
    architectures={"llama": ("LlamaForCausalLMEagle3",), "kimik2": ("Eagle3DeepseekV2ForCausalLM",)},
    rename=((r"midlayer\.", "layers.0."),),
    first_layer="layers.0",
    next_layers="layers.{n}",
    norm_above_first="hidden_norm",
    drops_unknown=True,
    ids_key="nested",
    ids_offset=0,
    required_keys={
        "draft_vocab_size": "releases before 0.5.2 read the attribute and fail without it",
        "eagle_config": "it then captures its default triple",
    },
    flags={
        "norm_before_residual": ("top", ()),
        "norm_before_fc": ("both", ("llama",)),
        "fc_norm": ("top", BOTH),
        "norm_output": ("top", BOTH),
    },
    qkv_bias=False,
    mlp_bias=False,
    skips_fc=("equal_widths",),
    norms_both=True,
    shares_embedding=True,
    rope_keys=("rope_parameters", "rope_theta"),
    map_if_full="read",
    needs_q_lora_rank=True,
    single_layer=("kimik2",),
    counts_captures_by="nested",
    captures_last=False,
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
