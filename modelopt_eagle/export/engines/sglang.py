"""SGLang: what it reads of a head, from which release on, and how a head is served in it. It was not run here."""

from __future__ import annotations

from modelopt_eagle.export.engines.profile import (
    LAYERS,
    Engine,
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
    version="0.5.23",
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
    targets=Targets("srt/models: classes with set_eagle3_layers_to_capture", TARGETS, complete=True),
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
)
