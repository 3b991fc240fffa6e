"""Measure a head's acceptance length by real decoding, per category and position, with a lower bound for CI."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from modelopt_eagle.common.parser import CommandParser, command_parser

if TYPE_CHECKING:
    from modelopt_eagle.decoding import SamplingOptions

BELOW_BOUND = 1


def build_parser() -> CommandParser:
    """The command line."""
    from modelopt_eagle.cli._options import json_object, output_file
    from modelopt_eagle.cli._reading import add_reading_options
    from modelopt_eagle.recipe.command_line import add_target_options

    parser = command_parser(
        "ar-validate",
        __doc__,
        example="modelopt-eagle ar-validate --model_path head --base_model NAME --html acceptance.html",
    )
    parser.add_argument(
        "--model_path", required=True, help="the head: an export, a checkpoint or a run's output folder"
    )
    parser.add_argument(
        "--base_model",
        "--base-model",
        help="target: hub id, local folder, GGUF file, quickstart (default: the head's own)",
    )
    parser.add_argument(
        "--target_adapter",
        metavar="DIR",
        help="PEFT folder of the target's adapter (or an export or run that holds one), merged into the target",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--prompts", nargs="+", help="JSONL of ours or of MT-Bench (question.jsonl); default: the shipped 80"
    )
    source.add_argument("--dataset", choices=("mt_bench",), help="a known prompt set, from the hub")
    parser.add_argument("--num_samples", type=int, help="prompts used, spread evenly over the set (default: all)")
    parser.add_argument("--max_new_tokens", type=int, default=256, help="limit of an answer (default 256)")
    parser.add_argument("--batch_size", type=int, default=8, help="prompts decoded together (default 8)")
    parser.add_argument("--turns", type=int, default=2, help="turns asked of each prompt (default 2)")
    parser.add_argument("--mode", choices=("chain", "tree"), default="chain", help="what to draft (default chain)")
    parser.add_argument("--steps", type=int, default=3, help="drafted tokens of a chain (default 3)")
    parser.add_argument("--topk", type=int, help="branching of a tree")
    parser.add_argument("--depth", type=int, help="depth of a tree (default: --steps)")
    parser.add_argument("--num_nodes", type=int, help="nodes of a tree, root included (default 1 + topk * depth)")
    parser.add_argument(
        "--engine_options", type=Path, metavar="FILE",
        help="JSON or YAML of TensorRT-LLM's speculative decoding (max_draft_len, dynamic_tree_max_topK, ...), in "
        "place of --mode, --steps and the tree's flags",
    )  # fmt: skip
    parser.add_argument("--temperature", type=float, default=0.0, help="of the answers (default 0: greedy)")
    parser.add_argument("--top_k", type=int, default=0, help="draw from the k likeliest tokens (default 0: all)")
    parser.add_argument("--top_p", type=float, default=1.0, help="draw from the likeliest mass of p (default 1: all)")
    parser.add_argument("--min_p", type=float, default=0.0, help="least share of the likeliest token (default 0)")
    parser.add_argument(
        "--sample_drafts", action="store_true", help="draw the drafts, too, and accept them by exact rejection"
    )
    parser.add_argument(
        "--sweep", action="store_true", help="also time chain lengths and tree shapes, and name the best"
    )
    parser.add_argument(
        "--concurrent", type=int, nargs="+", default=[4, 16], metavar="N",
        help="with --sweep: requests at a time at which the fastest shapes are timed, too (default 4 16)",
    )  # fmt: skip
    parser.add_argument(
        "--speedup_prompts", type=int, default=8, help="prompts timed against plain decoding (default 8; 0: none)"
    )
    parser.add_argument(
        "--ar_lower_bound", type=float, help=f"leave with exit code {BELOW_BOUND} below this acceptance length"
    )
    parser.add_argument(
        "--output", type=output_file, default="acceptance.json", help="the numbers as JSON (default acceptance.json)"
    )
    parser.add_argument("--html", type=output_file, help="write a report with plots here (extra: report)")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the interval's bootstrap, and of answers that are drawn (default 0)"
    )
    parser.add_argument(
        "--cuda-graph",
        choices=("auto", "on", "off"),
        default="auto",
        help="replay the draft loop from a CUDA graph: on CUDA (auto, the default), on or an error, off",
    )
    parser.add_argument(
        "--template_arguments",
        type=json_object,
        metavar="JSON",
        help='variables of the chat template, such as {"enable_thinking": false}; default: those the head records',
    )
    add_target_options(parser)
    add_reading_options(parser, base_model=False)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns 0, or 1 when the acceptance length is below ``--ar_lower_bound``.

    Raises:
        EagleError: bad input (exit code 2 through the dispatcher).
    """
    arguments = build_parser().parse_args(argv)
    check_arguments(arguments)
    from modelopt_eagle.common.console import ProgressBar
    from modelopt_eagle.data import load_prompts
    from modelopt_eagle.kernels.recorder import graph_switch
    from modelopt_eagle.validation import measure_acceptance
    from modelopt_eagle.validation.dialogues import first_turn
    from modelopt_eagle.validation.sweep import sweep, sweep_table

    source = arguments.prompts or arguments.dataset or "quickstart"
    prompts = load_prompts(source, arguments.num_samples, images=True)
    target, module = load_pair(arguments)
    cuda_graph = graph_switch(arguments.cuda_graph)
    print(f"target {target.name}, head {arguments.model_path}, {len(prompts)} prompts of {_source_name(source)}")
    print(f"first prompt as the target sees it:\n{target.tokenizer.decode(first_turn(target, prompts[0]))}\n")
    bar = ProgressBar(len(prompts), "validate", "prompts")
    report = measure_acceptance(
        target,
        module,
        prompts,
        num_steps=arguments.steps,
        max_new_tokens=arguments.max_new_tokens,
        batch_size=arguments.batch_size,
        mode=arguments.mode,
        topk=arguments.topk,
        depth=tree_depth(arguments),
        num_nodes=arguments.num_nodes,
        max_turns=arguments.turns,
        speedup_prompts=arguments.speedup_prompts,
        seed=arguments.seed,
        on_batch=bar.advance,
        cuda_graph=cuda_graph,
        sampling=sampling_options(arguments),
        sample_drafts=arguments.sample_drafts,
    )
    print(report.table())
    report.write_json(arguments.output)  # what a sweep may take long after is kept, whatever becomes of that
    if arguments.sweep:
        report.sweep = sweep(
            target, module, prompts, num_prompts=max(1, arguments.speedup_prompts), cuda_graph=cuda_graph,
            sampling=sampling_options(arguments), sample_drafts=arguments.sample_drafts, seed=arguments.seed,
            concurrent=arguments.concurrent,
        )  # fmt: skip
        print("\n" + sweep_table(report.sweep))
    print(f"wrote {report.write_json(arguments.output)}")
    if arguments.html is not None:
        from modelopt_eagle.report import facts_of, write_page

        facts = facts_of(report, Path(arguments.model_path).name)
        print(f"wrote {write_page(facts, arguments.html.parent, arguments.html.name, pictures=False)}")
    bound = arguments.ar_lower_bound
    if bound is not None and (report.steps == 0 or report.acceptance_length < bound):
        found = f"{report.acceptance_length:.3f}" if report.steps else "of no step"
        print(f"acceptance length {found} is below the bound of {bound}")
        return BELOW_BOUND
    return 0


def check_arguments(arguments: argparse.Namespace) -> None:
    """Refuse what can be refused before anything is loaded.

    Raises:
        DecodingError: a number out of range, or tree options that do not fit together.
    """
    from modelopt_eagle.decoding import DraftPlan
    from modelopt_eagle.errors import DecodingError

    for name, least in (("max_new_tokens", 1), ("batch_size", 1), ("turns", 1), ("speedup_prompts", 0), ("seed", 0)):
        if getattr(arguments, name) < least:
            raise DecodingError(f"--{name} must be at least {least}, found {getattr(arguments, name)}")
    if any(batch < 2 for batch in arguments.concurrent):
        raise DecodingError(f"--concurrent takes numbers of at least 2, found {min(arguments.concurrent)}")
    options = sampling_options(arguments)
    if options.greedy and (arguments.top_k or arguments.top_p != 1 or arguments.min_p or arguments.sample_drafts):
        raise DecodingError("--top_k, --top_p, --min_p and --sample_drafts need a --temperature above 0")
    if arguments.engine_options is not None:
        take_engine_options(arguments)
    if arguments.mode == "chain" and arguments.steps < 1:
        raise DecodingError(f"--steps must be at least 1, found {arguments.steps}")
    bound = arguments.ar_lower_bound
    if bound is not None and not 1 <= bound < float("inf"):
        raise DecodingError(f"--ar_lower_bound must be at least 1 (a step always gives one token), found {bound}")
    DraftPlan.from_options(arguments.mode, arguments.steps, arguments.topk, tree_depth(arguments), arguments.num_nodes)


def sampling_options(arguments: argparse.Namespace) -> SamplingOptions:
    """How the answers are drawn.

    Raises:
        DecodingError: a number out of range.
    """
    from modelopt_eagle.decoding import SamplingOptions

    return SamplingOptions(arguments.temperature, arguments.top_k, arguments.top_p, arguments.min_p)


def take_engine_options(arguments: argparse.Namespace) -> None:
    """Let the file of ``--engine_options`` say what is drafted.

    Raises:
        DecodingError: the file cannot be read, its keys do not fit together, or flags say the same.
    """
    from modelopt_eagle.draft.plan import read_engine_options
    from modelopt_eagle.errors import DecodingError

    parser = build_parser()
    shape = ("mode", "steps", "topk", "depth", "num_nodes")
    if given := [f"--{name}" for name in shape if getattr(arguments, name) != parser.get_default(name)]:
        raise DecodingError(f"--engine_options says what is drafted: leave {', '.join(given)} out")
    plan = read_engine_options(arguments.engine_options)
    arguments.mode, arguments.steps = ("tree", plan.depth) if plan.is_tree else ("chain", plan.depth)
    if plan.is_tree:
        arguments.topk, arguments.depth, arguments.num_nodes = plan.topk, plan.depth, plan.num_nodes


def tree_depth(arguments: argparse.Namespace) -> int | None:
    """Depth of the tree: ``--steps`` unless it is given."""
    return arguments.steps if arguments.mode == "tree" and arguments.depth is None else arguments.depth


def load_pair(arguments: argparse.Namespace):
    """The target and its head, on one device and in one dtype.

    Raises:
        EagleError: either cannot be loaded, or the head does not say what it was made for and nor does the caller.
    """
    from modelopt_eagle.cli._reading import own_target, read_options, recorded_by
    from modelopt_eagle.export import load_draft
    from modelopt_eagle.export.fitting import target_notes
    from modelopt_eagle.export.folders import resolve_checkpoint
    from modelopt_eagle.recipe.command_line import target_arguments
    from modelopt_eagle.target import load_target
    from modelopt_eagle.target.chat import use_chat_record
    from modelopt_eagle.target.identity import tokenizer_hash
    from modelopt_eagle.target.lora import merge_adapter

    resolve_checkpoint(arguments.model_path)  # before a target is loaded for it
    name = arguments.base_model
    if name is None:
        head = load_draft(arguments.model_path, options=read_options(arguments), quantised=True)
        name = own_target(arguments.model_path, head.config)
    with recorded_by(arguments.model_path, arguments.base_model):
        target = load_target(**target_arguments(arguments, name))
    if arguments.target_adapter is not None:
        print(f"target adapter {merge_adapter(target, arguments.target_adapter)}, merged")
    module = load_draft(
        arguments.model_path,
        vocab_size=target.vocab_size,
        tokenizer_hash=tokenizer_hash(target.tokenizer),
        dtype=target.dtype,
        options=read_options(arguments, target),
        quantised=True,
    )
    record = dict(module.config.extra)
    if arguments.template_arguments is not None:
        record["template_arguments"] = arguments.template_arguments
    use_chat_record(target.tokenizer, record)
    warn_of_another_template(module, target)
    for note in target_notes(module.config, target):
        print(f"warning: {note}")
    if "target_adapter" in module.config.extra and arguments.target_adapter is None:
        print(
            "warning: the head was trained together with an adapter on its target: give --target_adapter (unless "
            "--base_model is the merged target), or its acceptance is that over another model"
        )
    return target, module.to(target.device).eval()


def warn_of_another_template(module, target) -> None:
    """Say it if the prompts are rendered by another chat template than the head's training rows were."""
    from modelopt_eagle.target.identity import template_hash

    trained, found = module.config.extra.get("template_hash"), template_hash(target.tokenizer)
    if trained and trained != found:
        print(
            f"warning: the head was trained with another chat template (hash {trained}, this one's is "
            f"{found or 'none'}): "
            "its acceptance is measured on prompts that it does not know; pass that one with --chat_template"
        )


def _source_name(source) -> str:
    return source if isinstance(source, str) else ", ".join(source)
