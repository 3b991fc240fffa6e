"""The draft head: configuration, vocabulary map, layers and module. Knows nothing of training, files or servers."""

from .config import DraftConfig, check_aux_layer_ids, default_aux_layer_ids, rope_of
from .module import EagleModule
from .vocab import DraftVocab

__all__ = ["DraftConfig", "DraftVocab", "EagleModule", "check_aux_layer_ids", "default_aux_layer_ids", "rope_of"]
