"""What a run left behind, read from its output folder: each part is there or ``None``, and the page says which."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelopt_eagle.common.acceptance import CONTEXTS, acceptance_length, bootstrap_interval
from modelopt_eagle.common.files import file_sha256
from modelopt_eagle.common.machine import environment
from modelopt_eagle.errors import CheckpointError, EagleError
from modelopt_eagle.recipe import Recipe, load_recipe
from modelopt_eagle.training.checkpoint import BEST, RECIPE, STATE, CheckpointFolder
from modelopt_eagle.validation.report import JSON_FIELDS, AcceptanceReport

STATE_KEYS = ("step", "elapsed", "finished", "history", "evaluations")
DATA_KEYS = ("read", "dropped", "notes", "fanned_out", "rows", "max_length", "truncated", "tokens", "supervised")
PROMPT_KEYS, TURN_KEYS = ("id", "category", "turns"), ("question", "context", "pieces", "accepted")
"""What the page reads of ``trainer_state.json``, ``data.json``, a line of ``dialogues.jsonl`` and a turn in it."""


@dataclass(frozen=True)
class RecipeValue:
    """A value of the recipe that is not the default.

    Attributes:
        key: ``section.key``.
        value, default: as text.
        origin: where the value came from, if the run's ``recipe.yaml`` says it.
    """

    key: str
    value: str
    default: str
    origin: str


@dataclass(frozen=True)
class Measured:
    """Pooled acceptance of some steps: a name, the length, its 95 % interval, how many prompts and steps."""

    label: str
    value: float
    low: float
    high: float
    prompts: int
    steps: int


@dataclass
class RunFacts:
    """What is known of a run.

    Attributes:
        name: of its folder.
        state: ``trainer_state.json`` of its newest checkpoint.
        acceptance: ``acceptance.json``.
        dialogues: a row a prompt, see ``AcceptanceReport.dialogue_rows``.
        data: the account of its data.
        environment: the machine and the packages.
        recipe: its recipe.
        changes: values of it that are not the defaults.
        first_prompt: as the target saw it, where it was measured alone.
        outdated: whether ``acceptance`` is of another head than the run's best checkpoint of now.
    """

    name: str
    state: dict[str, Any] | None = None
    acceptance: dict[str, Any] | None = None
    dialogues: list[dict[str, Any]] = field(default_factory=list)
    data: dict[str, Any] | None = None
    environment: dict[str, str] | None = None
    recipe: Recipe | None = None
    changes: list[RecipeValue] = field(default_factory=list)
    first_prompt: str = ""
    outdated: bool = False

    @property
    def history(self) -> list[dict[str, Any]]:
        """Metrics of each log line."""
        return [] if self.state is None else self.state["history"]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """Acceptance walks over held-out rows while training."""
        return [] if self.state is None else self.state["evaluations"]

    @property
    def accepted(self) -> dict[str, list[int]]:
        """Prompt id to the accepted drafted tokens of its steps."""
        return {row["id"]: [n for turn in row["turns"] for n in turn["accepted"]] for row in self.dialogues}


def read_run(folder: str | Path) -> RunFacts:
    """What the output folder of a run holds, finished or not.

    Raises:
        CheckpointError: the folder holds no run, or a file of it is damaged.
    """
    folder = Path(folder)
    report, checkpoints = folder / "report", CheckpointFolder(folder)
    steps = checkpoints.steps() if folder.is_dir() else []
    state = read_object(checkpoints.path(steps[-1]) / STATE, STATE_KEYS) if steps else None
    acceptance = read_object(report / "acceptance.json", JSON_FIELDS)
    if state is None and acceptance is None:
        raise CheckpointError(
            f"{folder} holds no run: expected checkpoint-*/{STATE} or report/acceptance.json, as train-and-export "
            "leaves them"
        )
    recipe, changes = read_recipe(folder / RECIPE)
    return RunFacts(
        name=folder.resolve().name,
        state=state,
        acceptance=acceptance,
        dialogues=read_lines(report / "dialogues.jsonl"),
        data=read_object(folder / "data.json", DATA_KEYS),
        environment=read_object(folder / "environment.json"),
        recipe=recipe,
        changes=changes,
        outdated=acceptance is not None and is_outdated(folder),
    )


def is_outdated(folder: Path) -> bool:
    """Whether a run's acceptance was measured on other weights than its best checkpoint has now.

    False where nothing says what it was measured on, or there is no best checkpoint any more.
    """
    measured, weights = folder / "report" / "measured.json", folder / BEST / "model.safetensors"
    try:
        known = json.loads(measured.read_text(encoding="utf-8"))["weights"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return weights.is_file() and file_sha256(weights) != known


def facts_of(report: AcceptanceReport, name: str) -> RunFacts:
    """A measurement alone, for the page of a head that was not trained here."""
    return RunFacts(
        name=name,
        acceptance=report.to_dict(),
        dialogues=report.dialogue_rows(),
        environment=environment(),
        first_prompt=report.first_prompt,
    )


def read_object(file: Path, keys: Sequence[str] = ()) -> dict[str, Any] | None:
    """The JSON object in a file, ``None`` if there is no file.

    Raises:
        CheckpointError: it holds something else, or one of ``keys`` has no value in it.
    """
    if not file.is_file():
        return None
    try:
        return with_keys(json.loads(file.read_text(encoding="utf-8")), keys)
    except ValueError as error:  # also of bytes that are no UTF-8
        raise CheckpointError(f"{file} is damaged ({error}): remove it, and run the command that wrote it") from error


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The rows of ``dialogues.jsonl``, none if there is no file.

    Raises:
        CheckpointError: it holds something else.
    """
    if not file.is_file():
        return []
    rows = []
    try:
        for line in file.read_text(encoding="utf-8").split("\n"):
            if line.strip():
                rows.append(with_keys(json.loads(line), PROMPT_KEYS))
                for turn in rows[-1]["turns"]:
                    with_keys(turn, TURN_KEYS)
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged ({error}): remove it, and measure again") from error
    return rows


def with_keys(value: Any, keys: Sequence[str]) -> dict[str, Any]:
    """A value out of JSON as the object that it is; :class:`ValueError` if it is none or lacks one of ``keys``."""
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, found {type(value).__name__}")
    if missing := [key for key in keys if key not in value]:
        raise ValueError(f"it holds no {', '.join(missing)}")
    return value


def read_recipe(file: Path) -> tuple[Recipe | None, list[RecipeValue]]:
    """The recipe of a run and its values that are not the defaults; nothing where an older release wrote another one.

    A recipe with keys that this release does not know is left out, not guessed at.
    """
    if not file.is_file():
        return None, []
    try:
        recipe = load_recipe(file)
    except EagleError:
        return None, []
    origins, section = {}, ""
    for line in file.read_text(encoding="utf-8").splitlines():
        if named := re.match(r"(\w+):\s*$", line):
            section = named[1]
        elif (key := re.match(r"  (\w+):", line)) and "  # " in line:
            origins[f"{section}.{key[1]}"] = line.rsplit("  # ", 1)[1]
    default, changes = Recipe(), []
    for part, key in Recipe.keys():
        value, usual = getattr(getattr(recipe, part), key), getattr(getattr(default, part), key)
        if value != usual:
            name = f"{part}.{key}"
            changes.append(RecipeValue(name, as_text(value), as_text(usual), origins.get(name, "")))
    return recipe, changes


def as_text(value: Any) -> str:
    """A recipe's value as it would be written."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def by_category(facts: RunFacts) -> list[Measured]:
    """Acceptance of each category that had a step, from ``acceptance.json``."""
    acceptance = facts.acceptance or {}
    counts: dict[str, tuple[int, int]] = {}
    for row in facts.dialogues:
        prompts, steps = counts.get(row["category"], (0, 0))
        counts[row["category"]] = (prompts + 1, steps + sum(len(turn["accepted"]) for turn in row["turns"]))
    bounds = acceptance.get("per_category_ci95", {})
    return [
        Measured(name, value, *bounds.get(name, (value, value)), *counts.get(name, (0, 0)))
        for name, value in acceptance.get("per_category", {}).items()
        if value is not None
    ]


def by_context(dialogues: Sequence[dict[str, Any]]) -> list[Measured]:
    """Acceptance by how many tokens stood before a step: those of the prompt, and of the answer so far."""
    bins: dict[int, dict[str, list[int]]] = {}
    for row in dialogues:
        for turn in row["turns"]:
            length = turn["context"] + 1
            for count in turn["accepted"]:
                place = max(start for start in CONTEXTS if start <= length)
                bins.setdefault(place, {}).setdefault(row["id"], []).append(count)
                length += count + 1
    result = []
    for place in sorted(bins):
        rows = list(bins[place].values())
        low, high = bootstrap_interval(rows)
        ends = [start for start in CONTEXTS if start > place]
        label = f"{place} to {ends[0] - 1}" if ends else f"{place} and more"
        result.append(Measured(label, acceptance_length(rows), low, high, len(rows), sum(map(len, rows))))
    return result
