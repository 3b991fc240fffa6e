"""A head in a live engine: prompts asked so many at a time, timed, with the server's own counters read around them."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelopt_eagle.common.console import ProgressBar, say
from modelopt_eagle.data.prompts import Prompt
from modelopt_eagle.data.roles import Message
from modelopt_eagle.errors import EagleError, StreamError
from modelopt_eagle.export.engines import ENGINES
from modelopt_eagle.export.engines.llama_cpp import SPEC_TYPES
from modelopt_eagle.export.load import load_draft
from modelopt_eagle.serving.bench_report import WITH, WITHOUT, BenchReport, Cell, Failure, Side
from modelopt_eagle.serving.engine_server import serve_engine
from modelopt_eagle.serving.gguf_files import float32_target, head_file, holds_file, sizes_of_file, worded_target
from modelopt_eagle.serving.live import LiveServer, Reading, StreamedAnswer, difference
from modelopt_eagle.target.gguf import gguf_keys
from modelopt_eagle.target.identity import tokenizer_hash
from modelopt_eagle.target.load import load_config, load_tokenizer, resolve
from modelopt_eagle.validation.server_answers import Refused, request_body
from modelopt_eagle.validation.synthesis import SynthesisSettings

GIVEN_UP = 10
"""So many requests in a row without an answer (or twice the concurrency, if more), and a server is given up."""

ROOM = 4096
"""Longest window of a server that is started here, so that its cache fits where the target's own is very long."""

Open = Callable[[], contextlib.AbstractContextManager[LiveServer]]
"""What gives a running server, and ends it if it was started for this."""


@dataclass(frozen=True)
class Load:
    """How servers are asked.

    Attributes:
        concurrency: requests under way at a time, one level after the other.
        max_new_tokens, temperature, seed: of the answers.
        turns: turns asked of a prompt at most, each behind the answers before it.
        warmup: requests before each level that are not counted.
        by_category: the categories of a set are asked one after another, so that a server's counters, which know no
            requests, tell the acceptance of each.
    """

    concurrency: tuple[int, ...] = (1,)
    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    turns: int = 1
    warmup: int = 2
    by_category: bool = False


@dataclass(frozen=True)
class Outcome:
    """What became of a request; ``failed`` is the server's fault or the request's, ``unasked`` neither's."""

    prompt: str
    turn: int
    ended: float
    answer: StreamedAnswer | None = None
    failed: StreamError | None = None
    unasked: str = ""


def bench(
    opens: Mapping[str, Open],
    sets: Mapping[str, Sequence[Prompt]],
    load: Load,
    on_cell: Callable[[BenchReport], None] = lambda report: None,
) -> BenchReport:
    """Measure one server, or two one after the other.

    A server that cannot be asked any more ends its own part, Ctrl-C all of it; what was measured stays.

    Args:
        opens: side (``with``, ``without``) to what gives its server; in this order.
        sets: name to prompts.
        load: how they are asked.
        on_cell: gets the report whenever there is more of it.

    Returns:
        what was measured, to the end or not.

    Raises:
        EagleError: nothing could be measured at all, for a reason of the first server.
    """
    report = BenchReport({**vars(load), "sets": {name: len(prompts) for name, prompts in sets.items()}})
    for name, opened in opens.items():
        side = Side(name)
        report.sides.append(side)
        try:
            with opened() as server:
                side.url, side.model, side.version = server.url, server.model, server.version()
                for cell in cells_of(server, side, sets, load):
                    report.interrupted |= cell.interrupted and not side.stopped
                    on_cell(report)
                    if report.interrupted or side.stopped:
                        break
        except KeyboardInterrupt:
            report.interrupted = True
        except EagleError as error:
            if not any(each.cells for each in report.sides):
                raise
            side.stopped = str(error)
        if report.interrupted:
            side.stopped = side.stopped or "interrupted"
            break
    on_cell(report)
    return report


def groups_of(
    sets: Mapping[str, Sequence[Prompt]], by_category: bool
) -> Iterator[tuple[str, str | None, Sequence[Prompt]]]:
    """``(set, category, prompts)`` that are asked together: whole sets, or each category of those with several."""
    for name, prompts in sets.items():
        found: dict[str, list[Prompt]] = {}
        for prompt in prompts:
            found.setdefault(prompt.category, []).append(prompt)
        if by_category and len(found) > 1:
            yield from ((name, category, group) for category, group in found.items())
        else:
            yield name, None, prompts


def cells_of(server: LiveServer, side: Side, sets: Mapping[str, Sequence[Prompt]], load: Load) -> Iterator[Cell]:
    """Every level with every set or category, measured as it is asked for; each is in ``side`` already.

    Raises:
        StreamError: the server answers none of the requests of a warm-up.
    """
    settings = SynthesisSettings(server.model, load.max_new_tokens, load.temperature, load.seed)
    for level in load.concurrency:
        before = server.reading()
        before = server.settled(before, warm_up(server, next(iter(sets.values())), settings, level, load.warmup))
        for name, category, prompts in groups_of(sets, load.by_category):
            planned = sum(min(load.turns, len(prompt.turns)) for prompt in prompts)
            cell = Cell(name, level, planned, category=category)
            side.cells.append(cell)
            with ProgressBar(planned, f"{side.name} the head, {cell.title}, {level} at a time", "requests") as bar:
                ask_all(server, prompts, settings, load.turns, cell, bar)
            side.engine = before.engine
            before = tell(cell, before, server)
            if cell.interrupted and cell.not_asked.get(SILENT):
                side.stopped = SILENT
            yield cell


def prepare(
    engine: str, base_model: str, export_path: str | Path, folder: Path, *, num_speculative_tokens: int = 3
) -> dict[str, Any]:
    """What an engine's server is started with, in float32; whatever is wrong with target or head is told here.

    Args:
        engine: one whose server can be started here.
        base_model: the target, as in ``load_target``; for llama.cpp one that is a GGUF file.
        export_path: the exported head; for llama.cpp also its GGUF file.
        folder: where files that llama.cpp is given are written.
        num_speculative_tokens: drafted tokens.

    Returns:
        the job of the engine's server script, without ``port`` and ``batch_size``.

    Raises:
        CheckpointError: no head is there, or one for another target.
        ExportError: the engine cannot be given this target or this head.
        TargetError: no target is there.
    """
    runner, path = ENGINES[engine].runner, Path(export_path)
    job: dict[str, Any] = {"served_name": str(base_model), "dtype": "float32"}
    job["num_speculative_tokens"] = num_speculative_tokens
    file = worded_target(base_model) if runner.gguf else None
    head = window = None
    if not (runner.gguf and holds_file(path)):
        place = resolve(base_model)
        config, known = load_config(place).get_text_config(), tokenizer_hash(load_tokenizer(place))
        head = load_draft(path, vocab_size=config.vocab_size, tokenizer_hash=known, quantised=True)
        window = getattr(config, "max_position_embeddings", None)
        job |= {"model": str(place), "draft": str(path.absolute()), "draft_options": runner.options(head.config)}
    if file is not None:
        job["draft"] = str(head_file(path, head, sizes_of_file(file), folder).absolute())
        job["draft_options"] = {"spec_type": SPEC_TYPES[gguf_keys(Path(job["draft"]))["general.architecture"]]}
        unpacked, keys = float32_target(file, folder)
        window = keys[f"{keys['general.architecture']}.context_length"]
        job["model"] = str(unpacked)
    return {**job, "max_model_len": min(int(window), ROOM) if window else None}


@contextlib.contextmanager
def started(
    engine: str, python: Path, job: dict[str, Any], *, drafts: bool, concurrency: int = 1, timeout: float = 600.0
) -> Iterator[LiveServer]:
    """A server of an engine on this machine, with the head of a job or without it; it ends with the context.

    Args:
        engine, python: one that can be run here, and its interpreter.
        job: see :func:`prepare`.
        drafts: whether it is given the head.
        concurrency: requests that it may work on together.
        timeout: seconds that an answer may take.

    Raises:
        ExportError: it does not start.
    """
    say(f"starting {ENGINES[engine].name} {WITH if drafts else WITHOUT} the head")
    given = {**job, "batch_size": concurrency, **({} if drafts else {"draft": None})}
    with serve_engine(python, engine, given) as url:
        yield LiveServer(url, model=job["served_name"], engine=engine, timeout=timeout)


SILENT = "the server answered no more"
BROKEN_OFF = "interrupted"


def tell(cell: Cell, before: Reading, server: LiveServer) -> Reading:
    """Write into a cell what the server counted since a reading; returns the reading after it."""
    after = server.settled(before, cell.completion_tokens)
    counted = difference(after, before, cell.answered)
    cell.acceptance, cell.trouble = counted.acceptance, counted.trouble
    cell.generated, cell.cached = counted.generated, counted.cached
    return after


def warm_up(server: LiveServer, prompts: Sequence[Prompt], settings: SynthesisSettings, level: int, count: int) -> int:
    """Requests that are not counted, so that what a server makes at its first ones is not timed.

    Returns:
        new tokens of their answers.

    Raises:
        StreamError: it answers none of them, and none of further ones up to :data:`GIVEN_UP`.
        KeyboardInterrupt: as it is.
    """
    if not count:
        return 0
    chosen = list(itertools.islice(itertools.cycle(prompts), count))
    for _ in range(max(1, -(-GIVEN_UP // count))):
        cell = Cell("warm-up", level, count)
        ask_all(server, chosen, settings, 1, cell, None)
        if BROKEN_OFF in cell.not_asked:
            raise KeyboardInterrupt
        if cell.answered:
            return cell.completion_tokens
    raise StreamError(f"{server.url} answers no request: {cell.failures[0].reason}")


def ask_all(
    server: LiveServer, prompts: Sequence[Prompt], settings: SynthesisSettings, turns: int, cell: Cell,
    bar: ProgressBar | None,
) -> None:  # fmt: skip
    """Ask every prompt, ``cell.concurrency`` at a time, and write what came of it into the cell.

    Every request is accounted for; those under way when it is broken off are among ``not_asked``.
    """
    waiting: queue.SimpleQueue[Prompt] = queue.SimpleQueue()
    for prompt in prompts:
        waiting.put(prompt)
    outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    stop = threading.Event()

    def work() -> None:
        with contextlib.suppress(queue.Empty):
            while not stop.is_set():
                for outcome in converse(server, waiting.get_nowait(), turns, settings, stop):
                    outcomes.put(outcome)

    begun = ended = time.perf_counter()
    workers = min(cell.concurrency, len(prompts))
    for _ in range(workers):
        threading.Thread(target=work, daemon=True).start()  # one that waits for a server must not hold up the end
    silent, accounted, why = 0, 0, ""
    try:
        while accounted < cell.planned:
            with contextlib.suppress(queue.Empty):
                outcome = outcomes.get(timeout=0.2)
                accounted += 1
                ended = max(ended, outcome.ended)
                account_for(outcome, cell)
                if not outcome.unasked:
                    silent = silent + 1 if outcome.failed and not isinstance(outcome.failed, Refused) else 0
                if bar is not None:
                    bar.advance(1, f"({len(cell.failures)} failed)" if cell.failures else "")
            if silent >= max(GIVEN_UP, 2 * cell.concurrency):
                why = SILENT
                break
    except KeyboardInterrupt:
        why = BROKEN_OFF
    stop.set()
    cell.seconds = ended - begun
    if accounted < cell.planned:
        cell.interrupted = True
        cell.not_asked[why] += cell.planned - accounted
    if why == BROKEN_OFF:
        say("interrupted: writing what was measured")


def converse(
    server: LiveServer, prompt: Prompt, turns: int, settings: SynthesisSettings, stop: threading.Event
) -> Iterator[Outcome]:
    """The turns of a prompt, each behind the answers before it; one outcome for every turn unless it is broken off."""
    messages = list(prompt.beginning)
    last = ""
    for turn in range(min(turns, len(prompt.turns))):
        if last:
            yield Outcome(prompt.id, turn, time.perf_counter(), unasked=last)
            continue
        messages.append(prompt.message(turn))
        answer, failed = None, None
        try:
            answer = server.ask(request_body(prompt, turn, messages, settings), stop)
        except StreamError as error:
            failed = error
        except Exception as error:  # a fault of ours must not leave the others waiting for this request
            failed = StreamError(f"{type(error).__name__}: {error}")
        if stop.is_set():
            return
        yield Outcome(prompt.id, turn, time.perf_counter(), answer, failed)
        if answer is None:
            last = "the turn before it failed"
        elif answer.finish_reason == "tool_calls":
            last = "the model called a tool"
        else:
            messages.append(Message("assistant", answer.text))


def account_for(outcome: Outcome, cell: Cell) -> None:
    """Write one outcome into a cell."""
    answer = outcome.answer
    if outcome.unasked:
        cell.not_asked[outcome.unasked] += 1
    elif answer is None:
        cell.failures.append(Failure(outcome.prompt, outcome.turn, str(outcome.failed)[:500]))
    else:
        cell.answered += 1
        cell.first_token.append(answer.first)
        cell.request.append(answer.whole)
        cell.cut += answer.finish_reason == "length"
        tokens = answer.completion_tokens
        if tokens is None or answer.prompt_tokens is None:
            cell.untold += 1
        else:
            cell.completion_tokens += tokens
            cell.prompt_tokens += answer.prompt_tokens
            if tokens > 1:
                cell.per_token.append((answer.last - answer.first) / (tokens - 1))
