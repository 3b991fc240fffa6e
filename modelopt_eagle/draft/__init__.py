"""The draft head: configuration, vocabulary map, layers and module. Knows nothing of training, files or servers."""

from modelopt_eagle.draft.config import DraftConfig, rope_of
from modelopt_eagle.draft.module import EagleModule
from modelopt_eagle.draft.vocab import DraftVocab

__all__ = ["DraftConfig", "DraftVocab", "EagleModule", "rope_of"]
