"""Pooled acceptance statistics and their uncertainty.

Everything is counted over *verification steps*: a step of n accepted drafted tokens gives 1 + n tokens. Numbers are
pooled over the steps of all prompts, never a mean of means.

Without a step there is no acceptance length. :func:`pooled_length` is then ``None``, and what people read says "none"
(:func:`length_text`): a 0 or a 1 there would look like a measurement. Two numbers stay numbers because programs compare
them: :func:`acceptance_length` is 1 without a step, since plain decoding gives one token a pass, and a held-out walk
(``WalkResult.acceptance_length``) is 0, so that a checkpoint on which nothing was measured is never the best one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

Accepted = Sequence[Sequence[int]]
"""Accepted drafted tokens of each verification step, a list a prompt."""
CONTEXTS = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Where the buckets of context length begin: those of ``acceptance.json``, of the table and of the page."""


def count_steps(accepted: Accepted) -> int:
    """Verification steps of all prompts."""
    return sum(map(len, accepted))


def pooled_length(accepted: Accepted) -> float | None:
    """``Σ(1 + n) / steps`` over all steps of all prompts; ``None`` without a step."""
    steps = count_steps(accepted)
    return 1.0 + sum(map(sum, accepted)) / steps if steps else None


def acceptance_length(accepted: Accepted) -> float:
    """:func:`pooled_length` as a number: 1 without a step."""
    length = pooled_length(accepted)
    return 1.0 if length is None else length


def length_text(length: float | None) -> str:
    """A length as people read it: three digits, or ``none``."""
    return "none" if length is None else f"{length:.3f}"


def prefix_counts(accepted: Accepted, depth: int) -> list[int]:
    """``[depth]``: steps that accepted at least 1, 2, … drafted tokens; these are the counters of engines."""
    return [sum(n > k for row in accepted for n in row) for k in range(depth)]


def prefix_shares(accepted: Accepted, depth: int) -> list[float]:
    """``[depth]`` share of steps in which position k was accepted, and so everything before it; 0 without a step.

    These are the counters of vLLM per draft (``num_accepted_tokens_per_pos / num_drafts``); they never rise with k,
    and their sum plus one is the acceptance length.
    """
    return shares_of_counts(prefix_counts(accepted, depth), count_steps(accepted))


def shares_of_counts(counts: Sequence[int], steps: int) -> list[float]:
    """Counters of :func:`prefix_counts` over the steps they were counted in; 0 without a step."""
    return [count / steps if steps else 0.0 for count in counts]


def length_of_shares(shares: Sequence[float], steps: int) -> float | None:
    """The length that :func:`prefix_shares` add up to; ``None`` without a step."""
    return 1.0 + sum(shares) if steps else None


def bootstrap_interval(accepted: Accepted, seed: int = 0, rounds: int = 2000) -> tuple[float, float]:
    """95 % interval of the acceptance length, by drawing whole prompts with replacement, as their steps hang together.

    Args:
        accepted: accepted drafted tokens of each step, a list a prompt.
        seed: of the draws.
        rounds: number of draws.

    Returns:
        2.5th and 97.5th percentile; both the value itself when there is a single prompt with steps, and
        :func:`acceptance_length` without a step.
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


def conditional_rates(accepted: Sequence[Sequence[int]], depth: int) -> list[float | None]:
    """``[depth]`` share of the steps that accepted all before position k in which it was accepted, too.

    ``None`` where no step came so far.
    """
    reached = [sum(n >= k for row in accepted for n in row) for k in range(depth + 1)]
    return [reached[k + 1] / reached[k] if reached[k] else None for k in range(depth)]


def request_mean(accepted: Sequence[Sequence[int]]) -> float | None:
    """Mean over prompts of each prompt's own acceptance length, what a user sees; ``None`` without a step."""
    lengths = [1.0 + sum(row) / len(row) for row in accepted if len(row)]
    return sum(lengths) / len(lengths) if lengths else None


def by_context(
    accepted: Sequence[Sequence[int]], contexts: Sequence[Sequence[int]], edges: Sequence[int] = CONTEXTS
) -> dict[str, tuple[int, float]]:
    """Steps and acceptance length by the tokens that a step stood behind.

    Args:
        accepted: accepted drafted tokens of each step, a list a prompt.
        contexts: tokens before each step's drafts, likewise.
        edges: ascending; a bucket reaches from one of them to below the next.

    Returns:
        ``{"0-255": (steps, acceptance length), …}``, those buckets that have steps.
    """
    found: dict[str, list[int]] = {}
    names = [f"{low}-{high - 1}" for low, high in pairwise(edges)] + [f"{edges[-1]}+"]
    for row, places in zip(accepted, contexts, strict=True):
        for count, place in zip(row, places, strict=True):
            bucket = sum(place >= edge for edge in edges) - 1
            found.setdefault(names[max(0, bucket)], []).append(count)
    return {name: (len(found[name]), 1.0 + sum(found[name]) / len(found[name])) for name in names if name in found}


@dataclass(frozen=True)
class PairedDifference:
    """How much longer one head's acceptance is than another's on the same prompts.

    Attributes:
        difference: of the pooled acceptance lengths, second minus first.
        ci95: its 95 % interval, by drawing prompts with replacement, each with both its results.
        p_value: share of random exchanges of the two results within prompts that give at least this difference either
            way; small if chance alone would hardly do so.
        prompts: how many both answered.
    """

    difference: float
    ci95: tuple[float, float]
    p_value: float
    prompts: int


def paired_difference(
    first: Sequence[Sequence[int]], second: Sequence[Sequence[int]], seed: int = 0, rounds: int = 4000
) -> PairedDifference:
    """Compare two heads by prompt; see :class:`PairedDifference`.

    Args:
        first, second: accepted drafted tokens of each step, a list a prompt, of the same prompts in the same order. A
            prompt without steps in either is left out.
        seed: of the draws.
        rounds: number of draws of each kind.

    Returns:
        The difference, 0 with ``p_value`` 1 where no prompt is left.
    """
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if len(a) and len(b)]
    if not pairs:
        return PairedDifference(0.0, (0.0, 0.0), 1.0, 0)
    steps = torch.tensor([[len(row) for row in pair] for pair in pairs], dtype=torch.float64)  # [prompts,2]
    tokens = steps + torch.tensor([[sum(row) for row in pair] for pair in pairs], dtype=torch.float64)  # [prompts,2]
    generator = torch.Generator().manual_seed(seed)

    def differences(tokens: Tensor, steps: Tensor) -> Tensor:
        lengths = tokens.sum(-2) / steps.sum(-2)  # [...,2]
        return lengths[..., 1] - lengths[..., 0]

    found = float(differences(tokens, steps))
    drawn = torch.randint(len(pairs), (rounds, len(pairs)), generator=generator)  # [rounds,prompts]
    low, high = (
        differences(tokens[drawn], steps[drawn]).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    )
    swapped = (torch.rand(rounds, len(pairs), 1, generator=generator) < 0.5).expand(-1, -1, 2)  # [rounds,prompts,2]
    exchanged = differences(
        torch.where(swapped, tokens.flip(-1), tokens), torch.where(swapped, steps.flip(-1), steps)
    )  # [rounds]
    as_large = int((exchanged.abs() >= abs(found) - 1e-12).sum())
    return PairedDifference(found, (low, high), (1 + as_large) / (1 + rounds), len(pairs))
