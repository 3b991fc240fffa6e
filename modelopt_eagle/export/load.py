"""``load_draft``: a head from any folder that holds one, checked before it is handed out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from modelopt_eagle.common.dtypes import dtype_name, parse_dtype
from modelopt_eagle.draft import DraftConfig
from modelopt_eagle.draft.algorithm import Algorithm, algorithm_of, config_from_dict, find_algorithm, known_algorithms
from modelopt_eagle.draft.base import DraftModule
from modelopt_eagle.draft.build import bare_head
from modelopt_eagle.errors import CheckpointError
from modelopt_eagle.export.folders import resolve_checkpoint
from modelopt_eagle.export.foreign import LAYOUTS, ReadOptions, detect_layout, foreign_config, with_head_rows
from modelopt_eagle.export.quant_formats import is_quantised, unpacked, with_packed
from modelopt_eagle.export.tensors import check_names, module_tensors, of_its_kind, read_json, read_tensors, vocab_of
from modelopt_eagle.export.universal import drafter_of, parse_universal
from modelopt_eagle.target.lora import FOLDER as ADAPTER


@dataclass
class LoadedHead:
    """What a folder holds.

    Attributes:
        module: the head, its tensors in the dtype they were stored in (or the one asked for).
        layout: one of :data:`~modelopt_eagle.export.foreign.LAYOUTS`.
        folder: where it was found.
        left_out: tensors in the files that are not of the head.
    """

    module: DraftModule
    layout: str
    folder: Path
    left_out: list[str]

    @property
    def config(self) -> DraftConfig:
        """The head's configuration."""
        return self.module.config

    @property
    def adapter(self) -> Path | None:
        """The PEFT folder of the target's adapter that the head was trained with, if it lies there."""
        return self.folder / ADAPTER if (self.folder / ADAPTER).is_dir() else None


def check_dtype(tensors: dict[str, Tensor], named: str | None, where: str) -> torch.dtype:
    """The one dtype of the floating tensors.

    Raises:
        CheckpointError: several, or another than the config names.
    """
    by_dtype: dict[torch.dtype, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            by_dtype.setdefault(tensor.dtype, []).append(name)
    if len(by_dtype) != 1:
        found = "; ".join(f"{dtype_name(d)}: {names[0]} and {len(names) - 1} more" for d, names in by_dtype.items())
        raise CheckpointError(f"{where} mixes dtypes ({found or 'no numbers at all'}): convert it with --dtype")
    (dtype,) = by_dtype
    if named is not None and parse_dtype(named) != dtype:
        raise CheckpointError(
            f"{where}: config.json names {named}, the tensors are {dtype_name(dtype)}; engines would cast in silence: "
            "convert it with --dtype"
        )
    return dtype


def read_config(
    folder: Path, tensors: dict[str, Tensor], options: ReadOptions, strict: bool
) -> tuple[DraftConfig, str, str | None]:
    """``(config, layout, dtype named)`` of a folder; ``tensors`` under the names in its files."""
    where = str(folder)
    if options.layout is not None and options.layout not in LAYOUTS:
        raise CheckpointError(f"layout {options.layout!r} is unknown; known are {', '.join(LAYOUTS)}")
    if options.layout in (None, "training") and (folder / "draft_config.json").is_file():
        return config_from_dict(read_json(folder / "draft_config.json")), "training", None
    data = read_json(folder / "config.json")
    layout = options.layout or detect_layout(data, tensors, where)
    layer = data.get("transformer_layer_config") if isinstance(data.get("transformer_layer_config"), dict) else {}
    named = data.get("torch_dtype") or data.get("dtype") or layer.get("torch_dtype") or layer.get("dtype")
    renamed, _ = module_tensors(tensors)
    drafter = drafter_of(data, renamed, where)
    if layout == "universal":
        own = "embed_tokens.weight" in renamed
        config = parse_universal(
            data, strict=strict, own_embedding=own, where=where, aux_layer_ids=options.aux_layer_ids, drafter=drafter
        )
        if "t2d" in renamed and config.vocab_size <= config.draft_vocab_size:
            config.vocab_size = len(renamed["t2d"])
        return config, layout, named
    renamed = with_head_rows(renamed, data, options, where)
    return foreign_config(data, renamed, layout, options, where, strict, drafter), layout, named


def own_layout(folder: Path, tensors: dict[str, Tensor], options: ReadOptions) -> Algorithm | None:
    """The drafter whose own layout a folder has; ``None``: a checkpoint of training, or a folder of EAGLE-3 heads."""
    if options.layout is not None or not (folder / "config.json").is_file():
        return None
    data = read_json(folder / "config.json")
    found = (find_algorithm(name) for name in known_algorithms())
    return next((own for own in found if own.layout is not None and own.layout.recognises(data, tensors)), None)


def head_module(
    config: DraftConfig,
    tensors: dict[str, Tensor],
    where: str,
    *,
    dtype: torch.dtype | None = None,
    convention: str | None = None,
) -> DraftModule:
    """The head of a config and its tensors, every name, shape, number and the map checked.

    Args:
        tensors: under the module's names, see :func:`~modelopt_eagle.export.tensors.module_tensors`.
        where: what messages call the folder.
        dtype: cast floating tensors to it; ``None`` keeps theirs.
        convention: of ``d2t``, see :func:`~modelopt_eagle.export.tensors.vocab_of`.

    Returns:
        The head, with copies of the tensors.

    Raises:
        CheckpointError: tensors that are not those of the config, a broken map, numbers that are not finite.
    """
    check_names(tensors, config, where)  # before anything as large as the config says is made
    vocab = vocab_of(tensors, config.draft_vocab_size, config.vocab_size, where, convention)
    module = bare_head(algorithm_of(config).module, config, vocab)
    state = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    if dtype is not None:
        state = {name: tensor.to(dtype) for name, tensor in state.items()}
    state = {name: tensor.clone() for name, tensor in state.items()}  # not a view of the file
    bad = [name for name, tensor in state.items() if not bool(torch.isfinite(tensor).all())]
    if bad:
        raise CheckpointError(f"{where}: {', '.join(bad[:4])} hold numbers that are not finite")
    module.load_state_dict({**state, "d2t": vocab.d2t, "t2d": vocab.t2d}, assign=True)
    return module


@of_its_kind
def read_head(
    path: str | Path,
    *,
    vocab_size: int | None = None,
    tokenizer_hash: str | None = None,
    strict: bool = True,
    dtype: str | torch.dtype | None = None,
    options: ReadOptions | None = None,
    quantised: bool = False,
) -> LoadedHead:
    """Read a head and say where it came from.

    Args:
        path: an export, another tool's head, a training checkpoint, or a run's output folder.
        vocab_size: the target's vocabulary V; a head for another is refused.
        tokenizer_hash: of the target's tokenizer; a head that names another is refused.
        strict: refuse config keys that nothing reads, and dtypes that the config does not name.
        dtype: cast floating tensors to it, instead of checking theirs.
        options: answers to what another tool's folder leaves open.
        quantised: also read a quantised folder, as a head that computes with its packed numbers; such a head can be
            measured, and neither trained nor exported.

    Returns:
        the head with the layout and the folder that it was read from.

    Raises:
        CheckpointError: see the modules of this room; the message names the folder and what mends it.
    """
    folder, options = resolve_checkpoint(path), options or ReadOptions()
    where = str(folder)
    stored = read_tensors(folder)
    packed = {}
    if is_quantised(stored):
        if not quantised:
            raise CheckpointError(
                f"{where} is quantised: load the head it was made from; this one is for engines, ar_validate.py and "
                "check_serving.py"
            )
        stored, packed = unpacked(stored, where)
    own = own_layout(folder, stored, options)
    if own is None:
        config, layout, named = read_config(folder, stored, options, strict)
        tensors, left_out = module_tensors(stored)
        if layout not in ("training", "universal"):
            tensors = with_head_rows(tensors, read_json(folder / "config.json"), options, where)
    else:
        data = read_json(folder / "config.json")
        (config, tensors), layout, named = own.layout.read(data, stored, where), own.name, data.get("torch_dtype")
        left_out = []
    if vocab_size is not None and config.vocab_size != vocab_size:
        raise CheckpointError(
            f"{where} is a head for a vocabulary of {config.vocab_size} tokens, the target has {vocab_size}"
        )
    if tokenizer_hash and config.tokenizer_hash and tokenizer_hash != config.tokenizer_hash:
        raise CheckpointError(
            f"{where} was trained for another tokenizer (hash {config.tokenizer_hash}"
            f"{', ' + config.target_name if config.target_name else ''}; the target's is {tokenizer_hash}): its token "
            "ids mean other words; use the head of this target"
        )
    dtype = parse_dtype(dtype)
    stored_dtype = dtype or (check_dtype(tensors, named, where) if strict else None)
    module = head_module(config, tensors, where, dtype=stored_dtype, convention=options.d2t_convention)
    return LoadedHead(with_packed(module, packed) if packed else module, layout, folder, left_out)


@of_its_kind
def load_draft(
    path: str | Path,
    *,
    vocab_size: int | None = None,
    tokenizer_hash: str | None = None,
    strict: bool = True,
    dtype: str | torch.dtype | None = None,
    options: ReadOptions | None = None,
    quantised: bool = False,
) -> DraftModule:
    """The head in a folder, for EAGLE-3 an :class:`EagleModule`, with its :class:`DraftConfig` under ``.config``.

    Arguments and errors as :func:`read_head`.
    """
    return read_head(
        path, vocab_size=vocab_size, tokenizer_hash=tokenizer_hash, strict=strict, dtype=dtype, options=options,
        quantised=quantised,
    ).module  # fmt: skip
