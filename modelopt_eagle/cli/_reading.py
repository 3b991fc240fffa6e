"""Options of every command that reads a head of another tool."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from modelopt_eagle.common.lists import parse_ids
from modelopt_eagle.errors import CheckpointError, RecipeError, TargetError
from modelopt_eagle.export.foreign import LAYOUTS, ReadOptions
from modelopt_eagle.export.tensors import CONVENTIONS
from modelopt_eagle.recipe.command_line import add_target_options, table_arguments
from modelopt_eagle.target.gguf import QUICKSTART_NAME
from modelopt_eagle.target.identity import local_name
from modelopt_eagle.target.load import architecture_of, resolve

if TYPE_CHECKING:
    from modelopt_eagle.draft import DraftConfig
    from modelopt_eagle.target.like import TableTarget


def add_reading_options(parser: argparse.ArgumentParser, base_model: bool = True) -> None:
    """Add the flags that answer what a foreign folder leaves open.

    Args:
        base_model: add ``--base-model`` too, and how its tables are loaded, for commands that have none of their own.
    """
    group = parser.add_argument_group("answers to what a head of another tool leaves open")
    group.add_argument("--layout", choices=LAYOUTS, help="which tool wrote it; default: told from the folder")
    group.add_argument(
        "--aux-layer-ids", "--aux_layer_ids", help="captured layers, such as 1,14,26 (output of layer k, 0-based)"
    )
    group.add_argument("--target-layers", "--target_layers", type=int, help="number of layers of the target")
    group.add_argument(
        "--norm-before-residual",
        "--norm_before_residual",
        choices=("true", "false"),
        help="whether the residual of layer 0 is the normed state, for heads that do not say",
    )
    group.add_argument(
        "--d2t-convention", "--d2t_convention", choices=CONVENTIONS, help="what d2t holds, for heads without t2d"
    )
    group.add_argument(
        "--sliding-window",
        "--sliding_window",
        type=int,
        metavar="N",
        help="positions that the head sees back, 0 for all, for heads that do not say whether they use theirs",
    )
    group.add_argument(
        "--draft-layers", "--draft_layers", type=int, help="layers of the head, where its config and file disagree"
    )
    if base_model:
        group.add_argument(
            "--base-model", "--base_model", help="the target: its depth, tokenizer and embedding answer some of these"
        )
        add_target_options(parser, weights=False, template=False)


def read_options(arguments: argparse.Namespace, target: TableTarget | None = None) -> ReadOptions:
    """The answers in parsed arguments, and those that the target gives, where it is known."""
    residual = arguments.norm_before_residual
    return ReadOptions(
        layout=arguments.layout,
        aux_layer_ids=parse_ids(arguments.aux_layer_ids, "--aux-layer-ids", CheckpointError),
        target_layers=arguments.target_layers or (target.num_layers if target else None),
        norm_before_residual=None if residual is None else residual == "true",
        d2t_convention=arguments.d2t_convention,
        sliding_window=arguments.sliding_window,
        layers=arguments.draft_layers,
        lm_head=target.head.weight if target else None,
        target_dtype=dtype_of(target.config) if target else None,
        target_architecture=architecture_of(target),
    )


def reading_options(arguments: argparse.Namespace) -> tuple[ReadOptions, object | None]:
    """``(options, target tables or None)`` of parsed arguments."""
    if not arguments.base_model:
        return read_options(arguments), None
    from modelopt_eagle.target import load_target_tables

    target = load_target_tables(**table_arguments(arguments, arguments.base_model))
    return read_options(arguments, target), target


def dtype_of(config: Any) -> torch.dtype | None:
    """The dtype that a target's configuration names; engines serve it, and its drafts, in it."""
    dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    return getattr(torch, dtype, None) if isinstance(dtype, str) else dtype


def own_target(path: str | Path, config: DraftConfig) -> str:
    """What a command loads for a head whose target was not given.

    A head records a hub id, or the name of a local folder and not where that lay. The recipe of the run that the head
    lies in says where: it is believed if the folder is still there and goes by the recorded name.

    Args:
        path: as it was given: an export, a checkpoint or a run's output folder.
        config: of the head that was found there.

    Returns:
        ``quickstart``, a local path, or the recorded name.

    Raises:
        CheckpointError: the head records no target.
    """
    recorded = config.target_name
    if recorded is None:
        raise CheckpointError(f"{path} does not record its target: pass --base_model")
    if recorded == QUICKSTART_NAME:
        return "quickstart"
    whole = Path(path).resolve()
    trained = (_target_of_recipe(folder / "recipe.yaml") for folder in (whole, whole.parent))
    for named in (Path(name).expanduser() for name in trained if name):
        if named.exists() and local_name(Path(resolve(named))) == recorded:
            return str(named)
    return recorded


def _target_of_recipe(file: Path) -> str | None:
    """``model.base_model`` of a run's recipe; ``None`` where there is none to read."""
    from modelopt_eagle.recipe.yaml_file import read_yaml

    try:
        model = read_yaml(file)[0].get("model") if file.is_file() else None
    except RecipeError:
        return None
    name = model.get("base_model") if isinstance(model, dict) else None
    return name if isinstance(name, str) else None


@contextmanager
def recorded_by(path: str | Path, given: str | None) -> Iterator[None]:
    """Say, where a target cannot be loaded inside, that its name was the head's and not the caller's.

    Args:
        path: of the head.
        given: the target as it was given; ``None``: :func:`own_target` of the head.

    Raises:
        TargetError: that of the loading, with the flag that mends it.
    """
    try:
        yield
    except TargetError as error:
        if given is not None:
            raise
        raise TargetError(
            f"{error}. The name is what {path} records of its target: if that is a folder of this machine, give it as "
            "--base_model FOLDER"
        ) from error
