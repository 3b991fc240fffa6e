"""Features of the target: made in the step, kept in memory, read from a store or streamed from a server."""

from modelopt_eagle.features.batch import (
    FORMAT_VERSION,
    FeatureBatch,
    FeatureContract,
    FeatureRow,
    collate,
    needed_final_positions,
    predicting_positions,
)
from modelopt_eagle.features.foreign.reader import open_offline
from modelopt_eagle.features.hybrid import HybridSource
from modelopt_eagle.features.offline import OfflineSource
from modelopt_eagle.features.source import FeatureSource, MemorySource, OnlineSource, SelectedSource
from modelopt_eagle.features.stream.source import StreamedSource

__all__ = [
    "FORMAT_VERSION",
    "FeatureBatch",
    "FeatureContract",
    "FeatureRow",
    "FeatureSource",
    "HybridSource",
    "MemorySource",
    "OfflineSource",
    "OnlineSource",
    "SelectedSource",
    "StreamedSource",
    "collate",
    "needed_final_positions",
    "open_offline",
    "predicting_positions",
]
