"""``scripts/synthesize_answers.py``: answer prompts with the target, in-process, batched, resumable."""

import argparse
import sys
from pathlib import Path


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="synthesize_answers.py", description=__doc__)
    parser.add_argument("--model", required=True, help="target: hub id, local folder, GGUF file, or quickstart")
    parser.add_argument(
        "--input",
        required=True,
        nargs="+",
        help="prompts: .jsonl with turns, messages or conversations; answers in it are left out",
    )
    parser.add_argument(
        "--output", required=True, type=Path, help="conversations, .jsonl; rows already there are kept and skipped"
    )
    parser.add_argument("--max_new_tokens", type=int, default=128, help="an answer is cut here (default 128)")
    parser.add_argument("--batch_size", type=int, default=16, help="conversations decoded together (default 16)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling, with --temperature")
    parser.add_argument("--num_samples", type=int, help="answer only this many prompts, spread evenly over the input")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16"),
        help="of the target; auto is float32 without a GPU",
    )
    parser.add_argument("--chat_template", type=Path, help="file with a chat template that replaces the target's own")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command; raises ``EagleError`` for bad input, returns 130 when interrupted (what is answered is kept)."""
    arguments = build_parser().parse_args(argv)
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        print(f"\ninterrupted; the same command goes on from {arguments.output}", file=sys.stderr)
        return 130


def _run(arguments: argparse.Namespace) -> int:
    import torch

    from modelopt_eagle.common.console import ProgressBar
    from modelopt_eagle.data.prompts import load_prompts
    from modelopt_eagle.errors import DataError
    from modelopt_eagle.target import load_target
    from modelopt_eagle.validation.synthesis import SynthesisSettings, missing_prompts, prepare_output, synthesize

    for name in ("max_new_tokens", "batch_size"):
        if getattr(arguments, name) < 1:
            raise DataError(f"--{name} must be at least 1, found {getattr(arguments, name)}")
    if arguments.temperature < 0:
        raise DataError(f"--temperature must be 0 (greedy) or above, found {arguments.temperature}")
    prompts = load_prompts(arguments.input, arguments.num_samples)
    settings = SynthesisSettings(arguments.model, arguments.max_new_tokens, arguments.temperature, arguments.seed)
    left = len(missing_prompts(prompts, prepare_output(arguments.output, settings)))
    print(f"{len(prompts)} prompts, {len(prompts) - left} answered before, {left} to do")
    if not left:
        return 0

    gpu = torch.cuda.is_available()
    dtype = ("auto" if gpu else "float32") if arguments.dtype == "auto" else arguments.dtype
    target = load_target(
        arguments.model, dtype=dtype, device="cuda" if gpu else "cpu", chat_template=arguments.chat_template
    )
    bar = ProgressBar(left, "answers")
    cut = 0

    def report(rows: list[dict]) -> None:
        nonlocal cut
        cut += sum(row["finish_reason"] == "length" for row in rows)
        bar.advance(len(rows), f"({cut} cut at {arguments.max_new_tokens} tokens)")

    added = synthesize(target, prompts, arguments.output, settings, arguments.batch_size, report)
    print(f"{added} answers added to {arguments.output}, {cut} of them cut at {arguments.max_new_tokens} tokens")
    return 0
