"""How much of the training text the target would have written itself.

A head learns to guess what its target writes. Text by other writers is worth less, and features that belong to other
rows, positions or weights show here at once: the target's choices, made from the features, meet the text no more often
than chance.
"""

from __future__ import annotations

import torch

SAMPLE_ROWS = 8
LITTLE = 0.15
"""A share below this is no text of a language model for its own kind of data."""


@torch.no_grad()
def own_share(source, sample_rows: int = SAMPLE_ROWS) -> float | None:
    """Share of supervised tokens that are the target's likeliest, over rows spread evenly over the data.

    Args:
        source: a feature source with ``lengths`` and ``load(row numbers)``.
        sample_rows: rows looked at.

    Returns:
        the share; ``None`` where the features know no choices of the target.
    """
    count = len(source.lengths)
    equal = seen = 0
    for number in sorted({i * count // sample_rows for i in range(min(sample_rows, count))}):
        batch = source.load([number])
        if batch.target_top1 is None:
            return None
        chosen, following = batch.target_top1[0, :-1], batch.input_ids[0, 1:]  # [N-1] each
        at = chosen >= 0
        equal += int((chosen == following)[at].sum())
        seen += int(at.sum())
    return equal / seen if seen else None


def own_share_line(share: float | None) -> str:
    """What the head of a run says of it."""
    if share is None:
        return "text: whether it is the target's own is not known"
    line = f"text: {share:.0%} of the supervised tokens are the target's likeliest (a sample of rows)"
    if share < LITTLE:
        line += "; warning: neither the target's own text nor like it, or these features belong to other text"
    return line
