"""Memory, disk and time of a run before it starts: reads the target's configuration, never its weights."""

from __future__ import annotations

import time
from dataclasses import dataclass

from modelopt_eagle.common.dtypes import dtype_name
from modelopt_eagle.common.parser import command_parser
from modelopt_eagle.common.text import byte_text
from modelopt_eagle.recipe.command_line import add_run_arguments, run_recipe


@dataclass(frozen=True)
class Estimate:
    """Sizes of a run.

    Attributes:
        target_parameters, head_parameters: how many.
        target_bytes: of the target's weights in the recipe's dtype.
        training_bytes: weights, gradients and two moments of the head, float32.
        checkpoint_bytes: one checkpoint.
        disk_bytes: what the run leaves behind: checkpoints (one more while it writes), features and an export.
        feature_bytes: all features of the training data in the target's dtype, as a store or in memory. A store keeps
            prefixes that rows share once, so it may be smaller (`modelopt-eagle dump --estimate` counts them).
        rows, tokens, supervised: of the training data.
        steps: optimiser steps, unless time ends the run sooner.
        target_flops, head_flops: of the whole run.
        epochs: passes over the data.
        budget: seconds after which time ends it, or ``None``.
    """

    target_parameters: int
    head_parameters: int
    target_bytes: int
    training_bytes: int
    checkpoint_bytes: int
    disk_bytes: int
    feature_bytes: int
    rows: int
    tokens: int
    supervised: int
    steps: int
    target_flops: float
    head_flops: float
    epochs: float
    budget: float | None

    def lines(self, seconds: float, rate: str) -> list[str]:
        """As text.

        Args:
            seconds: of all steps.
            rate: what they are counted by, in words.
        """
        share = self.supervised / max(self.tokens, 1)
        text = f"{shown(seconds)} {rate}"
        if self.budget is not None and seconds > self.budget:
            text += (
                f"; training.time_budget_minutes ends it after {shown(self.budget)}, about "
                f"{self.budget / seconds:.0%} of the steps"
            )
        return [
            f"target       {self.target_parameters / 1e6:,.1f} M parameters, {byte_text(self.target_bytes)}",
            f"head         {self.head_parameters / 1e6:,.1f} M parameters, {byte_text(self.training_bytes)} with "
            "gradients and moments",
            f"disk         {byte_text(self.disk_bytes)} with checkpoints of {byte_text(self.checkpoint_bytes)}",
            f"data         {self.rows:,} rows, {self.tokens:,} tokens, {share:.0%} supervised",
            f"features     {byte_text(self.feature_bytes)} if kept, less what rows have in common at their start",
            f"steps        {self.steps:,}",
            f"arithmetic   {self.target_flops:.2e} operations of the target, {self.head_flops:.2e} of the head",
            f"time         {text}",
        ]


def shown(seconds: float) -> str:
    """A time as text."""
    return f"{seconds / 3600:,.2f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = command_parser(
        "estimate", __doc__, example="modelopt-eagle estimate --tokens 50000000 --gflops 300000 model.base_model=NAME"
    )
    parser.add_argument("--tokens", type=int, help="tokens of the data, in place of reading it")
    parser.add_argument("--rows", type=int, help="rows of the data, with --tokens (default: rows of data.max_length)")
    parser.add_argument("--supervised", type=float, default=0.6, help="share of supervised tokens, with --tokens (0.6)")
    parser.add_argument("--gflops", type=float, help="speed of the machine meant; default: a matrix product timed here")
    parser.add_argument("--tokens_per_second", type=float, help="measured rate of training, as its log lines print it")
    parser.add_argument("--memory", type=float, metavar="GiB", help="of the device meant; default: what is free here")
    parser.add_argument("--processes", type=int, default=1, help="how many train together (1)")
    add_run_arguments(parser)
    args = parser.parse_intermixed_args(argv)
    for name in ("tokens", "rows", "gflops", "tokens_per_second", "memory", "processes"):
        if (value := getattr(args, name)) is not None and value <= 0:
            parser.error(f"--{name} must be above 0, found {value:g}")
    if not 0 < args.supervised <= 1:
        parser.error(f"--supervised must lie above 0 and at most at 1, found {args.supervised:g}")
    recipe = run_recipe(args)
    from modelopt_eagle.training.placement import check_several, check_shards

    check_shards(recipe, args.processes)
    check_several(recipe, args.processes, "say how many (--processes N)")
    if args.tokens is None:
        source = read_rows(recipe)
    else:
        rows = args.rows or max(1, args.tokens // recipe.data.max_length)
        source = EvenRows(rows, args.tokens, round(args.tokens * args.supervised))
    found = estimate(recipe, source, args.processes)
    flops, rate = found.target_flops + found.head_flops, None
    if args.tokens_per_second is not None:
        seconds = found.tokens * found.epochs / args.tokens_per_second
        lines = found.lines(seconds, f"at {args.tokens_per_second:,.0f} tokens/s, as given")
    elif args.gflops is not None:
        rate = args.gflops * 1e9
        lines = found.lines(flops / args.processes / rate, f"at least, at {args.gflops:,.0f} GFLOP/s each")
    else:
        rate = measure()
        lines = found.lines(
            flops / args.processes / rate, f"at least, at {rate / 1e9:,.0f} GFLOP/s, a float32 matrix product here"
        )
    budget = [] if rate is None else budget_lines(recipe, found, rate * args.processes)
    print("\n".join([*lines, *budget, validation_line(recipe)]), flush=True)
    return fits(recipe, source, args)


def fits(recipe, source, args) -> int:
    """Say the peak and whether it fits.

    Returns:
        the exit code: 1 if it does not and ``training.ignore_memory`` is not set, else 0.
    """
    from dataclasses import replace

    from modelopt_eagle.common.machine import free_memory
    from modelopt_eagle.training.memory import bytes_kept, estimate_peak, heaviest_batch, state_bytes
    from modelopt_eagle.training.placement import not_split, split_share

    config, head = target_and_head(recipe)
    if args.memory is not None:
        available, whose = args.memory * 2**30, "as given"
    else:
        available, whose = free_memory(), "free here"
    shares = max(1, args.processes // recipe.training.context_parallel)
    shape = heaviest_batch(recipe, source.lengths, source.supervised_counts(), shares)
    device = recipe.model.load_arguments()["device"].split(":")[0]
    device = "cpu" if device == "cpu" else "cuda"
    found = estimate_peak(recipe, config, head, shape, processes=args.processes, device=device)
    kept = bytes_kept(recipe, sum(source.lengths), state_bytes(head), shape, device)
    found = replace(found, kept=kept)
    chosen = recipe.model.parallel
    if chosen == "auto" and available is not None and found.total > available and not_split(recipe) is None:
        chosen = "fsdp"
    if chosen in ("fsdp", "tensor") and args.processes > 1 and recipe.data.runs_target:
        shards = recipe.model.shards or args.processes
        found = replace(found, target=split_share(recipe, config, found.target, shards))
        how = "FSDP2), two layers gathered at a time" if chosen == "fsdp" else "tensor parallelism)"
        print(f"split        the target's layers over {shards} processes ({how}")
    print(f"memory       {found.line()}")
    if available is None:
        return 0
    if found.total <= available:
        print(f"fits         into {byte_text(available)} ({whose})")
        return 0
    print(f"does not fit into {byte_text(available)} ({whose})")
    return 0 if recipe.training.ignore_memory else 1


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
        line += f"; features have {given:,.1f}, enough for {rows} at this speed, reading and tokenising apart"
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


def read_rows(recipe):
    """The recipe's training rows, by ``lengths`` and ``supervised_counts()``.

    They are those of the store or dump for offline training, and of ``train_path`` where a store is yet to be filled.
    """
    if recipe.data.offline_data_path is not None and recipe.data.on_missing != "generate":
        from modelopt_eagle.features.foreign.reader import open_tokens
        from modelopt_eagle.training.data import rows_to_use

        found = open_tokens(recipe.data.offline_data_path, recipe.data.offline_all_supervised)
        numbers, window = rows_to_use(found, recipe.data)[0], recipe.data.max_length
        return RowSizes(
            [min(found.lengths[n], window) for n in numbers],
            [int(found.tokens(n)[1][:window].sum()) if found.lengths[n] > window else found.supervised[n]
             for n in numbers],
        )  # fmt: skip
    from modelopt_eagle.data import prepare_dataset
    from modelopt_eagle.data.packed import row_lengths, supervised_counts
    from modelopt_eagle.target.chat import set_chat_settings
    from modelopt_eagle.target.load import load_config, load_tokenizer, resolve
    from modelopt_eagle.target.vision import vision_of

    model, data = recipe.model, recipe.data
    place, options = resolve(model.base_model), (model.revision, model.trust_remote_code)
    tokenizer = load_tokenizer(place, *options, model.chat_template)
    set_chat_settings(tokenizer, data.template_arguments, data.template_date)
    rows = prepare_dataset(
        tokenizer, data.train_path, unknown_role=data.unknown_role, role_aliases=data.role_aliases,
        max_rows=data.max_rows, max_length=data.max_length, overlong=data.overlong, workers=data.workers,
        columns=data.columns, text_boundary=data.text_boundary,
        supervise_reasoning=data.supervise_reasoning, supervise_tool_calls=data.supervise_tool_calls,
        vision=vision_of(tokenizer, place, load_config(place, *options), *options),
    ).rows  # fmt: skip
    return RowSizes(row_lengths(rows), supervised_counts(rows))


class RowSizes:
    """Rows whose sizes are known, in place of a source.

    Args:
        lengths, supervised: of each row its tokens, and how many of them are supervised.
    """

    def __init__(self, lengths, supervised):
        self.lengths, self._supervised = list(lengths), list(supervised)

    def supervised_counts(self) -> list[int]:
        """Supervised tokens of each row."""
        return self._supervised


class EvenRows(RowSizes):
    """Rows of one length, where they are not known.

    Args:
        rows, tokens, supervised: in all.
    """

    def __init__(self, rows: int, tokens: int, supervised: int):
        super().__init__(*([total // rows + (n < total % rows) for n in range(rows)] for total in (tokens, supervised)))


def target_and_head(recipe):
    """The target's configuration, and that of the head that the recipe would make."""
    from modelopt_eagle.draft.algorithm import find_algorithm
    from modelopt_eagle.target.load import load_config, resolve

    model, eagle = recipe.model, recipe.eagle
    config = load_config(resolve(model.base_model), model.revision, model.trust_remote_code)
    algorithm = find_algorithm(recipe.drafter.algorithm)
    return config, algorithm.head_config(recipe, config, eagle.draft_vocab_size, eagle.aux_layer_ids)


def estimate(recipe, source, processes: int = 1) -> Estimate:
    """Sizes of a run on some rows.

    A product with a weight costs 2 operations a weight and position, its backward pass twice that. The head runs at
    every position in its first step and at supervised ones after, which ``ttt_warmup`` leaves out at first; the two
    output heads at supervised ones.

    Args:
        source: of the rows, ``lengths`` and ``supervised_counts()``.
        processes: how many train together.
    """
    import torch

    from modelopt_eagle.draft.algorithm import find_algorithm
    from modelopt_eagle.features import FeatureContract
    from modelopt_eagle.features.store import bytes_per_token
    from modelopt_eagle.target.load import causal_class
    from modelopt_eagle.training.course import plan_course

    model, training = recipe.model, recipe.training
    config, config_of_head = target_and_head(recipe)
    rows, tokens, supervised = len(source.lengths), sum(source.lengths), sum(source.supervised_counts())
    text = config.get_text_config()
    with torch.device("meta"):
        target = causal_class(config, model.base_model, model.trust_remote_code).from_config(config)
    target_parameters = sum(p.numel() for p in target.parameters())
    algorithm = find_algorithm(recipe.drafter.algorithm)
    settings = algorithm.settings(recipe)
    cost, depths = algorithm.cost(config_of_head), algorithm.depths(settings)
    dtype = model.load_arguments()["dtype"]
    dtype = dtype_name(getattr(text, "dtype", None) or torch.float32) if dtype == "auto" else dtype
    contract = FeatureContract("estimate", None, config_of_head.aux_layer_ids, True, dtype, None, None,
                               text.hidden_size, text.vocab_size)  # fmt: skip
    course = plan_course(recipe, source, max(1, processes // training.context_parallel))
    steps, epochs = course.total, course.epochs(course.total)
    passes = 1 if recipe.data.cache_features != "none" else epochs
    runs_target = recipe.data.offline_data_path is None and recipe.data.streaming_server_url is None
    shares = [1.0] * depths if algorithm.shares is None else list(algorithm.shares(settings))
    shares = shares[:1] + [share * (1 - recipe.eagle.ttt_warmup) for share in shares[1:]]
    later = sum(shares[1:]) * supervised
    below = cost.every_token * tokens + cost.every_prediction * later
    head_flops = 6 * below + (6 * sum(shares) + 2) * cost.output * supervised
    total = cost.every_token + cost.output if cost.parameters is None else cost.parameters
    features = round(tokens * bytes_per_token(contract, supervised / max(tokens, 1)))
    kept = (training.save_total_limit or steps // (training.save_steps or max(steps, 1)) + 1) + 1
    disk = kept * 12 * total + 2 * total + (features if recipe.data.cache_features == "disk" else 0)
    return Estimate(
        target_parameters=target_parameters,
        head_parameters=total,
        target_bytes=target_parameters * getattr(torch, dtype).itemsize,
        training_bytes=16 * total,
        checkpoint_bytes=12 * total,
        disk_bytes=disk,
        feature_bytes=features,
        rows=rows,
        tokens=tokens,
        supervised=supervised,
        steps=steps,
        target_flops=2.0 * target_parameters * tokens * passes if runs_target else 0.0,
        head_flops=float(head_flops * epochs),
        epochs=epochs,
        budget=None if training.time_budget_minutes is None else training.time_budget_minutes * 60,
    )


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
