"""``scripts/synthesize_answers.py``: answer prompts with the target, in-process or by servers; resumable."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from modelopt_eagle.common.parser import CommandParser, command_parser

if TYPE_CHECKING:
    from collections.abc import Iterable

    from modelopt_eagle.data import Prompt
    from modelopt_eagle.validation.synthesis import Account


def build_parser() -> CommandParser:
    """The command line."""
    from modelopt_eagle.cli._options import json_object
    from modelopt_eagle.recipe.command_line import add_target_options

    parser = command_parser(
        "synthesize-answers",
        __doc__,
        example="modelopt-eagle synthesize-answers --model NAME --input prompts.jsonl --output chats.jsonl",
    )
    parser.add_argument(
        "--model", help="target: hub id, local folder, GGUF file, or quickstart; with --server the name that it serves"
    )
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
        "--template_arguments",
        type=json_object,
        default={},
        metavar="JSON",
        help='variables of the chat template for every prompt, such as {"enable_thinking": false}; a prompt\'s own win',
    )
    add_target_options(parser)
    server = parser.add_argument_group("answers by running servers, in place of the model in this process")
    server.add_argument("--server", nargs="+", metavar="URL", help="OpenAI-compatible servers: http://HOST:PORT ...")
    server.add_argument("--concurrency", type=int, default=16, help="requests under way at a time (default 16)")
    server.add_argument("--retries", type=int, default=5, help="further tries of a request, with waits (default 5)")
    server.add_argument("--timeout", type=float, default=600.0, help="seconds that an answer may take (default 600)")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Returns:
        0, or 1 where a prompt was not answered, or 130 when interrupted; what is answered is kept.

    Raises:
        EagleError: bad input.
    """
    arguments = build_parser().parse_args(argv)
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        print(f"\ninterrupted; the same command goes on from {arguments.output}", file=sys.stderr)
        return 130


def _run(arguments: argparse.Namespace) -> int:
    from modelopt_eagle.data.prompts import load_prompts
    from modelopt_eagle.errors import DataError

    for name in ("max_new_tokens", "batch_size"):
        if getattr(arguments, name) < 1:
            raise DataError(f"--{name} must be at least 1, found {getattr(arguments, name)}")
    if arguments.temperature < 0:
        raise DataError(f"--temperature must be 0 (greedy) or above, found {arguments.temperature}")
    if arguments.model is None and arguments.server is None:
        raise DataError("give the target as --model, or running servers as --server URL ...")
    if arguments.server is not None and (unread := _given(arguments, _LOADING)):
        raise DataError(
            f"{', '.join(unread)} would load a target in this process, and servers have theirs: leave it out (vLLM "
            "takes --chat-template itself)"
        )
    if arguments.server is not None and (unread := _given(arguments, ("batch_size",))):
        raise DataError(f"{unread[0]} is for the model in this process; servers are asked --concurrency at a time")
    if arguments.server is None and (unread := _given(arguments, ("concurrency", "retries", "timeout"))):
        raise DataError(f"{', '.join(unread)} says how servers are asked: give their addresses as --server URL ...")
    prompts = load_prompts(arguments.input, arguments.num_samples)
    prompts = [with_arguments(prompt, arguments.template_arguments) for prompt in prompts]
    account = (_here if arguments.server is None else _by_servers)(arguments, prompts)
    print(
        f"{len(prompts)} prompts: {account.answered} answered, {account.failed} failed, {account.skipped} answered "
        f"before; {account.cut} cut at {arguments.max_new_tokens} tokens; {arguments.output}"
    )
    if account.failed:
        print(f"the failed ones stand in {arguments.output}.errors.jsonl; the same command tries them again")
    return 1 if account.failed else 0


_LOADING = ("revision", "trust_remote_code", "chat_template", "target_dtype", "device", "attn_implementation")


def _given(arguments: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """Those of the options that were given another value than their default."""
    parser = build_parser()
    given = [name for name in names if getattr(arguments, name) != parser.get_default(name)]
    return [f"--{name.removeprefix('target_')}" for name in given]


def with_arguments(prompt: Prompt, arguments: dict) -> Prompt:
    """The prompt with template arguments, its own winning."""
    return dataclasses.replace(prompt, template_arguments={**arguments, **prompt.template_arguments})


def _here(arguments: argparse.Namespace, prompts: list[Prompt]) -> Account:
    """Answer by the target in this process; it is loaded where something is to do."""
    from modelopt_eagle.common.console import ProgressBar
    from modelopt_eagle.recipe.command_line import target_arguments
    from modelopt_eagle.target import load_target
    from modelopt_eagle.target.load import read_chat_template
    from modelopt_eagle.validation.synthesis import AnswerFile, SynthesisSettings, synthesize

    template = None if arguments.chat_template is None else read_chat_template(arguments.chat_template)
    settings = SynthesisSettings(
        arguments.model, arguments.max_new_tokens, arguments.temperature, arguments.seed,
        None if template is None else hashlib.sha256(template.encode()).hexdigest(),
    )  # fmt: skip
    with AnswerFile(arguments.output, settings, prompts) as answers:
        if not answers.missing:
            return answers.account
        print(f"{len(prompts)} prompts, {answers.account.skipped} answered before, {len(answers.missing)} to do")
        target = load_target(**target_arguments(arguments, arguments.model))
        bar = ProgressBar(len(answers.missing), "answers")

        def report(account: Account) -> None:
            bar.reach(account.answered + account.failed, f"({account.failed} failed, {account.cut} cut)")

        return synthesize(target, answers, settings, arguments.batch_size, report)


def _by_servers(arguments: argparse.Namespace, prompts: list[Prompt]) -> Account:
    """Answer by servers."""
    from modelopt_eagle.common.console import ProgressBar
    from modelopt_eagle.errors import DataError
    from modelopt_eagle.validation.server_answers import KEY_VARIABLE, ChatServers, synthesize_by_servers
    from modelopt_eagle.validation.synthesis import AnswerFile, SynthesisSettings

    for name, least in (("concurrency", 1), ("retries", 0), ("timeout", 1)):
        if getattr(arguments, name) < least:
            raise DataError(f"--{name} must be at least {least}, found {getattr(arguments, name)}")
    servers = ChatServers(
        arguments.server, retries=arguments.retries, timeout=arguments.timeout, key=os.environ.get(KEY_VARIABLE)
    )
    model = arguments.model or servers.model()
    settings = SynthesisSettings(model, arguments.max_new_tokens, arguments.temperature, arguments.seed)
    bar = ProgressBar(len(prompts), "answers")

    def report(account: Account) -> None:
        bar.reach(account.answered + account.failed + account.skipped, f"({account.failed} failed)")

    with AnswerFile(arguments.output, settings, prompts) as answers:
        return synthesize_by_servers(servers, answers, settings, arguments.concurrency, report)
