"""Options of every command that reads a head of another tool."""

from __future__ import annotations

import argparse

from modelopt_eagle.export.foreign import LAYOUTS, ReadOptions, parse_ids
from modelopt_eagle.export.tensors import CONVENTIONS


def add_reading_options(parser: argparse.ArgumentParser, base_model: bool = True) -> None:
    """Add the flags that answer what a foreign folder leaves open.

    Args:
        base_model: add ``--base-model`` too, for commands that have none of their own.
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
    if base_model:
        group.add_argument(
            "--base-model", "--base_model", help="the target: its depth, tokenizer and embedding answer some of these"
        )


def read_options(arguments: argparse.Namespace, target_layers: int | None = None) -> ReadOptions:
    """The answers in parsed arguments; ``target_layers``: of the target, where it is known."""
    residual = arguments.norm_before_residual
    return ReadOptions(
        layout=arguments.layout,
        aux_layer_ids=parse_ids(arguments.aux_layer_ids),
        target_layers=arguments.target_layers or target_layers,
        norm_before_residual=None if residual is None else residual == "true",
        d2t_convention=arguments.d2t_convention,
    )


def reading_options(arguments: argparse.Namespace) -> tuple[ReadOptions, object | None]:
    """``(options, target tables or None)`` of parsed arguments."""
    if not arguments.base_model:
        return read_options(arguments), None
    from modelopt_eagle.target import load_target_tables

    target = load_target_tables(arguments.base_model)
    return read_options(arguments, int(target.config.num_hidden_layers)), target
