"""Which draft shape is best on this machine: chain lengths and tree shapes, timed side by side."""

from __future__ import annotations

from collections.abc import Sequence

from modelopt_eagle.data import Prompt
from modelopt_eagle.decoding import DraftPlan, PseudoSpeculativeGenerator, SamplingOptions
from modelopt_eagle.draft import DraftConfig
from modelopt_eagle.draft.algorithm import algorithm_of
from modelopt_eagle.draft.base import DraftModule
from modelopt_eagle.errors import DecodingError
from modelopt_eagle.target.model import Target
from modelopt_eagle.validation.dialogues import sampling_arguments
from modelopt_eagle.validation.measure import time_generators
from modelopt_eagle.validation.report import best_setting, format_table, plan_fields
from modelopt_eagle.validation.speed import UNDISTURBED

CHAINS = (1, 2, 3, 4, 5, 7)
TREES = ((2, 2, 5), (2, 3, 7), (4, 3, 9), (4, 4, 13), (8, 4, 17), (8, 5, 33))
"""Branching, depth, nodes (root included)."""


def sweep_plans(config: DraftConfig) -> list[DraftPlan]:
    """Plans that a sweep tries: those whose branching the head has tokens for, and whose depth it can draft.

    A chain of the length that the head was trained for is among them, see ``Algorithm.trained_length``.
    """
    trained = algorithm_of(config).trained_length(config)
    lengths = sorted({*CHAINS, *([trained] if trained else [])})
    trees = [DraftPlan.tree(*shape) for shape in TREES if shape[0] <= config.draft_vocab_size]
    return [plan for plan in [*map(DraftPlan.chain, lengths), *trees] if can_draft(config, plan)]


def can_draft(config: DraftConfig, plan: DraftPlan) -> bool:
    """Whether a head's drafter takes a plan."""
    try:
        algorithm_of(config).check_plan(config, plan)
    except DecodingError:
        return False
    return not plan.is_tree or algorithm_of(config).trees


def sweep(
    target: Target,
    module: DraftModule,
    prompts: Sequence[Prompt],
    *,
    plans: Sequence[DraftPlan] | None = None,
    num_prompts: int = 8,
    max_new_tokens: int = 64,
    cuda_graph: str | bool = "auto",
    sampling: SamplingOptions | None = None,
    sample_drafts: bool = False,
    seed: int = 0,
    concurrent: Sequence[int] = (),
) -> list[dict]:
    """Time every plan on the same prompts, one request at a time, in turns.

    Args:
        target: the frozen target.
        module: the head.
        prompts: the set that ``num_prompts`` are taken from, spread evenly.
        plans: what to try; ``None``: :func:`sweep_plans`.
        num_prompts: prompts timed.
        max_new_tokens: limit of an answer.
        cuda_graph, sample_drafts: see ``PseudoSpeculativeGenerator``; trees whose nodes cannot be drawn are left out.
        sampling, seed: how answers are drawn; ``None``: greedily.
        concurrent: also time the three fastest plans at these numbers of requests at a time.

    Returns:
        A row a plan, the fastest first: ``mode``, ``num_steps`` or ``topk``, ``depth`` and ``num_nodes``,
        ``acceptance_length``, ``speedup``, ``break_even``, ``unreliable``, and ``concurrent`` (requests to speed-up).

    Raises:
        DecodingError: no prompt to time on.
    """
    plans = list(sweep_plans(module.config) if plans is None else plans)
    if sample_drafts:
        plans = [plan for plan in plans if plan.topk is None or plan.num_nodes == 1 + plan.topk * plan.depth]
    generators = [
        PseudoSpeculativeGenerator(
            target, module, "tree", topk=plan.topk, depth=plan.depth, num_nodes=plan.num_nodes,
            cuda_graph=cuda_graph, sample_drafts=sample_drafts,
        )
        if plan.is_tree
        else PseudoSpeculativeGenerator(
            target, module, "chain", plan.depth, cuda_graph=cuda_graph, sample_drafts=sample_drafts
        )
        for plan in plans
    ]  # fmt: skip
    arguments = sampling_arguments(sampling, seed)
    speeds = time_generators(generators, prompts, num_prompts, max_new_tokens, sampling=arguments)
    if not speeds:
        raise DecodingError("a sweep needs a prompt of text that fits the target's window: raise num_prompts")
    rows = [
        {
            **plan_fields(plan),
            "acceptance_length": speed.acceptance_length,
            "speedup": speed.speedup,
            "break_even": speed.break_even,
            "processor_share": speed.processor_share,
            "unreliable": speed.implausible,
        }
        for plan, speed in zip(plans, speeds, strict=True)
    ]
    order = sorted(range(len(rows)), key=lambda place: -rows[place]["speedup"])
    best = order[:3]
    for batch in concurrent:
        fastest = time_generators(
            [generators[place] for place in best], prompts, max(batch, num_prompts), max_new_tokens,
            concurrent=batch, sampling=arguments,
        )  # fmt: skip
        for place, speed in zip(best, fastest, strict=True):
            rows[place].setdefault("concurrent", {})[batch] = speed.speedup
    return [rows[place] for place in order]


def sweep_table(rows: Sequence[dict]) -> str:
    """The rows of a sweep, and what to use on this machine."""
    cells: list[tuple[str, ...]] = [("draft", "acceptance length", "speed-up", "break-even")]
    for row in rows:
        numbers = (f"{row[key]:.3f}" for key in ("acceptance_length", "speedup", "break_even"))
        cells.append((plan_name(row) + (" (unreliable)" if row.get("unreliable") else ""), *numbers))
    lines = [format_table(cells)]
    for row in rows:
        if row.get("concurrent"):
            shares = ", ".join(f"{value:.2f}x at {batch}" for batch, value in row["concurrent"].items())
            lines.append(f"{plan_name(row)}, by requests at a time: {row['speedup']:.2f}x at 1, {shares}")
    return "\n".join([*lines, advice(rows)])


def advice(rows: Sequence[dict]) -> str:
    """What to use on this machine, from the rows of a sweep."""
    best, share = best_setting(rows), rows[0].get("processor_share")
    busy = ""
    if any(row.get("unreliable") for row in rows):
        busy = " (unreliable: some steps cost less than a plain step, which cannot be; sweep again on a quiet machine)"
    if share is not None and share < UNDISTURBED:
        busy = f" (doubtful: other work held this one up, {100 * share:.0f} % of the time on a processor)"
    if best["mode"] == "plain":
        return "best on this machine: draft nothing, every shape is slower than plain decoding" + busy
    return f"best on this machine: {plan_name(best)}, {max(row['speedup'] for row in rows):.2f}x{busy}"


def plan_name(row: dict) -> str:
    """``chain of K``, or the options of a tree."""
    if row["mode"] == "chain":
        return f"chain, steps {row['num_steps']}"
    return f"tree, topk {row['topk']}, depth {row['depth']}, num_nodes {row['num_nodes']}"
