"""Expected token counts under the target's own distribution: a better guide to the draft vocabulary than few texts.

A small data set shows a token or not; the target's probabilities at the same positions say what it would have written
elsewhere. On 100 conversations of the quick start a map of 4096 tokens covers 90.1 % of the target's choices on
unseen prompts when chosen by mass, 85.8 % when chosen by counting (8192: 94.4 % against 92.5 %).
"""

from __future__ import annotations

import torch
from torch import Tensor

from modelopt_eagle.features.batch import predicting_positions

POSITIONS = 8192
"""Predicting positions sampled; more changes little."""

CHUNK = 256


@torch.no_grad()
def teacher_mass(source, head, vocab_size: int, positions: int = POSITIONS) -> Tensor:
    """Sum of the target's distributions over a sample of predicting positions, scaled to all of them.

    Args:
        source: a feature source with ``lengths`` and ``load(row numbers)`` (memory, store or online), final states
            after the norm.
        head: the target's output head, ``[n, Ht] -> [n, V]`` logits.
        vocab_size: V.
        positions: how many positions to sample; rows are taken evenly over the data.

    Returns:
        ``[V]`` float64 expected counts.
    """
    mass = torch.zeros(vocab_size, dtype=torch.float64)
    rows = len(source.lengths)
    stride = max(1, sum(source.lengths) // (2 * positions))  # about half of the tokens predict
    taken = seen = 0
    for number in range(0, rows, stride):
        batch = source.load([number])
        where = predicting_positions(batch.supervised[0])  # [N]
        seen += 1
        for states in batch.final_hidden[0][where].split(CHUNK):
            mass += head(states).float().softmax(-1).sum(0).double().cpu()  # [V]
            taken += len(states)
        if taken >= positions:
            break
    return mass * (rows / max(seen, 1))
