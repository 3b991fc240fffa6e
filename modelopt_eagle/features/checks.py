"""Compute stored rows again with transformers, some or all, and compare: whoever made them, they must be the target's.

Finds what no checksum can: states of other rows (an engine that reorders or splits prompts), of other layers (an
extractor that counts inputs), of other weights, and a final norm that was left out or applied twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modelopt_eagle.common.dtypes import STATE_DTYPES
from modelopt_eagle.common.text import visible
from modelopt_eagle.errors import FeatureError
from modelopt_eagle.features.batch import FeatureContract, needed_final_positions
from modelopt_eagle.features.offline import OfflineSource

STRAYING = 4.0
"""How much further than the median over a row a single state may be off: rounding differs from token to token. A state
that is zero, or of another token, is off by all of its norm."""


@dataclass(frozen=True)
class RowCheck:
    """One stored row against the target.

    Attributes:
        row_id, tokens: of the row.
        aux: difference of each auxiliary layer, norm over norm, median over positions.
        final: of the final states, None for a row without supervised tokens.
        top1: share of predicting positions at which the stored choice is the target's, None without any. Where several
            tokens are about as likely, rounding chooses; a problem is a choice that the target finds far less likely.
        problem: what is wrong, or None.
    """

    row_id: str
    tokens: int
    aux: list[float]
    final: float | None
    top1: float | None
    problem: str | None


def sample_rows(count: int, sample: int) -> list[int]:
    """Row numbers spread evenly over a store."""
    taken = min(sample, count)
    return [(2 * i + 1) * count // (2 * taken) for i in range(taken)]


def recompute(
    reader, target, sample: int | None = 8, progress: Callable[[int], object] | None = None
) -> list[RowCheck]:
    """Compare rows of a reader with the target's own forward, each alone.

    Rows with images are left out: their pictures are not stored, and placeholders alone give other states.

    Args:
        reader: a ``StoreReader`` or ``ForeignReader``.
        target: the loaded target.
        sample: rows looked at, spread evenly; ``None``: all.
        progress: called with the number of rows done.

    Returns:
        a comparison for each row looked at.

    Raises:
        FeatureError: the contract names another target, tokenizer or layers than there are; or all of the sample's
            rows have images.
    """
    if sample is not None and sample < 1:
        raise FeatureError(f"at least one row is needed for a sample, {sample} asked for")
    contract = reader.contract
    if outside := [i for i in contract.aux_layer_ids if not 0 <= i < target.num_layers]:
        raise FeatureError(f"{reader.folder} names layers {outside}, {target.name} has {target.num_layers}")
    expected = FeatureContract.from_target(target, contract.aux_layer_ids)
    contract.require(expected, str(reader.folder), ignore=("dtype", "final_is_normed", "aux_layer_ids"))
    source = OfflineSource(reader, final_norm=target.final_norm, head=target.head, dtype=torch.float32)
    vision = getattr(target, "vision", None)
    pictures = torch.tensor([] if vision is None else sorted(vision.image_token_ids))
    numbers = sample_rows(len(source.lengths), len(source.lengths) if sample is None else sample)
    texts = [n for n in numbers if not torch.isin(reader.tokens(n)[0], pictures).any()]
    if not texts:
        raise FeatureError(
            f"{reader.folder}: all {len(numbers)} rows of the sample have images, which are not stored and cannot be "
            "computed again: take a larger --sample, or compare a store of rows of text"
        )
    checks = []
    for number in texts:
        checks.append(_check(source, target, number))
        if progress is not None:
            progress(len(checks))
    return checks


@torch.no_grad()
def _check(source: OfflineSource, target, number: int) -> RowCheck:
    row, ids, width = source.row(number), source.contract.aux_layer_ids, target.hidden_size
    output = target.features(row.input_ids[None].to(target.device), None, ids)
    own = output.aux_hidden[0].float().cpu().unflatten(-1, (len(ids), width))  # [s,A,Ht]
    stored = row.aux_hidden.unflatten(-1, (len(ids), width))  # [s,A,Ht]
    aux = [_difference(stored[:, a], own[:, a]) for a in range(len(ids))]
    needed = needed_final_positions(row.supervised)  # [s]
    final_own = output.final_hidden[0].float().cpu()  # [s,Ht]
    final = _difference(row.final_hidden[needed], final_own[needed]) if needed.any() else None
    predicting = row.target_top1 >= 0  # [s]
    allowed, problem = STATE_DTYPES[source.contract.dtype].recomputed, None
    straying, top1, choices = min(STRAYING * allowed, 0.9), None, None
    if predicting.any():
        logits = target.logits(output.final_hidden[0][predicting.to(target.device)]).float().cpu()  # [p,V]
        top1 = float((logits.argmax(-1) == row.target_top1[predicting]).float().mean())
        choices = _wrong_choices(logits, row.target_top1[predicting], predicting.nonzero()[:, 0], straying)
    bad = [a for a, difference in enumerate(aux) if not difference <= allowed]
    if bad:
        found = _nearest_layers(stored, row.input_ids, target)
        problem = "; ".join(
            f"states of layer {ids[a]} are {aux[a]:.0%} off, " + _explain(*found[a], allowed) for a in bad
        )
    elif final is not None and not final <= allowed:
        problem = f"final states are {final:.0%} off: a final norm left out or applied twice, or another head"
    else:
        parts = {f"states of layer {ids[a]}": (stored[:, a], own[:, a]) for a in range(len(ids))}
        parts["final states"] = (row.final_hidden[needed], final_own[needed])
        problem = _strays(parts, straying) or choices
    return RowCheck(row.row_id, len(row), aux, final, top1, problem)


def _explain(layer: int, difference: float, allowed: float) -> str:
    if difference <= allowed:
        return f"they are those of layer {layer}: ids are outputs of layers, counted from 0"
    return "and of no layer of this target on these tokens: other weights, or another row"


def _nearest_layers(stored: Tensor, input_ids: Tensor, target) -> list[tuple[int, float]]:
    """For each slot of [s, A, Ht] the layer whose states come nearest, and how near."""
    ids, width = list(range(target.num_layers)), target.hidden_size
    output = target.features(input_ids[None].to(target.device), None, ids)
    every = output.aux_hidden[0].float().cpu().unflatten(-1, (len(ids), width))  # [s,L,Ht]
    differences = [[_difference(stored[:, a], every[:, layer]) for layer in ids] for a in range(stored.shape[1])]
    return [min(enumerate(row), key=lambda pair: pair[1]) for row in differences]


def _strays(parts: dict[str, tuple[Tensor, Tensor]], allowed: float) -> str | None:
    """The first part with a state that is further off than the median may be, of (stored, own) [n, Ht] by name."""
    for name, (stored, own) in parts.items():
        differences = _differences(stored, own)  # [n]
        off = ~(differences <= allowed)  # NaN too
        if off.any():
            place = int(off.nonzero()[0])
            return (
                f"{name} are off at {int(off.sum())} of {len(off)} positions, first at {place} by "
                f"{float(differences[place]):.0%}: left out by the engine, or damaged before they were stored"
            )
    return None


def _wrong_choices(logits: Tensor, stored: Tensor, places: Tensor, allowed: float) -> str | None:
    """Stored choices that lie further below the likeliest token than rounding moves them.

    Args:
        logits: [p, V] of the target now.
        stored: [p] the stored argmax.
        places: [p] positions in the row.
        allowed: most that a choice may lie below the likeliest, over the distance of that from the mean.
    """
    best = logits.amax(-1)  # [p]
    below = best - logits.gather(1, stored[:, None])[:, 0]  # [p]
    off = below > allowed * (best - logits.mean(-1))  # [p]
    if not off.any():
        return None
    return (
        f"target_top1 is another token than the target's choice at {int(off.sum())} of {len(off)} positions, first at "
        f"{int(places[off][0])}: made with another head or vocabulary, or damaged before it was stored"
    )


def _differences(stored: Tensor, own: Tensor) -> Tensor:
    """``|stored - own| / |own|`` [n] of [n, Ht] states."""
    return (stored - own).norm(dim=-1) / own.norm(dim=-1).clamp_min(1e-30)


def _difference(stored: Tensor, own: Tensor) -> float:
    """Median of :func:`_differences`."""
    return float(_differences(stored, own).median())


def lines(checks: Sequence[RowCheck], layer_ids: Sequence[int]) -> list[str]:
    """A table of the result."""
    heads = [f"layer {layer}" for layer in layer_ids]
    table = [f"{'row':<24} {'tokens':>6} " + " ".join(f"{name:>10}" for name in (*heads, "final", "top-1"))]
    for check in checks:
        cells = [f"{value:.1e}" for value in check.aux]
        cells.append("-" if check.final is None else f"{check.final:.1e}")
        cells.append("-" if check.top1 is None else f"{check.top1:.1%}")
        table.append(f"{check.row_id[:24]:<24} {check.tokens:>6} " + " ".join(f"{cell:>10}" for cell in cells))
    table += [f"bad: row {check.row_id}: {check.problem}" for check in checks if check.problem]
    return [visible(line) for line in table]
