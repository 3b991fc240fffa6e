"""Read rows of a store in any order, while another process may still append to it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from modelopt_eagle.errors import FeatureError
from modelopt_eagle.features.batch import FeatureContract, FeatureRow
from modelopt_eagle.features.store.codec import decode_row
from modelopt_eagle.features.store.manifest import ShardEntry, read_manifests
from modelopt_eagle.features.store.shard import check_size, open_shard

MAPPED_SHARDS = 1024
"""Shards mapped at a time; the system allows some 65,000 mappings a process."""


class StoreReader:
    """Rows of a store, in the order of the data set that it was made from.

    Args:
        folder: the store.
        verify: ``"open"`` reads every shard once and compares checksums before anything else happens, several shards
            at a time; ``"read"`` does so for each shard when its first row is read (for stores of terabytes). Missing
            and cut shards are found at open in both.

    Attributes:
        contract: how the features were made.
        dataset_hash, dataset_rows: of the whole data set; ``len(reader) < dataset_rows`` while a dump goes on.
        row_ids, indices, categories, lengths, supervised: one value a row.
        fills: ``row`` can write states into given places.

    Raises:
        FeatureError: no store, or one whose shards are cut, altered, not finite, or hold a row twice.
    """

    fills = True

    def __init__(self, folder: str | Path, verify: str = "open"):
        if verify not in ("open", "read"):
            raise FeatureError(f"verify={verify!r} is not known; choose 'open' or 'read'")
        self.folder, self._verify = Path(folder), verify
        self._mapped: OrderedDict[str, dict[str, Tensor]] = OrderedDict()
        self._checked: set[str] = set()
        self._lock = threading.Lock()
        self.refresh()

    def refresh(self) -> int:
        """Take in what other processes have appended since; returns the number of rows.

        Raises:
            FeatureError: as at open.
        """
        manifests = list(read_manifests(self.folder).values())
        self.contract: FeatureContract = manifests[0].contract
        self.dataset_hash, self.dataset_rows = manifests[0].dataset_hash, manifests[0].dataset_rows
        entries = {entry.file: entry for manifest in manifests for entry in manifest.shards}
        self.shards: list[ShardEntry] = [entries[file] for file in sorted(entries)]
        places: dict[int, tuple[int, int]] = {}
        for number, entry in enumerate(self.shards):
            check_size(self.folder, entry)
            for row, index in enumerate(entry.indices):
                if index in places:
                    first = self.shards[places[index][0]].file
                    raise FeatureError(
                        f"{self.folder}: row {entry.row_ids[row]!r} is in {first} and in {entry.file}; workers must "
                        "all use the same n in --shard i/n: dump again into a new folder"
                    )
                places[index] = (number, row)
        self.indices = sorted(places)
        self._places = [places[index] for index in self.indices]
        self.row_ids = [self.shards[s].row_ids[r] for s, r in self._places]
        self.categories = [self.shards[s].categories[r] for s, r in self._places]
        self.lengths = [self.shards[s].tokens[r] for s, r in self._places]
        self.supervised = [self.shards[s].supervised[r] for s, r in self._places]
        if self._verify == "open":
            unread = [entry for entry in self.shards if entry.file not in self._checked]
            with ThreadPoolExecutor(max_workers=8) as pool:
                for _ in pool.map(self._open, unread):
                    pass
        return len(self)

    def __len__(self) -> int:
        return len(self._places)

    def _open(self, entry: ShardEntry) -> dict[str, Tensor]:
        """The shard's tensors, checked at their first use."""
        with self._lock:
            if entry.file in self._mapped:
                self._mapped.move_to_end(entry.file)
                return self._mapped[entry.file]
            checksum = entry.file not in self._checked
        shard = open_shard(self.folder, entry, self.contract, checksum)
        with self._lock:
            self._checked.add(entry.file)
            self._mapped[entry.file] = shard
            while len(self._mapped) > MAPPED_SHARDS:
                self._mapped.popitem(last=False)
        return shard

    def row(self, number: int, aux_out: Tensor | None = None, final_out: Tensor | None = None) -> FeatureRow:
        """Row ``number`` of this store (not of the data set: see ``indices``).

        Args:
            number: from 0 to ``len(reader) - 1``.
            aux_out, final_out: [s, A·Ht] and [s, Ht] of any floating dtype, to be filled with the states; see
                :func:`~modelopt_eagle.features.store.codec.decode_row`.

        Raises:
            FeatureError: its shard is found to be bad at this first read.
        """
        shard_number, row = self._places[number]
        entry = self.shards[shard_number]
        return decode_row(self._open(entry), row, entry.row_ids[row], entry.categories[row], aux_out, final_out)

    def tokens(self, number: int) -> tuple[Tensor, Tensor]:
        """Token ids [s] int32 and supervised [s] bool of a row, without its states.

        Raises:
            FeatureError: as :meth:`row`.
        """
        shard_number, row = self._places[number]
        shard = self._open(self.shards[shard_number])
        start, stop = shard["row_offsets"][row : row + 2].tolist()
        return shard["input_ids"][start:stop], shard["supervised"][start:stop].bool()
