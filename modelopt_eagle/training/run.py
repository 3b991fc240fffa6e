"""Assembling a run: from a recipe to the head, the features and the teacher that the trainer works with."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelopt_eagle.common.layers import check_layer_ids
from modelopt_eagle.common.machine import free_memory
from modelopt_eagle.common.package import require_extra
from modelopt_eagle.draft import DraftConfig
from modelopt_eagle.draft.algorithm import algorithm_of, find_algorithm
from modelopt_eagle.draft.base import DraftModule
from modelopt_eagle.errors import RecipeError, TrainingError
from modelopt_eagle.export.engines.versions import engine_lines
from modelopt_eagle.features import FeatureSource
from modelopt_eagle.features.unadapted import UnadaptedSource
from modelopt_eagle.recipe import Recipe, dump_resolved, same_recipe
from modelopt_eagle.target import TableTarget, load_target, load_target_tables
from modelopt_eagle.target.chat import RECORD_KEYS, chat_record
from modelopt_eagle.target.load import architecture_of, resolve
from modelopt_eagle.target.lora import TargetAdapter
from modelopt_eagle.target.shards import PATIENCE, Shards, local_bytes
from modelopt_eagle.training.budget import RunBudget
from modelopt_eagle.training.checkpoint import RECIPE, CheckpointFolder, read_state
from modelopt_eagle.training.context import ByPosition, check_processes, make_group
from modelopt_eagle.training.data import from_store, from_target, length_spread
from modelopt_eagle.training.given import Given
from modelopt_eagle.training.head import check_coverage, check_head, continued_head, new_head, rebuild_vocabulary
from modelopt_eagle.training.memory import check_weights, memory_line
from modelopt_eagle.training.own_share import own_share, own_share_line
from modelopt_eagle.training.placement import Placement, gib, place_target
from modelopt_eagle.training.prechecks import (
    check_evaluations,
    check_launch,
    check_read,
    check_sizes,
    check_vocabulary_size,
    data_files,
    launch_lines,
    use_chat_settings,
)
from modelopt_eagle.training.states import AdaptedStates, check_adapters, make_adapter
from modelopt_eagle.training.step import TeacherTables, TrainingStep
from modelopt_eagle.training.streams import from_servers_or_filled_store


@dataclass
class Run:
    """What the trainer works with.

    Attributes:
        step: the head with its loss.
        source: features to train on.
        eval_source: features of held-out rows, or ``None``.
        provenance: plain values that a resumed run must find again.
        header: what was printed about it.
        adapter: the target's adapters, if they are trained.
        data_account: plain values on the data: the counts of :class:`~modelopt_eagle.data.DataReport`, and ``lengths``,
            see :func:`~modelopt_eagle.training.data.length_spread`.
        training_seconds: after which training ends; ``None``: steps alone decide.
    """

    step: TrainingStep
    source: FeatureSource
    eval_source: FeatureSource | None
    provenance: dict
    header: list[str]
    adapter: TargetAdapter | None = None
    data_account: dict[str, Any] = field(default_factory=dict)
    training_seconds: float | None = None


def make_accelerator(recipe: Recipe):
    """The accelerator of a run; its processes come from ``accelerate launch`` or ``torchrun``.

    Raises:
        TrainingError: see :func:`~modelopt_eagle.training.prechecks.check_launch`.
    """
    check_launch(os.environ)
    accelerate = require_extra("accelerate", "train")
    from accelerate.utils import InitProcessGroupKwargs

    return accelerate.Accelerator(
        cpu=recipe.model.device == "cpu" or not torch.accelerator.is_available(),
        mixed_precision="no",  # autocast is the step's own, see TrainingStep
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=PATIENCE),
        ],
    )


def claim_output(recipe: Recipe, is_main: bool = True, processes: int = 1) -> None:
    """Make sure that the output folder is new or holds a run of the same recipe, and write ``recipe.yaml``.

    With another number of processes the micro-batches of a step may be others, too, if a step takes as many in all.

    Args:
        recipe: of the run.
        is_main: this is the first process.
        processes: how many there are.

    Raises:
        RecipeError: it holds a run of another recipe (each differing key is listed), or a run at all and
            ``training.resume`` is ``never``.
    """
    folder = Path(recipe.training.output_dir)
    previous = folder / RECIPE
    if CheckpointFolder(folder).steps():
        if recipe.training.resume == "never":
            raise RecipeError(
                f"training.resume is never and {folder} holds checkpoints of an earlier run: name another "
                "training.output_dir, remove that one, or set training.resume=auto"
            )
        differing = same_recipe(recipe, previous) if previous.is_file() else []
        if differing and not (differing == [ACCUMULATION] and _steps_alike(recipe, previous, processes)):
            raise RecipeError(
                f"{folder} holds a run of another recipe; differing: {_differences(recipe, previous, differing)}. Name "
                "another training.output_dir, or give the same values to go on"
            )
    if is_main:
        dump_resolved(recipe, previous)


ACCUMULATION = "training.gradient_accumulation_steps"


def _steps_alike(recipe: Recipe, previous: Path, processes: int) -> bool:
    """Whether a step takes as many micro-batches as in the newest checkpoint, over all processes."""
    from modelopt_eagle.recipe import load_recipe

    checkpoints = CheckpointFolder(recipe.training.output_dir)
    wrote = read_state(checkpoints.path(checkpoints.steps()[-1]))["world_size"]
    before = load_recipe(previous).training.gradient_accumulation_steps
    return wrote * before == processes * recipe.training.gradient_accumulation_steps


def _differences(recipe: Recipe, previous: Path, keys: list[str]) -> str:
    from modelopt_eagle.recipe import load_recipe

    before = load_recipe(previous)

    def value(of: Recipe, key: str):
        section, name = key.split(".")
        return getattr(getattr(of, section), name)

    return "; ".join(f"{key} was {value(before, key)!r}, is {value(recipe, key)!r}" for key in keys)


def finished_state(recipe: Recipe) -> dict | None:
    """``trainer_state.json`` of a run that came to its end in this output folder, or ``None``."""
    checkpoints = CheckpointFolder(recipe.training.output_dir)
    for step in reversed(checkpoints.steps()):
        state = read_state(checkpoints.path(step))
        return state if state.get("finished") is True else None
    return None


def assemble(recipe: Recipe, accelerator, say: Callable[[str], None], given: Given | None = None) -> Run:
    """Load, read, check and build everything that comes before the first step.

    Args:
        recipe: of the run.
        accelerator: from :func:`make_accelerator`.
        say: prints a line; called on every process, so let it print on the first only.
        given: what the caller has loaded already.

    Raises:
        EagleError: whatever is wrong with recipe, target, data or features.
    """
    check_processes(recipe.training.context_parallel, accelerator.num_processes)
    check_drafter(recipe)
    check_read(recipe)
    given = given or Given()
    offline = not recipe.data.runs_target
    check_sizes(recipe, given)
    placement = place_target(recipe, accelerator, given.target is not None)
    if given.target is None and placement.shards is None:
        check_weights(recipe, resolve(recipe.model.base_model), free_memory(str(accelerator.device)))
    target = load(recipe, accelerator.device, placement.shards) if given.target is None else given.target
    budget = None if recipe.training.run_budget_minutes is None else RunBudget(recipe, accelerator)
    use_chat_settings(recipe, target, accelerator.is_main_process, accelerator.wait_for_everyone)
    embedding, config = target.embedding_weight, target.config
    head = None
    if recipe.model.draft_init is not None:
        head = continued_head(recipe, target.identity(), embedding, target.head.weight)
    ids = layer_ids(recipe, config, head)
    identity = target.identity()
    say(f"target: {identity['model']}, {config.num_hidden_layers} layers of {config.hidden_size}, "
        f"{identity['vocab_size']} tokens, features of layers {', '.join(map(str, ids))}")  # fmt: skip
    check_vocabulary_size(recipe, target)
    planned = check_head(recipe, target, ids) if head is None else head.config
    for line in engine_lines(architecture_of(target), planned):
        say(f"engine: {line}")
    if not offline:
        target.check_parity(parity_sample(target))
    if recipe.target_lora.rank:
        check_adapters(recipe, target)

    def memory(source) -> str | None:
        if placement.shards is not None:  # what a process holds of the target is said apart
            return None
        return memory_line(recipe, target, planned, source, accelerator)

    if recipe.data.asks_servers or recipe.data.fills_store:
        data = from_servers_or_filled_store(recipe, target, ids, accelerator, say, given)
    elif offline:
        data = from_store(recipe, target, ids, say)
    else:
        data = from_target(recipe, target, ids, accelerator, say, given, budget, memory)
    if head is None:
        head, vocabulary = new_head(recipe, target, data, ids)
    else:
        vocabulary = check_coverage(
            recipe, data, head.vocab, f"the {head.config.draft_vocab_size} tokens of {recipe.model.draft_init}, kept"
        )
        if recipe.model.draft_init_vocab == "rebuild":
            head, vocabulary = rebuild_vocabulary(recipe, head, target, data)
        head.config.training_length = max(head.config.training_length or 0, max(data.train.lengths))
        algorithm_of(head.config).complete(head.config, recipe, target, data.counts)
    rendered = {key: value for key, value in head.config.extra.items() if key not in RECORD_KEYS}
    head.config.extra = {**rendered, **chat_record(target.tokenizer)}
    if architecture := architecture_of(target):
        head.config.extra = {**head.config.extra, "target_architecture": architecture}
    if not offline and any(p.requires_grad for p in target.model.parameters()):
        raise TrainingError("a parameter of the target is trainable; only the head may be: please report this")
    head = head.float().to(accelerator.device).train()
    tables = TeacherTables.make(embedding, target.head, head.target_ids, accelerator.device)
    frozen = 0 if offline else sum(p.numel() for p in target.model.parameters())
    processes = launch_lines(
        os.environ, accelerator.num_processes, accelerator.device.type, recipe.training.context_parallel,
        *target_lines(placement, target),
    )  # fmt: skip
    header = [*data.header, *processes, own_share_line(own_share(data.train)), vocabulary]
    adapter, states, sharing = None, None, None
    if recipe.target_lora.rank:
        adapter = make_adapter(recipe, target, accelerator.device)
        head.config.extra = {**head.config.extra, "target_adapter": adapter.summary()}
        data.train = UnadaptedSource(data.train, adapter)
        states = AdaptedStates(adapter, recipe.target_lora, recipe.training.seed)
        header.append(adapter.line())
    if recipe.training.context_parallel > 1:
        sharing = ByPosition(make_group(recipe, accelerator))
    step = TrainingStep(
        head, tables, recipe.eagle, recipe.training.precision, states=states, sharing=sharing,
        settings=algorithm_of(head.config).settings(recipe),
    )  # fmt: skip
    header += head_lines(head, frozen, adapter)
    if (line := memory(data.train)) is not None:
        header.append(line)
    minutes = recipe.training.time_budget_minutes
    seconds = None if minutes is None else 60.0 * minutes
    if budget is not None:
        seconds = budget.training_seconds()
        header += [line for line in (budget.left_out_line(), budget.line()) if line is not None]
    for line in header[len(data.header) :]:
        say(line)
    provenance = {
        "target": identity.as_dict(),
        "aux_layer_ids": list(ids),
        "data": data.fingerprint,
        "rows": len(data.train.lengths),
        "vocabulary": hashlib.sha256(str(head.target_ids.tolist()).encode()).hexdigest()[:16],
        **({"files": data_files(recipe)} if given.data is None else {}),
    }
    check_evaluations(recipe, data.held_out is not None)
    account = {**data.report.to_dict(), "lengths": length_spread(data.train.lengths)}
    return Run(step, data.train, data.held_out, provenance, header, adapter, account, seconds)


def check_drafter(recipe: Recipe) -> None:
    """Refuse what the recipe's drafter cannot do, before anything is loaded.

    Raises:
        RecipeError: an unknown drafter; trees, drawn drafts, a shared batch or a start from the target that it does
            not have.
    """
    algorithm = find_algorithm(recipe.drafter.algorithm)
    cannot = {
        "validation.mode: tree": recipe.validation.mode == "tree" and not algorithm.trees,
        "validation.sample_drafts": recipe.validation.sample_drafts and not algorithm.draws,
        "training.context_parallel above 1": recipe.training.context_parallel > 1 and not algorithm.shares_context,
        "eagle.init: target": recipe.eagle.init == "target" and algorithm.from_target is None,
    }
    if asked := [name for name, refused in cannot.items() if refused]:
        raise RecipeError(f"algorithm {algorithm.name} has no {', no '.join(asked)}: leave it at the default")
    algorithm.check_recipe(recipe)


def target_lines(placement: Placement, target: TableTarget) -> tuple[str | None, str | None]:
    """How a split target lies, ``None`` where each process has its own; and why, where the recipe left it open."""
    shards, split = placement.shards, None
    if shards is not None:
        own, whole = local_bytes(target.model)  # type: ignore[attr-defined]
        split = f"{shards.line} ({gib(own)} of {gib(whole)} in each)"
    reason = None if placement.reason is None else f"model.parallel is auto: {placement.reason}"
    return split, reason


def load(recipe: Recipe, device: torch.device, shards: Shards | None = None) -> TableTarget:
    """The target of a recipe: the model if the run makes features by it, else its tables on ``device``.

    Args:
        shards: processes that split the model between them; ``device`` is then this one's.
    """
    if recipe.data.runs_target and shards is not None:
        arguments = recipe.model.load_arguments() | {"device": str(device)}
        return load_target(**arguments, shards=shards)
    if recipe.data.runs_target:
        return load_target(**recipe.model.load_arguments())
    return load_target_tables(**recipe.model.table_arguments(device))


def layer_ids(recipe: Recipe, config, head: DraftModule | None = None) -> tuple[int, ...]:
    """The auxiliary layers of a continued head or of a recipe, checked against the target's."""
    wanted = recipe.eagle.aux_layer_ids if head is None else head.config.aux_layer_ids
    layers = config.num_hidden_layers
    if wanted is None:
        return find_algorithm(recipe.drafter.algorithm).default_layers(layers)
    return check_layer_ids(wanted, layers)


def parity_sample(target, length: int = 32) -> Tensor:
    """``[1, length]`` token ids to compare the rebuilt logits on, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, target.vocab_size, (1, length), generator=generator)


def architecture_line(config: DraftConfig) -> str:
    """The resolved architecture of a head, see :meth:`~modelopt_eagle.draft.config.DraftConfig.describe`."""
    return "head: " + config.describe()


def head_lines(head: DraftModule, frozen: int, adapter: TargetAdapter | None = None) -> list[str]:
    """What is trained and how much memory it takes.

    Args:
        frozen: parameters of the loaded target.
        adapter: its adapters, if they are trained.
    """
    trained = sum(p.numel() for p in head.parameters() if p.requires_grad)
    where = "all of the head"
    if adapter is not None:
        trained += sum(p.numel() for p in adapter.parameters())
        where = "the head and the adapters"
    total = trained + frozen
    return [
        architecture_line(head.config),
        f"trainable: {trained / 1e6:.2f} M of {total / 1e6:.2f} M parameters ({trained / total:.1%}), {where}",
        f"memory: {trained * 16 / 2**20:.0f} MiB for weights, gradients and optimiser; a checkpoint takes "
        f"{trained * 12 / 2**20:.0f} MiB",
    ]
