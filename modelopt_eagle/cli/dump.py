"""Dump a target's hidden states with transformers: batched by length, on any device."""

from __future__ import annotations

from modelopt_eagle.cli._dump import build_parser, parse_layers, run


def open_back_end(args):
    """Load the target with transformers."""
    from modelopt_eagle.features.dump import TargetBackEnd
    from modelopt_eagle.recipe.command_line import target_arguments
    from modelopt_eagle.target import load_target

    target = load_target(**target_arguments(args, args.model))
    return TargetBackEnd(target, parse_layers(args.aux_layers), args.batch_tokens)


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    return run(build_parser(__doc__, "dump", weights=True), open_back_end, argv)
