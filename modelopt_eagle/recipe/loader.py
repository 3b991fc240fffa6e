"""Loading a recipe: a YAML file, then dotted overrides, typed by the schema, each value with its origin."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from modelopt_eagle.errors import RecipeError
from modelopt_eagle.recipe.explain import explain, nearest, nearest_key, unknown_key, unknown_section
from modelopt_eagle.recipe.recipe import Recipe, default_output_dir
from modelopt_eagle.recipe.sections.base import accepted_types
from modelopt_eagle.recipe.yaml_file import parse_value, read_yaml

OVERRIDE = "override"
SHORT = {"algorithm": ("drafter", "algorithm")}
"""Names at the top of a recipe that stand for a key of a section."""
GIVEN = "given in Python"


def load_recipe(path: str | Path | Mapping[str, Any] | None = None, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe and apply overrides.

    Args:
        path: a YAML file, the name of a shipped recipe (``"quickstart"``), sections as a mapping
            (``{"training": {"epochs": 2}}``), or None for the schema's defaults.
        overrides: ``section.key=value`` strings; the value is YAML, then typed by the schema. Later ones win.
            Keys below a mapping may be named: ``data.role_aliases.my_model=assistant``.

    Returns:
        The checked recipe, with ``recipe.origin`` filled.

    Raises:
        RecipeError: with file, line and key of every fault, and the nearest valid name.
    """
    content: dict[str, Any] = {}
    places: dict[str, str] = {}
    if isinstance(path, Mapping):
        content, path = dict(path), GIVEN
    elif path is not None:
        path = find_recipe(path)
        content, lines = read_yaml(path)
        places = {name: f"{path}:{line}" for name, line in lines.items()}
    content = _with_sections(content, places)
    origin = {
        f"{section}.{key}": places.get(f"{section}.{key}", places.get(section, str(path)))
        for section, body in content.items()
        for key in body
    }
    texts: dict[str, str] = {}
    for text in overrides:
        name = _apply_override(content, text)
        origin[name] = OVERRIDE
        texts[name] = text
    try:
        recipe = Recipe.model_validate(content)
    except ValidationError as error:
        raise RecipeError(explain(error, places, texts, path)) from None
    recipe._origin = origin
    if all(origin.get(f"training.{key}") == OVERRIDE for key in ("batch_size", "max_tokens_per_batch")):
        if recipe.training.max_tokens_per_batch is not None:
            raise RecipeError(
                "training.batch_size and training.max_tokens_per_batch are both given, and a batch is counted in rows "
                "or in tokens: leave one of them out"
            )
    return recipe


def as_recipe(value: Recipe | Mapping[str, Any] | str | Path | None) -> Recipe:
    """A recipe as it is, or what :func:`load_recipe` makes of a mapping, a file or a shipped recipe's name."""
    return value if isinstance(value, Recipe) else load_recipe(value)


def replaced(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """A copy of a recipe with other values, which are checked as those of a file are; the recipe stays as it is.

    The output folder follows another ``model.base_model`` unless it was named.

    Args:
        recipe: a checked recipe.
        changes: ``section.key`` → value; their origin becomes ``given in Python``.

    Raises:
        RecipeError: the values do not fit together.
    """
    content = recipe.model_dump()
    if content["training"]["output_dir"] == default_output_dir(recipe.model.base_model, recipe.drafter.algorithm):
        content["training"]["output_dir"] = None
    for name, value in changes.items():
        section, key = name.split(".")
        content[section][key] = value
    try:
        copied = Recipe.model_validate(content)
    except ValidationError as error:
        raise RecipeError(explain(error, {}, {}, None)) from None
    copied._origin = {**recipe._origin, **dict.fromkeys(changes, GIVEN)}
    return copied


def recipe_folder() -> Path:
    """The folder of the shipped recipes, inside the package; ``recipes/`` of a clone is a link to it."""
    return Path(str(files("modelopt_eagle.recipe") / "recipes"))


def find_recipe(path: str | Path) -> Path:
    """The file itself, or the shipped recipe of that name.

    Raises:
        RecipeError: neither exists; the message lists the shipped ones.
    """
    path = Path(path)
    if path.is_file():
        return path
    shipped = {file.stem: file for file in sorted(recipe_folder().glob("*.yaml"))}
    if str(path) in shipped:
        file = shipped[str(path)]
        return file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    if path.is_dir():
        raise RecipeError(f"{path}: expected a YAML file, found a folder")
    near = nearest(path.stem, shipped)
    hint = f"; nearest: {near}" if near else ""
    raise RecipeError(f"{path}: no such recipe{hint} (shipped: {', '.join(shipped)})")


def _with_sections(content: dict[str, Any], places: dict[str, str]) -> dict[str, dict[str, Any]]:
    """The mapping with every known section a dict of its own (an empty section is no error)."""
    result: dict[str, dict[str, Any]] = {}
    for section, body in content.items():
        where = places.get(str(section), "recipe")
        if section in SHORT:
            owner, key = SHORT[section]
            result.setdefault(owner, {})[key] = body
            places.setdefault(f"{owner}.{key}", where)
            continue
        if section not in Recipe.sections():
            raise RecipeError(f"{where}: {unknown_section(str(section))}")
        if body is not None and not isinstance(body, dict):
            raise RecipeError(f"{where}: expected keys below section {section!r}, found {body!r}")
        result.setdefault(section, {}).update({str(key): copy.deepcopy(value) for key, value in (body or {}).items()})
    return result


def override_name(text: str) -> str:
    """The ``section.key`` that an override speaks of, as far as it is one; a short name is written out."""
    name = text.partition("=")[0].strip()
    return ".".join(SHORT.get(name, (name,)))


def _apply_override(content: dict[str, dict[str, Any]], text: str) -> str:
    """Write one override into the mapping; returns its ``section.key``."""
    _, equals, raw = text.partition("=")
    name = override_name(text)
    section, dot, rest = name.partition(".")
    key, *below = rest.split(".")
    if not equals or not dot or not key or not all(below):
        near = nearest_key(None, name) if not dot and section not in Recipe.sections() else None
        hint = f"; nearest valid name: {near}" if near else ""
        raise RecipeError(f"override {text!r}: expected section.key=value{hint}")
    if section not in Recipe.sections():
        near = nearest_key(None, rest)
        hint = f"; nearest valid name: {near}" if near else ""
        raise RecipeError(f"override {text!r}: {unknown_section(section)}{hint}")
    body = content.setdefault(section, {})
    if key not in Recipe.sections()[section].model_fields:
        raise RecipeError(f"override {text!r}: {unknown_key(section, key)}")
    kinds = accepted_types(Recipe.sections()[section].model_fields[key].annotation)
    value = parse_value(raw)
    if below:
        if dict not in kinds:
            raise RecipeError(f"override {text!r}: {section}.{key} has no keys below it; write {section}.{key}=VALUE")
        inner = body
        for part in (key, *below[:-1]):
            above = inner.get(part) or {}
            if not isinstance(above, dict):
                raise RecipeError(f"override {text!r}: {part} is {above!r}, which has no keys below it")
            inner[part] = dict(above)
            inner = inner[part]
        inner[below[-1]] = value
    else:
        is_text = str in kinds and not isinstance(value, (str, list, dict, type(None)))
        body[key] = raw.strip() if is_text else value
    return f"{section}.{key}"
