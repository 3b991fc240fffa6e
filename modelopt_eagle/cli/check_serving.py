"""Serve an export in a real engine and hold its counters and its text against ours (`scripts/check_serving.py`)."""

from __future__ import annotations

import json
from pathlib import Path

from modelopt_eagle.cli._options import add_prompt_options, output_file
from modelopt_eagle.common.parser import CommandParser, command_parser
from modelopt_eagle.errors import ExportError
from modelopt_eagle.recipe.command_line import add_target_options

NOT_SERVED_RIGHT = 1


def build_parser() -> CommandParser:
    """The options."""
    parser = command_parser(
        "check-serving",
        __doc__,
        example="modelopt-eagle check-serving --export_path ckpts/quickstart-eagle3/export --base_model quickstart",
        epilog="Exit code 0: served as trained; 1: not; 2: bad input. For engines that do not run here, "
        "inspect-checkpoint says what they would do with the folder.",
    )
    parser.add_argument(
        "--export_path",
        required=True,
        type=Path,
        help="the exported folder; for llama.cpp also one of convert_checkpoint --to gguf, then with --checkpoint",
    )
    parser.add_argument("--base_model", required=True, help="target: hub id, local folder, GGUF file, or quickstart")
    parser.add_argument(
        "--checkpoint", type=Path, help="the head as it was trained, to hold the engine against; default: the export"
    )
    parser.add_argument(
        "--engine", default="vllm", choices=("vllm", "llama.cpp"), help="the engine to run (default vllm)"
    )
    parser.add_argument(
        "--engine-python",
        "--engine_python",
        type=Path,
        help="interpreter that has it; default that of .venv-vllm or .venv-llama, which scripts/setup_vllm_cpu.sh and "
        "scripts/setup_llama_cpp.sh make",
    )
    parser.add_argument(
        "--target_gguf",
        "--target-gguf",
        type=Path,
        help="for llama.cpp, the target as a float32 GGUF file; default: written from a GGUF target or a plain Llama",
    )
    add_prompt_options(parser, num_samples=24, max_new_tokens=96)
    parser.add_argument("--num_speculative_tokens", type=int, default=3, help="drafted tokens (default 3)")
    parser.add_argument("--batch_size", type=int, default=8, help="requests decoded together (default 8)")
    parser.add_argument(
        "--tolerance", type=float, default=0.01, help="largest difference of acceptance at a position (default 0.01)"
    )
    parser.add_argument(
        "--as_released",
        "--as-released",
        action="store_true",
        help="run the engine with its known faults; default: with the plugin for those that there is one for",
    )
    add_target_options(parser, weights=False)  # it runs in float32 on the CPU, as in the engine
    parser.add_argument("--json", type=output_file, help="write the result there; default: print it after the table")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    arguments = build_parser().parse_args(argv)
    for name in ("num_samples", "max_new_tokens", "num_speculative_tokens", "batch_size"):
        if getattr(arguments, name) < 1:
            raise ExportError(f"--{name} must be at least 1, found {getattr(arguments, name)}")
    from modelopt_eagle.serving.check import check_serving

    report = check_serving(
        arguments.export_path,
        arguments.base_model,
        checkpoint=arguments.checkpoint,
        engine=arguments.engine,
        engine_python=arguments.engine_python,
        target_gguf=arguments.target_gguf,
        chat_template=arguments.chat_template,
        revision=arguments.revision,
        trust_remote_code=bool(arguments.trust_remote_code),
        prompts=arguments.prompts,
        num_samples=arguments.num_samples,
        max_new_tokens=arguments.max_new_tokens,
        num_speculative_tokens=arguments.num_speculative_tokens,
        batch_size=arguments.batch_size,
        tolerance=arguments.tolerance,
        mend=not arguments.as_released,
    )
    print(report.table())
    text = json.dumps(report.to_dict(), indent=2)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(text + "\n", encoding="utf-8")
        print(f"written: {arguments.json}")
    else:
        print(text)
    return 0 if report.passed else NOT_SERVED_RIGHT
