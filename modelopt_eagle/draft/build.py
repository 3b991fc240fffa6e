"""A head of given numbers: made without drawing any from the caller's random state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from modelopt_eagle.draft.base import DraftModule
from modelopt_eagle.draft.config import DraftConfig
from modelopt_eagle.draft.vocab import DraftVocab

Head = TypeVar("Head", bound=DraftModule)


def bare_head(
    kind: Callable[[Any, DraftVocab | None], Head],
    config: DraftConfig,
    vocab: DraftVocab | None = None,
    tensors: Mapping[str, Tensor] | None = None,
) -> Head:
    """A head of a kind and a configuration, holding the given tensors.

    Args:
        kind: class of the head.
        config: its sizes and flags.
        vocab: its vocabulary map; ``None`` leaves it unset, if the vocabulary is reduced.
        tensors: all of its state, by the names of ``state_dict``; they are taken over without a copy, in their dtype.
            ``None`` leaves the numbers that the class begins with, which mean nothing.

    Returns:
        The head. The global random state is as it was.

    Raises:
        RuntimeError: tensors that are not those of the configuration; from ``load_state_dict``.
    """
    with torch.random.fork_rng(devices=[]):
        head = kind(config, vocab)
    if tensors is not None:
        head.load_state_dict(dict(tensors), assign=True)
    return head
