"""Draft checkpoints: written for three engines, read from every known tool, checked, quantised, uploaded."""

from modelopt_eagle.export.convert import convert_checkpoint
from modelopt_eagle.export.engines.check import check_engine, engine_reasons
from modelopt_eagle.export.foreign import ReadOptions
from modelopt_eagle.export.inspect import inspect_checkpoint
from modelopt_eagle.export.load import LoadedHead, load_draft, read_head
from modelopt_eagle.export.write import ExportReport, export_checkpoint

__all__ = [
    "ExportReport",
    "LoadedHead",
    "ReadOptions",
    "check_engine",
    "convert_checkpoint",
    "engine_reasons",
    "export_checkpoint",
    "inspect_checkpoint",
    "load_draft",
    "read_head",
]
