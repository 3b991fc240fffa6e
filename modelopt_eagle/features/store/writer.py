"""Write a store, shard by shard, so that a kill at any moment loses at most the shard being written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from modelopt_eagle.errors import FeatureError
from modelopt_eagle.features.batch import FORMAT_VERSION, FeatureContract, FeatureRow
from modelopt_eagle.features.store.codec import (
    AUX_TENSORS,
    check_dtype,
    decode_row,
    drop_prefix,
    encode_row,
    join_rows,
    restore,
    row_bytes,
)
from modelopt_eagle.features.store.files import TEMPORARY_PREFIX, refuse_other_workers, take_lock, write_durably
from modelopt_eagle.features.store.manifest import (
    SHARDS_PER_MANIFEST,
    Manifest,
    ShardEntry,
    foreign_format,
    is_store,
    manifest_name,
    read_manifests,
)
from modelopt_eagle.features.store.sharing import BLOCK, PrefixIndex, agreeing

SHARD_BYTES = 256 * 2**20


def dataset_hash(rows: Sequence) -> str:
    """Hash of ids, token ids, masks and images of all rows, in order.

    Args:
        rows: tokenised rows with ``id, input_ids, supervised``.
    """
    digest = hashlib.sha256()
    for row in rows:
        digest.update(f"{row.id}\0{len(row.input_ids)}\0".encode())
        digest.update(torch.as_tensor(row.input_ids, dtype=torch.int32).numpy().tobytes())
        digest.update(torch.as_tensor(row.supervised, dtype=torch.uint8).numpy().tobytes())
        if getattr(row, "images", None) is not None:
            digest.update(row.images.digest.encode())
    return digest.hexdigest()


class StoreWriter:
    """One worker's writer; use it as a context manager.

    Args:
        folder: the store, made if it does not exist.
        contract: how the rows are made; ``contract.dtype`` is the storage dtype. Its format version does not count: a
            new store has the newest.
        dataset_hash: see :func:`dataset_hash`.
        dataset_rows: rows of the whole data set.
        worker: (i, n), this worker's share ``--shard i/n``.
        shard_bytes: a shard is closed when it holds so many bytes.
        share_prefixes: store the states of a prefix that rows of a shard have in common once. A store that was begun
            in format version 1 goes on without.

    Attributes:
        done: places in the data set that any worker has finished, to be left out.

    Raises:
        FeatureError: another process writes this share, or the folder holds rows of another contract or data set.
    """

    def __init__(
        self,
        folder: str | Path,
        contract: FeatureContract,
        *,
        dataset_hash: str,
        dataset_rows: int,
        worker: tuple[int, int] = (0, 1),
        shard_bytes: int = SHARD_BYTES,
        share_prefixes: bool = True,
    ):
        index, count = worker
        if not 0 <= index < count:
            raise FeatureError(f"shard {index}/{count} does not exist: give i/n with 0 <= i < n")
        check_dtype(contract.dtype)
        self.folder = Path(folder)
        if not is_store(self.folder) and (kind := foreign_format(self.folder)):
            raise FeatureError(f"{self.folder} holds a dump of {kind}: write the store into a folder of its own")
        self._make_folder()
        self._worker, self._prefix = worker, f"features-{index}-of-{count}-"
        self._lock = take_lock(self.folder / f".lock-{index}-of-{count}", f"writes shard {index}/{count} here")
        try:
            refuse_other_workers(self.folder, count)
            self._open(Manifest(contract, dataset_hash, dataset_rows))
        except BaseException:
            self._lock.release()
            raise
        self._shard_bytes = shard_bytes
        self._share = share_prefixes and self._manifest.contract.format_version > 1
        self._begin_shard()

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FeatureError(
                f"cannot make the folder {self.folder}: {error.strerror}; name one that can be written"
            ) from error

    def _begin_shard(self) -> None:
        self._pending: list[tuple[int, FeatureRow, dict[str, Tensor]]] = []
        self._pending_bytes = 0
        self._prefixes = PrefixIndex()

    def _open(self, fresh: Manifest) -> None:
        """Find what is finished, remove what a killed run left half-made, state the contract on the disk."""
        self._part, self._next = 0, 0
        self.done: set[int] = set()
        known: set[str] = set()
        found = read_manifests(self.folder) if is_store(self.folder) else {}
        versions = [manifest.contract.format_version for manifest in found.values()]
        contract = replace(fresh.contract, format_version=min(versions, default=FORMAT_VERSION))
        self._manifest = Manifest(contract, fresh.dataset_hash, fresh.dataset_rows)
        for name, manifest in found.items():
            manifest.contract.require(fresh.contract, str(self.folder / name), ignore=())
            if manifest.dataset_hash != fresh.dataset_hash:
                raise FeatureError(
                    f"{self.folder} was begun with other data ({manifest.dataset_rows} rows, hash "
                    f"{manifest.dataset_hash[:12]}; now {fresh.dataset_rows} rows, hash {fresh.dataset_hash[:12]}): "
                    "dump into a new folder, or give the same input file and --max-length"
                )
            for shard in manifest.shards:
                self.done.update(shard.indices)
                known.add(shard.file)
        while manifest_name(self._worker, self._part) in found:
            self._manifest = found[manifest_name(self._worker, self._part)]
            self._part += 1
        self._part = max(0, self._part - 1)
        manifest_file = manifest_name(self._worker, self._part)
        for path in list(self.folder.iterdir()):
            name = path.name.removeprefix(TEMPORARY_PREFIX)
            half_written = path.name != name and (name.startswith(self._prefix) or name == manifest_file)
            unnamed = path.name.startswith(self._prefix) and path.name not in known
            if (half_written or unnamed) and (path.is_symlink() or not path.is_dir()):
                path.unlink()
        numbers = [int(name[len(self._prefix) :].split(".")[0]) for name in known if name.startswith(self._prefix)]
        self._next = max(numbers, default=-1) + 1
        if not self._manifest.shards:
            self._manifest.save(self.folder / manifest_file)

    def add(self, index: int, row: FeatureRow) -> None:
        """Take one row; it is on the disk after the shard is full, or at :meth:`close`.

        Args:
            index: place of the row in the data set.
            row: its features.

        Raises:
            FeatureError: a row already stored, one that breaks the contract, or a disk that is full.
        """
        self._take(index, row)
        self._flush_if_full()

    def add_and_read(self, index: int, row: FeatureRow) -> FeatureRow:
        """:meth:`add`; returns the row as the store gives it, in its dtype and with the prefix of an earlier row.

        Raises:
            FeatureError: as :meth:`add`.
        """
        encoded = self._take(index, row)
        whole = {name: part for name, part in encoded.items() if name != "prefix"}
        whole |= self._pending_aux(len(self._pending) - 1, len(row))
        self._flush_if_full()
        return decode_row(join_rows([whole]), 0, row.row_id, row.category)

    def _take(self, index: int, row: FeatureRow) -> dict[str, Tensor]:
        """Encode a row and keep it for the next shard."""
        if index in self.done:
            raise FeatureError(f"row {index} ({row.row_id!r}) is already stored in {self.folder}")
        encoded = self._shared(encode_row(row, self._manifest.contract))
        self.done.add(index)
        self._pending.append((index, row, encoded))
        self._pending_bytes += row_bytes(encoded)
        return encoded

    def _flush_if_full(self) -> None:
        if self._pending_bytes >= self._shard_bytes:
            self.flush()

    def _shared(self, encoded: dict[str, Tensor]) -> dict[str, Tensor]:
        """An encoded row without the aux states that an earlier row of this shard gives it."""
        if not self._share:
            return encoded
        number, length = self._prefixes.add(encoded["input_ids"])
        if not length:
            return encoded
        contract = self._manifest.contract
        ours = {name: part[:length] for name, part in encoded.items() if name in AUX_TENSORS}
        theirs = self._pending_aux(number, length)
        states = [restore(aux["aux_hidden"], aux.get("aux_scale")) for aux in (ours, theirs)]  # [n,A·Ht] each
        length = agreeing(*states, len(contract.aux_layer_ids), contract.dtype)
        return drop_prefix(encoded, number, length) if length >= BLOCK else encoded

    def _pending_aux(self, number: int, length: int) -> dict[str, Tensor]:
        """The first aux states of a pending row as they are stored; some may be an earlier row's."""
        parts = []
        while length > 0:
            encoded = self._pending[number][2]
            number, begin = encoded["prefix"].tolist() if "prefix" in encoded else (-1, 0)
            if length > begin:
                parts.append({name: encoded[name][: length - begin] for name in AUX_TENSORS if name in encoded})
                length = begin
        return {name: torch.cat([part[name] for part in parts[::-1]]) for name in parts[0]}

    @property
    def pending(self) -> int:
        """Rows taken that are not on the disk yet."""
        return len(self._pending)

    def flush(self) -> None:
        """Write the pending rows as one shard, then the manifest that names it."""
        if not self._pending:
            return
        manifest = self._manifest
        meta = {"contract": json.dumps(manifest.contract.to_dict())}  # of several keys the order would be random
        content = save(join_rows([encoded for _, _, encoded in self._pending]), metadata=meta)
        name = f"{self._prefix}{self._next:06d}.safetensors"
        write_durably(self.folder / name, content)
        if len(manifest.shards) >= SHARDS_PER_MANIFEST:
            manifest = Manifest(manifest.contract, manifest.dataset_hash, manifest.dataset_rows)
            self._manifest, self._part = manifest, self._part + 1
        manifest.shards.append(
            ShardEntry(
                file=name,
                bytes=len(content),
                sha256=hashlib.sha256(content).hexdigest(),
                row_ids=[row.row_id for _, row, _ in self._pending],
                indices=[index for index, _, _ in self._pending],
                categories=[row.category for _, row, _ in self._pending],
                tokens=[len(row) for _, row, _ in self._pending],
                supervised=[int(row.supervised.sum()) for _, row, _ in self._pending],
                shared=sum(int(encoded["prefix"][1]) for _, _, encoded in self._pending if "prefix" in encoded),
            )
        )
        manifest.save(self.folder / manifest_name(self._worker, self._part))
        self._next += 1
        self._begin_shard()

    def close(self) -> None:
        """Write what is pending and let go of the share."""
        try:
            self.flush()
        finally:
            self._lock.release()

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *exception) -> None:
        self.close()
