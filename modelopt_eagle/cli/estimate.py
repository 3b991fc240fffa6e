"""Bytes and time of a run before it starts: reads the target's configuration, never its weights."""

from __future__ import annotations

import time
from dataclasses import dataclass

from modelopt_eagle.common.dtypes import dtype_name
from modelopt_eagle.common.parser import command_parser
from modelopt_eagle.recipe.command_line import add_run_arguments, run_recipe


@dataclass(frozen=True)
class Estimate:
    """Sizes of a run.

    Attributes:
        target_parameters, head_parameters: how many.
        target_bytes: of the target's weights in the recipe's dtype.
        training_bytes: weights, gradients and two moments of the head, float32.
        checkpoint_bytes: one checkpoint.
        feature_bytes: all features of the training data in the target's dtype, as a store or in memory. A store keeps
            prefixes that rows share once, so it may be smaller (`modelopt-eagle dump --estimate` counts them).
        rows, tokens, supervised: of the training data.
        steps: optimiser steps, unless time ends the run sooner.
        target_flops, head_flops: of the whole run.
    """

    target_parameters: int
    head_parameters: int
    target_bytes: int
    training_bytes: int
    checkpoint_bytes: int
    feature_bytes: int
    rows: int
    tokens: int
    supervised: int
    steps: int
    target_flops: float
    head_flops: float

    def lines(self, flops_per_second: float, rate_from: str) -> list[str]:
        """As text."""
        total = self.target_flops + self.head_flops
        share = self.supervised / max(self.tokens, 1)
        hours = total / flops_per_second / 3600
        shown = f"{hours:.2f} h" if hours >= 1 else f"{hours * 60:.1f} min"
        return [
            f"target       {self.target_parameters / 1e6:,.1f} M parameters, {size(self.target_bytes)}",
            f"head         {self.head_parameters / 1e6:,.1f} M parameters, {size(self.training_bytes)} while training "
            f"(weights, gradients, moments)",
            f"checkpoint   {size(self.checkpoint_bytes)} each",
            f"data         {self.rows:,} rows, {self.tokens:,} tokens, {share:.0%} supervised",
            f"features     {size(self.feature_bytes)} if they are kept, less what rows have in common at their start",
            f"steps        {self.steps:,}",
            f"arithmetic   {self.target_flops:.2e} operations of the target, {self.head_flops:.2e} of the head",
            f"time         at least {shown} at {flops_per_second / 1e9:,.0f} GFLOP/s ({rate_from})",
        ]


def size(count: float) -> str:
    """Bytes as text."""
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = command_parser(
        "estimate", __doc__, example="modelopt-eagle estimate --tokens 50000000 --gflops 300000 model.base_model=NAME"
    )
    parser.add_argument("--tokens", type=int, help="tokens of the data, in place of reading it")
    parser.add_argument("--rows", type=int, help="rows of the data, with --tokens (default: rows of data.max_length)")
    parser.add_argument("--supervised", type=float, default=0.6, help="share of supervised tokens, with --tokens (0.6)")
    parser.add_argument("--gflops", type=float, help="speed of the machine meant; default: a matrix product timed here")
    add_run_arguments(parser)
    args = parser.parse_intermixed_args(argv)
    recipe = run_recipe(args)
    if args.tokens is None:
        rows, tokens, supervised = read_data(recipe)
    else:
        rows = args.rows or max(1, args.tokens // recipe.data.max_length)
        tokens, supervised = args.tokens, round(args.tokens * args.supervised)
    found = estimate(recipe, rows, tokens, supervised)
    rate, rate_from = (
        (measure(), "a float32 matrix product here") if args.gflops is None else (args.gflops * 1e9, "as given")
    )
    print("\n".join([*found.lines(rate, rate_from), *budget_lines(recipe, found, rate), validation_line(recipe)]))
    return 0


def budget_lines(recipe, found: Estimate, flops_per_second: float) -> list[str]:
    """How the minutes of ``training.run_budget_minutes`` are shared out, at this speed; nothing without them."""
    from modelopt_eagle.training.budget import FEATURES_UNTIL, training_until

    minutes = recipe.training.run_budget_minutes
    if minutes is None:
        return []
    until = training_until(recipe) * minutes
    line = f"budget       {minutes:,.1f} min from the loaded target on, training ends after {until:,.1f}"
    if recipe.data.cache_features != "none":
        needed, given = found.target_flops / flops_per_second / 60, FEATURES_UNTIL * minutes
        rows = "all rows" if needed <= given else f"about {given / needed:.0%} of the rows"
        line += f"; features have {given:,.1f}, which is enough for {rows}"
    return [line]


def validation_line(recipe) -> str:
    """Whether the trained head could be measured."""
    from modelopt_eagle.decoding.verifiable import refusal

    if recipe.validation.mode == "none":
        return "validation   none: the head would be exported unmeasured"
    reason = refusal(recipe)
    if reason is None:
        return f"validation   by {recipe.validation.mode}, as far as the target's configuration tells"
    return f"validation   refused: {reason}; or set validation.mode: none"


def read_data(recipe) -> tuple[int, int, int]:
    """Rows, tokens and supervised tokens of the recipe's training data.

    They are those of the store or dump for offline training, and of ``train_path`` where a store is yet to be filled.
    """
    if recipe.data.offline_data_path is not None and recipe.data.on_missing != "generate":
        from modelopt_eagle.features.foreign.reader import open_tokens
        from modelopt_eagle.training.data import rows_to_use

        found = open_tokens(recipe.data.offline_data_path, recipe.data.offline_all_supervised)
        report = rows_to_use(found, recipe.data)[1]
        return report.rows, report.tokens, report.supervised
    from modelopt_eagle.data import prepare_dataset
    from modelopt_eagle.target.chat import set_chat_settings
    from modelopt_eagle.target.load import load_config, load_tokenizer, resolve
    from modelopt_eagle.target.vision import vision_of

    model, data = recipe.model, recipe.data
    place, options = resolve(model.base_model), (model.revision, model.trust_remote_code)
    tokenizer = load_tokenizer(place, *options, model.chat_template)
    set_chat_settings(tokenizer, data.template_arguments, data.template_date)
    report = prepare_dataset(
        tokenizer, data.train_path, unknown_role=data.unknown_role, role_aliases=data.role_aliases,
        max_rows=data.max_rows, max_length=data.max_length, overlong=data.overlong, workers=data.workers,
        columns=data.columns, text_boundary=data.text_boundary,
        supervise_reasoning=data.supervise_reasoning, supervise_tool_calls=data.supervise_tool_calls,
        vision=vision_of(tokenizer, place, load_config(place, *options), *options),
    ).report  # fmt: skip
    return report.rows, report.tokens, report.supervised


def estimate(recipe, rows: int, tokens: int, supervised: int) -> Estimate:
    """Sizes of a run on so much data.

    A product with a weight costs 2 operations a weight and position, its backward pass twice that. The head runs at
    every position in its first step and at supervised ones after; the two output heads at supervised ones.
    """
    import torch

    from modelopt_eagle.draft.algorithm import find_algorithm
    from modelopt_eagle.features import FeatureContract
    from modelopt_eagle.features.store import bytes_per_token
    from modelopt_eagle.target.load import causal_class, load_config, resolve
    from modelopt_eagle.training.course import plan_course

    model, eagle = recipe.model, recipe.eagle
    config = load_config(resolve(model.base_model), model.revision, model.trust_remote_code)
    text = config.get_text_config()
    with torch.device("meta"):
        target = causal_class(config, model.base_model, model.trust_remote_code).from_config(config)
    target_parameters = sum(p.numel() for p in target.parameters())
    algorithm = find_algorithm(recipe.drafter.algorithm)
    config_of_head = algorithm.head_config(recipe, config, eagle.draft_vocab_size, eagle.aux_layer_ids)
    settings = algorithm.settings(recipe)
    cost, depths = algorithm.cost(config_of_head), algorithm.depths(settings)
    dtype = model.load_arguments()["dtype"]
    dtype = dtype_name(getattr(text, "dtype", None) or torch.float32) if dtype == "auto" else dtype
    contract = FeatureContract("estimate", None, config_of_head.aux_layer_ids, True, dtype, None, None,
                               text.hidden_size, text.vocab_size)  # fmt: skip
    course = plan_course(recipe, EvenRows(rows, tokens, supervised), 1)
    steps, epochs = course.total, course.epochs(course.total)
    passes = 1 if recipe.data.cache_features != "none" else epochs
    runs_target = recipe.data.offline_data_path is None and recipe.data.streaming_server_url is None
    shares = [1.0] * depths if algorithm.shares is None else algorithm.shares(settings)
    later = sum(shares[1:]) * supervised
    below = cost.every_token * tokens + cost.every_prediction * later
    head_flops = 6 * below + (6 * sum(shares) + 2) * cost.output * supervised
    total = cost.every_token + cost.output if cost.parameters is None else cost.parameters
    return Estimate(
        target_parameters=target_parameters,
        head_parameters=total,
        target_bytes=target_parameters * getattr(torch, dtype).itemsize,
        training_bytes=16 * total,
        checkpoint_bytes=12 * total,
        feature_bytes=round(tokens * bytes_per_token(contract, supervised / max(tokens, 1))),
        rows=rows,
        tokens=tokens,
        supervised=supervised,
        steps=steps,
        target_flops=2.0 * target_parameters * tokens * passes if runs_target else 0.0,
        head_flops=float(head_flops * epochs),
    )


class EvenRows:
    """Rows of one length, in place of a source whose rows are not known.

    Args:
        rows, tokens, supervised: in all.
    """

    def __init__(self, rows: int, tokens: int, supervised: int):
        self.lengths = [max(1, tokens // rows)] * rows
        self._supervised = supervised // rows

    def supervised_counts(self) -> list[int]:
        """Supervised tokens of each row."""
        return [self._supervised] * len(self.lengths)


def measure(seconds: float = 0.5) -> float:
    """Operations in a second of a float32 matrix product on the fastest device here, the best of several."""
    import torch

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    a = torch.randn(1024, 1024, device=device)
    a @ a
    best, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until:
        begun = time.perf_counter()
        (a @ a).sum().item()
        best = min(best, time.perf_counter() - begun)
    return 2 * 1024**3 / best
