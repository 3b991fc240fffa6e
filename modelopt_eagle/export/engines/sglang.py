"""SGLang: what it reads of a head, from which release on, and how a head is served in it. It was not run here."""

from __future__ import annotations

from modelopt_eagle.export.engines.profile import (
    LAYERS,
    Counters,
    Engine,
    Evidence,
    LoadRules,
    Order,
    Parallel,
    QuantRules,
    Since,
    Targets,
    part_of_name,
    whole_name,
)

LLAMA_FILE = "srt/models/llama_eagle3.py"
TARGETS = {
    "0.4.9": (
        "InternLM3ForCausalLM", "Llama4ForCausalLM", "Llama4ForConditionalGeneration", "LlamaForCausalLM",
        "MistralForCausalLM", "Phi3ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM",
    ),
    "0.5.1": (
        "GptOssForCausalLM",
    ),
    "0.5.2": (
        "Qwen2ForCausalLM", "Qwen2MoeForCausalLM", "Qwen2_5_VLForConditionalGeneration",
    ),
    "0.5.3": (
        "ApertusForCausalLM",
    ),
    "0.5.5": (
        "DeepseekV2ForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeForCausalLM",
    ),
    "0.5.6": (
        "LongcatFlashForCausalLM", "MiniMaxM2ForCausalLM", "TeleFLMForCausalLM",
    ),
    "0.5.7": (
        "Ministral3ForCausalLM", "MistralLarge3ForCausalLM",
    ),
    "0.5.8": (
        "Glm4MoeLiteForCausalLM", "IQuestCoderForCausalLM",
    ),
    "0.5.9": (
        "BailingMoEForCausalLM", "BailingMoeForCausalLM", "BailingMoeV2ForCausalLM", "ExaoneMoEForCausalLM",
        "GlmMoeDsaForCausalLM", "Qwen3NextForCausalLM",
    ),
    "0.5.10": (
        "KimiK25ForConditionalGeneration", "SarvamMoEForCausalLM",
    ),
    "0.5.11": (
        "InternS1ProForConditionalGeneration", "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration",
    ),
    "0.5.12": (
        "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration",
        "InternS2PreviewForConditionalGeneration",
    ),
    "0.5.13": (
        "Gemma4UnifiedForConditionalGeneration",
    ),
    "0.5.16": (
        "MellumForCausalLM", "MiniMaxM3SparseForCausalLM",
    ),
    "0.5.18": (
        "InternS2MobiusForConditionalGeneration", "MiniMaxM3SparseForConditionalGeneration",
    ),
    "0.5.20": (
        "Cosmos3ForConditionalGeneration", "Glm5NextForConditionalGeneration", "Qwen4ExpForConditionalGeneration",
    ),
    "0.5.22": (
        "ExaoneMoeForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM",
    ),
}  # fmt: skip
"""Targets by the first release whose class has a ``set_eagle3_layers_to_capture``, own or inherited; older ones than
0.4.9 were not looked at."""
SPLITS_KV_B = "it splits kv_b_proj after loading and takes floating numbers only"
VOCAB_FILE = "srt/layers/vocab_parallel_embedding.py"
CAPTURE_FILE = "srt/model_executor/model_runner_components/spec_aux_hidden_state.py"
METRICS_FILE = "srt/observability/metrics_collector.py"
EVIDENCE = (
    Evidence("layer ids are nested outputs", CAPTURE_FILE, r'"eagle_aux_hidden_state_layer_ids"'),
    Evidence("one is added to them", "srt/models/llama.py", r"layers_to_capture = \[val \+ 1 for val in layer_ids\]"),
    Evidence("norm_before_residual is not read", LLAMA_FILE, "norm_before_residual", present=False),
    Evidence(
        "norm_before_fc is read nested and at top level",
        LLAMA_FILE,
        r'eagle_config\.get\("norm_before_fc", getattr\(config, "norm_before_fc", False\)\)',
    ),
    Evidence("fc_norm is read at top level", LLAMA_FILE, r'getattr\(config, "fc_norm", None\)'),
    Evidence("norm_output is read at top level", LLAMA_FILE, r'getattr\(config, "norm_output", False\)'),
    Evidence(
        "fc is left out for features as wide as the head",
        LLAMA_FILE,
        r"hidden_states\.shape\[-1\] != embeds\.shape\[-1\]",
    ),
    Evidence("attention biases are not loaded", LLAMA_FILE, "attention_bias", present=False),
    Evidence("query and key norms are not known", LLAMA_FILE, "q_norm", present=False),
    Evidence("fc is plain", LLAMA_FILE, r"self\.fc = torch\.nn\.Linear"),
    Evidence("windows are told on the command line", LLAMA_FILE, r"speculative_draft_window_size"),
    Evidence("tied drafts take their embedding as lm_head", LLAMA_FILE, r"if self\.config\.tie_word_embeddings"),
    Evidence("the norm above layer 0 is hidden_norm", LLAMA_FILE, r"= self\.hidden_norm\(hidden_states, residual\)"),
    Evidence("rotary sections are taken for plain", LLAMA_FILE, r'rope_scaling\["rope_type"\] = "default"'),
    Evidence(
        "the vocabulary is padded to 64", "srt/layers/vocab_parallel_embedding.py", r"DEFAULT_VOCAB_PADDING_SIZE = 64"
    ),
    Evidence("latent heads have a class", "srt/models/kimi_k25_eagle3.py", r"class Eagle3DeepseekV2ForCausalLM"),
    Evidence("it counts rounds", METRICS_FILE, r'name="sglang:spec_verify_calls_total"'),
    Evidence("it counts new tokens", METRICS_FILE, r'name="sglang:generation_tokens_total"'),
    Evidence("it counts cached tokens", METRICS_FILE, r'name="sglang:cached_tokens_total"'),
)


def serve(order: Order) -> list[str]:
    """The server's command line; it is told of a window as the number of keys before the query's own."""
    window = order.config.sliding_window
    told = f" \\\n    --speculative-draft-window-size {window - 1}" if window else ""
    return [
        f"{order.need}, tested with {order.tested}:",
        "",
        "```bash",
        f"python -m sglang.launch_server --model-path {order.target} --speculative-algorithm EAGLE3 \\",
        "    --speculative-draft-model-path THIS_FOLDER --speculative-num-steps 3 --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens 4{told}",
        "```",
    ]


ENGINE = Engine(
    key="sglang",
    name="SGLang",
    aliases=(),
    package="sglang",
    version="0.5.23",
    evidence=EVIDENCE,
    source="sglang 0.5.23: srt/models/{llama_eagle3,kimi_k25_eagle3,llama}.py, srt/speculative/eagle_utils.py, "
    "srt/model_executor/model_runner_components/spec_aux_hidden_state.py",
    tested="0.5.23 (by its loader's rules)",
    loads=LoadRules(
        architectures={"llama": ("LlamaForCausalLMEagle3",), "kimik2": ("Eagle3DeepseekV2ForCausalLM",)},
        rewrites={},
        rename=((r"midlayer\.", "layers.0."),),
        rename_several=((r"midlayer\.", "layers.0."),),
        first_layer="layers.0",
        first_of_several="layers.0",
        next_layers="layers.{n}",
        norm_above_first="hidden_norm",
        drops_unknown=True,
        ids_key="nested",
        ids_offset=0,
        window={"llama": "serving"},
        required_keys={
            "draft_vocab_size": "releases before 0.5.2 read the attribute and fail without it",
            "eagle_config": "it then captures its default triple",
        },
        flags={
            "norm_before_residual": ("top", ()),
            "norm_before_fc": ("both", ("llama",)),
            "fc_norm": ("top", LAYERS),
            "norm_output": ("top", LAYERS),
        },
        qkv_bias=(),
        mlp_bias=(),
        output_bias=(),
        skips_fc=("equal_widths",),
        norms_both=True,
        ties=True,
        shares_embedding=True,
        rope_keys=("rope_parameters", "rope_theta"),
        rounds_latent_yarn=False,
        map_if_full="read",
        needs_q_lora_rank=True,
        single_layer=("kimik2",),
        counts_captures_by="nested",
        captures_last=False,
        drafters={"eagle3": LAYERS},
    ),
    quantised=QuantRules(
        source="sglang 0.5.23: srt/models/{llama_eagle3,kimi_k25_eagle3}.py",
        file="config.json",
        algorithms={("modelopt", "FP8"): "FP8", ("modelopt", "NVFP4"): "NVFP4", ("compressed-tensors", ""): "INT8"},
        matches={"modelopt": part_of_name, "compressed-tensors": whole_name},
        first_layer="model.layers.0",
        plain={"llama": ("fc",)},
        refuses={
            "kimik2": {
                "NVFP4": "it takes a latent-attention head for bfloat16 when it is told of nvfp4",
                "FP8": SPLITS_KV_B,
                "INT8": SPLITS_KV_B,
            }
        },
    ),
    targets=Targets(
        "srt/models: classes with set_eagle3_layers_to_capture",
        TARGETS,
        complete=True,
        folder="srt/models",
        interface="set_eagle3_layers_to_capture",
    ),
    parallel=Parallel("srt/layers/{linear,vocab_parallel_embedding}.py, srt/models/llama.py", 64, alone=None),
    since={
        "an EAGLE-3 head": Since("0.4.4.post2", "0.4.4.post1", LLAMA_FILE),
        "eagle_aux_hidden_state_layer_ids": Since("0.4.9", "0.4.8.post1", "srt/model_executor/model_runner.py"),
        "fc_norm": Since("0.5.12", "0.5.11", LLAMA_FILE),
        "norm_output": Since("0.5.12", "0.5.11", LLAMA_FILE),
        "several draft layers": Since("0.5.12", "0.5.11", LLAMA_FILE),
        "another number of captured layers than 3": Since("0.5.12", "0.5.11", LLAMA_FILE),
        "layers.0 names": Since("0.5.12", "0.5.11", LLAMA_FILE),
        "latent attention": Since("0.5.12", "0.5.11", "srt/models/kimi_k25_eagle3.py"),
        "norm_before_fc": Since("0.5.17", "0.5.16", LLAMA_FILE),
        "a sliding window": Since("0.5.12", "0.5.11", LLAMA_FILE),
    },
    serve=serve,
    counters=Counters(
        "srt/observability/metrics_collector.py, with --enable-metrics; read, not tried",
        drafts="sglang:spec_verify_calls_total",
        generated="sglang:generation_tokens_total",
        cached="sglang:cached_tokens_total",
        version=("/server_info", "version"),
    ),
)
