"""The manifest of a store: which shards are whole, what they hold, and under which contract."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from modelopt_eagle.errors import FeatureError
from modelopt_eagle.features.batch import FeatureContract
from modelopt_eagle.features.store.files import write_durably

FORMAT = "modelopt_eagle.features"
SHARDS_PER_MANIFEST = 512
"""A worker begins another manifest file after so many shards: rewriting one stays cheap next to writing a shard."""

_MANIFEST_NAME = re.compile(r"manifest(-\d+-of-\d+)?(\.\d+)?\.json")


@dataclass
class ShardEntry:
    """What the manifest says of one shard.

    Attributes:
        file: name in the folder.
        bytes, sha256: size and checksum of the file.
        row_ids, indices, categories, tokens, supervised: one value a row: conversation id, place in the data set,
            category, number of tokens and of supervised tokens.
        shared: tokens whose aux states another row of the shard gives.
    """

    file: str
    bytes: int
    sha256: str
    row_ids: list[str]
    indices: list[int]
    categories: list[str]
    tokens: list[int]
    supervised: list[int]
    shared: int = 0


@dataclass
class Manifest:
    """One manifest file.

    Attributes:
        contract: how the features were made.
        dataset_hash: hash of ids and masks of the whole data set, so that a dump never goes on with other data.
        dataset_rows: rows of the whole data set, over all workers.
        shards: finished shards.
    """

    contract: FeatureContract
    dataset_hash: str
    dataset_rows: int
    shards: list[ShardEntry] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write the file durably."""
        values = {
            "format": FORMAT,
            "contract": self.contract.to_dict(),
            "dataset_hash": self.dataset_hash,
            "dataset_rows": self.dataset_rows,
            "shards": [vars(shard) for shard in self.shards],
        }
        write_durably(path, json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode())

    @classmethod
    def load(cls, path: Path) -> Manifest:
        """Read one manifest file.

        Raises:
            FeatureError: not a manifest, or one of another format version.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(values, dict) or values.get("format") != FORMAT:
                raise FeatureError(f"{path} is not a manifest of a feature store (format {FORMAT!r} expected)")
            return cls(
                contract=FeatureContract.from_dict(values["contract"]),
                dataset_hash=values["dataset_hash"],
                dataset_rows=values["dataset_rows"],
                shards=[ShardEntry(**shard) for shard in values["shards"]],
            )
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise FeatureError(
                f"{path} cannot be read as a manifest ({error}); restore it, or dump into a new folder"
            ) from error


def manifest_name(worker: tuple[int, int], part: int) -> str:
    """File name of a worker's manifest; ``manifest.json`` for the only worker's first."""
    index, count = worker
    name = "manifest" if count == 1 else f"manifest-{index}-of-{count}"
    return f"{name}.json" if part == 0 else f"{name}.{part}.json"


def is_store(folder: Path) -> bool:
    """Whether a folder is a feature store of ours, begun at least."""
    return folder.is_dir() and any(folder.glob("manifest*.json"))


def foreign_format(folder: Path) -> str | None:
    """Name of the tool that made a foreign dump, or None."""
    from modelopt_eagle.features.foreign.files import find_format

    try:
        return find_format(folder)[0]
    except FeatureError:
        return None


def read_manifests(folder: Path) -> dict[str, Manifest]:
    """All manifests of a folder by file name.

    Raises:
        FeatureError: the folder or its manifests are missing, or they disagree in contract or data set.
    """
    if not folder.is_dir():
        raise FeatureError(f"feature store {folder} does not exist; make it with modelopt-eagle dump")
    names = sorted(path.name for path in folder.iterdir() if _MANIFEST_NAME.fullmatch(path.name))
    if not names:
        if kind := foreign_format(folder):
            raise FeatureError(
                f"{folder} is a dump of {kind}: turn it into a store by `modelopt-eagle features import {folder} "
                "--model NAME --output-dir STORE --aux-layers … --final-states …`"
            )
        raise FeatureError(
            f"{folder} holds no manifest*.json: it is not a feature store, or its dump stopped before the first shard; "
            "run the dump again"
        )
    manifests = {name: Manifest.load(folder / name) for name in names}
    first_name, first = next(iter(manifests.items()))
    for name, manifest in manifests.items():
        manifest.contract.require(first.contract, f"{folder / name} (beside {first_name})", ignore=())
        if manifest.dataset_hash != first.dataset_hash:
            raise FeatureError(f"{folder}: {first_name} and {name} were made from different data; use one folder each")
    return manifests
