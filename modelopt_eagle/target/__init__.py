"""Frozen targets: loading them, finding their parts, taking features out of them."""

from modelopt_eagle.target.capture import LayerCapture, check_layer_ids, default_layer_ids
from modelopt_eagle.target.head import TargetHead
from modelopt_eagle.target.load import load_target
from modelopt_eagle.target.model import Target, TargetOutput

__all__ = [
    "LayerCapture",
    "Target",
    "TargetHead",
    "TargetOutput",
    "check_layer_ids",
    "default_layer_ids",
    "load_target",
]
