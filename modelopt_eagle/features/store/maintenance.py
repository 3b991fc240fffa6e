"""Look at a store, check every byte of it, join the manifests of its workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock

from modelopt_eagle.common.text import visible
from modelopt_eagle.errors import FeatureError
from modelopt_eagle.features.batch import FeatureContract
from modelopt_eagle.features.store.codec import aux_bytes
from modelopt_eagle.features.store.files import take_lock
from modelopt_eagle.features.store.manifest import Manifest, ShardEntry, manifest_name, read_manifests
from modelopt_eagle.features.store.shard import open_shard


@dataclass
class StoreSummary:
    """What a store holds.

    Attributes:
        contract: how the features were made.
        rows, dataset_rows: rows finished, and rows of the data set that the dump was started with.
        tokens, supervised: over all rows.
        bytes: size of all shards.
        shared, saved_bytes: tokens whose aux states another row of the shard gives, and the bytes that this saves.
        shards, manifests: number of files.
        length_histogram: rows by number of tokens, ``(least, most, rows)`` in powers of two.
        categories: rows by category.
    """

    contract: FeatureContract
    rows: int
    dataset_rows: int
    tokens: int
    supervised: int
    bytes: int
    shared: int
    saved_bytes: int
    shards: int
    manifests: int
    length_histogram: list[tuple[int, int, int]]
    categories: dict[str, int]

    def lines(self) -> list[str]:
        """The summary as text."""
        share = self.supervised / max(self.tokens, 1)
        coverage = self.rows / max(self.dataset_rows, 1)
        lines = [
            f"rows        {self.rows:,} of {self.dataset_rows:,} ({coverage:.1%} coverage)",
            f"tokens      {self.tokens:,}, {share:.1%} supervised",
            f"bytes       {self.bytes:,} in {self.shards} shards, {self.bytes / max(self.tokens, 1):,.0f} a token",
            f"prefixes    {self.shared:,} tokens ({self.shared / max(self.tokens, 1):.1%}) take the states of another "
            f"row: {self.saved_bytes:,} bytes saved ({self.saved_bytes / max(self.bytes + self.saved_bytes, 1):.1%})",
            f"manifests   {self.manifests}",
            "contract",
        ]
        lines += [f"  {name:<18} {value}" for name, value in self.contract.to_dict().items()]
        lines.append("lengths")
        most = max((count for _, _, count in self.length_histogram), default=1)
        for least, longest, count in self.length_histogram:
            lines.append(f"  {least:>7}-{longest:<7} {count:>8} {'#' * -(-40 * count // most)}")
        if set(self.categories) - {""}:
            lines.append("categories")
            lines += [f"  {name or '(none)':<18} {count:>8}" for name, count in sorted(self.categories.items())]
        return [visible(line) for line in lines]


def summarise(folder: str | Path) -> StoreSummary:
    """Read the manifests of a store and add up; no shard is opened.

    Returns:
        rows, tokens, bytes and lengths.

    Raises:
        FeatureError: no store, or manifests that disagree.
    """
    manifests = read_manifests(Path(folder))
    first = next(iter(manifests.values()))
    named = {shard.file: shard for manifest in manifests.values() for shard in manifest.shards}
    shards = list(named.values())  # a merge that was killed leaves entries twice
    lengths = [tokens for shard in shards for tokens in shard.tokens]
    shared = sum(shard.shared for shard in shards)
    bins = Counter(max(length, 1).bit_length() for length in lengths)
    return StoreSummary(
        contract=first.contract,
        rows=len(lengths),
        dataset_rows=first.dataset_rows,
        tokens=sum(lengths),
        supervised=sum(count for shard in shards for count in shard.supervised),
        bytes=sum(shard.bytes for shard in shards),
        shared=shared,
        saved_bytes=shared * aux_bytes(first.contract),
        shards=len(shards),
        manifests=len(manifests),
        length_histogram=[(2 ** (bits - 1), 2**bits - 1, bins[bits]) for bits in sorted(bins)],
        categories=dict(Counter(name for shard in shards for name in shard.categories)),
    )


@dataclass
class VerifyReport:
    """Outcome of :func:`verify`: shards looked at, and one message for each bad one."""

    shards: int = 0
    rows: int = 0
    bad: dict[str, str] = field(default_factory=dict)
    dropped_rows: int = 0


def verify(
    folder: str | Path, *, drop_bad: bool = False, progress: Callable[[int, int], None] | None = None
) -> VerifyReport:
    """Read every byte of a store: sizes, checksums, rows, contract, and NaN or infinity at every position.

    Args:
        folder: the store.
        drop_bad: delete bad shards and their entries, so that the next dump makes their rows again.
        progress: called with (bytes read, bytes in all).

    Returns:
        what was read, and every fault with its place.

    Raises:
        FeatureError: no store, manifests that disagree, or a dump is running while ``drop_bad`` is asked for.
    """
    folder = Path(folder)
    manifests = read_manifests(folder)
    locks = _lock_all(folder) if drop_bad else []
    try:
        report = VerifyReport()
        named = {shard.file: shard.bytes for manifest in manifests.values() for shard in manifest.shards}
        total, done = sum(named.values()), 0
        seen: dict[int, str] = {}
        for name, manifest in manifests.items():
            good = []
            for entry in manifest.shards:
                if entry.file not in named:  # a merge that was killed: an earlier manifest names it, too
                    good += [entry] if entry.file not in report.bad else []
                    continue
                del named[entry.file]
                if problem := _problem(folder, entry, manifest, seen):
                    report.bad[entry.file] = problem
                    report.dropped_rows += len(entry.row_ids) if drop_bad else 0
                else:
                    good.append(entry)
                    seen.update(dict.fromkeys(entry.indices, entry.file))
                report.shards += 1
                report.rows += len(entry.row_ids)
                done += entry.bytes
                if progress is not None:
                    progress(done, total)
            if drop_bad and len(good) < len(manifest.shards):
                bad = [entry for entry in manifest.shards if entry.file in report.bad]
                manifest.shards = good
                manifest.save(folder / name)
                for entry in bad:
                    (folder / entry.file).unlink(missing_ok=True)
        return report
    finally:
        for lock in locks:
            lock.release()


def _problem(folder: Path, entry: ShardEntry, manifest: Manifest, seen: dict[int, str]) -> str | None:
    """What is wrong with a shard, or None."""
    if twice := [index for index in entry.indices if index in seen]:
        return f"shard {folder / entry.file} repeats {len(twice)} rows of {seen[twice[0]]}"
    try:
        open_shard(folder, entry, manifest.contract, checksum=True)
    except FeatureError as error:
        return str(error)
    return None


def merge(folder: str | Path) -> int:
    """Join the manifests of all workers into ``manifest.json``; returns the number of shards.

    The joined file is renamed into place before the others are deleted; a kill in between leaves entries twice, which
    readers count once.

    Raises:
        FeatureError: no store, manifests that disagree, or a worker still writes.
    """
    folder = Path(folder)
    read_manifests(folder)  # no lock files in a folder that is no store
    locks = _lock_all(folder)
    try:
        manifests = read_manifests(folder)
        first = next(iter(manifests.values()))
        entries = {entry.file: entry for manifest in manifests.values() for entry in manifest.shards}
        joined = Manifest(first.contract, first.dataset_hash, first.dataset_rows, [entries[f] for f in sorted(entries)])
        joined.save(folder / manifest_name((0, 1), 0))
        for name in manifests:
            if name != manifest_name((0, 1), 0):
                (folder / name).unlink()
        return len(entries)
    finally:
        for lock in locks:
            lock.release()


def _lock_all(folder: Path) -> list[FileLock]:
    """Locks of every worker that has written here."""
    names = {path.name for path in folder.glob(".lock-*-of-*")} | {".lock-0-of-1"}
    locks: list[FileLock] = []
    try:
        for name in sorted(names):
            locks.append(take_lock(folder / name, "writes into this store"))
    except FeatureError:
        for lock in locks:
            lock.release()
        raise
    return locks
