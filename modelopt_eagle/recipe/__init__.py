"""Typed recipes: ``load_recipe``, the sections, and the resolved recipe of a run."""

from modelopt_eagle.recipe.command_line import (
    add_recipe_arguments,
    recipe_from_arguments,
    train_parser,
    train_recipe,
)
from modelopt_eagle.recipe.loader import as_recipe, find_recipe, load_recipe, replaced
from modelopt_eagle.recipe.recipe import Recipe
from modelopt_eagle.recipe.resolved import dump_resolved, resolved_text, same_recipe
from modelopt_eagle.recipe.sections import (
    DataSection,
    EagleSection,
    ExportSection,
    ModelSection,
    Section,
    TargetLoraSection,
    TrainingSection,
    ValidationSection,
)

__all__ = [
    "DataSection",
    "EagleSection",
    "ExportSection",
    "ModelSection",
    "Recipe",
    "Section",
    "TargetLoraSection",
    "TrainingSection",
    "ValidationSection",
    "add_recipe_arguments",
    "as_recipe",
    "dump_resolved",
    "find_recipe",
    "load_recipe",
    "recipe_from_arguments",
    "replaced",
    "resolved_text",
    "same_recipe",
    "train_parser",
    "train_recipe",
]
