"""Options that several commands take: types of their values, and what -q, -v and --json do."""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from modelopt_eagle.common.console import line_handler, say
from modelopt_eagle.recipe import Recipe


def json_object(text: str) -> dict[str, Any]:
    """An option's value as an object of JSON."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"expected JSON ({error.msg}), found {text!r}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected an object, found {text!r}")
    return value


def output_file(text: str) -> Path:
    """An option's value as a file that can be written, known before the work that it is to hold."""
    path = Path(text)
    above = path.absolute().parent
    while not above.exists() and above != above.parent:
        above = above.parent
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder: name a file in it")
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written, as {above} is no folder that takes files")
    return path


def add_prompt_options(parser: argparse.ArgumentParser, num_samples: int, max_new_tokens: int) -> None:
    """Add which prompts are answered, how many of them and how long an answer may be.

    Args:
        parser: of the command.
        num_samples, max_new_tokens: its defaults.
    """
    parser.add_argument("--prompts", default="quickstart", help="prompts to answer, a .jsonl; default: the 80 shipped")
    parser.add_argument(
        "--num_samples", type=int, default=num_samples, help=f"take this many, spread evenly (default {num_samples})"
    )
    parser.add_argument(
        "--max_new_tokens", type=int, default=max_new_tokens, help=f"length of an answer (default {max_new_tokens})"
    )


def begin(recipe: Recipe, arguments: argparse.Namespace) -> None:
    """Say at once what is about to happen, before anything large is imported; with ``--quiet`` only what goes wrong."""
    handler = line_handler()
    if arguments.quiet and handler is not None:
        handler.setLevel(logging.WARNING)
    if int(os.environ.get("RANK", "0")) == 0:
        say(f"{recipe.model.base_model}: a run into {recipe.training.output_dir} (loading)")


def metrics_printer(arguments: argparse.Namespace) -> Callable[[dict[str, Any]], None] | None:
    """What prints the metrics of each log line as JSON, ``None`` without ``--json``."""
    if not arguments.json:
        return None
    return lambda metrics: print(json.dumps(metrics), flush=True)
