"""The data of a run as feature sources: made online, kept in memory or on disk, read from a store, or streamed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from torch import Tensor

from modelopt_eagle.common.console import ProgressBar
from modelopt_eagle.data import DataReport, TokenizedDataset, prepare_dataset, prepare_rows
from modelopt_eagle.data.packed import chosen_rows, row_lengths
from modelopt_eagle.data.vocab import count_supervised
from modelopt_eagle.errors import DataError, TargetError
from modelopt_eagle.features import (
    FeatureContract,
    FeatureRow,
    FeatureSource,
    MemorySource,
    OnlineSource,
    SelectedSource,
)
from modelopt_eagle.features.dump import TargetBackEnd, dump
from modelopt_eagle.features.foreign.reader import RECIPE_KEYS, ForeignReader, open_reader
from modelopt_eagle.features.offline import OfflineSource
from modelopt_eagle.features.store import StoreReader, dataset_hash
from modelopt_eagle.recipe import Recipe
from modelopt_eagle.target.like import RunningTarget, TableTarget
from modelopt_eagle.training.acceptance import EvaluationFiles
from modelopt_eagle.training.budget import RunBudget
from modelopt_eagle.training.given import Given
from modelopt_eagle.training.prechecks import check_evaluations
from modelopt_eagle.training.shared_rows import RowsOfARun

CACHE_SHARD_BYTES = 32 * 2**20
"""Shards of ``cache_features: disk``; killing the feature stage loses at most one."""

HELD_OUT_LEAST, HELD_OUT_MOST, HELD_OUT_FROM_ROWS = 8, 64, 100


@dataclass
class RunData:
    """Features to train on and to evaluate on.

    Attributes:
        train, held_out: sources; ``held_out`` is one a file where several were named, ``None`` without evaluation rows.
        counts: ``[V]`` int64 how often each token is supervised in the training rows.
        header: the account of the data, for the head of the run.
        fingerprint: hash of the training rows' tokens and masks.
        report: counts of what was read, kept and dropped.
    """

    train: FeatureSource
    held_out: FeatureSource | EvaluationFiles | None
    counts: Tensor
    header: list[str]
    fingerprint: str
    report: DataReport


@dataclass(frozen=True)
class TokenRow:
    """A stored row without its states: ``input_ids`` [s] int32 and ``supervised`` [s] bool."""

    id: str
    input_ids: Tensor
    supervised: Tensor


class Rows:
    """A reader of some rows of another, so that a store can be split without copying.

    Args:
        reader: anything with ``contract, lengths, row(number)``.
        numbers: rows to show, in this order.
        window: longer rows are cut at so many tokens.
    """

    def __init__(self, reader, numbers: list[int], window: int):
        self._reader, self._numbers, self._window = reader, numbers, window
        self.folder, self.contract = getattr(reader, "folder", "the reader"), reader.contract
        self.fills = getattr(reader, "fills", False)
        self.lengths = [min(reader.lengths[number], window) for number in numbers]

    @property
    def supervised(self) -> list[int]:
        """Supervised tokens of each row, of those that are cut in what is left of them."""
        whole, cut_to = self._reader, self._window
        return [
            int(whole.tokens(n)[1][:cut_to].sum()) if whole.lengths[n] > cut_to else int(whole.supervised[n])
            for n in self._numbers
        ]

    def tokens(self, number: int) -> TokenRow:
        """Ids and mask of row ``number`` of the selection, without its states."""
        place = self._numbers[number]
        ids, supervised = (part[: self._window] for part in self._reader.tokens(place))
        return TokenRow(self._reader.row_ids[place], ids, supervised)

    def row(self, number: int, aux_out: Tensor | None = None, final_out: Tensor | None = None) -> FeatureRow:
        """Row ``number`` of the selection, its states in two places [s, A·Ht] and [s, Ht] if they are given."""
        place = self._numbers[number]
        if aux_out is None:
            return cut(self._reader.row(place), self._window)
        if self.fills and self._reader.lengths[place] <= self._window:
            return self._reader.row(place, aux_out, final_out)
        row = cut(self._reader.row(place), self._window)
        return replace(row, aux_hidden=aux_out.copy_(row.aux_hidden), final_hidden=final_out.copy_(row.final_hidden))


def cut(row: FeatureRow, window: int) -> FeatureRow:
    """The first ``window`` tokens of a row; what the last one predicts is no longer there."""
    if len(row) <= window:
        return row
    parts = {f.name: getattr(row, f.name) for f in fields(row)}
    parts = {name: part[:window].clone() if isinstance(part, Tensor) else part for name, part in parts.items()}
    if parts["target_top1"] is not None:
        parts["target_top1"][-1] = -1
    return FeatureRow(**parts)


def rows_to_use(reader: StoreReader | ForeignReader, data) -> tuple[list[int], DataReport]:
    """Numbers of the stored rows that a recipe's ``data`` section asks for, and the account of them.

    ``max_rows`` takes the first ones; those longer than ``max_length`` are cut or left out, as ``overlong`` says.
    """
    count, window = min(len(reader.lengths), data.max_rows or len(reader.lengths)), data.max_length
    kept, report = [], DataReport(read=count, max_length=window)
    for number in range(count):
        length, supervised = reader.lengths[number], reader.supervised[number]
        if length > window:
            place = f"{reader.folder}, row {reader.row_ids[number]!r}"
            if data.overlong == "drop":
                report.drop("too_long", f"{place}: {length} tokens, the window has {window}")
                continue
            supervised = int(reader.tokens(number)[1][:window].sum())
            if not supervised:
                report.drop("prompt_fills_window", f"{place}: no answer begins within {window} of {length} tokens")
                continue
            report.truncated += 1
        kept.append(number)
        report.rows += 1
        report.tokens += min(length, window)
        report.supervised += supervised
    return kept, report


def held_out_rows(count: int) -> list[int]:
    """Numbers of the rows kept for evaluation where the recipe names none: 2 %, spread evenly, none of a small set."""
    if count < HELD_OUT_FROM_ROWS:
        return []
    wanted = min(HELD_OUT_MOST, max(HELD_OUT_LEAST, count // 50))
    return [(2 * i + 1) * count // (2 * wanted) for i in range(wanted)]


def read_data(
    recipe: Recipe, target: TableTarget, paths, rows=None, name: str = "data", shared: RowsOfARun | None = None
) -> TokenizedDataset:
    """Conversations of a recipe, tokenised for a target.

    Args:
        paths: of files; not read where there are rows.
        rows: conversations in memory.
        name: what messages call those.
        shared: of the run; ``None`` keeps the tokens in memory.
    """
    data = recipe.data
    if target.tokenizer is None:
        raise TargetError(
            f"{target.name} has no tokenizer: give a folder that holds one, or target=(model, tokenizer) in Python"
        )
    from_servers = data.streaming_server_url is not None  # they read text only
    options = {
        "unknown_role": data.unknown_role,
        "role_aliases": data.role_aliases,
        "max_rows": data.max_rows,
        "max_length": data.max_length,
        "target_window": getattr(target.config, "max_position_embeddings", None),
        "overlong": data.overlong,
        "columns": data.columns,
        "text_boundary": data.text_boundary,
        "supervise_reasoning": data.supervise_reasoning,
        "supervise_tool_calls": data.supervise_tool_calls,
        "workers": data.workers,
        "end_token_ids": target.end_token_ids,
        "vision": None if from_servers else target.vision,
    }

    def make(folder: Path | None) -> TokenizedDataset:
        if rows is not None:
            return prepare_rows(target.tokenizer, rows, name=name, folder=folder, **options)
        return prepare_dataset(target.tokenizer, paths, folder=folder, **options)

    dataset = (shared or RowsOfARun()).read(make)
    dataset.report.check_used(data.min_used_share)
    return dataset


@dataclass(frozen=True)
class SplitRows:
    """Tokenised rows of a run whose target is loaded.

    Attributes:
        train: rows to train on.
        held_out: rows to evaluate on, by where they come from; one entry ``""`` where they were held out of the data.
        header: the account of the data.
        report: its counts.
    """

    train: Sequence
    held_out: dict[str, Sequence]
    header: list[str]
    report: DataReport


def split_rows(recipe: Recipe, target: TableTarget, given: Given, shared: RowsOfARun | None = None) -> SplitRows:
    """Read the data, and the rows that are evaluated on: given, named, or held out of the data.

    Returns:
        both, and the lines that say so.
    """
    dataset = read_data(recipe, target, recipe.data.train_path, given.data, shared=shared)
    header, paths = dataset.header().splitlines(), recipe.data.eval_path
    if given.eval_data is not None:
        held = read_data(recipe, target, None, given.eval_data, "eval_data", shared).rows
        return SplitRows(
            dataset.rows, {"": held}, [*header, f"evaluation: {len(held)} rows of eval_data"], dataset.report
        )
    if paths is not None:
        paths = [paths] if isinstance(paths, str) else paths
        files = {path: read_data(recipe, target, path, shared=shared).rows for path in paths}
        header += [f"evaluation: {len(part)} rows of {path}" for path, part in files.items()]
        return SplitRows(dataset.rows, files, header, dataset.report)
    chosen = set(held_out_rows(len(dataset.rows)))
    train, held = (
        dataset.rows.select(n for n in range(len(dataset.rows)) if (n in chosen) == wanted) for wanted in (False, True)
    )
    return SplitRows(train, {"": held}, [*header, held_out_line(len(held))], dataset.report)


def from_target(
    recipe: Recipe,
    target: RunningTarget,
    aux_layer_ids,
    accelerator,
    say,
    given: Given | None = None,
    budget: RunBudget | None = None,
    check: Callable[[OnlineSource], object] | None = None,
) -> RunData:
    """Features that the loaded target makes: in the step, or once into memory or a store.

    With a budget and features that are kept, rows to train on are taken as long as their share of the time lasts; the
    others are counted and named. Rows to evaluate on come first, all of them.

    Args:
        budget: of the run.
        check: called with the training rows before features of them are kept.
    """
    shared = RowsOfARun(Path(recipe.training.output_dir), accelerator)
    split = split_rows(recipe, target, given or Given(), shared)
    for line in split.header:
        say(line)
    check_evaluations(recipe, any(split.held_out.values()))  # before features are made
    if check is not None and recipe.data.cache_features != "none":
        check(OnlineSource(target, split.train, aux_layer_ids))

    def make(part: Sequence, name: str, parts: Iterable[list[int]] | None = None):
        return _cached(recipe, target, part, aux_layer_ids, accelerator, name, parts)

    if len(split.held_out) > 1:
        named = enumerate(split.held_out.items(), 1)
        held_out = EvaluationFiles({path: make(part, f"evaluation features {n}") for n, (path, part) in named})
    else:
        (held,) = split.held_out.values()
        held_out = make(held, "evaluation features") if held else None
    rows, header, fingerprint = split.train, split.header, dataset_hash(split.train)
    if budget is None or recipe.data.cache_features == "none":
        train = make(rows, "features")
    else:
        taken: list[int] = []
        train = make(rows, "features", _noting(budget.parts(row_lengths(rows), fingerprint), taken))
        if len(train.lengths) != len(taken):  # the store of a former start with more time
            kept, chosen = train.reader.indices, set(taken)
            train = SelectedSource(train, [place for place, number in enumerate(kept) if number in chosen])
        rows, header = _taken_rows(split, sorted(taken), budget)
    return RunData(train, held_out, count_supervised(rows, target.vocab_size), header, fingerprint, split.report)


def _noting(parts: Iterable[list[int]], taken: list[int]) -> Iterator[list[int]]:
    """The parts, their numbers put into ``taken`` as they go by."""
    for part in parts:
        taken += part
        yield part


def _taken_rows(split: SplitRows, taken: list[int], budget: RunBudget) -> tuple[Sequence, list[str]]:
    """The rows that the budget had time for, and the header with the others counted as left out."""
    chosen, report = set(taken), split.report
    lines = len(report.header().splitlines())
    others = [row for number, row in enumerate(split.train) if number not in chosen]
    for row in others:
        report.drop("out_of_time", f"row {row.id!r}")
        report.rows -= 1
        report.tokens -= len(row.input_ids)
        report.supervised -= sum(row.supervised)
    budget.write_left_out([row.id for row in others])
    return chosen_rows(split.train, taken), [*report.header().splitlines(), *split.header[lines:]]


def _cached(
    recipe: Recipe, target, rows, aux_layer_ids, accelerator, name: str, parts: Iterable[list[int]] | None = None
) -> FeatureSource:
    """A source of rows, as ``data.cache_features`` says; with ``parts`` of those that are in one."""
    if recipe.data.cache_features == "none":
        return OnlineSource(target, rows, aux_layer_ids)
    tokens = sum(row_lengths(rows))
    bar = ProgressBar(tokens, name, unit="tokens") if accelerator.is_main_process else None
    if recipe.data.cache_features == "memory":
        return MemorySource.from_target(
            target, rows, aux_layer_ids, dtype=target.dtype,
            progress=None if bar is None else lambda done, total: bar.reach(done), parts=parts,
        )  # fmt: skip
    folder = Path(recipe.training.output_dir) / name.replace(" ", "_")

    def begin(stored: int, missing: int) -> None:
        if bar is not None:
            bar.resize(max(missing, 1))

    back_end = TargetBackEnd(target, aux_layer_ids)
    with back_end.together():
        dump(
            back_end, rows, folder, dtype=back_end.contract.dtype if target.dtype == torch.float32 else "bfloat16",
            worker=(accelerator.process_index, accelerator.num_processes), shard_bytes=CACHE_SHARD_BYTES,
            begin=begin, progress=None if bar is None else bar.advance, parts=parts,
        )  # fmt: skip
    accelerator.wait_for_everyone()
    return OfflineSource(folder, FeatureContract.from_target(target, aux_layer_ids))


def open_stored(recipe: Recipe, tables, aux_layer_ids) -> StoreReader | ForeignReader:
    """What ``data.offline_data_path`` names: a feature store, or a dump of another tool as it is.

    Raises:
        FeatureError: a dump that leaves open what no key says, or a store that is damaged.
    """
    data = recipe.data
    said = recipe.eagle.aux_layer_ids is not None or recipe.model.draft_init is not None
    states = data.offline_final_states
    return open_reader(
        data.offline_data_path, tables, aux_layer_ids if said else None,
        final_is_normed=None if states is None else states == "normed",
        all_supervised=data.offline_all_supervised, answers=RECIPE_KEYS,
    )  # fmt: skip


def from_store(recipe: Recipe, tables, aux_layer_ids, say) -> RunData:
    """Features read from ``data.offline_data_path``, without running the target.

    Raises:
        FeatureError: the store is damaged or was made by another target, tokenizer or template; or the dump of another
            tool leaves something open.
    """
    reader = open_stored(recipe, tables, aux_layer_ids)
    identity = tables.identity()
    expected = FeatureContract.from_identity(identity, aux_layer_ids)
    kept, report = rows_to_use(reader, recipe.data)
    chosen = set(held_out_rows(len(kept)))
    parts = [[n for place, n in enumerate(kept) if (place in chosen) == held] for held in (False, True)]

    def source(numbers: list[int]) -> OfflineSource:
        rows = Rows(reader, numbers, recipe.data.max_length)
        return OfflineSource(rows, expected, final_norm=tables.final_norm, head=tables.head)

    kind = f", a dump of {reader.format}" if isinstance(reader, ForeignReader) else ""
    header = [
        *report.header().splitlines(),
        f"features: {recipe.data.offline_data_path} ({reader.contract.dtype}{kind})",
        held_out_line(len(parts[1])),
    ]
    if (made := reader.contract.end_token_ids) not in (None, tables.end_token_ids):
        header.append(
            f"features: their answers end with the tokens {list(made)}, today's target stops at "
            f"{list(tables.end_token_ids)}; what they supervise is kept"
        )
    for line in header:
        say(line)
    if not report.supervised:
        raise DataError(f"{recipe.data.offline_data_path} holds no supervised token, there is nothing to train on")
    train = source(parts[0])
    train.check_teacher(tables.head, final_norm=tables.final_norm)
    counts = count_supervised((train.reader.tokens(n) for n in range(len(parts[0]))), identity["vocab_size"])
    fingerprint = hashlib.sha256(f"{reader.dataset_hash} {parts[0]}".encode()).hexdigest()
    return RunData(train, source(parts[1]) if parts[1] else None, counts, header, fingerprint, report)


def length_spread(lengths: Sequence[int], most_bins: int = 24) -> dict[str, list[int]]:
    """How long rows are, in few numbers.

    Args:
        lengths: tokens of each row, at least one.
        most_bins: of the histogram.

    Returns:
        ``quantiles`` (least, 5 %, 25 %, median, 75 %, 95 %, most), ``edges`` [bins + 1], ``counts`` [bins]: rows with
        ``edges[i] <= length < edges[i + 1]``.
    """
    ordered = sorted(lengths)
    quantiles = [ordered[round(share * (len(ordered) - 1))] for share in (0, 0.05, 0.25, 0.5, 0.75, 0.95, 1)]
    width = max(1, -(-(ordered[-1] - ordered[0] + 1) // most_bins))
    edges = list(range(ordered[0], ordered[-1] + 1 + width, width))
    counts = [0] * (len(edges) - 1)
    for length in ordered:
        counts[(length - ordered[0]) // width] += 1
    return {"quantiles": quantiles, "edges": edges, "counts": counts}


def held_out_line(count: int) -> str:
    """What the head of a run says of its evaluation rows."""
    if not count:
        return f"evaluation: none (fewer than {HELD_OUT_FROM_ROWS} rows, and data.eval_path is null)"
    return f"evaluation: {count} of these rows are held out of training (data.eval_path names others)"
