"""The model card: what the head was trained on, how much it is worth, how to serve it in each engine, its licence."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from modelopt_eagle.common.acceptance import length_text
from modelopt_eagle.common.text import argument, markdown, markdown_with_code, visible
from modelopt_eagle.draft import DraftConfig
from modelopt_eagle.draft.algorithm import algorithm_of
from modelopt_eagle.export.engines import ENGINES
from modelopt_eagle.export.engines.parallel import parallel_text
from modelopt_eagle.export.engines.profile import Order
from modelopt_eagle.export.engines.versions import needed_version

LICENCE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE", "COPYING")
QUICKSTART = ("quickstart", "HuggingFaceTB/SmolLM2-135M-Instruct")
"""The bundled target under its short name and its own; its GGUF file says apache-2.0."""


MEASURING = "`python scripts/ar_validate.py --model_path .` measures it."


def acceptance_lines(report: dict[str, Any], measuring: str = MEASURING) -> list[str]:
    """The acceptance section, from ``acceptance.json``.

    Args:
        measuring: what is said of a head that was not measured.
    """
    if "acceptance_length" not in report:
        return [f"Not measured. {measuring}"]
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
        machine = (report.get("costs") or {}).get("machine")
        lines.append(
            f"Speed-up of this toolkit's generator over plain decoding in the same run: {report['speedup']:.2f}"
            + (f", on {machine}." if machine else ".")
        )
    rows = report.get("per_category") or {}
    if rows:
        lines += ["", "| category | acceptance length | 95 % interval |", "|---|---|---|"]
        for category, entry in rows.items():
            entry = entry if isinstance(entry, dict) else {"acceptance_length": entry}
            bounds = entry.get("ci95") or (report.get("per_category_ci95") or {}).get(category)
            shown = f"{bounds[0]:.3f} to {bounds[1]:.3f}" if bounds else "-"
            lines.append(f"| {markdown(str(category))} | {length_text(entry['acceptance_length'])} | {shown} |")
    return lines


def serve_lines(config: DraftConfig, data: dict[str, Any]) -> list[str]:
    """Serving commands of every engine, with the target's name and this folder's settings in place."""
    if (layout := algorithm_of(config).layout) is not None:
        lines, faults = [], layout.faults(config)
        for key in layout.engines:
            need, engine = needed_version(key, config), ENGINES[key]
            if need.unserved:
                part = [f"{need.unserved}."]
            elif engine.runner is None or not engine.runner.gguf:  # it reads the folder itself
                part = layout.serve_lines(config, data)
            elif faults.get(key):
                part = [f"{engine.name} {engine.version} would not serve this head as trained: it "
                        f"{'; it '.join(faults[key])}."]  # fmt: skip
            else:
                order = Order(argument(config.target_name or "TARGET"), config, need.text(key), engine.tested)
                part = engine.serve(order)
            lines += [*([""] if lines else []), *part]
        return lines or layout.serve_lines(config, data)
    adapted, quantised = "target_adapter" in config.extra, "quantization_config" in data
    target = "MERGED_TARGET" if adapted else argument(config.target_name or "TARGET")
    lines = adapter_lines(config) if adapted else []
    lines += template_lines(config)
    for index, (key, engine) in enumerate(ENGINES.items()):
        need = needed_version(key, config, quantised=quantised)
        order = Order(target, config, need.text(key), engine.tested)
        lines += [*([""] if index else []), *([f"{need.unserved}."] if need.unserved else engine.serve(order))]
    return [*lines, "", f"Tensor-parallel sizes: {parallel_text(config)}."]


def template_lines(config: DraftConfig) -> list[str]:
    """What requests must carry so that prompts are rendered as the head's training rows were."""
    arguments = config.extra.get("template_arguments")
    if not arguments:
        return []
    given = json.dumps(arguments).replace("`", "\\u0060").replace("'", "\\u0027")
    return [
        f"The head was trained on prompts rendered with the template arguments `{given}`. Give them with each request "
        f'(`"chat_template_kwargs": {given}`), or to the server where it takes a default '
        f"(vLLM: `--default-chat-template-kwargs '{given}'`).",
        "",
    ]


def adapter_lines(config: DraftConfig) -> list[str]:
    """How to serve a head whose target was trained with it: the adapter merged, or given to an engine that adds it."""
    target, adapter = config.target_name or "TARGET", config.extra["target_adapter"]
    others = [engine.serve_adapted(argument(target), adapter) for engine in ENGINES.values() if engine.serve_adapted]
    quoted = json.dumps(visible(target)).replace("`", "\\u0060")
    return [
        f"This head belongs to {markdown(target)} **with the adapter in `target_adapter/`** (rank {adapter['rank']} on "
        f"{markdown(', '.join(adapter['modules']))} from layer {adapter['first']} on): they were trained together, and "
        "over the plain target it drafts worse. The text is the adapted target's. Merge the adapter once, for any "
        "engine:",
        "",
        "```python",
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        f'base = AutoModelForCausalLM.from_pretrained({quoted}, dtype="auto")',
        'PeftModel.from_pretrained(base, "THIS_FOLDER/target_adapter").merge_and_unload()'
        '.save_pretrained("MERGED_TARGET")',
        f'AutoTokenizer.from_pretrained({quoted}).save_pretrained("MERGED_TARGET")',
        "```",
        "",
        *others,
        *([""] if others else []),
    ]


def training_lines(config: DraftConfig, report: dict[str, Any]) -> list[str]:
    """What is known of the training run."""
    name, kind = config.target_name or "not recorded", config.target_model_type or "type not recorded"
    lines = [f"* target: {markdown(name)} ({markdown(kind)})"]
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
            lines.append(f"* {name}: {markdown_with_code(str(report[key]))}")
    return lines


def model_card(
    config: DraftConfig,
    data: dict[str, Any],
    *,
    report: dict[str, Any],
    notes: list[str],
    serve: list[str] | None = None,
    measuring: str = MEASURING,
) -> str:
    """The text of ``README.md``.

    Args:
        config: the head's.
        data: the content of ``config.json``.
        report: ``acceptance.json``; keys ``data``, ``recipe``, ``commit`` and ``target_license`` are used too if there.
        notes: added to the card; what stands between backticks is code, the rest plain text.
        serve: how it is served, for a folder of another kind than the engines' own commands are for.
        measuring: how such a folder is measured.
    """
    known = report.get("target_license") or licence_of(config.target_name)
    licence = markdown(known) if known else "that of the target; see its model card"
    engine_notes = [f"* {markdown_with_code(note)}" for note in notes]
    hub_name = config.target_name if re.fullmatch(r"[\w.-]+/[\w.-]+", config.target_name or "", re.ASCII) else None
    parts = [
        "---",
        f"tags: [{config.algorithm}, speculative-decoding]",
        *([f"license: {known}"] if known and re.fullmatch(r"[a-z0-9][a-z0-9.-]*", known) else []),
        *([f"base_model: {hub_name}"] if hub_name else []),
        "---",
        "",
        f"# {algorithm_of(config).title} draft head for "
        f"{markdown(config.target_name or 'a target that was not recorded')}",
        "",
        "It proposes tokens that the target then verifies, so the text is the target's own.",
        "",
        "## Trained",
        "",
        *training_lines(config, report),
        "",
        "## Acceptance",
        "",
        *acceptance_lines(report, measuring),
        *(["", "## Notes", "", *engine_notes] if engine_notes else []),
        "",
        "## Serve",
        "",
        *(serve_lines(config, data) if serve is None else serve),
        "",
        "## Licence",
        "",
        f"The head was made from its target: {licence}.",
        "",
    ]
    return "\n".join(parts)


def front_matter(readme: Path) -> dict:
    """The metadata at the head of a model card; empty if there is none that can be read."""
    try:
        text = readme.read_text(encoding="utf-8")
        head = text.split("---", 2)[1] if text.startswith("---") and text.count("---") >= 2 else ""
        data = yaml.safe_load(head)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return data if isinstance(data, dict) else {}


def said_by(readme: Path) -> str | None:
    """What a model card gives as its licence: ``license``, or the name that stands behind ``other``."""
    data = front_matter(readme)
    licence = data.get("license")
    if licence == "other":
        licence = data.get("license_name") or licence
    return str(licence) if licence else None


def licence_of(target: str | Path | None) -> str | None:
    """The licence of a target; ``None`` if nothing on this machine says it. The network is not asked.

    Args:
        target: a local folder, a hub id whose card is in the hub's cache, ``quickstart``, or ``None``.
    """
    if target is None:
        return None
    if str(target) in QUICKSTART:
        return "apache-2.0"
    folder = Path(target).expanduser()
    if folder.is_dir():
        found = said_by(folder / "README.md")
        if found:
            return found
        for name in LICENCE_FILES:
            if (folder / name).is_file():
                lines = (folder / name).read_text(encoding="utf-8", errors="replace").splitlines()
                first = next((line.strip(" #\t") for line in lines if line.strip(" #\t")), "")
                return f"{first} (its file {name})" if first else None
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(str(target), "README.md")
    except HFValidationError:
        return None
    return said_by(Path(cached)) if isinstance(cached, str) else None
