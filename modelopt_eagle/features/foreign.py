"""Read hidden states that other tools have dumped, as they lie on the disk.

====================  =============================================================================================
format                what a folder holds
====================  =============================================================================================
Model-Optimizer       ``ID.pt`` a conversation: ``input_ids [s]``, ``aux_hidden_states [s, A*Ht]``,
                      ``hidden_states [s, Ht]``; newer ones also ``loss_mask [s]`` and ``hidden_states_prenorm``
SpecForge             ``rows_A-B/data_N.ckpt`` (or ``.ckpt.gz``): ``input_ids [s]``, ``loss_mask [s]``,
                      ``aux_hidden_state [1, s, A*Ht]``, ``hidden_state [1, s, Ht]``
speculators           ``hidden_states/hs_N.safetensors``: ``hidden_states [s, A+1, Ht]``, ``token_ids [s]``, beside a
                      ``datasets`` folder with ``input_ids`` and ``loss_mask``; older ones ``data_N.pt`` with a list
                      ``hidden_states`` of A+1 tensors
====================  =============================================================================================

Files are unpickled with ``weights_only=True``: they cannot run code.
"""

from __future__ import annotations

import gzip
import io
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from modelopt_eagle.errors import FeatureError, require_extra
from modelopt_eagle.features.batch import FeatureContract, FeatureRow
from modelopt_eagle.features.store.shard import map_safetensors


@dataclass
class _Raw:
    """One file's tensors in our names; ``final_is_normed`` is None where the file does not say it."""

    input_ids: torch.Tensor
    aux_hidden: torch.Tensor
    final_hidden: torch.Tensor
    supervised: torch.Tensor | None
    final_is_normed: bool | None


def _load(path: Path) -> dict:
    """The dictionary of a ``.pt``, ``.ckpt`` or ``.ckpt.gz`` file."""
    try:
        if path.suffix == ".gz":
            value = torch.load(io.BytesIO(gzip.decompress(path.read_bytes())), map_location="cpu", weights_only=True)
        else:
            value = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch, zipfile, pickle and gzip raise many kinds for a damaged file
        raise FeatureError(
            f"{path} cannot be read: {str(error).splitlines()[0]}; dump it again or delete it"
        ) from error
    if not isinstance(value, dict):
        raise FeatureError(f"{path} holds {type(value).__name__}, a dictionary of tensors expected")
    return value


def _take(values: dict, name: str, path: Path) -> torch.Tensor:
    if name not in values:
        raise FeatureError(f"{path} has no {name}; it has {sorted(values)}")
    return values[name]


def _read_model_optimizer(path: Path, masks) -> _Raw:
    values = _load(path)
    prenorm = values.get("hidden_states_prenorm")
    return _Raw(
        _take(values, "input_ids", path),
        _take(values, "aux_hidden_states", path),
        _take(values, "hidden_states", path),
        values.get("loss_mask"),
        None if prenorm is None else not bool(prenorm),
    )


def _read_specforge(path: Path, masks) -> _Raw:
    values = _load(path)
    aux, final = _take(values, "aux_hidden_state", path), _take(values, "hidden_state", path)
    return _Raw(
        _take(values, "input_ids", path), aux.flatten(0, -2), final.flatten(0, -2), values.get("loss_mask"), None
    )


def _read_speculators(path: Path, masks) -> _Raw:
    if path.suffix == ".pt":
        values = _load(path)
        states = torch.stack(list(_take(values, "hidden_states", path)), 1)  # [s,A+1,Ht]
        ids, mask = _take(values, "input_ids", path), values.get("loss_mask")
    else:
        values, _ = map_safetensors(path)
        states, ids = _take(values, "hidden_states", path), _take(values, "token_ids", path)
        mask = masks(_number(path), ids) if masks is not None else None
    if states.ndim != 3:
        raise FeatureError(f"{path}: hidden_states of shape [s, A+1, Ht] expected, {tuple(states.shape)} found")
    return _Raw(ids, states[:, :-1].flatten(1), states[:, -1], mask, None)


_FORMATS: dict[str, tuple[tuple[str, ...], Callable]] = {
    "speculators": (("hs_*.safetensors", "hidden_states/hs_*.safetensors", "data_*.pt"), _read_speculators),
    "SpecForge": (("data_*.ckpt", "data_*.ckpt.gz", "rows_*/data_*.ckpt", "rows_*/data_*.ckpt.gz"), _read_specforge),
    "Model-Optimizer": (("*.pt",), _read_model_optimizer),
}


def _number(path: Path) -> int:
    return int(re.findall(r"\d+", path.name)[0])


def _natural(path: Path) -> list:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", str(path))]


def find_format(folder: str | Path) -> tuple[str, list[Path]]:
    """Name of the format of a foreign dump, and its files in their natural order.

    Raises:
        FeatureError: not a folder, or none of the known layouts.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FeatureError(f"folder of features {folder} does not exist")
    for name, (patterns, _) in _FORMATS.items():
        if files := sorted({path for pattern in patterns for path in folder.glob(pattern)}, key=_natural):
            return name, files
    raise FeatureError(
        f"{folder} is neither a feature store (manifest.json) nor a dump of Model-Optimizer (*.pt), SpecForge "
        "(rows_*/data_*.ckpt[.gz]) or speculators (hs_*.safetensors)"
    )


class ForeignReader:
    """Rows of a foreign dump; give it to :class:`~modelopt_eagle.features.OfflineSource`.

    Args:
        folder: the dump.
        identity: of the target that made it (``Target.identity()`` or ``TargetTables.identity()``): the folder does
            not say it, so it is taken on trust; ``OfflineSource.check_teacher`` cannot find a wrong one here.
        aux_layer_ids: canonical ids (output of layer k, 0-based) of the states, in their order.
        final_is_normed: whether final states are post-norm; may be None if the files say it.
        all_supervised: take every token as supervised where the files hold no loss mask.

    Raises:
        FeatureError: an unknown layout, a damaged file, widths that do not fit the ids, or a question that the folder
            leaves open and the arguments do not answer.
    """

    def __init__(
        self,
        folder: str | Path,
        identity: dict,
        aux_layer_ids: Sequence[int] | None,
        *,
        final_is_normed: bool | None = None,
        all_supervised: bool = False,
    ):
        self.folder = Path(folder)
        self.format, self._files = find_format(folder)
        self._read, self._all_supervised = _FORMATS[self.format][1], all_supervised
        self._masks = _arrow_masks(self.folder) if self.format == "speculators" else None
        if aux_layer_ids is None:
            raise FeatureError(
                f"{folder} ({self.format}) does not say which layers it holds; give their ids, output of layer k "
                "counted from 0 (--aux-layers 1,n//2-1,n-4 is what most dumps hold)"
            )
        first = self._raw(0)
        normed = first.final_is_normed if final_is_normed is None else final_is_normed
        if normed is None:
            raise FeatureError(
                f"{folder} ({self.format}) does not say whether final states are before or after the final norm; "
                "say it (--final-states normed for dumps by transformers, SGLang, TensorRT-LLM; pre-norm for vLLM)"
            )
        if first.supervised is None and not all_supervised:
            raise FeatureError(
                f"{folder} ({self.format}) holds no loss mask; dump it with one, or take all tokens as supervised "
                "(--all-supervised)"
            )
        self.contract = replace(
            FeatureContract.from_identity(identity, aux_layer_ids, str(first.aux_hidden.dtype).removeprefix("torch.")),
            aux_layer_ids=tuple(aux_layer_ids),
            final_is_normed=normed,
        )
        with ThreadPoolExecutor(8) as pool:
            self.lengths = list(pool.map(lambda n: int(self._raw(n).input_ids.numel()), range(len(self._files))))

    def _raw(self, number: int) -> _Raw:
        return self._read(self._files[number], self._masks)

    def row(self, number: int) -> FeatureRow:
        """Row ``number``, without the target's predictions.

        Raises:
            FeatureError: names the file.
        """
        raw, path = self._raw(number), self._files[number]
        ids = raw.input_ids.flatten().long()  # [s]
        if raw.final_is_normed is not None and raw.final_is_normed != self.contract.final_is_normed:
            raise FeatureError(
                f"{path} is {'post' if raw.final_is_normed else 'pre'}-norm, unlike the folder's other files"
            )
        if raw.supervised is None and not self._all_supervised:
            raise FeatureError(f"{path} holds no loss mask, unlike the folder's first file")
        mask = torch.ones_like(ids) if raw.supervised is None else raw.supervised.flatten()
        row_id = str(path.relative_to(self.folder)).split(".")[0]
        row = FeatureRow(row_id, "", ids, mask.bool(), raw.aux_hidden, raw.final_hidden)
        try:
            row.validate(self.contract)
        except FeatureError as error:
            raise FeatureError(f"{path}: {error}") from error
        if not (torch.isfinite(row.aux_hidden).all() and torch.isfinite(row.final_hidden).all()):
            raise FeatureError(f"{path} holds NaN or infinity; dump it again or delete it")
        return row


def _arrow_masks(folder: Path) -> Callable[[int, torch.Tensor], torch.Tensor] | None:
    """Loss masks of a speculators folder by file number, from the data set beside it; None if there is none."""
    place = next((p for p in (folder, folder.parent) if (p / "dataset_info.json").is_file()), None)
    if place is None:
        return None
    rows = require_extra("datasets", "data").load_from_disk(str(place))

    def mask(number: int, ids: torch.Tensor) -> torch.Tensor:
        if number >= len(rows):
            raise FeatureError(f"{place} has {len(rows)} rows, none for hs_{number}.safetensors")
        row = rows[number]
        if list(row["input_ids"]) != ids.flatten().tolist():
            raise FeatureError(f"hs_{number}.safetensors holds states of other tokens than row {number} of {place}")
        return torch.as_tensor(row["loss_mask"])

    return mask


def open_offline(
    path: str | Path,
    tables,
    aux_layer_ids: Sequence[int] | None = None,
    *,
    final_is_normed: bool | None = None,
    all_supervised: bool = False,
    **options,
):
    """Open whatever ``data.offline_data_path`` names: our store, or a foreign dump.

    Args:
        path: the folder.
        tables: ``TargetTables`` (or a ``Target``) of the target.
        aux_layer_ids: canonical ids that this run asks for; None accepts a store's own.
        final_is_normed, all_supervised: for foreign dumps, see :class:`ForeignReader`.
        options: of :class:`~modelopt_eagle.features.OfflineSource`: dtype, prefetch, verify.

    Returns:
        an ``OfflineSource`` whose contract has been compared with the target and whose teacher has been checked.

    Raises:
        FeatureError: see there.
    """
    from modelopt_eagle.features.offline import OfflineSource
    from modelopt_eagle.features.store.manifest import read_manifests

    folder = Path(path)
    if folder.is_dir() and any(folder.glob("manifest*.json")):
        stored = next(iter(read_manifests(folder).values())).contract
        ids = stored.aux_layer_ids if aux_layer_ids is None else aux_layer_ids
        expected = FeatureContract.from_identity(tables.identity(), ids)
        source = OfflineSource(folder, expected, final_norm=tables.final_norm, head=tables.head, **options)
    else:
        reader = ForeignReader(
            folder, tables.identity(), aux_layer_ids, final_is_normed=final_is_normed, all_supervised=all_supervised
        )
        source = OfflineSource(reader, final_norm=tables.final_norm, head=tables.head, **options)
    source.check_teacher(tables.head, final_norm=tables.final_norm)
    return source
