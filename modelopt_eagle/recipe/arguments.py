"""Recipes on a command line: ``--recipe FILE`` and any number of ``section.key=value``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable

from modelopt_eagle.recipe.loader import load_recipe
from modelopt_eagle.recipe.schema import Recipe


def add_recipe_arguments(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """Add ``--recipe`` and the overrides; parse with ``parse_intermixed_args`` so that they may stand anywhere.

    Args:
        parser: the command's parser.
        default: the recipe used without ``--recipe``; None for the schema's defaults.
    """
    parser.add_argument(
        "--recipe", default=default, metavar="FILE", help="recipe file, or the name of a shipped one (%(default)s)"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="values in place of the recipe's (docs/recipes.md)"
    )


def recipe_from_arguments(args: argparse.Namespace, flags: Iterable[tuple[str, object]] = ()) -> Recipe:
    """The recipe that parsed arguments describe.

    Args:
        args: with ``recipe`` and ``overrides``, of ``add_recipe_arguments``.
        flags: ``("section.key", value)`` of the command's own flags; None means not given. They are applied before
            the overrides.

    Raises:
        RecipeError: as ``load_recipe``.
    """
    given = [f"{name}={_as_yaml(value)}" for name, value in flags if value is not None]
    return load_recipe(args.recipe, [*given, *args.overrides])


def _as_yaml(value: object) -> str:
    """A flag's value as override text: JSON, which is YAML, so that text stays as typed."""
    return json.dumps(value, ensure_ascii=False)
