"""``run``: train, validate, export in one call. The command behind ``train_eagle3_and_export.sh`` calls it.

Each stage that is complete is passed over, so that the same call goes on after Ctrl-C at any moment.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelopt_eagle.common.console import ProgressBar, say, shown
from modelopt_eagle.common.files import file_sha256, write_whole
from modelopt_eagle.data.files import IN_MEMORY
from modelopt_eagle.errors import DecodingError, ExportError, MissingExtraError, RecipeError
from modelopt_eagle.recipe import Recipe, as_recipe

if TYPE_CHECKING:
    from modelopt_eagle.target import RunningTarget, TableTarget
    from modelopt_eagle.training.trainer import OnStep, TrainingResult


@dataclass(frozen=True)
class RunResult:
    """What :func:`run` leaves behind.

    Attributes:
        recipe: as it was used, with what was given in Python written in.
        training: see :class:`~modelopt_eagle.training.TrainingResult`; its ``finished`` is false after a stop.
        acceptance: the content of ``report/acceptance.json``; ``None`` after a dry run or a stop, with
            ``validation.mode: none``, and on all processes but the first.
        export_path: the folder that engines load; ``None`` where nothing was exported.
        unmeasured: why a finished run was not measured; ``None`` where it was, and on all processes but the first.
    """

    recipe: Recipe
    training: TrainingResult
    acceptance: dict[str, Any] | None = None
    export_path: Path | None = None
    unmeasured: str | None = None

    @property
    def acceptance_length(self) -> float | None:
        """Measured by decoding, ``None`` if it was not."""
        return None if self.acceptance is None else self.acceptance["acceptance_length"]

    @property
    def below_bound(self) -> bool:
        """Whether the acceptance length is below ``validation.ar_lower_bound``."""
        bound, length = self.recipe.validation.ar_lower_bound, self.acceptance_length
        return bound is not None and length is not None and length < bound


def run(
    recipe: Recipe | Mapping[str, Any] | str | Path,
    target: Any = None,
    data: Any = None,
    *,
    eval_data: Any = None,
    on_step: OnStep | None = None,
    quiet: bool = False,
) -> RunResult:
    """Train a head, measure its acceptance length by decoding, and export it.

    Args:
        recipe, target, data, eval_data, on_step, quiet: as for :func:`modelopt_eagle.train`. A target that is given
            is also the one that validation decodes with.

    Returns:
        what was trained, measured and written.

    Raises:
        EagleError: bad input; what export or validation would refuse is said before training.
    """
    from modelopt_eagle.training import train
    from modelopt_eagle.training.given import take
    from modelopt_eagle.training.run import finished_state

    recipe, given = take(as_recipe(recipe), target, data, eval_data)
    first = int(os.environ.get("RANK", "0")) == 0
    with shown(first and not quiet):
        if finished_state(recipe) is None:
            check_export_path(recipe)
            check_cuda_graph(recipe)
            check_verifiable(recipe, given.target)
            check_rope_scaling(recipe)
        result = train(
            recipe, target=given.target, data=given.data, eval_data=given.eval_data, on_step=on_step, quiet=quiet
        )
        untrained = recipe.training.dry_run and not result.finished  # a finished run is reported as it is
        if not (result.finished or untrained) or not first:
            return RunResult(recipe, result)
        unmeasured = None if untrained else why_unmeasured(recipe, given.target)
        measured = None if untrained or unmeasured else validate(recipe, result, given.target)
        if unmeasured is not None:
            say(f"the acceptance length is not measured: {unmeasured}")
        export(recipe, result, measured, given.target)
        if not untrained:
            make_page(result.output_dir)
    return RunResult(recipe, result, measured, recipe.export_path, unmeasured)


def why_unmeasured(recipe: Recipe, target: RunningTarget | None = None) -> str | None:
    """Why a trained head is not decoded with; ``None`` if it is.

    After a run of several processes the first one decodes alone, with a whole copy of the target on its own device.

    Args:
        recipe: of the run.
        target: the loaded target, if there is one.
    """
    if recipe.validation.mode == "none":
        return "validation.mode: none"
    if target is not None or recipe.model.parallel == "none" or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    import gc

    import torch

    from modelopt_eagle.training.placement import whole_fits

    gc.collect()  # this process's part of the target that was trained with
    device = torch.device(recipe.model.load_arguments()["device"])
    if device.type == "cuda":
        torch.cuda.empty_cache()
    fits, numbers = whole_fits(recipe, device, alone=True)
    if fits:
        return None
    return (
        f"the first process would decode alone, and {numbers}; `modelopt-eagle ar-validate` in one process spreads the "
        "target over all devices"
    )


def export_stamp(recipe: Recipe) -> Path:
    """The file in the output folder that says which export folder this run has claimed, and what lies in it."""
    return Path(recipe.training.output_dir) / "report" / "exported.json"


def may_replace(recipe: Recipe) -> bool:
    """Whether the export folder may be replaced: the recipe says so, or an earlier start of this run made it."""
    claimed = read_stamp(export_stamp(recipe)).get("path")
    return recipe.export.overwrite or claimed == str(recipe.export_path.resolve())


def read_stamp(file: Path) -> dict[str, Any]:
    """What a stage noted of its work; empty where it did not, or where the note is damaged: the work is done anew."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


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

    device, section = recipe.model.device, recipe.validation
    if section.mode != "none" and section.cuda_graph == "on" and (device == "cpu" or not torch.cuda.is_available()):
        raise RecipeError(
            f"validation.cuda_graph is on, but there is no CUDA device here or model.device is not one ({device}): "
            "set validation.cuda_graph: auto, or off"
        )


def check_verifiable(recipe: Recipe, target: RunningTarget | None = None) -> None:
    """Refuse before training a target that validation could not decode with after it.

    Args:
        recipe: of the run.
        target: the loaded target; else its configuration is looked at.

    Raises:
        RecipeError: says why, and what to set.
    """
    from modelopt_eagle.decoding.verifiable import refusal

    if (reason := refusal(recipe, target)) is not None:
        raise RecipeError(
            f"validation, after training, would refuse this target: {reason}. Or set validation.mode: none, and the "
            "head is exported unmeasured"
        )


def check_rope_scaling(recipe: Recipe) -> None:
    """Refuse before training a scaling that export would refuse after it.

    Raises:
        CheckpointError: see :func:`~modelopt_eagle.draft.rotary.check_scaling`.
    """
    from modelopt_eagle.draft.rotary import check_scaling

    if recipe.export.rope_scaling is not None:
        check_scaling(recipe.export.rope_scaling)


def validate(recipe: Recipe, result: TrainingResult, target: RunningTarget | None = None) -> dict[str, Any]:
    """Measure the best checkpoint by decoding, and write ``report/acceptance.json``; a finished measurement is kept.

    Args:
        recipe: of the run.
        result: of its training.
        target: the loaded target, if it is not to be loaded.

    Returns:
        the content of ``acceptance.json``.
    """
    from modelopt_eagle.data import load_prompts
    from modelopt_eagle.decoding import SamplingOptions
    from modelopt_eagle.export import load_draft
    from modelopt_eagle.kernels.recorder import graph_switch
    from modelopt_eagle.target import load_target
    from modelopt_eagle.target.chat import use_chat_record
    from modelopt_eagle.target.lora import merge_adapter
    from modelopt_eagle.training.budget import measuring_seconds
    from modelopt_eagle.validation import measure_acceptance

    section, file = recipe.validation, result.output_dir / "report" / "acceptance.json"
    stamp = file.with_name("measured.json")
    mark = measurement_mark(recipe, result.best_checkpoint) | {"target": target_revision(recipe, target)}
    if read_stamp(stamp) == mark and (found := read_stamp(file)):
        say(f"{file}: measured already")
        return found
    source = section.dataset or ("quickstart" if section.prompts == "shipped" else section.prompts)
    prompts = load_prompts(source, section.num_samples, images=True)
    if target is None:
        target = load_target(**recipe.model.decoding_arguments())
    if (adapter := own_adapter(result.best_checkpoint)) is not None:
        merge_adapter(target, adapter)
    identity = target.identity()
    module = load_draft(
        result.best_checkpoint,
        vocab_size=identity.vocab_size,
        tokenizer_hash=identity.tokenizer_hash,
        dtype=target.dtype,
    )
    use_chat_record(target.tokenizer, module.config.extra)
    bar = ProgressBar(len(prompts), "validate", "prompts", log_every=5.0)
    try:
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
            sampling=SamplingOptions(section.temperature, section.top_k, section.top_p, section.min_p),
            sample_drafts=section.sample_drafts,
            seconds=measuring_seconds(recipe, result.seconds),
        )
    except DecodingError as error:  # of lengths that only the prompts tell; see check_verifiable
        if "validation.mode: none" in str(error):
            raise
        raise DecodingError(f"{error}. Or set validation.mode: none, and the head is exported unmeasured") from error
    say(report.table())
    report.write_dialogues(file.with_name("dialogues.jsonl"))
    report.write_json(file)
    write_whole(stamp, json.dumps(mark, indent=1) + "\n")
    return json.loads(file.read_text(encoding="utf-8"))


def make_page(output_dir: Path) -> Path | None:
    """Write ``report/index.html`` of a run; returns it, or ``None`` where the extra ``report`` is missing, said so."""
    from modelopt_eagle.report import read_run, write_page

    try:
        page = write_page(read_run(output_dir), output_dir / "report")
    except MissingExtraError as error:
        say(f"note: no page of the run: {error}; then: modelopt-eagle report {output_dir}")
        return None
    say(f"page of the run: {page}")
    return page


def target_revision(recipe: Recipe, target: RunningTarget | None) -> str:
    """What tells the weights of the run's target from others; a target that is not given is not loaded for it."""
    from modelopt_eagle.target.checkpoint_files import content_revision
    from modelopt_eagle.target.load import resolve

    if target is not None:
        return target.identity().revision
    return content_revision(resolve(recipe.model.base_model), recipe.model.revision)


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


def export(
    recipe: Recipe, result: TrainingResult, measured: dict[str, Any] | None, target: TableTarget | None = None
) -> None:
    """Write the folder that engines load, unless it holds this checkpoint already; then upload it if asked to.

    Args:
        recipe: of the run.
        result: of its training.
        measured: what :func:`validate` returned, for the card.
        target: the loaded target, if its tables are not to be read from its files.
    """
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
    if read_stamp(stamp) == mark and (path / "config.json").is_file():
        say(f"{path}: exported already")
        return
    check_export_path(recipe)
    stamp.parent.mkdir(parents=True, exist_ok=True)
    write_whole(stamp, json.dumps({"path": mark["path"]}) + "\n")  # from here on the folder is this run's to replace
    if target is None:
        target = load_target_tables(**{**recipe.model.table_arguments("cpu"), "dtype": recipe.model.dtype})
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
        say(f"note: {note}")
    if section.push_to_hub is not None:
        from modelopt_eagle.export.hub import push_to_hub

        say(f"uploaded to {push_to_hub(path, section.push_to_hub)}")
    write_whole(stamp, json.dumps(mark, indent=1) + "\n")


def data_facts(recipe: Recipe, result: TrainingResult) -> str | None:
    """For the card: the names of the training files, without their folders, and what was read of them."""
    paths = recipe.data.train_path if isinstance(recipe.data.train_path, list) else [recipe.data.train_path]
    if not result.header:
        return None
    names = ", ".join("rows given in Python" if path == IN_MEMORY else Path(path).name for path in paths)
    if recipe.data.offline_data_path:
        names = "stored features"
    return f"{names}; {result.header[0].removeprefix('data: ')}"


def recipe_facts(recipe: Recipe) -> str:
    """For the card: each setting of head, training and adapters that is not the default, paths left out."""
    facts = []
    for section in recipe.sections():
        if section in ("model", "data", "validation", "export"):
            continue
        values = getattr(recipe, section)
        for key, field in type(values).model_fields.items():
            value = getattr(values, key)
            if value != field.get_default(call_default_factory=True) and not key.endswith(("_path", "_dir")):
                facts.append(f"{section}.{key}={json.dumps(value)}".replace("`", "'"))
    return ", ".join(f"`{fact}`" for fact in facts) or "the defaults"
