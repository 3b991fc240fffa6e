"""What a run was trained on, held against what it would go on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from modelopt_eagle.errors import CheckpointError
from modelopt_eagle.features.store import dataset_hash
from modelopt_eagle.recipe import Recipe
from modelopt_eagle.target import load_target_tables
from modelopt_eagle.target.identity import same_revision
from modelopt_eagle.training.data import split_rows
from modelopt_eagle.training.given import Given


def check_provenance(folder: Path, before: dict, now: dict) -> None:
    """Refuse to go on with other features than a run began with.

    Args:
        folder: of the run or its checkpoint, for the message.
        before, now: what :class:`Run` calls provenance; keys that only one of them has are not compared, and the
            files are not: their rows are.

    Raises:
        CheckpointError: a value differs; each is listed.
    """
    changed = [key for key in now if key in before and key != "files" and not _same(before[key], now[key])]
    if changed:
        lines = "\n".join(f"  {key}: {before.get(key)} before, {now[key]} now" for key in changed)
        raise CheckpointError(
            f"{folder} was trained on other features:\n{lines}\nname another training.output_dir, or bring "
            "the data and the target back as they were"
        )


def _same(before: Any, now: Any) -> bool:
    """Whether two values of a provenance are alike; fingerprints of weights are compared as far as both reach."""
    if not isinstance(before, dict) or not isinstance(now, dict):
        return before == now
    alike = same_revision(before.get("revision"), now.get("revision"))
    return alike and {**before, "revision": None} == {**now, "revision": None}


def check_given(recipe: Recipe, given: Given, state: dict, device: torch.device) -> None:
    """Refuse the result of a finished run where another target or other rows are given than it was made of.

    Files and names are compared by the recipe; what is handed over in Python stands in none.

    Raises:
        CheckpointError: as :func:`check_provenance`.
    """
    now: dict[str, Any] = {}
    if given.target is not None:
        now["target"] = given.target.identity().as_dict()
    if given.data is not None and recipe.data.on_missing != "skip":  # else the rows are those that the store holds
        target = given.target or load_target_tables(**recipe.model.table_arguments(device))
        now["data"] = dataset_hash(split_rows(recipe, target, given).train)
    check_provenance(Path(recipe.training.output_dir), state["provenance"], now)
