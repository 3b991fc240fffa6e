"""Wall-clock speed-up over plain decoding in the same run, and what it is made of."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from modelopt_eagle.decoding import GenerationOutput, PlainGenerator, PseudoSpeculativeGenerator, Timings
from modelopt_eagle.decoding.divergence import Divergence, first_divergence
from modelopt_eagle.target.model import Target

PLAUSIBLE = 0.97
"""Cost of a step in plain steps below which, the noise of clocks aside, something else slowed plain decoding down."""
UNDISTURBED = 0.8
"""Least share of the time on a processor that times are trusted at."""


@dataclass(frozen=True)
class Speed:
    """Speed of one generator against plain decoding with a cache, at one number of requests at a time.

    Attributes:
        speedup: wall-clock seconds of plain decoding over ours, a token, prefill included.
        acceptance_length: on these prompts.
        plain_step, draft_step, verify_step, other_step: seconds a step of the whole batch, prefill left out.
        tokens: new tokens timed.
        prompts: how many were timed.
        divergences: texts that are not plain decoding's, where they part; near ties of the target, or a fault.
        processor_share: processor seconds of this process over seconds that passed; well below 1 on a CPU if other work
            kept it waiting, so that the times say little. ``None`` on other devices.
    """

    speedup: float
    acceptance_length: float
    plain_step: float
    draft_step: float
    verify_step: float
    other_step: float
    tokens: int
    divergences: tuple[Divergence, ...] = ()
    processor_share: float | None = None
    prompts: int = 0

    @property
    def disturbed(self) -> bool:
        """Whether other work on the machine held this one up for a good part of the time."""
        return self.processor_share is not None and self.processor_share < UNDISTURBED

    @property
    def implausible(self) -> bool:
        """Whether the numbers cannot be: a step that costs less than a plain one, or more speed than acceptance."""
        return self.break_even < PLAUSIBLE or self.efficiency > 1 / PLAUSIBLE

    @property
    def break_even(self) -> float:
        """The acceptance length from which drafting pays: a step's cost in plain steps."""
        spent = self.draft_step + self.verify_step + self.other_step
        return spent / self.plain_step if self.plain_step else float("inf")

    @property
    def efficiency(self) -> float:
        """Share of the acceptance length that arrives as speed-up."""
        return self.speedup / self.acceptance_length


def measure_speed(
    generators: Sequence[PseudoSpeculativeGenerator],
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    *,
    concurrent: int = 1,
    sampling: dict[str, Any] | None = None,
    tries: int = 2,
    seconds: float | None = None,
) -> list[Speed]:
    """Time generators of one target against plain decoding on the same prompts.

    All take turns on each prompt, so that a machine that slows down slows all of them. What cannot be (a step cheaper
    than a plain step) is timed once more; what still cannot be then stays marked (:attr:`Speed.implausible`).

    Args:
        generators: what to time.
        prompts: token ids.
        max_new_tokens: limit of an answer.
        concurrent: prompts decoded together; the set is repeated to fill the last batch.
        sampling: arguments of ``generate`` for answers that are drawn; texts are not compared then.
        tries: how often an implausible measurement is made.
        seconds: what all of this may take; batches for which no time is left are not timed, the first always is.

    Returns:
        A :class:`Speed` a generator.
    """
    begun = time.perf_counter()
    speeds = _time(generators, prompts, max_new_tokens, concurrent, sampling or {}, seconds)
    for _ in range(tries - 1):
        left = None if seconds is None else seconds - (time.perf_counter() - begun)
        if not any(speed.implausible for speed in speeds) or (left is not None and left < 0.5 * (seconds or 0.0)):
            break
        speeds = _time(generators, prompts, max_new_tokens, concurrent, sampling or {}, left)
    return speeds


def _time(
    generators: Sequence[PseudoSpeculativeGenerator],
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    concurrent: int,
    sampling: dict[str, Any],
    seconds: float | None = None,
) -> list[Speed]:
    count = -(-len(prompts) // concurrent) * concurrent
    filled = [prompts[place % len(prompts)] for place in range(count)]
    batches = [filled[start : start + concurrent] for start in range(0, count, concurrent)]
    plain = PlainGenerator(generators[0].target, fast_linear=generators[0].fast_linear)
    for generator in (plain, *generators):  # caches, kernels and thread pools warm up outside the measurement
        generator.generate(batches[0], min(8, max_new_tokens), **sampling)
    base: list[GenerationOutput] = []
    outputs: list[list[GenerationOutput]] = [[] for _ in generators]
    begun, used = time.perf_counter(), time.process_time()
    for done, batch in enumerate(batches):
        if done and seconds is not None and (time.perf_counter() - begun) * (done + 1) / done > seconds:
            break
        base.append(plain.generate(batch, max_new_tokens, **sampling))
        for own, generator in zip(outputs, generators, strict=True):
            own.append(generator.generate(batch, max_new_tokens, **sampling))
    target, share = generators[0].target, None
    if torch.device(target.device).type == "cpu":
        share = (time.process_time() - used) / (time.perf_counter() - begun)
    timed = min(len(prompts), len(base) * concurrent)
    return [_speed(target, [] if sampling else batches, base, own, share, timed) for own in outputs]


def _speed(
    target: Target,
    batches,
    base: list[GenerationOutput],
    own: list[GenerationOutput],
    share: float | None,
    prompts: int,
) -> Speed:
    plain, mine = _pool(base), _pool(own)
    parted = [
        first_divergence(target, prompt, a, b)
        for batch, one, other in zip(batches, base, own, strict=False)
        for prompt, a, b in zip(batch, one.tokens, other.tokens, strict=True)
    ]
    plain_tokens, tokens = sum(o.new_tokens for o in base), sum(o.new_tokens for o in own)
    accepted, drafted = sum(o.accepted for o in own), max(1, sum(o.steps for o in own))
    steps = max(1, sum(o.rounds for o in own))  # passes of the whole batch
    plain_steps = max(1, sum(o.rounds for o in base))
    return Speed(
        speedup=(plain.total / plain_tokens) / (mine.total / tokens),
        acceptance_length=1 + accepted / drafted,
        plain_step=plain.decode / plain_steps,
        draft_step=mine.draft / steps,
        verify_step=mine.verify / steps,
        other_step=mine.other / steps,
        tokens=tokens,
        divergences=tuple(d for d in parted if d is not None),
        processor_share=share,
        prompts=prompts,
    )


def _pool(outputs: list[GenerationOutput]) -> Timings:
    return Timings(
        *(sum(getattr(o.timings, name) for o in outputs) for name in ("prefill", "draft", "verify", "other"))
    )
