"""Checkpoints that are complete or absent.

``checkpoint-STEP/`` holds the head (``model.safetensors`` under the module's names, ``draft_config.json``) and the
state of training (``optimizer.pt``, ``rng-RANK.pt``, ``trainer_state.json``, ``recipe.yaml``); with adapters on the
target also ``target_adapter/``, a PEFT folder. It is made under a temporary name, flushed to the disk and renamed;
``complete.json`` is written last of all and holds the size and SHA-256 of every file. A folder without it, or that
does not match it, is passed over and the one before is used.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelopt_eagle.common.files import disk_trouble, flush_folder, read_json, write_whole
from modelopt_eagle.common.folders import flush_tree
from modelopt_eagle.common.pickles import load_tensors
from modelopt_eagle.common.sealed import SEAL, seal, seal_fault
from modelopt_eagle.draft import EagleModule
from modelopt_eagle.errors import CheckpointError
from modelopt_eagle.target.lora import FOLDER as ADAPTER
from modelopt_eagle.target.lora import read_adapter
from modelopt_eagle.training.run_folder import remove

COMPLETE = SEAL
WEIGHTS = "model.safetensors"
CONFIG = "draft_config.json"
OPTIMIZER = "optimizer.pt"
STATE = "trainer_state.json"
RECIPE = "recipe.yaml"
BEST = "best"
"""Link in the output folder to the best checkpoint."""
_REMEDY = "remove this checkpoint, the run then goes on from the one before"


@dataclass
class Checkpoint:
    """A complete checkpoint, read.

    Attributes:
        folder, step: where it is, and the optimiser steps done.
        tensors: the head's ``state_dict``.
        optimizers: one ``state_dict`` an optimiser.
        rng: random states of this process; ``None`` where fewer processes wrote it.
        state: ``trainer_state.json``.
        adapter: tensors of the target's adapters, or ``None``.
    """

    folder: Path
    step: int
    tensors: dict[str, Tensor]
    optimizers: list[dict]
    rng: dict | None
    state: dict
    adapter: dict[str, Tensor] | None = None


class CheckpointFolder:
    """The checkpoints of one run.

    Args:
        output_dir: of the run.
        limit: checkpoints kept, the best one among them; ``None`` keeps all.
        rank, world_size: this process. Rank 0 writes; every rank adds its random state.
        barrier: called where the processes must wait for each other.
        say: prints a line for the user.
    """

    def __init__(
        self,
        output_dir: str | Path,
        limit: int | None = None,
        *,
        rank: int = 0,
        world_size: int = 1,
        barrier: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = print,
    ):
        self.output_dir, self.limit = Path(output_dir), limit
        self.rank, self.world_size, self.barrier, self.say = rank, world_size, barrier, say

    def path(self, step: int) -> Path:
        """``checkpoint-STEP``."""
        return self.output_dir / f"checkpoint-{step}"

    def steps(self) -> list[int]:
        """Steps of the folders that carry the marker of completeness, ascending."""
        found = (re.fullmatch(r"checkpoint-(\d+)", entry.name) for entry in self.output_dir.glob("checkpoint-*"))
        steps = sorted(int(match.group(1)) for match in found if match)
        return [step for step in steps if (self.path(step) / COMPLETE).is_file()]

    def save(
        self,
        step: int,
        module: EagleModule,
        optimizers: list,
        state: dict,
        recipe_text: str,
        best_step: int,
        adapter=None,
    ) -> Path:
        """Write a checkpoint, point ``best`` at the best one, then remove what is over the limit.

        Args:
            step: optimiser steps done.
            module: the head, without wrappers.
            state: plain values for ``trainer_state.json``; ``step`` and ``world_size`` are added.
            recipe_text: the resolved recipe.
            best_step: step of the checkpoint to keep and to point at.
            adapter: the target's ``TargetAdapter``, if it has one.

        Returns:
            the checkpoint's folder.

        Raises:
            CheckpointError: the disk is full or refuses; older checkpoints are as they were.
        """
        folder, part = self.path(step), self.output_dir / f".checkpoint-{step}.part"
        failure = None
        try:
            if self.rank == 0:
                self.output_dir.mkdir(parents=True, exist_ok=True)
                for stale in self.output_dir.glob(".checkpoint-*.part"):
                    remove(stale)
                part.mkdir()
            self.barrier()
            write_whole(part / f"rng-{self.rank}.pt", lambda stream: torch.save(rng_state(), stream))
            self.barrier()
            if self.rank == 0:
                state = {**state, "step": step, "world_size": self.world_size}
                self._write_files(part, module, optimizers, state, recipe_text, adapter)
                remove(folder)
                os.replace(part, folder)
                flush_folder(self.output_dir)
                seal(folder, step=step)
                self._point_at_best(best_step)
                self._remove_surplus(best_step, step)
        except (OSError, SafetensorError, RuntimeError) as error:
            failure = error
            if self.rank == 0:
                shutil.rmtree(part, ignore_errors=True)
        if failure is not None:
            raise _save_error(folder, failure, self.steps()) from failure
        self.barrier()
        return folder

    def _write_files(self, part: Path, module, optimizers, state: dict, recipe_text: str, adapter) -> None:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in module.state_dict().items()}
        save_file(tensors, part / WEIGHTS, metadata={"format": "pt"})
        if adapter is not None:
            adapter.save(part / ADAPTER)
        dumps = [optimizer.state_dict() for optimizer in optimizers]
        write_whole(part / OPTIMIZER, lambda stream: torch.save(dumps, stream))
        for name, text in (
            (CONFIG, json.dumps(module.config.to_dict(), indent=2)),
            (STATE, json.dumps(state, indent=1)),
            (RECIPE, recipe_text),
        ):
            write_whole(part / name, text)
        flush_tree(part)

    def _point_at_best(self, step: int) -> None:
        link, temporary = self.output_dir / BEST, self.output_dir / f".{BEST}.link"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(self.path(step).name, target_is_directory=True)
        os.replace(temporary, link)

    def _remove_surplus(self, best_step: int, newest: int) -> None:
        """Delete the oldest ones over the limit, and those of steps that this run has not reached."""
        steps = self.steps()
        keep = {best_step, newest}
        surplus = [step for step in steps if step not in keep]
        if self.limit is not None:
            room = max(0, self.limit - len(keep))
            surplus = surplus[: len(surplus) - room] if room else surplus
        else:
            surplus = []
        if 0 in steps and newest > 0 and 0 not in keep and 0 not in surplus:
            surplus.append(0)  # written to find a full disk early; of no use once another exists
        for step in surplus:
            if not self.path(step).is_symlink():
                (self.path(step) / COMPLETE).unlink()  # from here on it is incomplete for every reader
            remove(self.path(step))

    def latest(self) -> Checkpoint | None:
        """The newest complete checkpoint, or ``None``; incomplete ones are named and passed over."""
        found = [entry for entry in self.output_dir.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", entry.name)]
        for folder in sorted(found, key=lambda entry: -int(entry.name.rpartition("-")[2])):
            reason = incomplete(folder)
            if reason is None:
                return self.read(folder)
            self.say(f"{folder} is passed over: {reason}")
        return None

    def read(self, folder: Path) -> Checkpoint:
        """Read one complete checkpoint.

        Returns:
            what it holds.

        Raises:
            CheckpointError: it holds what no run of ours writes.
        """
        state = read_state(folder)
        try:
            tensors = load_file(folder / WEIGHTS)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder / WEIGHTS} is no safetensors file ({error}): {_REMEDY}") from error
        return Checkpoint(
            folder,
            state["step"],
            tensors,
            _read_pickle(folder / OPTIMIZER, list),
            _read_pickle(folder / f"rng-{self.rank}.pt", dict) if self.rank < state["world_size"] else None,
            state,
            read_adapter(folder / ADAPTER)[1] if (folder / ADAPTER).is_dir() else None,
        )

    def require_room(self, module: EagleModule) -> None:
        """Refuse to start where two checkpoints would not fit on the disk (the old one goes after the new one).

        Raises:
            CheckpointError: not enough free space, or a folder that cannot be made.
        """
        weights = sum(p.numel() * p.element_size() for p in module.parameters())
        needed = 2 * 3 * weights  # weights and two moments, twice
        try:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.output_dir).free
        except OSError as error:
            raise _save_error(self.output_dir, error, []) from error
        if free < needed:
            raise CheckpointError(
                f"{self.output_dir}: two checkpoints need {needed / 1e9:.2f} GB, the disk has {free / 1e9:.2f} GB "
                "free: make room, or name another folder with training.output_dir"
            )


def incomplete(folder: Path) -> str | None:
    """Why a checkpoint folder cannot be used; ``None`` if it is whole."""
    return seal_fault(folder, needed=(WEIGHTS, CONFIG, OPTIMIZER, STATE))


def read_state(folder: Path) -> dict:
    """``trainer_state.json`` of a checkpoint.

    Raises:
        CheckpointError: it cannot be read, or lacks what every run writes.
    """
    state = read_json(folder / STATE, CheckpointError, _REMEDY)
    for name in ("step", "world_size"):
        if type(state.get(name)) is not int:
            raise CheckpointError(f"{folder / STATE}: {name} expected, a number, found {state.get(name)!r}: {_REMEDY}")
    return state


def _read_pickle(file: Path, kind: type):
    """A pickle of tensors and plain values.

    Raises:
        CheckpointError: it is damaged, holds anything else (nothing of it is run), or is not of this kind.
    """
    try:
        value = load_tensors(file)
    except ValueError as error:
        raise CheckpointError(f"{file} is refused: {error}: {_REMEDY}") from error
    if not isinstance(value, kind):
        raise CheckpointError(f"{file} holds a {type(value).__name__}, a {kind.__name__} expected: {_REMEDY}")
    return value


def rng_state() -> dict:
    """Random states of Python and torch, on all devices, as ``torch.load(weights_only=True)`` can read them."""
    version, words, gauss = random.getstate()
    state = {"python": [version, list(words), gauss], "cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: dict) -> None:
    """Inverse of :func:`rng_state`; states of devices that are not here are left out."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available() and len(state.get("cuda", ())) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def _save_error(folder: Path, error: Exception, left: list[int]) -> CheckpointError:
    rest = f"intact: {', '.join(f'checkpoint-{step}' for step in left)}" if left else "there is none yet"
    return CheckpointError(
        f"cannot save {folder}: {disk_trouble(error)}. Earlier checkpoints are {rest}; make room or set "
        "training.output_dir, then run the same command again"
    )
