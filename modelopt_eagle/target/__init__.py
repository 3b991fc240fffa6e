"""Frozen targets: loading them, finding their parts, taking features out of them."""

from modelopt_eagle.target.capture import LayerCapture
from modelopt_eagle.target.head import TargetHead
from modelopt_eagle.target.identity import TargetIdentity
from modelopt_eagle.target.like import RunningTarget, TableTarget
from modelopt_eagle.target.load import load_target
from modelopt_eagle.target.model import Target, TargetOutput
from modelopt_eagle.target.tables import TargetTables, load_target_tables

__all__ = [
    "LayerCapture",
    "RunningTarget",
    "TableTarget",
    "Target",
    "TargetHead",
    "TargetIdentity",
    "TargetOutput",
    "TargetTables",
    "load_target",
    "load_target_tables",
]
