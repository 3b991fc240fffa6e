"""Pooled acceptance statistics and their uncertainty."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def acceptance_length(accepted: Sequence[Sequence[int]]) -> float:
    """``Σ(1 + n) / steps`` over all steps of all prompts (pooled, not a mean of means); 1 without a step."""
    steps = sum(map(len, accepted))
    return 1.0 + sum(map(sum, accepted)) / steps if steps else 1.0


def prefix_shares(accepted: Sequence[Sequence[int]], depth: int) -> list[float]:
    """``[depth]`` share of steps in which position k was accepted, and so everything before it.

    These are the counters of vLLM per draft (``num_accepted_tokens_per_pos / num_drafts``); they never rise with k,
    and their sum plus one is the acceptance length.
    """
    steps = sum(map(len, accepted))
    counts = [sum(n > k for row in accepted for n in row) for k in range(depth)]
    return [count / steps if steps else 0.0 for count in counts]


def bootstrap_interval(accepted: Sequence[Sequence[int]], seed: int = 0, rounds: int = 2000) -> tuple[float, float]:
    """95 % interval of the acceptance length, by drawing whole prompts with replacement, as their steps hang together.

    Args:
        accepted: accepted drafted tokens of each step, a list a prompt.
        seed: of the draws.
        rounds: number of draws.

    Returns:
        2.5th and 97.5th percentile; both the value itself when there is a single prompt.
    """
    rows = [row for row in accepted if len(row)]
    if not rows:
        return 1.0, 1.0
    steps = torch.tensor([len(row) for row in rows], dtype=torch.float64)  # [prompts]
    tokens = torch.tensor([len(row) + sum(row) for row in rows], dtype=torch.float64)  # [prompts]
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(rows), (rounds, len(rows)), generator=generator)  # [rounds,prompts]
    lengths = tokens[drawn].sum(1) / steps[drawn].sum(1)  # [rounds]
    low, high = lengths.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high
