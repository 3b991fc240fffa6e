"""TensorRT-LLM: what it reads of a head and how a head is served in it. It was not run here.

Its released packages were not compared, so from which release on it reads each part of a head is not known.
"""

from __future__ import annotations

from modelopt_eagle.export.engines.profile import LAYERS, Engine, LoadRules, Order, QuantRules, Targets, shell_pattern

NOBODY_READ = "its code was not read for quantised heads of this type, so it is not known to serve them"
SPECULATING = (
    "ApertusForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV3ForCausalLM", "ExaoneMoEForCausalLM",
    "GptOssForCausalLM", "KimiLinearForCausalLM", "LlamaForCausalLM", "NemotronHForCausalLM", "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM", "Qwen4ExpForCausalLM", "Step3p7ForConditionalGeneration",
)  # fmt: skip
"""Targets whose classes were seen to draft; the others were not read."""


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
    evidence=(),
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
