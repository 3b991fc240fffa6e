"""The manifest of a store: which shards are whole, what they hold, and under which contract."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field, fields
from pathlib import Path

from modelopt_eagle.common.strict_json import parse_json
from modelopt_eagle.errors import FeatureError
from modelopt_eagle.features.batch import FeatureContract
from modelopt_eagle.features.store.files import write_durably

FORMAT = "modelopt_eagle.features"
SHARDS_PER_MANIFEST = 512
"""A worker begins another manifest file after so many shards: rewriting one stays cheap next to writing a shard."""

_SHARD_NAME = re.compile(r"features-\d+-of-\d+-\d{6,}\.safetensors")
"""Shards have bare names of this kind; a manifest that names anything else might reach outside of its folder."""
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

    @classmethod
    def from_dict(cls, values) -> ShardEntry:
        """Read what a manifest says of one shard.

        Args:
            values: the parsed JSON, whatever it is.

        Returns:
            the entry.

        Raises:
            ValueError: says what is not as this writer writes it.
        """
        names = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or set(values) | {"shared"} != names:
            raise ValueError(f"a shard with the fields {sorted(names)} expected")
        file = values["file"]
        if not isinstance(file, str) or not _SHARD_NAME.fullmatch(file):
            raise ValueError(f"a shard's file name such as features-0-of-1-000000.safetensors expected, {file!r} found")
        if not isinstance(values["sha256"], str) or not re.fullmatch("[0-9a-f]{64}", values["sha256"]):
            raise ValueError(f"{file}: sha256 of 64 hexadecimal digits expected")
        for name in ("bytes", "shared"):
            if not _is_count(values.get(name, 0)):
                raise ValueError(f"{file}: {name} must be a number of at least 0")
        rows = values["row_ids"]
        for name, fits in (
            ("row_ids", lambda value: isinstance(value, str)),
            ("categories", lambda value: isinstance(value, str)),
            ("indices", _is_count),
            ("tokens", _is_count),
            ("supervised", _is_count),
        ):
            column = values[name]
            if not isinstance(column, list) or not isinstance(rows, list) or len(column) != len(rows):
                raise ValueError(f"{file}: {name} must be a list with a value for each row")
            if bad := [value for value in column if not fits(value)]:
                raise ValueError(f"{file}: {name} holds {bad[0]!r}")
        entry = cls(**values)
        if len(set(entry.indices)) != len(entry.indices):
            raise ValueError(f"{file}: indices name a row twice")
        if any(own > tokens for own, tokens in zip(entry.supervised, entry.tokens, strict=True)):
            raise ValueError(f"{file}: more supervised tokens than tokens in a row")
        if entry.shared > sum(entry.tokens):
            raise ValueError(f"{file}: more shared tokens than tokens")
        return entry


def _is_count(value) -> bool:
    return type(value) is int and 0 <= value < 2**62


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
        write_durably(path, _text(values | {CHECKSUM: _checksum(values)}))

    @classmethod
    def load(cls, path: Path) -> Manifest:
        """Read one manifest file.

        Returns:
            the manifest.

        Raises:
            FeatureError: not a manifest, a damaged one, or one of another format version.
        """
        try:
            values = parse_json(path.read_bytes())
            if not isinstance(values, dict) or values.get("format") != FORMAT:
                raise FeatureError(f"{path} is not a manifest of a feature store (format {FORMAT!r} expected)")
            contract = FeatureContract.from_dict(values.get("contract"))  # a newer format may have other checksums
            return cls._from_dict(values, contract)
        except (OSError, ValueError) as error:
            if isinstance(error, FeatureError):
                raise FeatureError(str(error) if str(path) in str(error) else f"{path}: {error}") from error
            raise FeatureError(
                f"{path} cannot be read as a manifest ({error}); restore it, or dump into a new folder"
            ) from error

    @classmethod
    def _from_dict(cls, values: dict, contract: FeatureContract) -> Manifest:
        """Raises ValueError for what is not as :meth:`save` writes it; the checksum came later than the format."""
        found = values.pop(CHECKSUM, None)
        if found is not None and found != _checksum(values):
            raise ValueError("its checksum differs: it was altered after it was written")
        if set(values) != {"format", "contract", "dataset_hash", "dataset_rows", "shards"}:
            raise ValueError(f"fields {sorted(values)} found")
        if not isinstance(values["dataset_hash"], str) or not _is_count(values["dataset_rows"]):
            raise ValueError("dataset_hash must be a text, dataset_rows a number")
        if not isinstance(values["shards"], list):
            raise ValueError("shards must be a list")
        return cls(
            contract=contract,
            dataset_hash=values["dataset_hash"],
            dataset_rows=values["dataset_rows"],
            shards=[ShardEntry.from_dict(shard) for shard in values["shards"]],
        )


CHECKSUM = "checksum"
"""Field of a manifest: SHA-256 of the text of all others, in their order."""


def _text(values: dict) -> bytes:
    """A manifest's JSON; half characters, which UTF-8 has not, are escaped."""
    text = json.dumps(values, ensure_ascii=False, separators=(",", ":"))
    try:
        return text.encode()
    except UnicodeEncodeError:
        return json.dumps(values, separators=(",", ":")).encode()


def _checksum(values: dict) -> str:
    return hashlib.sha256(_text(values)).hexdigest()


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
