"""Dump a target's hidden states with transformers: batched by length, on any device."""

from __future__ import annotations

from modelopt_eagle.cli._dump import build_parser, parse_layers, run


def open_back_end(args):
    """Load the target with transformers."""
    import torch

    from modelopt_eagle.features.dump import TargetBackEnd
    from modelopt_eagle.target import load_target

    device = args.device
    if device == "auto" and not torch.accelerator.is_available():
        device = "cpu"
    dtype = "float32" if args.target_dtype == "auto" and device == "cpu" else args.target_dtype
    target = load_target(
        args.model,
        dtype=dtype,
        device=device,
        revision=args.revision,
        trust_remote_code=args.trust_remote_code,
        chat_template=args.chat_template,
    )
    return TargetBackEnd(target, parse_layers(args.aux_layers), args.batch_tokens)


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = build_parser(__doc__, "dump")
    parser.add_argument(
        "--device", default="auto", help="such as cuda:1 for one worker a device; auto spreads the target over all"
    )
    return run(parser, open_back_end, argv)
