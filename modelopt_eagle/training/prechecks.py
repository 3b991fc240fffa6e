"""What is looked at before a run costs anything: the launch, data paths, sizes of the vocabulary, and chat templates.

What a launcher asks for and would change a run behind its recipe is refused; what has no effect is told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from modelopt_eagle.common.files import file_sha256
from modelopt_eagle.data.files import IN_MEMORY, check_sources, local_files
from modelopt_eagle.data.vocab import required_ids
from modelopt_eagle.draft.algorithm import find_algorithm
from modelopt_eagle.draft.rotary import check_scaling
from modelopt_eagle.errors import CheckpointError, RecipeError, TrainingError
from modelopt_eagle.recipe import Recipe
from modelopt_eagle.target import TableTarget
from modelopt_eagle.target.chat import asks_for_date, chat_settings, keep_date, kept_date, set_chat_settings, today
from modelopt_eagle.target.load import load_config, resolve
from modelopt_eagle.training.given import Given

SHARDING = {
    "ACCELERATE_USE_FSDP": "FSDP (--use_fsdp)",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed (--use_deepspeed)",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM (--use_megatron_lm)",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism configuration (--use_parallelism_config)",
}
"""Variables of ``accelerate launch`` that ask for parts of the model on each process."""


def check_launch(environment: Mapping[str, str]) -> None:
    """Refuse what accelerate would do to the loss, the graph or the weights without the recipe's knowing.

    Args:
        environment: of this process.

    Raises:
        TrainingError: sharding, gradient accumulation or compilation asked for by ``accelerate launch`` or the file of
            ``accelerate config``; says what to do in its place.
    """
    for variable, name in SHARDING.items():
        if environment.get(variable, "false").lower() in ("true", "1"):
            raise TrainingError(
                f"accelerate is set to {name}, and a recipe says how things are split here: model.parallel=fsdp or "
                "tensor splits the target, training.context_parallel shares long sequences, the head stays whole. "
                "Launch without it (accelerate launch --multi_gpu --num_processes N, or torchrun), or set it off in "
                "`accelerate config`"
            )
    if (steps := environment.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")) not in ("1", "auto"):
        raise TrainingError(
            f"accelerate is set to --gradient_accumulation_steps {steps}, which would divide the loss once more: leave "
            f"it out, and set training.gradient_accumulation_steps={steps}"
        )
    if (backend := environment.get("ACCELERATE_DYNAMO_BACKEND", "no")).lower() != "no":
        raise TrainingError(
            f"accelerate is set to --dynamo_backend {backend.lower()}, which would compile around the loss: leave it "
            "out, and set training.torch_compile=true"
        )


def launch_lines(
    environment: Mapping[str, str],
    processes: int,
    device: str,
    shared: int = 1,
    split: str | None = None,
    reason: str | None = None,
) -> list[str]:
    """How many processes run, and what their launcher was told that has no effect.

    Args:
        environment: of this process.
        processes: how many there are.
        device: kind of device that each runs on.
        shared: processes that share a batch by positions.
        split: how the target lies, where it is split over them.
        reason: why it is split or not, where the recipe left that open.
    """
    whole = "" if processes == 1 else ", each with the whole target and head"
    if split is not None:
        whole = f", each with the whole head; the target is {split}"
    groups = f"; each batch is shared by {shared}" if shared > 1 else ""
    lines = [f"processes: {processes} on {device}{whole}{groups}"]
    lines += [] if reason is None else [f"processes: {reason}"]
    launched_alone = "MASTER_PORT" in environment and "WORLD_SIZE" not in environment
    if processes == 1 and launched_alone and "ACCELERATE_USE_CPU" in environment:
        lines.append(
            "processes: accelerate launch was asked for several and starts one on a CPU without mpirun: launch by "
            "torchrun --nproc_per_node N"
        )
    if (precision := environment.get("ACCELERATE_MIXED_PRECISION", "no")).lower() != "no":
        lines.append(f"launch: accelerate's mixed precision {precision} is not used; training.precision says it")
    return lines


def check_paths(recipe: Recipe, given: Given) -> None:
    """Refuse data paths that name nothing, before the target is loaded.

    Raises:
        DataError: a file or data set that is not there.
        RecipeError: a folder of features that is not there.
    """
    data = recipe.data
    reads = data.offline_data_path is None or data.on_missing != "fail"
    paths = [data.train_path] if reads and given.data is None else []
    paths += [data.eval_path] if data.eval_path is not None and given.eval_data is None else []
    for path in paths:
        if path != IN_MEMORY:
            check_sources(path)
    stored = data.offline_data_path
    if stored is not None and data.on_missing == "fail" and not Path(stored).expanduser().is_dir():
        raise RecipeError(f"data.offline_data_path: {stored} is no folder; name the one that a dump was written to")


def check_read(recipe: Recipe) -> None:
    """Refuse keys that were set and that nothing reads in a run of this kind.

    Raises:
        RecipeError: each of them, with why.
    """
    model, eagle, export = recipe.model, recipe.eagle, recipe.export
    unread = []
    if eagle.draft_vocab_size is None and eagle.draft_vocab_path is None and model.draft_init is None:
        of_a_part = [f"eagle.{key}" for key in ("in_vocab_only", "min_vocab_coverage") if key in eagle.changed()]
        unread += [f"{key} speaks of a part of the vocabulary, and the head has all of it" for key in of_a_part]
    if "layer_names" in export.changed():
        if find_algorithm(recipe.drafter.algorithm).layout is not None:
            unread.append(f"export.layer_names speaks of EAGLE-3's names, and {recipe.drafter.algorithm} has its own")
        elif eagle.num_layers > 1:
            unread.append(f"export.layer_names speaks of one-layer heads, and eagle.num_layers is {eagle.num_layers}")
    if not recipe.data.runs_target and recipe.validation.mode == "none" and "attn_implementation" in model.changed():
        unread.append("model.attn_implementation is that of a target which runs, and this run reads its tables only")
    if unread:
        raise RecipeError(f"nothing would read these keys: {'; '.join(unread)}. Leave them out")


def check_sizes(recipe: Recipe, given: Given) -> None:
    """Refuse sizes that the target's config contradicts, before its weights are loaded.

    Raises:
        CheckpointError: a draft vocabulary larger than the target's, a rotary scaling that nothing computes, and
            whatever else the drafter's config refuses.
        TargetError: no target of that name, a config that cannot be read, or layers that it does not have.
    """
    model, eagle = recipe.model, recipe.eagle
    if eagle.rope_scaling is not None and eagle.rope_scaling["rope_type"] != "default":
        check_scaling(eagle.rope_scaling)
    if given.target is not None or model.draft_init is not None:
        return
    config = load_config(resolve(model.base_model), model.revision, model.trust_remote_code)
    find_algorithm(recipe.drafter.algorithm).head_config(recipe, config, eagle.draft_vocab_size, eagle.aux_layer_ids)


def data_files(recipe: Recipe) -> dict[str, str]:
    """Digest of each file that a recipe reads conversations from, by its name in the recipe."""
    data = recipe.data
    if data.offline_data_path is not None and data.on_missing == "fail":
        return {}
    named = [path for path in (data.train_path, data.eval_path) if path not in (None, IN_MEMORY)]
    files = [file for path in named for file in local_files(path)]
    return {str(file): file_sha256(file) for file in files}


def check_files(recipe: Recipe, state: dict) -> None:
    """Refuse the result of a finished run whose data files are not those that it was trained on.

    Raises:
        CheckpointError: each file that differs.
    """
    before = state["provenance"].get("files")
    if before is None:  # of a version that did not record them, or of rows in memory
        return
    now = data_files(recipe)
    changed = [name for name in before if now.get(name) != before[name]]
    if changed:
        raise CheckpointError(
            f"{recipe.training.output_dir}: the training there is complete, and it was done on other data: "
            f"{', '.join(changed)} changed since. Name another training.output_dir to train on it, or bring it back"
        )


def check_evaluations(recipe: Recipe, held_out: bool) -> None:
    """Refuse a count of evaluations where nothing is held out to make them on.

    Raises:
        RecipeError: see above.
    """
    if recipe.training.early_stopping is not None and not held_out:
        raise RecipeError(
            "training.early_stopping counts evaluations, and there is no row to evaluate on: give data.eval_path, more "
            "rows, or set early_stopping to null"
        )


def check_vocabulary_size(recipe: Recipe, target: TableTarget) -> None:
    """Refuse a draft vocabulary that cannot be made, before features are.

    Raises:
        RecipeError: it is too small for the tokens that are always in it.
    """
    size, total = recipe.eagle.draft_vocab_size, target.identity().vocab_size
    if size is None or recipe.eagle.draft_vocab_path is not None:
        return
    needed = required_ids(target.tokenizer, total, target.end_token_ids)
    if size < len(needed):
        raise RecipeError(
            f"eagle.draft_vocab_size is {size}, and {len(needed)} special and end tokens are always in a draft "
            "vocabulary: choose more"
        )


def use_chat_settings(
    recipe: Recipe, target: TableTarget, is_main: bool = True, barrier: Callable[[], None] = lambda: None
) -> None:
    """Give the target's chat template the recipe's arguments, and its day where it prints one.

    Raises:
        DataError: an argument that cannot be passed, or a date that cannot be pinned.
    """
    tokenizer, data = target.tokenizer, recipe.data
    if tokenizer is None:
        return
    template = tokenizer.get_chat_template() if getattr(tokenizer, "chat_template", None) else ""
    date = data.template_date
    if date is None and asks_for_date(template):
        store = data.offline_data_path
        folders = [Path(recipe.training.output_dir), *([] if store is None else [Path(store).expanduser()])]
        date = next((found for folder in folders if (found := kept_date(folder)) is not None), None)
        if date is None:
            if is_main:
                keep_date(folders[0], today())
            barrier()
            date = kept_date(folders[0])
    if data.template_arguments or date is not None or chat_settings(tokenizer).arguments:
        set_chat_settings(tokenizer, data.template_arguments, date)
