"""The vocabulary map of a head on disk: found, checked, and never guessed."""

from __future__ import annotations

import torch
from torch import Tensor

from modelopt_eagle.draft import DraftVocab
from modelopt_eagle.errors import CheckpointError

CONVENTIONS = ("offset", "absolute")


def map_kind(tensors: dict[str, Tensor], draft_vocab_size: int | None, vocab_size: int | None) -> str:
    """``identity``, ``reduced`` or ``missing``, told from the tables and the head's rows, not from the config alone."""
    if "d2t" in tensors:
        whole = len(tensors.get("t2d", ())) or vocab_size
        return "identity" if not bool(tensors["d2t"].any()) and len(tensors["d2t"]) == whole else "reduced"
    return "identity" if draft_vocab_size == vocab_size else "missing"


def vocab_of(
    tensors: dict[str, Tensor], draft_vocab_size: int, vocab_size: int, where: str, convention: str | None = None
) -> DraftVocab:
    """The checked map of a head.

    Args:
        tensors: the head's, with ``d2t`` and ``t2d`` if it has them. A config that repeats the draft's size as
            ``vocab_size`` is overruled by the length of ``t2d``.
        convention: what ``d2t`` holds, for a head of another tool without ``t2d``: ``offset`` or ``absolute``.

    Raises:
        CheckpointError: no map for a reduced vocabulary, sizes that contradict, a broken invariant, or a table that
            reads as either convention.
    """
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None:
        if draft_vocab_size != vocab_size:
            raise CheckpointError(
                f"{where}: the head proposes {draft_vocab_size} of {vocab_size} tokens and holds no d2t: no engine can "
                "know which, and each serves nonsense; copy the map from the training checkpoint"
            )
        return DraftVocab.identity(vocab_size)
    if d2t.dim() != 1 or d2t.is_floating_point():
        raise CheckpointError(f"{where}: d2t must be integers of one dimension, found {d2t.dtype} {list(d2t.shape)}")
    d2t = d2t.to(torch.int64)
    if len(d2t) != draft_vocab_size:
        raise CheckpointError(f"{where}: d2t has {len(d2t)} entries, lm_head {draft_vocab_size} rows")
    if t2d is not None and len(t2d) != vocab_size:
        raise CheckpointError(f"{where}: t2d has {len(t2d)} entries, the target's vocabulary is {vocab_size}")
    if convention == "absolute":
        d2t = d2t - torch.arange(len(d2t))
    try:
        vocab = DraftVocab(d2t, t2d) if t2d is not None else DraftVocab.from_d2t(d2t, vocab_size)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error
    if (
        t2d is None
        and convention is None
        and len(d2t) > 1
        and bool((d2t.diff() > 0).all())
        and int(d2t[-1]) < vocab_size
    ):
        raise CheckpointError(
            f"{where}: d2t rises at every entry and there is no t2d to check it by, so it could hold offsets or "
            "target ids; which? answer with --d2t-convention offset|absolute"
        )
    return vocab
