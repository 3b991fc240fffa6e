"""Quantise a head (fp8, nvfp4, int8) and export it unless it lost too much (`scripts/quantize_drafter.py`)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from modelopt_eagle.cli._options import add_prompt_options
from modelopt_eagle.common.parser import CommandParser, command_parser
from modelopt_eagle.errors import ExportError


def build_parser() -> CommandParser:
    """The options."""
    from modelopt_eagle.cli._reading import add_reading_options
    from modelopt_eagle.recipe.command_line import add_target_options

    parser = command_parser(
        "quantize-drafter",
        __doc__,
        example="modelopt-eagle quantize-drafter --model_path head --format fp8 --export_path head-fp8",
    )
    parser.add_argument(
        "--model_path", required=True, type=Path, help="a trained head: checkpoint, run folder or export"
    )
    parser.add_argument(
        "--format", required=True, choices=("fp8", "nvfp4", "int8"), help="number format of the weights"
    )
    parser.add_argument(
        "--calib_data",
        required=True,
        help="conversations (.jsonl, quickstart: those shipped), or a folder of stored features",
    )
    parser.add_argument(
        "--export_path", required=True, type=Path, help="folder to make; it appears whole or not at all"
    )
    parser.add_argument("--base_model", "--base-model", help="target; default: the one that the head names")
    parser.add_argument("--calib_samples", type=int, default=32, help="rows to calibrate on (default 32)")
    parser.add_argument("--calib_length", type=int, default=512, help="tokens of a row at most (default 512)")
    parser.add_argument("--steps", type=int, default=3, help="drafted tokens, in calibration and measuring (default 3)")
    add_prompt_options(parser, num_samples=16, max_new_tokens=96)
    parser.add_argument(
        "--max_drop", type=float, default=0.02, help="largest loss of acceptance length that is exported (default 0.02)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export, whole")
    add_target_options(parser, dtype="float32", device="cpu")
    add_reading_options(parser, base_model=False)
    return parser


def calibration_batches(arguments: argparse.Namespace, target, aux_layer_ids: tuple[int, ...]) -> list:
    """Feature batches of the calibration data: stored ones, or made now.

    Raises:
        DataError, FeatureError: data that cannot be read.
    """
    from modelopt_eagle.features.offline import OfflineSource
    from modelopt_eagle.features.source import OnlineSource

    if Path(arguments.calib_data).is_dir():
        source = OfflineSource(arguments.calib_data, final_norm=target.final_norm, head=target.head)
    else:
        from modelopt_eagle.data import prepare_dataset

        dataset = prepare_dataset(
            target.tokenizer,
            arguments.calib_data,
            max_rows=arguments.calib_samples,
            max_length=arguments.calib_length,
            vision=target.vision,
        )
        source = OnlineSource(target, dataset, aux_layer_ids)
    wanted = arguments.calib_samples
    batches = []
    for batch in source.batches(0, batch_size=1, seed=0, shuffle=False):
        if len(batches) == wanted:
            break
        if batch is not None:
            batches.append(batch)
    return batches


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    arguments = build_parser().parse_args(argv)
    for name in ("calib_samples", "calib_length", "steps", "num_samples", "max_new_tokens"):
        if getattr(arguments, name) < 1:
            raise ExportError(f"--{name} must be at least 1, found {getattr(arguments, name)}")
    if not 0 <= arguments.max_drop < 1:
        raise ExportError(f"--max_drop is a share such as 0.02, at least 0 and below 1, found {arguments.max_drop}")
    from modelopt_eagle.cli._reading import own_target, read_options, recorded_by
    from modelopt_eagle.cli.ar_validate import warn_of_another_template
    from modelopt_eagle.data.prompts import load_prompts
    from modelopt_eagle.export import read_head
    from modelopt_eagle.export.folders import resolve_checkpoint
    from modelopt_eagle.export.quantize import feed, quantize_drafter
    from modelopt_eagle.recipe.command_line import target_arguments
    from modelopt_eagle.target import load_target
    from modelopt_eagle.target.chat import use_chat_record
    from modelopt_eagle.validation import measure_acceptance

    resolve_checkpoint(arguments.model_path)  # before a target is loaded for it
    name = arguments.base_model
    if name is None:
        head = read_head(arguments.model_path, options=read_options(arguments))
        name = own_target(arguments.model_path, head.config)
    with recorded_by(arguments.model_path, arguments.base_model):
        target = load_target(**target_arguments(arguments, name))
    identity = target.identity()
    head = read_head(
        arguments.model_path,
        vocab_size=identity["vocab_size"],
        tokenizer_hash=identity["tokenizer_hash"],
        options=read_options(arguments, target),
    )
    if "target_adapter" in head.config.extra:
        print(
            f"warning: the head was trained together with an adapter on its target: unless {name} is the merged target "
            "(--base_model), it is calibrated and measured over another model"
        )
    use_chat_record(target.tokenizer, head.config.extra)
    warn_of_another_template(head.module, target)
    batches = calibration_batches(arguments, target, head.config.aux_layer_ids)
    prompts = load_prompts(arguments.prompts, arguments.num_samples)

    def measure(module) -> dict:
        print(f"measuring on {len(prompts)} prompts", file=sys.stderr)
        return measure_acceptance(
            target, module, prompts, num_steps=arguments.steps, max_new_tokens=arguments.max_new_tokens, max_turns=1,
            speedup_prompts=0,
        ).to_dict()  # fmt: skip

    report = quantize_drafter(
        head.module, arguments.export_path, arguments.format, feed(batches, target.embedding, arguments.steps),
        measure=measure, max_drop=arguments.max_drop, target=target, overwrite=arguments.overwrite,
        adapter=head.adapter,
    )  # fmt: skip
    print(f"calibrated         on {len(batches)} rows, {report.layers} layers to {report.form}")
    print(f"size               {report.bytes_before / 1e6:.1f} MB before, {report.bytes_after / 1e6:.1f} MB after")
    print(
        f"acceptance length  {report.acceptance_before:.3f} before, {report.acceptance_after:.3f} after "
        f"({0 - report.drop:+.1%})"
    )
    print(f"exported           {report.path}")
    for need in report.needs:
        print(f"needs              {need}")
    for note in report.notes:
        print(f"note               {note}")
    return 0
