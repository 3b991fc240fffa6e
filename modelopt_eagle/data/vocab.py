"""Choosing the draft vocabulary: the tokens that the target writes most, counted over supervised tokens.

The map is kept as ``draft_vocab.safetensors`` (``d2t`` int64 offsets, ``t2d`` bool) with ``draft_vocab.json`` beside
it, which says of which tokenizer, what data and what coverage. When fewer tokens occur in the data than the map has
places, the places left are filled with the lowest unused ids: byte-pair vocabularies are ordered by frequency, so these
are the likeliest, and the result depends on nothing else.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelopt_eagle.common.files import read_json, whole_file, write_whole
from modelopt_eagle.data.encode import TokenizedRow
from modelopt_eagle.draft import DraftVocab
from modelopt_eagle.errors import CheckpointError, DataError

WEIGHTS, RECORD = "draft_vocab.safetensors", "draft_vocab.json"


@dataclass(frozen=True)
class VocabChoice:
    """A draft vocabulary and how well it covers the data it was chosen from.

    Attributes:
        vocab: the map.
        counts: ``[V]`` int64, occurrences of each token among the supervised ones.
        seen: different tokens among them.
        coverage: share of supervised tokens inside the map.
    """

    vocab: DraftVocab
    counts: Tensor
    seen: int
    coverage: float

    def describe(self) -> str:
        """One line for the head of a run."""
        filled = max(0, self.vocab.size - self.seen)
        note = f", {filled} places filled with tokens that do not occur" if filled else ""
        inside = f"{self.coverage:.2%} of the supervised tokens are inside" if self.seen else "none are supervised"
        return (
            f"draft vocabulary: {self.vocab.size} of {self.counts.numel()} tokens; "
            f"{self.seen} different ones occur{note}; {inside}"
        )


def count_supervised(rows: Iterable[TokenizedRow], vocab_size: int) -> Tensor:
    """How often each token is to be predicted.

    Args:
        rows: tokenised rows (of a data set or a feature store).
        vocab_size: V of the target.

    Returns:
        ``[V]`` int64.

    Raises:
        DataError: an id that the target does not have, as when data and target use different tokenizers.
    """
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for row in rows:
        ids = torch.as_tensor(row.input_ids)[torch.as_tensor(row.supervised)]  # [n]
        if ids.numel() and int(ids.max()) >= vocab_size:
            raise DataError(
                f"row {row.id}: token id {int(ids.max())}, the target has only {vocab_size}; "
                "tokenise the data with the target's own tokenizer"
            )
        counts += torch.bincount(ids, minlength=vocab_size)
    return counts


def required_ids(
    tokenizer, vocab_size: int, end_token_ids: Sequence[int] = (), counts: Tensor | None = None
) -> list[int]:
    """Ids that are always in a draft vocabulary, ascending: end tokens, and the special tokens that are used.

    Used are the tokenizer's named ones (begin, end, padding, unknown), those that stand in its chat template, and those
    that the data count. Tokenizers may hold thousands of placeholders besides (``<unused42>``).

    Args:
        counts: ``[V]`` occurrences of each token, if there are any yet.
    """
    added = {i: str(token) for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special}
    named = [
        getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad", "unk", "sep", "cls", "mask")
    ]
    template = tokenizer.get_chat_template() if getattr(tokenizer, "chat_template", None) else ""
    written = {i for i, text in added.items() if text in template}
    counted = set() if counts is None else {i for i in added if i < vocab_size and int(counts[i])}
    ids = {*(i for i in named if i is not None), *end_token_ids, *written, *counted}
    return sorted(i for i in ids if i < vocab_size)  # some tokenizers add ids that the model has no row for


def choose_draft_vocab(
    rows: Iterable[TokenizedRow], tokenizer, vocab_size: int, draft_vocab_size: int, end_token_ids: Sequence[int] = ()
) -> VocabChoice:
    """The ``draft_vocab_size`` most frequent supervised tokens, special and end tokens always among them.

    Raises:
        CheckpointError: a size larger than the target's vocabulary (with both numbers), or too small for the special
            tokens.
        DataError: see :func:`count_supervised`.
    """
    counts = count_supervised(rows, vocab_size)
    needed = required_ids(tokenizer, vocab_size, end_token_ids, counts)
    vocab = DraftVocab.from_counts(counts, draft_vocab_size, needed)
    return VocabChoice(vocab, counts, int((counts > 0).sum()), coverage_of(counts, vocab))


def coverage_of(counts: Tensor, vocab: DraftVocab) -> float:
    """Share of the counted tokens, ``[V]``, that are inside the map; 0 when nothing was counted."""
    return float(counts[vocab.t2d].sum() / counts.sum().clamp(min=1))


def count_predictions(predictions: Iterable[Tensor], vocab_size: int) -> Tensor:
    """Occurrences of each token among the target's argmaxes; entries of -1 (not a predicting position) are left out.

    Returns:
        ``[V]`` int64.
    """
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for part in predictions:
        part = part.reshape(-1).cpu()
        counts += torch.bincount(part[part >= 0], minlength=vocab_size)
    return counts


def save_draft_vocab(folder: str | Path, vocab: DraftVocab, record: dict) -> Path:
    """Write the map and its record; each file appears whole or not at all.

    Args:
        folder: made if missing.
        record: what to remember beside the sizes; ``tokenizer_hash`` is what :func:`load_draft_vocab` checks.

    Returns:
        the file with the map.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {"d2t": vocab.d2t.cpu().contiguous(), "t2d": vocab.t2d.cpu().contiguous()}
    with whole_file(folder / WEIGHTS) as part:
        save_file(tensors, part)
    sizes = {"draft_vocab_size": vocab.size, "vocab_size": vocab.t2d.numel()}
    write_whole(folder / RECORD, json.dumps(sizes | record, indent=1) + "\n")
    return folder


def load_draft_vocab(
    folder: str | Path, tokenizer_hash: str | None = None, vocab_size: int | None = None
) -> DraftVocab:
    """Read a map that :func:`save_draft_vocab` wrote.

    Args:
        folder: what was written, or the ``draft_vocab.safetensors`` in it.
        tokenizer_hash: of the target at hand; a map of another tokenizer is refused.
        vocab_size: V of the target at hand; likewise.

    Returns:
        the map.

    Raises:
        CheckpointError: files missing or broken, a map of another tokenizer or of another vocabulary size.
    """
    folder = Path(folder)
    folder = folder.parent if folder.name == WEIGHTS else folder
    for name in (WEIGHTS, RECORD):
        if not (folder / name).is_file():
            raise CheckpointError(
                f"{folder}: expected {WEIGHTS} and {RECORD}, {name} is missing; make them with "
                "scripts/calibrate_draft_vocab.py --save_dir"
            )
    try:
        tensors = load_file(folder / WEIGHTS)
    except SafetensorError as error:
        raise CheckpointError(f"{folder}: the map cannot be read ({error}); make it again") from error
    record = read_json(folder / RECORD, CheckpointError, "make the map again")
    if set(tensors) != {"d2t", "t2d"}:
        raise CheckpointError(
            f"{folder / WEIGHTS}: expected the tensors d2t and t2d, found {', '.join(sorted(tensors))}"
        )
    if tokenizer_hash is not None and record.get("tokenizer_hash") != tokenizer_hash:
        raise CheckpointError(
            f"{folder}: the map was made for another tokenizer ({record.get('model')}, "
            f"hash {record.get('tokenizer_hash')}; the target's is {tokenizer_hash}), so its ids mean other "
            "tokens; calibrate it for this target"
        )
    vocab = DraftVocab(tensors["d2t"], tensors["t2d"])
    if vocab_size is not None and vocab.t2d.numel() != vocab_size:
        raise CheckpointError(
            f"{folder}: the map is of a vocabulary of {vocab.t2d.numel()} tokens, the target has {vocab_size}"
        )
    return vocab
