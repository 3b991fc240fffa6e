"""``measure_acceptance``: how many tokens a head makes the target give in a step, by real decoding."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from modelopt_eagle.common.acceptance import (
    bootstrap_interval,
    by_context,
    conditional_rates,
    pooled_length,
    prefix_shares,
    request_mean,
)
from modelopt_eagle.common.package import package_commit
from modelopt_eagle.data import Prompt
from modelopt_eagle.data.prompts import as_prompts
from modelopt_eagle.decoding import PseudoSpeculativeGenerator, SamplingOptions
from modelopt_eagle.draft.base import DraftModule
from modelopt_eagle.errors import DataError
from modelopt_eagle.target.model import Target
from modelopt_eagle.validation.dialogues import answer_dialogues, first_turn, sampling_arguments, window
from modelopt_eagle.validation.report import AcceptanceReport
from modelopt_eagle.validation.speed import Speed, measure_speed

SPEED_TOKENS = 128
"""Longest answer timed for the speed-up."""
ANSWERS_UNTIL = 0.65
"""Share of ``seconds`` after which no more prompts are answered; the speed-up is timed in the rest."""


def measure_acceptance(
    target: Target,
    module: DraftModule,
    prompts: str | Path | Sequence[Prompt | str],
    *,
    num_steps: int = 3,
    max_new_tokens: int = 256,
    batch_size: int = 8,
    mode: str = "chain",
    topk: int | None = None,
    depth: int | None = None,
    num_nodes: int | None = None,
    max_turns: int = 2,
    speedup_prompts: int = 8,
    seed: int = 0,
    on_batch: Callable[[int], None] | None = None,
    cuda_graph: str | bool = "auto",
    sampling: SamplingOptions | None = None,
    sample_drafts: bool = False,
    seconds: float | None = None,
) -> AcceptanceReport:
    """Answer prompts with draft and verification, greedily or as production samples, and count what was accepted.

    Args:
        target: the frozen target.
        module: the head.
        prompts: asked through the target's chat template; later turns follow the answers given. Also texts, or what
            ``load_prompts`` takes.
        num_steps: K drafted tokens of a chain.
        max_new_tokens: limit of an answer.
        batch_size: prompts decoded together (the result does not depend on it).
        mode, topk, depth, num_nodes: see ``PseudoSpeculativeGenerator``.
        max_turns: turns asked of each prompt.
        speedup_prompts: prompts on which the speed-up over plain decoding is timed, one at a time; 0: not timed.
        seed: of the bootstrap, and of what is drawn.
        on_batch: called with the number of prompts that a batch finished.
        cuda_graph: see ``PseudoSpeculativeGenerator``.
        sampling: temperature and filters of the answers; ``None``: greedy.
        sample_drafts: draw the drafts, too, see ``PseudoSpeculativeGenerator``.
        seconds: what this may take. Prompts for which no time is left are not asked, and are counted in ``notes``; the
            first batch always is. ``None``: all prompts.

    Returns:
        :class:`AcceptanceReport`.

    Raises:
        DataError: no prompts, none that fits, no answer of more than a token, or no chat template.
        DecodingError: options or models that do not fit together.
    """
    prompts = as_prompts(prompts)
    if not prompts:
        raise DataError("no prompts to validate on")
    generator = PseudoSpeculativeGenerator(
        target, module, mode, num_steps, topk=topk, depth=depth, num_nodes=num_nodes, cuda_graph=cuda_graph,
        sample_drafts=sample_drafts,
    )  # fmt: skip
    begun = time.monotonic()

    def more(done: int, coming: int) -> bool:
        spent = time.monotonic() - begun
        return spent * (done + coming) / done <= ANSWERS_UNTIL * (seconds or 0.0)

    dialogues = answer_dialogues(
        generator,
        prompts,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        max_turns=max_turns,
        on_batch=on_batch,
        sampling=sampling,
        seed=seed,
        more=None if seconds is None else more,
    )
    answered = [dialogue for dialogue in dialogues if dialogue.tokens]
    accepted = [dialogue.accepted for dialogue in answered]
    categories: dict[str, list[list[int]]] = {}
    for dialogue in answered:
        categories.setdefault(dialogue.prompt.category, []).append(dialogue.accepted)
    length = pooled_length(accepted)
    if length is None:
        raise DataError(
            f"no draft was verified: each of {len(answered)} answers ended with its first token; raise max_new_tokens "
            f"(it is {max_new_tokens}), or look at the prompts"
        )
    arguments = sampling_arguments(sampling, seed)
    left = None if seconds is None else max(0.0, seconds - (time.monotonic() - begun))
    speed = time_generators([generator], prompts, speedup_prompts, max_new_tokens, sampling=arguments, seconds=left)
    notes = list(generator.notes)
    if unasked := sum(not dialogue.messages and not dialogue.too_long for dialogue in dialogues):
        notes.append(f"{unasked} of {len(prompts)} prompts were not asked: the time for measuring was over")
    if speed and speed[0].prompts < min(speedup_prompts, len(prompts)) and seconds is not None:
        notes.append(f"the speed-up was timed on {speed[0].prompts} of {speedup_prompts} prompts, for the same reason")
    return AcceptanceReport(
        acceptance_length=length,
        ci95=bootstrap_interval(accepted, seed),
        per_position=prefix_shares(accepted, generator.plan.depth),
        conditional=conditional_rates(accepted, generator.plan.depth),
        request_mean=request_mean(accepted),
        by_context=by_context(accepted, [dialogue.contexts for dialogue in answered]),
        sampling=sampling,
        sample_drafts=sample_drafts,
        per_category={name: pooled_length(rows) for name, rows in categories.items()},
        per_category_ci95={name: bootstrap_interval(rows, seed) for name, rows in categories.items() if any(rows)},
        speedup=speed[0].speedup if speed else None,
        steps=sum(map(len, accepted)),
        prompts=len(answered),
        target=target.name,
        commit=package_commit(),
        plan=generator.plan,
        counts={name: (len(rows), sum(map(len, rows))) for name, rows in categories.items()},
        too_long=sum(dialogue.too_long for dialogue in dialogues),
        speed=speed[0] if speed else None,
        first_prompt=target.tokenizer.decode(first_turn(target, prompts[0])),
        notes=notes,
        dialogues=answered,
    )


def time_generators(
    generators: Sequence[PseudoSpeculativeGenerator],
    prompts: Sequence[Prompt],
    count: int,
    max_new_tokens: int,
    *,
    concurrent: int = 1,
    sampling: dict[str, Any] | None = None,
    seconds: float | None = None,
) -> list[Speed]:
    """Speed of generators on ``count`` prompts of text spread over the set (those that fit); empty if there is none.

    With ``seconds`` on as many of them as these allow, one at least.
    """
    target, limit = generators[0].target, min(max_new_tokens, SPEED_TOKENS)
    prompts = [prompt for prompt in prompts if not prompt.parts]
    count = min(count, len(prompts))
    encoded = [first_turn(target, prompts[i * len(prompts) // count]) for i in range(count)]
    encoded = [ids for ids in encoded if len(ids) + limit <= window(target)]
    if not encoded:
        return []
    return measure_speed(generators, encoded, limit, concurrent=concurrent, sampling=sampling, seconds=seconds)
