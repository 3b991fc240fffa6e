"""The sections of a recipe, a file each."""

from modelopt_eagle.recipe.sections.base import Section
from modelopt_eagle.recipe.sections.data import DataSection
from modelopt_eagle.recipe.sections.dflash import DFlashSection
from modelopt_eagle.recipe.sections.drafter import DrafterSection
from modelopt_eagle.recipe.sections.eagle import EagleSection
from modelopt_eagle.recipe.sections.export import ExportSection
from modelopt_eagle.recipe.sections.medusa import MedusaSection
from modelopt_eagle.recipe.sections.model import ModelSection
from modelopt_eagle.recipe.sections.peagle import PEagleSection
from modelopt_eagle.recipe.sections.target_lora import TargetLoraSection
from modelopt_eagle.recipe.sections.training import TrainingSection
from modelopt_eagle.recipe.sections.validation import ValidationSection

__all__ = [
    "DFlashSection",
    "DataSection",
    "DrafterSection",
    "EagleSection",
    "ExportSection",
    "MedusaSection",
    "ModelSection",
    "PEagleSection",
    "Section",
    "TargetLoraSection",
    "TrainingSection",
    "ValidationSection",
]
