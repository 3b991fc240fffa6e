"""Convert a head of any known tool into another layout, numbers unchanged (`scripts/convert_checkpoint.py`)."""

from __future__ import annotations

from pathlib import Path

from modelopt_eagle.common.parser import CommandParser, command_parser


def build_parser() -> CommandParser:
    """The options."""
    from modelopt_eagle.cli._reading import add_reading_options
    from modelopt_eagle.export.convert import FORMATS

    parser = command_parser(
        "convert-checkpoint", __doc__, example="modelopt-eagle convert-checkpoint --input THEIR_HEAD --output head"
    )
    parser.add_argument("--input", required=True, type=Path, help="a head: SafeAILab, SpecForge, Model-Optimizer, ...")
    parser.add_argument("--output", required=True, type=Path, help="folder to make; it appears whole or not at all")
    parser.add_argument("--to", choices=FORMATS, default="universal", help="layout to write (default universal)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="of the result; default: as it is, and one only"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export, whole")
    parser.add_argument("--no-strict", "--no_strict", action="store_true", help="accept config keys that nothing reads")
    add_reading_options(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    from modelopt_eagle.cli._reading import reading_options
    from modelopt_eagle.export.convert import convert_checkpoint
    from modelopt_eagle.target.gguf import gguf_file_of

    arguments = build_parser().parse_args(argv)
    options, target = reading_options(arguments)
    report = convert_checkpoint(
        arguments.input,
        arguments.output,
        arguments.to,
        options=options,
        target=target,
        dtype=arguments.dtype,
        strict=not arguments.no_strict,
        overwrite=arguments.overwrite,
        target_file=gguf_file_of(arguments.base_model) if arguments.base_model else None,
    )
    print(f"converted  {arguments.input} to {report.path} ({arguments.to})")
    print(f"           {report.tensors} tensors, {report.dtype}, {report.bytes / 1e6:.1f} MB, read back and compared")
    for need in report.needs:
        print(f"needs      {need}")
    for note in report.notes:
        print(f"note       {note}")
    return 0
