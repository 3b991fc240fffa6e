"""Run the frozen target over tokenised rows and take out their features, in batches of similar length."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from modelopt_eagle.draft.documents import upload
from modelopt_eagle.errors import FeatureError
from modelopt_eagle.features.batch import FeatureRow, predicting_positions
from modelopt_eagle.features.pictures import has_images, picture_states
from modelopt_eagle.features.prefix_cache import CommonPrefix, find_common_prefix

PADDING = 1.5
"""Rows of a batch go through the target together while this padding makes of them no more than so many times their
tokens; a long row among short ones would make each as long as itself."""

HEAD_CHUNK_BYTES = 64 * 2**20
"""Logits of one chunk of positions stay below this, so ``[B,S,V]`` never exists."""


def length_batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Group row numbers by length, longest first, so that rows times the longest stays within ``batch_tokens``.

    Longest first shows at once whether the memory suffices. A row longer than ``batch_tokens`` goes alone.

    Args:
        lengths: tokens of each row.
        batch_tokens: padded tokens of one forward.

    Returns:
        lists of row numbers; each number once; a pure function of its arguments.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    batches: list[list[int]] = []
    for index in order:
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def teacher_predictions(head, final_hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Argmax and log-sum-exp of the target's full-vocabulary logits, in chunks of positions.

    Args:
        head: ``TargetHead``, post-norm states to logits.
        final_hidden: [n, Ht] post-norm.

    Returns:
        top1 [n] int64, logsumexp [n] float32, on the states' device.
    """
    chunk = max(1, HEAD_CHUNK_BYTES // (4 * head.weight.shape[0]))
    top1 = [final_hidden.new_zeros(0, dtype=torch.long)]
    normaliser = [final_hidden.new_zeros(0, dtype=torch.float32)]
    for part in final_hidden.split(chunk) if len(final_hidden) else ():  # [c,Ht]
        logits = head(part.to(head.weight.device)).float()  # [c,V]
        top1.append(logits.argmax(-1).to(final_hidden.device))
        normaliser.append(torch.logsumexp(logits, -1).to(final_hidden.device))
    return torch.cat(top1), torch.cat(normaliser)


def compute_features(
    target,
    rows: Sequence,
    aux_layer_ids: Sequence[int],
    *,
    prefix: CommonPrefix | None = None,
    gradient: bool = False,
) -> list[FeatureRow]:
    """Features of some rows by one forward of the target, right-padded to the longest.

    Padding stands after every real token and is masked, so that a causal target gives each row the values it would
    have alone. Rows of very different lengths are run in several forwards, see :data:`PADDING`; rows with images one by
    one.

    Args:
        target: a loaded :class:`~modelopt_eagle.target.Target`.
        rows: tokenised rows with ``id, category, input_ids, supervised``.
        aux_layer_ids: canonical layer ids.
        prefix: tokens that all rows begin with, run already.
        gradient: keep the graph of the states, through which a gradient reaches the adapters of the target.

    Returns:
        one row each, in the given order, on the target's device and in its dtype.

    Raises:
        FeatureError: a state that is not finite.
    """
    if any(map(has_images, rows)):
        return _with_pictures(target, rows, aux_layer_ids, prefix, gradient)
    made = _made(target, rows, aux_layer_ids, prefix, gradient)
    check_finite(made)
    return made


def _made(target, rows: Sequence, aux_layer_ids, prefix: CommonPrefix | None, gradient: bool) -> list[FeatureRow]:
    """The same for rows without images, unchecked: no device is asked for anything."""
    begun = 0 if prefix is None else len(prefix)
    lengths = [len(row.input_ids) - begun for row in rows]
    longest = max(lengths)
    if longest * len(rows) > (most := PADDING * sum(lengths)):
        held: dict[int, FeatureRow] = {}
        for group in length_batches(lengths, int(most)):
            some = [rows[i] for i in group]
            held |= dict(zip(group, _made(target, some, aux_layer_ids, prefix, gradient), strict=True))
        return [held[i] for i in range(len(rows))]
    ids = torch.zeros(len(rows), longest, dtype=torch.long)  # [B,S]
    mask = torch.zeros(len(rows), longest, dtype=torch.long)  # [B,S]
    for b, row in enumerate(rows):
        ids[b, : len(row.input_ids) - begun] = torch.as_tensor(row.input_ids[begun:])
        mask[b, : len(row.input_ids) - begun] = 1
    padding = None if bool(mask.all()) else mask
    ids = upload(ids, target.device)
    if prefix is None:
        output = target.features(ids, padding, aux_layer_ids, gradient=gradient)
    else:
        output = prefix.features(ids, padding)
    result = []
    for b, row in enumerate(rows):
        s = len(row.input_ids) - begun
        aux, final = output.aux_hidden[b, :s].clone(), output.final_hidden[b, :s].clone()  # [s,A·Ht], [s,Ht]
        if prefix is not None:
            aux, final = torch.cat([prefix.aux_hidden, aux]), torch.cat([prefix.final_hidden, final])
        result.append(make_row(row, aux, final, target.head))
    return result


def _with_pictures(target, rows: Sequence, aux_layer_ids, prefix, gradient: bool) -> list[FeatureRow]:
    """The same for rows of which some have images."""
    texts = [row for row in rows if not has_images(row)]
    made = iter(compute_features(target, texts, aux_layer_ids, prefix=prefix, gradient=gradient) if texts else ())
    return [
        finish_row(row, *picture_states(target, row, aux_layer_ids, gradient), None, target.head)
        if has_images(row)
        else next(made)
        for row in rows
    ]


@torch.no_grad()
def finish_row(row, aux_hidden: Tensor, final_hidden: Tensor, final_norm, head) -> FeatureRow:
    """A row of features from the target's states, with the target's predictions.

    Args:
        row: the tokenised row: ``id, category, input_ids, supervised``.
        aux_hidden: [s, A·Ht].
        final_hidden: [s, Ht], pre-norm if ``final_norm`` is given, else post-norm.
        final_norm: the target's final norm, or None.
        head: the target's head.

    Raises:
        FeatureError: a state that is not finite, or not one state for each token.
    """
    tokens = len(row.input_ids)
    if not len(aux_hidden) == len(final_hidden) == tokens:
        raise FeatureError(
            f"row {row.id!r} has {tokens} tokens, {len(aux_hidden)} auxiliary and {len(final_hidden)} final states "
            "came: whatever made them left some out, or made more than were asked for"
        )
    if final_norm is not None:
        weight = next(final_norm.parameters())
        final_hidden = final_norm(final_hidden.to(weight)).to(final_hidden.device)  # [s,Ht]
    made = make_row(row, aux_hidden, final_hidden, head)
    check_finite([made])
    return made


def check_finite(rows: Sequence[FeatureRow]) -> None:
    """Look at the states of some rows, and read one answer back for all of them.

    Raises:
        FeatureError: names the first row with a state that is not finite.
    """
    sound = [torch.isfinite(row.final_hidden).all() & torch.isfinite(row.aux_hidden).all() for row in rows]
    for row, answer in zip(rows, torch.stack(sound).tolist(), strict=True):
        if not answer:
            raise FeatureError(
                f"row {row.row_id!r}: the target gave a state that is not finite in {row.aux_hidden.dtype}; load it in "
                "float32 or bfloat16"
            )


@torch.no_grad()
def make_row(row, aux_hidden: Tensor, final_hidden: Tensor, head) -> FeatureRow:
    """A row of features from states [s, A·Ht] and [s, Ht] (post-norm), unchecked; no device is asked for anything."""
    device = final_hidden.device
    flags = torch.as_tensor(row.supervised, dtype=torch.bool)  # [s]
    predicting = upload(predicting_positions(flags).nonzero().squeeze(1), device)  # [n]
    supervised = upload(flags, device)
    input_ids = upload(torch.as_tensor(row.input_ids, dtype=torch.long), device)  # [s]
    top1 = torch.full_like(input_ids, -1)
    normaliser = torch.zeros(len(input_ids), dtype=torch.float32, device=device)
    top1[predicting], normaliser[predicting] = teacher_predictions(head, final_hidden[predicting])
    return FeatureRow(row.id, row.category or "", input_ids, supervised, aux_hidden, final_hidden, top1, normaliser)


def check_tokens(asked, made: FeatureRow) -> None:
    """Refuse a row that was made of other tokens than it was asked for.

    Args:
        asked: the tokenised row.
        made: its features.

    Raises:
        FeatureError: names the row.
    """
    if made.input_ids.tolist() != list(asked.input_ids):
        raise FeatureError(
            f"row {asked.id!r}: features of other tokens came back: whatever makes them must keep the order of the rows"
        )


def compute_rows(
    target, rows: Sequence, aux_layer_ids: Sequence[int], batch_tokens: int = 4096, done: Collection[int] = ()
) -> Iterator[tuple[int, FeatureRow]]:
    """Features of all rows, in batches of similar length, longest first; what all begin with is run once.

    Args:
        done: numbers of rows to leave out. The batches are those of all rows, so that a row has the same bits whichever
            others are left out: rounding depends on what lies beside it.

    Yields:
        (number of the row in ``rows``, its features).
    """
    texts = [row for row in rows if not has_images(row)]
    prefix = find_common_prefix(target, texts, aux_layer_ids) if texts else None
    begun = 0 if prefix is None else len(prefix)
    for batch in length_batches([len(row.input_ids) - begun for row in rows], batch_tokens):
        if all(i in done for i in batch):
            continue
        made = compute_features(target, [rows[i] for i in batch], aux_layer_ids, prefix=prefix)
        yield from ((i, row) for i, row in zip(batch, made, strict=True) if i not in done)
