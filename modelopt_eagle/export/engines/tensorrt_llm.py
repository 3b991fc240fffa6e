"""TensorRT-LLM: what it reads of a head and how a head is served in it. It was not run here.

Its released packages were not compared, so from which release on it reads each part of a head is not known.
"""

from __future__ import annotations

from modelopt_eagle.export.engines.profile import (
    LAYERS,
    Engine,
    Evidence,
    LoadRules,
    Order,
    QuantRules,
    Targets,
    shell_pattern,
)

NOBODY_READ = "its code was not read for quantised heads of this type, so it is not known to serve them"
SPECULATING = (
    "ApertusForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV3ForCausalLM", "ExaoneMoEForCausalLM",
    "GptOssForCausalLM", "KimiLinearForCausalLM", "LlamaForCausalLM", "NemotronHForCausalLM", "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM", "Qwen4ExpForCausalLM", "Step3p7ForConditionalGeneration",
)  # fmt: skip
"""Targets whose classes were seen to draft; the others were not read."""
HEAD_FILE = "_torch/models/modeling_speculative.py"
EVIDENCE = (
    Evidence("layers.0 is renamed to midlayer", HEAD_FILE, r"'midlayer\.', new_k"),
    Evidence("the layers of several to midlayer.N", HEAD_FILE, r"r'midlayer\.\\1\.', new_k"),
    Evidence("fc of one captured layer is left out", HEAD_FILE, r"num_capture_layers > 1"),
    Evidence(
        "features as wide as the head pass by fc", HEAD_FILE, r"hidden_states\.shape\[-1\] != expected_hidden_size"
    ),
    Evidence("norm_before_fc is nested", HEAD_FILE, r'eagle_config\.get\("norm_before_fc", False\)'),
    Evidence("fc_norm is read at top level", HEAD_FILE, r'getattr\(config, "fc_norm", False\)'),
    Evidence("norm_output is read at top level", HEAD_FILE, r'config, "norm_output", False\)'),
    Evidence("fc_norm or norm_before_fc, not both", HEAD_FILE, r"elif self\.model\._norm_before_fc"),
    Evidence("norm_before_residual is not read", HEAD_FILE, "norm_before_residual", present=False),
    Evidence("query and key norms are not known", HEAD_FILE, r"q_norm|qk_norm", present=False),
    Evidence("windows are not known", HEAD_FILE, "sliding_window", present=False),
    Evidence("attention biases are loaded", HEAD_FILE, r"bias=config\.attention_bias"),
    Evidence("feed-forward biases are loaded", HEAD_FILE, r'bias=getattr\(config, "mlp_bias", False\)'),
    Evidence("the norm above layer 0 is hidden_norm", HEAD_FILE, r"hidden_states = self\.hidden_norm\(hidden_states\)"),
    Evidence("the embedding is the target's", HEAD_FILE, r"embed_tokens = target_model\.model\.embed_tokens"),
    Evidence("latent heads are told by kv_lora_rank", HEAD_FILE, r"hasattr\(config, 'kv_lora_rank'\)"),
    Evidence("latent heads take q_lora_rank", HEAD_FILE, r"q_lora_rank=config\.q_lora_rank"),
)


def serve(order: Order) -> list[str]:
    """The server's command line and its file of options, which name the captured layers."""
    return [
        f"TensorRT-LLM, tested with {order.tested}, by "
        f"`trtllm-serve {order.target} --extra_llm_api_options serve.yaml` with",
        "",
        "```yaml",
        "speculative_config:",
        "  decoding_type: Eagle3",
        "  max_draft_len: 3",
        "  speculative_model: THIS_FOLDER",
        f"  eagle3_layers_to_capture: {list(order.config.aux_layer_ids)}",
        "```",
    ]


ENGINE = Engine(
    key="tensorrt_llm",
    name="TensorRT-LLM",
    aliases=("tensorrt-llm", "trtllm"),
    package="tensorrt_llm",
    version="1.3 (main at 00679c6)",
    evidence=EVIDENCE,
    source="NVIDIA/TensorRT-LLM: tensorrt_llm/_torch/models/modeling_speculative.py at 00679c6, modeling_auto.py at "
    "01bffee, one-model EAGLE-3 (eagle3_model_arch llama3)",
    tested="1.3 (main at 00679c6) (by its loader's rules)",
    loads=LoadRules(
        architectures={
            "llama": ("LlamaForCausalLMEagle3", "LlamaForCausalLM"),
            "kimik2": ("Eagle3DeepseekV2ForCausalLM",),
        },
        rewrites={},
        rename=((r"^layers\.0\.", "midlayer."),),
        rename_several=((r"^layers\.(\d+)\.", r"midlayer.\1."),),
        first_layer="midlayer",
        first_of_several="midlayer.0",
        next_layers="midlayer.{n}",
        norm_above_first="hidden_norm",
        drops_unknown=True,
        ids_key="serving",
        ids_offset=0,
        window={},
        required_keys={
            "draft_vocab_size": "it tells an EAGLE-3 head by this key",
            "rope_theta": "it reads the old layout only and takes 10000",
        },
        flags={
            "norm_before_residual": ("top", ()),
            "norm_before_fc": ("nested", LAYERS),
            "fc_norm": ("top", LAYERS),
            "norm_output": ("top", LAYERS),
        },
        qkv_bias=("llama",),
        mlp_bias=("llama", "kimik2"),
        output_bias=("llama",),
        skips_fc=("one_layer", "equal_widths"),
        norms_both=False,
        ties=True,
        shares_embedding=True,
        rope_keys=("rope_theta",),
        rounds_latent_yarn=False,
        map_if_full="read",
        needs_q_lora_rank=True,
        single_layer=(),
        counts_captures_by="served",
        captures_last=True,
        drafters={"eagle3": LAYERS},
    ),
    quantised=QuantRules(
        source="NVIDIA/TensorRT-LLM: _torch/models/modeling_speculative.py at 00679c6, _torch/model_config.py at "
        "008e0af",
        file="hf_quant_config.json",
        algorithms={("modelopt", "FP8"): "FP8", ("modelopt", "NVFP4"): "NVFP4"},
        matches={"modelopt": shell_pattern},
        first_layer="model.midlayer",
        plain={},
        refuses={"kimik2": {"FP8": NOBODY_READ, "NVFP4": NOBODY_READ}},
    ),
    targets=Targets(
        "_torch/models/modeling_*.py at several commits of 2026: classes over SpecDecOneEngineForCausalLM",
        {"1.3": SPECULATING},
        complete=False,
        never=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    ),
    parallel=None,
    since={},
    serve=serve,
)
