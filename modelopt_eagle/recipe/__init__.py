"""Typed recipes: ``load_recipe``, the schema, and the resolved recipe of a run."""

from modelopt_eagle.recipe.arguments import add_recipe_arguments, recipe_from_arguments
from modelopt_eagle.recipe.launch import train_parser, train_recipe
from modelopt_eagle.recipe.loader import as_recipe, find_recipe, load_recipe, replaced
from modelopt_eagle.recipe.outcome import ExportSection, ValidationSection
from modelopt_eagle.recipe.resolved import dump_resolved, resolved_text, same_recipe
from modelopt_eagle.recipe.schema import (
    DataSection,
    EagleSection,
    ModelSection,
    Recipe,
    TrainingSection,
)

__all__ = [
    "DataSection",
    "EagleSection",
    "ExportSection",
    "ModelSection",
    "Recipe",
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
