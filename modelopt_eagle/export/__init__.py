"""Draft checkpoints: written for three engines, read from every known tool, checked, quantised, uploaded."""

from .loader import LoadedHead, load_draft, read_head
from .readers import ReadOptions
from .writer import ExportReport, export_checkpoint

__all__ = ["ExportReport", "LoadedHead", "ReadOptions", "export_checkpoint", "load_draft", "read_head"]
