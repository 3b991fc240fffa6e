"""Draft checkpoints: written for three engines, read from every known tool, checked, quantised, uploaded."""

from .convert import convert_checkpoint
from .engines import check_engine, engine_reasons
from .inspection import inspect_checkpoint
from .loader import LoadedHead, load_draft, read_head
from .readers import ReadOptions
from .writer import ExportReport, export_checkpoint

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
