"""The model card: what the head was trained on, how much it is worth, and how to serve it in each engine."""

from __future__ import annotations

import re
from typing import Any

from modelopt_eagle.draft import DraftConfig
from modelopt_eagle.export.engines.check import SGLANG, TENSORRT_LLM, VLLM
from modelopt_eagle.export.engines.versions import needed_version
from modelopt_eagle.export.licence import licence_of

TESTED = {
    "vLLM": f"{VLLM.version} (run on a CPU)",
    "SGLang": f"{SGLANG.version} (by its loader's rules)",
    "TensorRT-LLM": f"{TENSORRT_LLM.version} (by its loader's rules)",
}
"""Engine versions that an export was held against; see docs/serving.md."""


def acceptance_lines(report: dict[str, Any]) -> list[str]:
    """The acceptance section, from ``acceptance.json``."""
    if "acceptance_length" not in report:
        return ["Not measured. `python scripts/ar_validate.py --model_path .` measures it."]
    low, high = report.get("ci95") or (None, None)
    interval = f" (95 % interval {low:.3f} to {high:.3f})" if low is not None else ""
    lines = [
        f"Mean acceptance length **{report['acceptance_length']:.3f}**{interval}, the target's own token included."
    ]
    draft = report.get("draft") or {}
    if draft.get("mode") == "tree":
        shape = f"topk {draft['topk']}, depth {draft['depth']} and {draft['num_nodes']} nodes"
        lines.append(f"Drafted: dynamic trees of {shape}.")
    elif draft:
        lines.append(f"Drafted: chains of {draft['num_steps']} tokens.")
    if report.get("per_position"):
        positions = ", ".join(f"{p:.3f}" for p in report["per_position"])
        lines.append(f"Accepted at each drafted position: {positions}.")
    if report.get("speedup"):
        lines.append(
            f"Speed-up of this toolkit's generator over plain decoding in the same run: {report['speedup']:.2f}."
        )
    rows = report.get("per_category") or {}
    if rows:
        lines += ["", "| category | acceptance length | 95 % interval |", "|---|---|---|"]
        for category, entry in rows.items():
            entry = entry if isinstance(entry, dict) else {"acceptance_length": entry}
            bounds = entry.get("ci95") or (report.get("per_category_ci95") or {}).get(category)
            shown = f"{bounds[0]:.3f} to {bounds[1]:.3f}" if bounds else "-"
            lines.append(f"| {category} | {entry['acceptance_length']:.3f} | {shown} |")
    return lines


def serve_lines(config: DraftConfig, data: dict[str, Any]) -> list[str]:
    """Serving commands, with the target's name and this folder's settings in place."""
    adapted = "target_adapter" in config.extra
    target = "MERGED_TARGET" if adapted else config.target_name or "TARGET"
    ids = list(config.aux_layer_ids)
    quantised = "quantization_config" in data
    needs = {name: needed_version(name, config, quantised=quantised).text(name) for name in ("vllm", "sglang")}
    return [
        *(adapter_lines(config) if adapted else []),
        f"{needs['vllm']}, tested with {TESTED['vLLM']}:",
        "",
        "```bash",
        f"vllm serve {target} --speculative-config "
        '\'{"method": "eagle3", "model": "THIS_FOLDER", "num_speculative_tokens": 3}\'',
        "```",
        "",
        f"{needs['sglang']}, tested with {TESTED['SGLang']}:",
        "",
        "```bash",
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm EAGLE3 \\",
        "    --speculative-draft-model-path THIS_FOLDER --speculative-num-steps 3 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 4",
        "```",
        "",
        f"TensorRT-LLM, tested with {TESTED['TensorRT-LLM']}, by "
        f"`trtllm-serve {target} --extra_llm_api_options serve.yaml` with",
        "",
        "```yaml",
        "speculative_config:",
        "  decoding_type: Eagle3",
        "  max_draft_len: 3",
        "  speculative_model: THIS_FOLDER",
        f"  eagle3_layers_to_capture: {ids}",
        "```",
    ]


VLLM_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM takes for ``--max-lora-rank``."""


def adapter_lines(config: DraftConfig) -> list[str]:
    """How to serve a head whose target was trained with it: the adapter merged, or given to vLLM as a LoRA module."""
    target, adapter = config.target_name or "TARGET", config.extra["target_adapter"]
    rank = next((limit for limit in VLLM_LORA_RANKS if limit >= adapter["rank"]), adapter["rank"])
    return [
        f"This head belongs to {target} **with the adapter in `target_adapter/`** (rank {adapter['rank']} on "
        f"{', '.join(adapter['modules'])} from layer {adapter['first']} on): they were trained together, and over the "
        "plain target it drafts worse. The text is the adapted target's. Merge the adapter once, for any engine:",
        "",
        "```python",
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        f'base = AutoModelForCausalLM.from_pretrained("{target}", dtype="auto")',
        'PeftModel.from_pretrained(base, "THIS_FOLDER/target_adapter").merge_and_unload()'
        '.save_pretrained("MERGED_TARGET")',
        f'AutoTokenizer.from_pretrained("{target}").save_pretrained("MERGED_TARGET")',
        "```",
        "",
        f"or let vLLM add it: `vllm serve {target} --enable-lora --max-lora-rank {rank} --lora-modules "
        "adapted=THIS_FOLDER/target_adapter --speculative-config ...`, with `adapted` as the model of each request.",
        "",
    ]


def training_lines(config: DraftConfig, report: dict[str, Any]) -> list[str]:
    """What is known of the training run."""
    lines = [f"* target: {config.target_name or 'not recorded'} ({config.target_model_type or 'type not recorded'})"]
    lines.append(
        f"* reads the outputs of layers {list(config.aux_layer_ids)} (0-based); {config.num_hidden_layers} draft layers"
    )
    share = config.draft_vocab_size / config.vocab_size
    lines.append(f"* draft vocabulary: {config.draft_vocab_size} of {config.vocab_size} tokens ({share:.1%})")
    if config.training_length:
        lines.append(f"* longest training row: {config.training_length} tokens")
    names = {"data": "data", "recipe": "recipe", "training_steps": "optimizer steps", "commit": "toolkit commit"}
    for key, name in names.items():
        if report.get(key):
            lines.append(f"* {name}: {report[key]}")
    return lines


def model_card(config: DraftConfig, data: dict[str, Any], *, report: dict[str, Any], notes: list[str]) -> str:
    """The text of ``README.md``.

    Args:
        config: the head's.
        data: the content of ``config.json``.
        report: ``acceptance.json``; keys ``data``, ``recipe``, ``commit`` and ``target_license`` are used too if there.
        notes: added to the card as they are.
    """
    known = report.get("target_license") or licence_of(config.target_name)
    licence = known or "that of the target; see its model card"
    engine_notes = [f"* {note}" for note in notes]
    parts = [
        "---",
        "tags: [eagle3, speculative-decoding]",
        *([f"license: {known}"] if known and re.fullmatch(r"[a-z0-9][a-z0-9.-]*", known) else []),
        *([f"base_model: {config.target_name}"] if config.target_name and "/" in config.target_name else []),
        "---",
        "",
        f"# EAGLE-3 draft head for {config.target_name or 'a target that was not recorded'}",
        "",
        "It proposes tokens that the target then verifies, so the text is the target's own.",
        "",
        "## Trained",
        "",
        *training_lines(config, report),
        "",
        "## Acceptance",
        "",
        *acceptance_lines(report),
        *(["", "## Notes", "", *engine_notes] if engine_notes else []),
        "",
        "## Serve",
        "",
        *serve_lines(config, data),
        "",
        "## Licence",
        "",
        f"The head was made from its target: {licence}.",
        "",
    ]
    return "\n".join(parts)
