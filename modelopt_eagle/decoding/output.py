"""What a generation returns."""

from __future__ import annotations

from dataclasses import dataclass, field

from modelopt_eagle.common.acceptance import acceptance_length, count_steps


@dataclass
class Timings:
    """Wall-clock seconds of one ``generate`` call.

    ``prefill`` reads the prompts; ``draft`` is the head, ``verify`` the target's forward with the choice of tokens,
    ``other`` acceptance, KV moves and bookkeeping. They add up to ``total``.
    """

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    other: float = 0.0

    @property
    def total(self) -> float:
        """Sum of the parts."""
        return self.prefill + self.draft + self.verify + self.other

    @property
    def decode(self) -> float:
        """Seconds after the prompts were read."""
        return self.draft + self.verify + self.other


@dataclass
class GenerationOutput:
    """Generated text and what the drafts were worth.

    Attributes:
        tokens: new token ids of each request, without the prompt, with the end token that stopped it.
        accepted_lengths: per request and verification step, the drafted tokens that the target accepted (the bonus
            token not counted). Drafts behind an end token or stop string are not counted; those behind
            ``max_new_tokens`` are, as only the caller's limit cut them off. The first token comes from the prompt's
            prefill and belongs to no step.
        accepted_per_position: ``[K or D]``, steps in which at least ``k + 1`` drafted tokens were accepted (prefix
            statistics, not marginals).
        finish_reasons: ``"eos"``, ``"stop"`` or ``"length"`` for each request.
        timings: seconds.
    """

    tokens: list[list[int]]
    accepted_lengths: list[list[int]]
    accepted_per_position: list[int]
    finish_reasons: list[str]
    timings: Timings = field(default_factory=Timings)

    @property
    def steps(self) -> int:
        """Verification steps, pooled over requests."""
        return count_steps(self.accepted_lengths)

    @property
    def rounds(self) -> int:
        """Passes of the target after the prompts: the steps of the request that took most."""
        return max((len(lengths) for lengths in self.accepted_lengths), default=0)

    @property
    def accepted(self) -> int:
        """Accepted drafted tokens, pooled."""
        return sum(sum(lengths) for lengths in self.accepted_lengths)

    @property
    def acceptance_length(self) -> float:
        """Tokens a verification step gives, ``Σ(1 + n) / steps``, pooled; 1 when there was no step."""
        return acceptance_length(self.accepted_lengths)

    @property
    def new_tokens(self) -> int:
        """Tokens generated, pooled."""
        return sum(map(len, self.tokens))

    @property
    def tokens_per_second(self) -> float:
        """New tokens over wall-clock seconds, prefill included."""
        return self.new_tokens / self.timings.total if self.timings.total > 0 else 0.0
