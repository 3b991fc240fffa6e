"""Hold an engine's rules against the source of a release (`scripts/check_engine_rules.py`); nothing of it is run."""

from __future__ import annotations

from pathlib import Path

from modelopt_eagle.common.parser import CommandParser, command_parser
from modelopt_eagle.errors import ExportError

RULES_BROKEN = 1


def build_parser() -> CommandParser:
    """The options."""
    parser = command_parser(
        "check-engine-rules",
        __doc__,
        example="modelopt-eagle check-engine-rules --engine vllm --download 0.11.0",
        epilog="Exit code 0: every rule matches and no target is gone; 1: some do not; 2: bad input.",
    )
    parser.add_argument("--engine", required=True, help="vllm, sglang, tensorrt_llm or llama.cpp")
    parser.add_argument(
        "--source",
        type=Path,
        help="a wheel, a source package, or the folder in which the engine lies (site-packages, a clone)",
    )
    parser.add_argument("--download", metavar="VERSION", help="get this release by pip, without what it depends on")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    arguments = build_parser().parse_args(argv)
    from modelopt_eagle.export.engines import engine_of
    from modelopt_eagle.serving.rules import Source, check_rules, downloaded

    if (arguments.source is None) == (arguments.download is None):
        raise ExportError("name the release to read: --source PATH, or --download VERSION")
    engine = engine_of(arguments.engine)
    if arguments.download is not None:
        with downloaded(engine, arguments.download) as package:
            report = check_rules(engine, Source(package, engine))
    else:
        report = check_rules(engine, Source(arguments.source, engine))
    print(report.text())
    return 0 if report.passed else RULES_BROKEN
