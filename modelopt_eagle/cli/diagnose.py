"""Find out under which convention a head drafts best: layers, map, norms, rotary base, alignment, each in turn."""

from __future__ import annotations

import json
from pathlib import Path

from modelopt_eagle.common.console import say
from modelopt_eagle.common.parser import CommandParser, command_parser
from modelopt_eagle.errors import DecodingError

ANOTHER_IS_BETTER = 1


def build_parser() -> CommandParser:
    """The options."""
    from modelopt_eagle.cli._options import add_prompt_options, output_file
    from modelopt_eagle.cli._reading import add_reading_options
    from modelopt_eagle.recipe.command_line import add_target_options

    parser = command_parser(
        "diagnose",
        __doc__,
        example="modelopt-eagle diagnose --model_path head --base_model NAME",
        epilog="Exit code 0: no convention beats the declared one; 1: one does, and the last line says how to declare "
        "it; 2: bad input.",
    )
    parser.add_argument("--model_path", required=True, type=Path, help="a head of any tool, or a run's output folder")
    parser.add_argument(
        "--base_model",
        "--base-model",
        help="target: hub id, local folder, GGUF file, quickstart; default: the head's own",
    )
    add_prompt_options(parser, num_samples=8, max_new_tokens=64)
    parser.add_argument("--num_steps", type=int, default=3, help="drafted tokens (default 3)")
    parser.add_argument("--json", type=output_file, help="write every number there")
    add_target_options(parser, dtype="float32", device="cpu")
    add_reading_options(parser, base_model=False)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    arguments = build_parser().parse_args(argv)
    for name in ("num_samples", "max_new_tokens", "num_steps"):
        if getattr(arguments, name) < 1:
            raise DecodingError(f"--{name} must be at least 1, found {getattr(arguments, name)}")
    from modelopt_eagle.cli._reading import own_target, read_options, recorded_by
    from modelopt_eagle.cli.ar_validate import warn_of_another_template
    from modelopt_eagle.data.prompts import load_prompts
    from modelopt_eagle.export import load_draft
    from modelopt_eagle.export.folders import resolve_checkpoint
    from modelopt_eagle.recipe.command_line import target_arguments
    from modelopt_eagle.target import load_target
    from modelopt_eagle.target.chat import use_chat_record
    from modelopt_eagle.validation.diagnose import diagnose

    resolve_checkpoint(arguments.model_path)  # before a target is loaded for it
    name = arguments.base_model
    if name is None:
        name = own_target(
            arguments.model_path, load_draft(arguments.model_path, options=read_options(arguments)).config
        )
    prompts = load_prompts(arguments.prompts, arguments.num_samples)
    with recorded_by(arguments.model_path, arguments.base_model):
        target = load_target(**target_arguments(arguments, name))
    module = load_draft(
        arguments.model_path, vocab_size=target.vocab_size, dtype="float32", options=read_options(arguments, target)
    )
    use_chat_record(target.tokenizer, module.config.extra)
    warn_of_another_template(module, target)
    found = diagnose(
        target, module.to(target.device), prompts, num_steps=arguments.num_steps,
        max_new_tokens=arguments.max_new_tokens, say=say,
    )  # fmt: skip
    print(found.text())
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(found.to_dict(), indent=2) + "\n", encoding="utf-8")
        print(f"written: {arguments.json}")
    return 0 if found.best is None else ANOTHER_IS_BETTER
