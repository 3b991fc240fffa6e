"""Dump a target's hidden states with transformers: batched by length, on any device.

A target that no device holds whole is split over processes: torchrun with ``--parallel fsdp`` or ``tensor``.
"""

from __future__ import annotations

import os

from modelopt_eagle.cli._dump import build_parser, parse_layers, run
from modelopt_eagle.common.text import byte_text
from modelopt_eagle.errors import FeatureError


def open_back_end(args):
    """Load the target with transformers, whole or in slices."""
    from modelopt_eagle.features.dump import TargetBackEnd
    from modelopt_eagle.recipe.command_line import target_arguments
    from modelopt_eagle.target import load_target
    from modelopt_eagle.target.load import check_device
    from modelopt_eagle.target.shards import local_bytes

    shards, more = None, {}
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    check_parallel(args, processes)
    check_device(args.device)
    if args.parallel != "none":
        shards, device = start_together(args, args.shards or processes)
        more = {"shards": shards, "device": device}
    target = load_target(**target_arguments(args, args.model) | more)
    if shards is not None and int(os.environ["RANK"]) == 0:
        own, whole = local_bytes(target.model)
        print(f"target: {shards.line} ({byte_text(own)} of {byte_text(whole)} in each)")
    return TargetBackEnd(target, parse_layers(args.aux_layers), args.batch_tokens)


def check_parallel(args, processes: int) -> None:
    """Refuse a split that the launched processes cannot make.

    Raises:
        FeatureError: there is one process, ``--shards`` does not divide them or says nothing, or all have one device.
    """
    if args.parallel == "none":
        if args.shards is not None:
            raise FeatureError("--shards says how many processes hold a split target: give --parallel fsdp or tensor")
        return
    where = f"--parallel {args.parallel}"
    if processes == 1:
        raise FeatureError(
            f"{where} splits the target over processes, and there is one: start several (torchrun --nproc_per_node N "
            "-m modelopt_eagle dump ...), or leave it out: --device auto spreads the target over all devices"
        )
    size = processes if args.shards is None else args.shards
    if size < 2 or processes % size:
        raise FeatureError(f"--shards is {size}, and there are {processes} processes: choose a divisor of that above 1")
    if ":" in args.device:
        raise FeatureError(f"{where}: each process takes its own device, and --device is {args.device}: set auto")


def start_together(args, size: int):
    """Join the other processes; the groups that hold a copy of the target, and this process's device."""
    import torch

    from modelopt_eagle.common.package import require_extra
    from modelopt_eagle.target.shards import PATIENCE, Shards

    require_extra("accelerate", "train")
    from accelerate import PartialState

    state = PartialState(cpu=args.device == "cpu" or not torch.accelerator.is_available(), timeout=PATIENCE)
    return Shards.make(args.parallel, size, state.device.type), str(state.device)


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = build_parser(__doc__, "dump", weights=True)
    parser.add_argument(
        "--parallel", default="none", choices=("none", "fsdp", "tensor"),
        help="how the processes of torchrun hold the target: a copy in each (none, the default), or in slices",
    )  # fmt: skip
    parser.add_argument("--shards", type=int, metavar="N", help="processes that hold one copy in slices (default all)")
    return run(parser, open_back_end, argv)
