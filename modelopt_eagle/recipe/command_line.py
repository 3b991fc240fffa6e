"""Recipes on a command line: ``--recipe FILE``, any number of ``section.key=value``, and the flags of training."""

from __future__ import annotations

import argparse
import json
import typing
from collections.abc import Iterable, Sequence
from typing import Any

from modelopt_eagle.common.machine import check_device_name
from modelopt_eagle.common.parser import CommandParser, command_parser
from modelopt_eagle.recipe.loader import SHORT, load_recipe
from modelopt_eagle.recipe.recipe import Recipe
from modelopt_eagle.recipe.sections import ModelSection


def add_recipe_arguments(parser: argparse.ArgumentParser, default: str | None = None, said: str | None = None) -> None:
    """Add ``--recipe`` and the overrides; parse with ``parse_intermixed_args`` so that they may stand anywhere.

    Args:
        parser: the command's parser.
        default: the recipe used without ``--recipe``; None for the schema's defaults.
        said: the same in words, for the help.
    """
    said = said or default or "the defaults of docs/recipes.md"
    parser.add_argument(
        "--recipe", default=default, metavar="FILE", help=f"recipe file, or the name of a shipped one (default: {said})"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="values in place of the recipe's (docs/recipes.md)"
    )
    add_target_options(parser, of_a_recipe=True)


def add_target_options(
    parser: argparse.ArgumentParser,
    *,
    of_a_recipe: bool = False,
    weights: bool = True,
    template: bool = True,
    dtype: str = "auto",
    device: str = "auto",
    dtype_option: str = "--dtype",
) -> None:
    """Add the options that say how a target is loaded; the same ones in every command that loads one.

    Args:
        parser: the command's parser.
        of_a_recipe: the recipe says what is not given; else the defaults are :class:`ModelSection`'s.
        weights: the target runs; else only its tables and its tokenizer are read, which have no attention.
        template: its chat template is used.
        dtype, device: defaults of a command that wants others.
        dtype_option: its name where ``--dtype`` is that of something else.
    """
    group = parser.add_argument_group("how the target is loaded")
    instead = "; default: the recipe's" if of_a_recipe else ""
    group.add_argument("--revision", metavar="NAME", help=f"branch, tag or commit on the hub{instead}")
    group.add_argument(
        "--trust_remote_code", action="store_const", const=True, help="run Python code that its repository ships"
    )
    if template:
        group.add_argument(
            "--chat_template", metavar="FILE", help="a Jinja chat template, or a file with one, in place of its own"
        )
    if not weights:
        return
    fields = ModelSection.model_fields
    dtypes = typing.get_args(fields["dtype"].annotation)
    group.add_argument(
        dtype_option, dest="target_dtype", choices=dtypes if of_a_recipe else (*dtypes, "float16"),
        default=None if of_a_recipe else dtype,
        help="numbers that it runs in; auto: float32 on a CPU, else its checkpoint's"
        + (instead or f" (default {dtype})"),
    )  # fmt: skip
    group.add_argument(
        "--device", type=_device, default=None if of_a_recipe else device, metavar="NAME",
        help="auto (all accelerators, or the CPU), cpu, cuda, cuda:1, ..." + (instead or f" (default {device})"),
    )  # fmt: skip
    group.add_argument(
        "--attn_implementation", choices=typing.get_args(fields["attn_implementation"].annotation),
        help="its attention in transformers" + (instead or " (default sdpa)"),
    )  # fmt: skip


def _device(text: str) -> str:
    """A device's name; what argparse says of another one."""
    try:
        return check_device_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


_TARGET_KEYS = {
    "revision": "revision", "trust_remote_code": "trust_remote_code", "chat_template": "chat_template",
    "target_dtype": "dtype", "device": "device", "attn_implementation": "attn_implementation",
}  # fmt: skip


def target_section(args: argparse.Namespace, name: str) -> ModelSection:
    """The section ``model`` that the options of :func:`add_target_options` describe, for the target of this name."""
    given = {key: getattr(args, option, None) for option, key in _TARGET_KEYS.items()}
    if given["dtype"] == "float16":  # not one to train with; see target_arguments
        given["dtype"] = "bfloat16"
    return ModelSection(base_model=name, **{key: value for key, value in given.items() if value is not None})


def target_arguments(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Arguments of ``load_target`` from the options of :func:`add_target_options`."""
    found = target_section(args, name).load_arguments()
    return {**found, "dtype": "float16"} if getattr(args, "target_dtype", None) == "float16" else found


def table_arguments(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Arguments of ``load_target_tables`` from the same options, in the numbers of its files, on the CPU."""
    found = target_section(args, name)
    keys = ("revision", "trust_remote_code", "chat_template")
    return {"name": name, **{key: getattr(found, key) for key in keys}}


def recipe_from_arguments(args: argparse.Namespace, flags: Iterable[tuple[str, object]] = ()) -> Recipe:
    """The recipe that parsed arguments describe.

    Args:
        args: with ``recipe``, ``overrides`` and how the target is loaded, of ``add_recipe_arguments``.
        flags: ``("section.key", value)`` of the command's own flags; None means not given. They are applied before
            the overrides.

    Raises:
        RecipeError: as ``load_recipe``.
    """
    own = [(f"model.{key}", getattr(args, option, None)) for option, key in _TARGET_KEYS.items()]
    given = [f"{name}={_as_yaml(value)}" for name, value in (*own, *flags) if value is not None]
    return load_recipe(args.recipe, [*given, *args.overrides])


def _as_yaml(value: object) -> str:
    """A flag's value as override text: JSON, which is YAML, so that text stays as typed."""
    return json.dumps(value, ensure_ascii=False)


TRAIN = "train"
TRAIN_AND_EXPORT = "train-and-export"


def train_parser(command: str = TRAIN_AND_EXPORT) -> CommandParser:
    """The command line of train-and-export and of train; parse with ``parse_intermixed_args``."""
    export = command == TRAIN_AND_EXPORT
    parser = command_parser(
        command,
        "Train a draft head"
        + (", measure its acceptance length and export it" if export else ": checkpoints only")
        + ". Without arguments: the bundled quick-start target and conversations.",
        example=f"""
            modelopt-eagle {command} --base_model NAME --data chats.jsonl --output_dir ckpts/mine
            modelopt-eagle {command} --recipe eagle3 training.epochs=2 eagle.draft_vocab_size=32000""",
        epilog="bash train_eagle3_and_export.sh takes the same options and makes the environment first (.venv; "
        "--python-env current uses the active one)."
        if export
        else "",
    )
    add_run_arguments(parser, default="quickstart; eagle3 for another target, eagle3_offline with --offline_data")
    parser.add_argument(
        "--output_dir", metavar="DIR", help="checkpoints, report and export (default: ckpts/TARGET-eagle3)"
    )
    parser.add_argument("--dry_run", action="store_true", help="everything up to the first step, train nothing")
    parser.add_argument("-q", "--quiet", action="store_true", help="say only what goes wrong, and the result")
    parser.add_argument("-v", "--verbose", action="store_true", help="a line for every step (training.log_steps=1)")
    parser.add_argument(
        "--json", action="store_true", help="on standard output one JSON object a log line, and one with the result"
    )
    return parser


def add_run_arguments(parser: argparse.ArgumentParser, default: str = "quickstart") -> None:
    """What a run is about: target, data and recipe, as every command that speaks of a run takes it.

    Args:
        parser: the command's parser.
        default: what is used without ``--recipe``, in words.
    """
    parser.add_argument("--base_model", metavar="NAME", help="the target: hub id, local folder, GGUF file, quickstart")
    parser.add_argument("--data", nargs="+", metavar="FILE", help="conversations, .jsonl")
    parser.add_argument("--offline_data", metavar="DIR", help="train from dumped features instead")
    add_recipe_arguments(parser, said=default)


def train_recipe(argv: list[str] | None = None) -> Recipe:
    """The recipe of a train-and-export command line, see :func:`run_recipe`.

    Raises:
        RecipeError: as ``load_recipe``.
    """
    return train_arguments(argv)[0]


def train_arguments(
    argv: list[str] | None = None, command: str = TRAIN_AND_EXPORT
) -> tuple[Recipe, argparse.Namespace]:
    """The recipe of a command line of training, and its options ``quiet``, ``verbose`` and ``json``.

    Raises:
        RecipeError: as ``load_recipe``.
    """
    args = train_parser(command).parse_intermixed_args(argv)
    flags = [
        ("training.output_dir", args.output_dir),
        ("training.dry_run", True if args.dry_run else None),
        ("training.log_steps", 1 if args.verbose else None),
    ]
    return run_recipe(args, flags), args


def run_recipe(args: argparse.Namespace, flags: Sequence[tuple[str, object]] = ()) -> Recipe:
    """The recipe that the arguments of :func:`add_run_arguments` describe.

    Without ``--recipe``, the quick start is run for the bundled target, ``eagle3`` for another one and
    ``eagle3_offline`` with ``--offline_data``. Flags win over the file, overrides over flags.

    Args:
        args: parsed by ``parse_intermixed_args``.
        flags: values of further flags by their keys; ``None``: not given.

    Raises:
        RecipeError: as ``load_recipe``.
    """
    data = data_flag(args)
    if args.recipe is None:
        args.recipe = _default_recipe(args)
    own = [("model.base_model", args.base_model), data, ("data.offline_data_path", args.offline_data)]
    return recipe_from_arguments(args, [*own, *flags])


def data_flag(args: argparse.Namespace) -> tuple[str, object]:
    """The value of ``--data FILE ...`` as a flag of :func:`recipe_from_arguments`.

    Of ``--data a.jsonl section.key=value`` argparse gives everything to ``--data``; overrides are moved to
    ``args.overrides``, before the others. Call it before anything reads those.
    """
    if args.data is not None:
        args.overrides = [text for text in args.data if _is_override(text)] + args.overrides
        args.data = [text for text in args.data if not _is_override(text)] or None
    return "data.train_path", args.data if args.data is None or len(args.data) > 1 else args.data[0]


def _default_recipe(args: argparse.Namespace) -> str:
    if args.offline_data is not None or _overridden(args, "data.offline_data_path"):
        return "eagle3_offline"
    if _overridden(args, "data.streaming_server_url"):
        return "eagle3_streaming"
    other = args.base_model not in (None, "quickstart") or _overridden(args, "model.base_model")
    return "eagle3" if other else "quickstart"


def _overridden(args: argparse.Namespace, name: str) -> bool:
    return any(text.startswith(f"{name}=") for text in args.overrides)


def _is_override(text: str) -> bool:
    """Whether a word names a section's key rather than a file."""
    name, equals, _ = text.partition("=")
    known = name in SHORT or name.partition(".")[0] in Recipe.sections()
    return bool(equals) and known and "/" not in name
