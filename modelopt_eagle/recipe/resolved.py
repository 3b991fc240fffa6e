"""The recipe of a run as a file: written fully resolved, and compared with what a folder was trained with."""

from __future__ import annotations

from pathlib import Path

from modelopt_eagle.common.files import write_whole
from modelopt_eagle.recipe.loader import load_recipe
from modelopt_eagle.recipe.recipe import Recipe
from modelopt_eagle.recipe.yaml_file import dump_value

# Keys that do not change what is trained: where things lie, how often they are said, and what follows training.
IMMATERIAL_SECTIONS = {"validation", "export"}
IMMATERIAL = {
    "model.device",
    "model.parallel",
    "model.shards",
    "data.workers",
    "data.streaming_server_url",
    "data.streaming_transport",
    "training.output_dir",
    "training.log_steps",
    "training.save_steps",
    "training.eval_steps",
    "training.save_total_limit",
    "training.resume",
    "training.report_to",
    "training.torch_compile",
    "training.dry_run",
    "training.ignore_memory",
}


def dump_resolved(recipe: Recipe, path: str | Path) -> None:
    """Write every value of the recipe with its origin as a comment; the file, whole or absent, loads to the same."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, resolved_text(recipe))


def resolved_text(recipe: Recipe) -> str:
    """The YAML text of ``dump_resolved``."""
    origin = recipe.origin
    lines = ["# The recipe of this run, fully resolved; behind each value, where it comes from."]
    for section in Recipe.sections():
        lines += ["", f"{section}:"]
        for key, value in getattr(recipe, section).model_dump().items():
            lines.append(f"  {key}: {dump_value(value)}  # {origin[f'{section}.{key}']}")
    return "\n".join(lines) + "\n"


def same_recipe(recipe: Recipe, path_of_previous: str | Path) -> list[str]:
    """The ``section.key`` names in which a recipe would train something else than a previous one.

    Output paths, the cadence of logs and checkpoints, the device, and all that follows training are left out.
    An empty list means that training may go on in the same folder.

    Raises:
        RecipeError: the previous recipe cannot be read.
    """
    previous = load_recipe(path_of_previous)
    return [
        f"{section}.{key}"
        for section, key in Recipe.keys()
        if section not in IMMATERIAL_SECTIONS
        and f"{section}.{key}" not in IMMATERIAL
        and getattr(getattr(recipe, section), key) != getattr(getattr(previous, section), key)
    ]
