"""Measure a head in a live engine: acceptance by its counters, tokens a second and latencies, with and without it."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from modelopt_eagle.common.parser import CommandParser, command_parser
from modelopt_eagle.errors import DataError, ExportError

if TYPE_CHECKING:
    from modelopt_eagle.serving.bench import Load, Open
    from modelopt_eagle.serving.bench_report import BenchReport

STARTED = "started"
NOT_WHOLE = 1
INTERRUPTED = 130


def build_parser() -> CommandParser:
    """The command line."""
    parser = command_parser(
        "bench",
        __doc__,
        example="modelopt-eagle bench --url http://127.0.0.1:8000 --plain_url http://127.0.0.1:8001\n"
        "modelopt-eagle bench --url started --base_model quickstart --export_path ckpts/quickstart-eagle3/export",
        epilog="Exit code 0: everything was measured; 1: requests failed or a server answered no more; 2: bad input; "
        "130: interrupted. What was measured is written in any case.",
    )
    parser.add_argument(
        "--url", required=True, help="server with the head, http://HOST:PORT, or `started`: both are started here"
    )
    parser.add_argument("--plain_url", metavar="URL", help="server of the same target without a head")
    parser.add_argument(
        "--engine",
        help="whose counters the server has (vllm, sglang, llama.cpp); default: told by their "
        "names, and vllm where servers are started here",
    )
    parser.add_argument("--model", help="the name that the servers know the target by; default: the first they name")
    parser.add_argument(
        "--prompts",
        nargs="+",
        default=["quickstart"],
        metavar="FILE",
        help="sets of prompts, a file each: rows of ours or in the fields of MT-Bench, GSM8K or HumanEval; default: "
        "the 80 shipped",
    )
    parser.add_argument("--num_samples", type=int, help="prompts of each set, spread evenly over it (default: all)")
    parser.add_argument("--turns", type=int, default=1, help="turns asked of a prompt at most (default 1)")
    parser.add_argument(
        "--concurrency",
        type=int,
        nargs="+",
        default=[1],
        help="requests at a time, levels one by one (default 1)",
    )
    parser.add_argument("--max_new_tokens", type=int, default=128, help="an answer is cut here (default 128)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    parser.add_argument("--seed", type=int, default=0, help="of answers that are drawn (default 0)")
    parser.add_argument("--warmup", type=int, default=2, help="requests before each level, not counted (default 2)")
    parser.add_argument(
        "--by_category",
        action=argparse.BooleanOptionalAction,
        help="ask the categories that a set names one after another, and tell each; default: where every level is one "
        "request at a time, which is then asked as it would be without",
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that an answer may take (default 600)")
    parser.add_argument("--output", type=Path, default=Path("bench.json"), help="the numbers as JSON (bench.json)")
    parser.add_argument("--html", type=Path, help="write a page with plots here (extra: report)")
    own = parser.add_argument_group("with --url started")
    own.add_argument(
        "--base_model", help="target: hub id, local folder, GGUF file, or quickstart; for llama.cpp one of the last two"
    )
    own.add_argument("--export_path", type=Path, help="the exported head; for llama.cpp also its GGUF file")
    own.add_argument("--num_speculative_tokens", type=int, default=3, help="drafted tokens (default 3)")
    own.add_argument(
        "--engine_python", type=Path, help="interpreter that has it; default that of .venv-vllm or .venv-llama"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    arguments = build_parser().parse_args(argv)
    check_arguments(arguments)
    from modelopt_eagle.data.prompts import load_prompts
    from modelopt_eagle.report.bench import write_bench
    from modelopt_eagle.report.compare import names
    from modelopt_eagle.serving.bench import Load, bench

    sets = {
        name: load_prompts(source, arguments.num_samples)
        for name, source in zip(names(list(map(Path, arguments.prompts))), arguments.prompts, strict=True)
    }
    load = Load(
        tuple(arguments.concurrency), arguments.max_new_tokens, arguments.temperature, arguments.seed,
        arguments.turns, arguments.warmup,
        set(arguments.concurrency) == {1} if arguments.by_category is None else arguments.by_category,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        servers = opens(arguments, load, Path(folder))
        report = bench(servers, sets, load, functools.partial(write_json, arguments.output))
    print(report.table())
    print(f"wrote {arguments.output}")
    if arguments.html is not None:
        print(f"wrote {write_bench(report, arguments.html)}")
    if report.interrupted:
        return INTERRUPTED
    return 0 if report.whole else NOT_WHOLE


def write_json(file: Path, report: BenchReport) -> None:
    """Write what is there of a bench."""
    from modelopt_eagle.common.files import write_whole

    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps(report.to_dict(), indent=2, ensure_ascii=False) + "\n")


def check_arguments(arguments: argparse.Namespace) -> None:
    """Refuse what can be refused before anything is read or started.

    Raises:
        DataError: a number out of range, or options that do not fit together.
        MissingExtraError: a page is asked for and its libraries are not there.
    """
    from modelopt_eagle.common.package import require_extra
    from modelopt_eagle.export.engines import ENGINES

    for name, least in (("num_samples", 1), ("turns", 1), ("max_new_tokens", 1), ("temperature", 0), ("warmup", 0),
                        ("timeout", 1), ("num_speculative_tokens", 1)):  # fmt: skip
        found = getattr(arguments, name)
        if found is not None and not least <= found < float("inf"):
            raise DataError(f"--{name} must be at least {least}, found {found}")
    if wrong := [level for level in arguments.concurrency if level < 1]:
        raise DataError(f"--concurrency takes numbers of at least 1, found {wrong[0]}")
    if len(set(arguments.concurrency)) < len(arguments.concurrency):
        raise DataError(f"--concurrency names a level twice: {' '.join(map(str, arguments.concurrency))}")
    if arguments.engine is not None:
        counted = {engine.name: key for key, engine in ENGINES.items() if engine.counters}
        named = next((key for key, engine in ENGINES.items() if engine.called(arguments.engine)), None)
        if named not in counted.values():
            raise DataError(
                f"--engine {arguments.engine}: its counters are not known, those of {', '.join(counted)} are; without "
                "the option any OpenAI-compatible server is measured"
            )
        arguments.engine = named
    if arguments.url == STARTED:
        if arguments.base_model is None or arguments.export_path is None:
            raise DataError("--url started needs --base_model and --export_path")
        if arguments.plain_url is not None or arguments.model is not None:
            raise DataError("--url started starts both servers itself: leave --plain_url and --model out")
    elif arguments.base_model or arguments.export_path or arguments.engine_python:
        raise DataError("--base_model, --export_path and --engine_python are for --url started")
    if arguments.html is not None:
        for module in ("matplotlib", "jinja2"):
            require_extra(module, "report")


def opens(arguments: argparse.Namespace, load: Load, folder: Path) -> dict[str, Open]:
    """What opens each server, the one without the head first.

    Args:
        folder: for files that a server that is started here is given.

    Raises:
        ExportError: an engine that is to be started and cannot run here.
        CheckpointError, TargetError: what it is to be started with is not there, or does not fit together.
        StreamError: a running server that does not answer.
    """
    from modelopt_eagle.export.engines import ENGINES
    from modelopt_eagle.serving.bench import prepare, started
    from modelopt_eagle.serving.bench_report import WITH, WITHOUT
    from modelopt_eagle.serving.check import find_engine_python
    from modelopt_eagle.serving.engine_server import SERVERS
    from modelopt_eagle.serving.live import LiveServer
    from modelopt_eagle.validation.server_answers import KEY_VARIABLE

    if arguments.url == STARTED:
        engine = arguments.engine or "vllm"
        if engine not in SERVERS:
            can = ", ".join(ENGINES[key].name for key in SERVERS)
            raise ExportError(f"the server of {ENGINES[engine].name} cannot be started here, only that of {can} can")
        python = find_engine_python(arguments.engine_python, engine)
        job = prepare(
            engine, arguments.base_model, arguments.export_path, folder,
            num_speculative_tokens=arguments.num_speculative_tokens,
        )  # fmt: skip
        start = functools.partial(
            started, engine, python, job, concurrency=max(load.concurrency), timeout=arguments.timeout
        )
        return {WITHOUT: functools.partial(start, drafts=False), WITH: functools.partial(start, drafts=True)}

    def running(url: str) -> Callable[[], contextlib.AbstractContextManager[LiveServer]]:
        server = LiveServer(
            url, model=arguments.model, engine=arguments.engine, key=os.environ.get(KEY_VARIABLE),
            timeout=arguments.timeout,
        )  # fmt: skip
        return lambda: contextlib.nullcontext(server)

    plain = {} if arguments.plain_url is None else {WITHOUT: running(arguments.plain_url)}
    return {**plain, WITH: running(arguments.url)}
