"""Train a head, measure its acceptance length, export it: the command behind `train_eagle3_and_export.sh`.

Each stage that is complete is passed over, so the same command goes on after Ctrl-C at any moment.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from modelopt_eagle.common.files import file_sha256, write_whole
from modelopt_eagle.errors import ExportError, RecipeError
from modelopt_eagle.recipe import Recipe, train_recipe

INTERRUPTED, BELOW_BOUND = 130, 1


def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Returns:
        0; 1 when the acceptance length is below ``validation.ar_lower_bound``; 130 when training was interrupted.

    Raises:
        EagleError: bad input (exit code 2 through the dispatcher).
    """
    recipe = train_recipe(argv)
    from modelopt_eagle.training import train
    from modelopt_eagle.training.run import finished_state

    if finished_state(recipe) is None:
        check_export_path(recipe)
        check_cuda_graph(recipe)
        check_rope_scaling(recipe)
    result = train(recipe)
    untrained = recipe.training.dry_run and not result.finished  # a finished run is reported as it is
    if not result.finished and not untrained:
        return INTERRUPTED
    if int(os.environ.get("RANK", 0)) != 0:
        return 0
    measured = None if untrained else validate(recipe, result)
    export(recipe, result, measured)
    print("\n" + summary(recipe, result, measured))
    bound = recipe.validation.ar_lower_bound
    if measured is not None and bound is not None and measured["acceptance_length"] < bound:
        print(f"acceptance length {measured['acceptance_length']:.3f} is below validation.ar_lower_bound {bound}")
        return BELOW_BOUND
    return 0


def export_stamp(recipe: Recipe) -> Path:
    """The file in the output folder that says which export folder this run has claimed, and what lies in it."""
    return Path(recipe.training.output_dir) / "report" / "exported.json"


def may_replace(recipe: Recipe) -> bool:
    """Whether the export folder may be replaced: the recipe says so, or an earlier start of this run made it."""
    stamp = export_stamp(recipe)
    if recipe.export.overwrite or not stamp.is_file():
        return recipe.export.overwrite
    return json.loads(stamp.read_text(encoding="utf-8"))["path"] == str(recipe.export_path.resolve())


def check_export_path(recipe: Recipe) -> None:
    """Refuse before training what export would refuse after it.

    Raises:
        ExportError: the export folder is in use and may not be replaced.
    """
    from modelopt_eagle.export.folders import is_export

    path = recipe.export_path
    if not path.is_dir() or not any(path.iterdir()):
        return
    if not may_replace(recipe):
        raise ExportError(
            f"{path} exists already: set export.overwrite=true to replace it at the end, or name another export.path"
        )
    if not is_export(path):
        raise ExportError(f"{path} holds files that no export writes: name another export.path")


def check_cuda_graph(recipe: Recipe) -> None:
    """Refuse before training what validation would refuse after it.

    Raises:
        RecipeError: a CUDA graph is asked for, and the target will not lie on a CUDA device.
    """
    import torch

    device = recipe.model.device
    if recipe.validation.cuda_graph == "on" and (device == "cpu" or not torch.cuda.is_available()):
        raise RecipeError(
            f"validation.cuda_graph is on, but there is no CUDA device here or model.device is not one ({device}): "
            "set validation.cuda_graph: auto, or off"
        )


def check_rope_scaling(recipe: Recipe) -> None:
    """Refuse before training a scaling that export would refuse after it.

    Raises:
        CheckpointError: see :func:`~modelopt_eagle.draft.rotary.check_scaling`.
    """
    from modelopt_eagle.draft.rotary import check_scaling

    if recipe.export.rope_scaling is not None:
        check_scaling(recipe.export.rope_scaling)


def validate(recipe: Recipe, result) -> dict:
    """Measure the best checkpoint by decoding, and write ``report/acceptance.json``; a finished measurement is kept.

    Returns:
        the content of ``acceptance.json``.
    """
    from modelopt_eagle.common.console import ProgressBar
    from modelopt_eagle.data import load_prompts
    from modelopt_eagle.export import load_draft
    from modelopt_eagle.kernels.recorder import graph_switch
    from modelopt_eagle.target import load_target
    from modelopt_eagle.target.lora import merge_adapter
    from modelopt_eagle.validation import measure_acceptance

    section, file = recipe.validation, result.output_dir / "report" / "acceptance.json"
    stamp, mark = file.with_name("measured.json"), measurement_mark(recipe, result.best_checkpoint)
    if file.is_file() and stamp.is_file() and json.loads(stamp.read_text(encoding="utf-8")) == mark:
        print(f"{file}: measured already", file=sys.stderr)
        return json.loads(file.read_text(encoding="utf-8"))
    source = section.dataset or ("quickstart" if section.prompts == "shipped" else section.prompts)
    prompts = load_prompts(source, section.num_samples, images=True)
    target = load_target(**recipe.model.decoding_arguments())
    if (adapter := own_adapter(result.best_checkpoint)) is not None:
        merge_adapter(target, adapter)
    identity = target.identity()
    module = load_draft(
        result.best_checkpoint,
        vocab_size=identity["vocab_size"],
        tokenizer_hash=identity["tokenizer_hash"],
        dtype=target.dtype,
    )
    bar = ProgressBar(len(prompts), "validate", "prompts", log_every=5.0)
    report = measure_acceptance(
        target,
        module.to(target.device).eval(),
        prompts,
        num_steps=section.num_steps,
        max_new_tokens=section.max_new_tokens,
        batch_size=section.batch_size,
        mode=section.mode,
        topk=section.topk,
        depth=section.tree_depth if section.mode == "tree" else None,
        num_nodes=section.num_nodes,
        speedup_prompts=section.speedup_prompts,
        seed=section.seed,
        on_batch=bar.advance,
        cuda_graph=graph_switch(section.cuda_graph),
    )
    print(report.table())
    report.write_json(file)
    write_whole(stamp, json.dumps(mark, indent=1) + "\n")
    return json.loads(file.read_text(encoding="utf-8"))


def measurement_mark(recipe: Recipe, checkpoint: Path) -> dict:
    """What a measurement was made of: the head's bytes, the prompts, and the options."""
    section = recipe.validation.model_dump(mode="json", exclude={"ar_lower_bound"})
    prompts = Path(recipe.validation.prompts)
    return {
        "weights": file_sha256(checkpoint / "model.safetensors"),
        **adapter_mark(checkpoint),
        "prompts": file_sha256(prompts) if prompts.is_file() else None,
        "validation": section,
    }


def own_adapter(checkpoint: Path) -> Path | None:
    """The folder of the target's adapter in a checkpoint, if the run trained one."""
    from modelopt_eagle.target.lora import FOLDER

    return checkpoint / FOLDER if (checkpoint / FOLDER).is_dir() else None


def adapter_mark(checkpoint: Path) -> dict:
    """What tells one adapter from another; empty without one."""
    from modelopt_eagle.target.lora import WEIGHTS

    adapter = own_adapter(checkpoint)
    return {} if adapter is None else {"target_adapter": file_sha256(adapter / WEIGHTS)}


def export(recipe: Recipe, result, measured: dict | None) -> None:
    """Write the folder that engines load, unless it holds this checkpoint already; then upload it if asked to."""
    from modelopt_eagle.export import export_checkpoint, load_draft
    from modelopt_eagle.export.card import licence_of
    from modelopt_eagle.target import load_target_tables
    from modelopt_eagle.target.lora import FOLDER, check_adapter

    section, path, stamp = recipe.export, recipe.export_path, export_stamp(recipe)
    mark = {
        "path": str(path.resolve()),
        "weights": file_sha256(result.best_checkpoint / "model.safetensors"),
        **adapter_mark(result.best_checkpoint),
        "acceptance": measured,
        "export": section.model_dump(mode="json", exclude={"overwrite"}),
    }
    if stamp.is_file() and json.loads(stamp.read_text(encoding="utf-8")) == mark and (path / "config.json").is_file():
        print(f"{path}: exported already", file=sys.stderr)
        return
    check_export_path(recipe)
    stamp.parent.mkdir(parents=True, exist_ok=True)
    write_whole(stamp, json.dumps({"path": mark["path"]}) + "\n")  # from here on the folder is this run's to replace
    arguments = recipe.model.load_arguments()
    del arguments["attn_implementation"]
    target = load_target_tables(**{**arguments, "device": "cpu", "dtype": recipe.model.dtype})
    module = load_draft(result.best_checkpoint)
    card = {
        **(measured or {}),
        "data": data_facts(recipe, result),
        "recipe": recipe_facts(recipe),
        "training_steps": result.steps,
        "target_license": licence_of(recipe.model.base_model),
    }
    report = export_checkpoint(
        module,
        None,
        path,
        target=target,
        dtype=target.embedding_weight.dtype if section.dtype == "auto" else section.dtype,
        layer_names=section.layer_names,
        rope_scaling=section.rope_scaling,
        overwrite=True,  # check_export_path has refused what may not be replaced
        report=card,
        adapter=own_adapter(result.best_checkpoint),
    )
    if own_adapter(result.best_checkpoint) is not None:
        model = recipe.model
        check_adapter(path / FOLDER, model.base_model, model.revision, model.trust_remote_code)
    for note in report.notes:
        print(f"note: {note}")
    if section.push_to_hub is not None:
        from modelopt_eagle.export.hub import push_to_hub

        print(f"uploaded to {push_to_hub(path, section.push_to_hub)}")
    write_whole(stamp, json.dumps(mark, indent=1) + "\n")


def data_facts(recipe: Recipe, result) -> str | None:
    """For the card: the names of the training files, without their folders, and what was read of them."""
    paths = recipe.data.train_path if isinstance(recipe.data.train_path, list) else [recipe.data.train_path]
    if not result.header:
        return None
    names = "stored features" if recipe.data.offline_data_path else ", ".join(Path(path).name for path in paths)
    return f"{names}; {result.header[0].removeprefix('data: ')}"


def recipe_facts(recipe: Recipe) -> str:
    """For the card: each setting of head, training and adapters that is not the default, paths left out."""
    facts = []
    for section in ("eagle", "training", "target_lora"):
        values = getattr(recipe, section)
        for key, field in type(values).model_fields.items():
            value = getattr(values, key)
            if value != field.get_default(call_default_factory=True) and not key.endswith(("_path", "_dir")):
                facts.append(f"{section}.{key}={json.dumps(value)}")
    return ", ".join(f"`{fact}`" for fact in facts) or "the defaults"


def summary(recipe: Recipe, result, measured: dict | None) -> str:
    """The table at the end: what was trained on, what was reached, where things lie, how to serve it."""
    rows = [("trained on", result.header[0].removeprefix("data: ") if result.header else "not recorded")]
    rows.append(("", f"{result.steps} steps in {result.seconds / 60:.1f} min"))
    if measured is not None:
        low, high = measured["ci95"]
        prompts = f"{measured['prompts']} prompts, {recipe.validation.num_steps} drafted tokens"
        if recipe.validation.mode == "tree":
            prompts = f"{measured['prompts']} prompts, tree of {recipe.validation.tree_nodes} nodes"
        rows.append(("acceptance length", f"{measured['acceptance_length']:.3f} [{low:.3f}, {high:.3f}] ({prompts})"))
        rows.append(("per position", " ".join(f"{share:.3f}" for share in measured["per_position"])))
        speedup = measured["speedup"]
        rows.append(("speed-up", "not measured" if speedup is None else f"{speedup:.2f} over plain decoding, same run"))
    rows.append(("checkpoint", str(result.best_checkpoint)))
    if measured is not None:
        rows.append(("report", str(result.output_dir / "report" / "acceptance.json")))
    rows.append(("export", str(recipe.export_path)))
    width = max(len(name) for name, _ in rows) + 2
    lines = [f"{name:<{width}}{value}" for name, value in rows]
    return "\n".join([*lines, "", "serve it:", *(f"  {line}" for line in serving_lines(recipe))])


def serving_lines(recipe: Recipe) -> list[str]:
    """The commands of the model card with this run's target and folder in place."""
    from modelopt_eagle.export.card import serve_lines
    from modelopt_eagle.export.load import load_draft
    from modelopt_eagle.target.load import resolve

    path = recipe.export_path
    config = load_draft(path).config
    data = json.loads((path / "config.json").read_text(encoding="utf-8"))
    place, name = str(resolve(recipe.model.base_model)), config.target_name or "TARGET"
    lines = [line for line in serve_lines(config, data) if line and not line.startswith("```")]
    return [line.replace(f" {name} ", f" {place} ").replace("THIS_FOLDER", str(path.resolve())) for line in lines]


if __name__ == "__main__":
    sys.exit(main())
