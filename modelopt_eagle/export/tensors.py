"""A head's tensors in files: one safetensors file, shards with an index or a pickled ``.bin``; their names; their map.

The module says ``layers.N.*``, files say that or ``midlayer.*``. The vocabulary map is found, checked, never guessed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from modelopt_eagle.common.pickles import load_tensors
from modelopt_eagle.common.strict_json import parse_json
from modelopt_eagle.draft import DraftConfig, DraftVocab
from modelopt_eagle.draft.algorithm import algorithm_of
from modelopt_eagle.draft.build import bare_head
from modelopt_eagle.errors import CheckpointError, EagleError

P = ParamSpec("P")
T = TypeVar("T")

SINGLE_FILES = ("model.safetensors", "draft.safetensors", "pytorch_model.bin")
INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
PREFIXES = ("model.", "module.", "eagle_module.", "draft_model.")
NOT_OF_THE_HEAD = ("verifier_norm.", "verifier_lm_head.", "rotary_emb.")
"""Copies of the target's tensors, and tables that are computed; left out, and counted, when reading."""
CONVENTIONS = ("offset", "absolute")
"""What a ``d2t`` can hold."""


def of_its_kind(read: Callable[P, T]) -> Callable[P, T]:
    """A reader of a head's folder that answers values of other kinds in its files by an error of the project.

    Returns:
        the reader; a ``CheckpointError`` names the folder where Python's own errors would name a line of ours.
    """

    @functools.wraps(read)
    def guarded(*arguments: P.args, **options: P.kwargs) -> T:
        try:
            return read(*arguments, **options)
        except EagleError:
            raise
        except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            place = arguments[0] if arguments else options.get("path")
            raise CheckpointError(
                f"{place} cannot be read as a head: a value in its files is not of its kind ({type(error).__name__}: "
                f"{error}); copy it again, or export it again"
            ) from error

    return guarded


def read_json(path: Path) -> dict:
    """A JSON object.

    Raises:
        CheckpointError: missing, broken, or no object.
    """
    try:
        data = parse_json(path.read_bytes(), finite=False)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} must hold a JSON object, found {type(data).__name__}")
    return data


def weight_files(folder: Path) -> list[Path]:
    """The files that together hold the tensors.

    Raises:
        CheckpointError: none, or an index that names a file that is not there.
    """
    for name in INDEX_FILES:
        if (folder / name).is_file():
            shards = sorted(set(read_json(folder / name).get("weight_map", {}).values()))
            missing = [shard for shard in shards if not (folder / shard).is_file()]
            if missing or not shards:
                raise CheckpointError(
                    f"{folder / name} names {len(shards)} shards, missing: {', '.join(missing) or 'all'}: copy the "
                    "whole folder again"
                )
            return [folder / shard for shard in shards]
    for name in SINGLE_FILES:
        if (folder / name).is_file():
            return [folder / name]
    raise CheckpointError(f"{folder} holds no weights: expected one of {', '.join(SINGLE_FILES + INDEX_FILES)}")


def read_file(path: Path) -> dict[str, Tensor]:
    """All tensors of one file, on the CPU.

    Raises:
        CheckpointError: cut short, not of its format, or a pickle that holds anything but tensors.
    """
    try:
        if path.suffix == ".safetensors":
            with safe_open(str(path), framework="pt", device="cpu") as file:
                return {name: file.get_tensor(name) for name in file.keys()}
        data = load_tensors(path)
    except (SafetensorError, OSError, RuntimeError) as error:
        size = path.stat().st_size if path.exists() else 0
        raise CheckpointError(f"{path} ({size} bytes) is cut short or damaged: {error}: copy it again") from error
    except ValueError as error:
        raise CheckpointError(
            f"{path} ({path.stat().st_size} bytes) is cut short or damaged, or is refused: a pickle may hold tensors "
            f"only ({error}): copy it again"
        ) from error
    if isinstance(data, dict) and isinstance(data.get("state_dict"), dict):
        data = data["state_dict"]
    if not isinstance(data, dict) or not all(isinstance(value, Tensor) for value in data.values()):
        raise CheckpointError(f"{path} must hold a plain dictionary of tensors")
    return data


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a head's folder, under the names they have there.

    Raises:
        CheckpointError: see :func:`weight_files` and :func:`read_file`; also a tensor that the index names and no
            shard holds, or one that two shards hold.
    """
    tensors: dict[str, Tensor] = {}
    for path in weight_files(folder):
        for name, tensor in read_file(path).items():
            if name in tensors:
                raise CheckpointError(f"{folder}: two shards hold {name!r}")
            tensors[name] = tensor
    for index in INDEX_FILES:
        if (folder / index).is_file():
            lost = sorted(set(read_json(folder / index)["weight_map"]) - set(tensors))
            if lost:
                raise CheckpointError(f"{folder / index} names tensors that no shard holds: {', '.join(lost[:5])}")
            break
    return tensors


def module_name(name: str) -> str:
    """A file's tensor name as the module says it: wrapper prefixes off, ``midlayer`` as ``layers``."""
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    name = re.sub(r"^midlayer\.(?=\d+\.)", "layers.", name)
    return re.sub(r"^midlayer\.", "layers.0.", name)


def module_tensors(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """A file's tensors under the module's names, and the names left out because they are not of the head.

    Raises:
        CheckpointError: two names of the same tensor with different values, or an output bias that is not zero.
    """
    renamed: dict[str, Tensor] = {}
    left_out = []
    for name, tensor in tensors.items():
        new = module_name(name)
        if new.startswith(NOT_OF_THE_HEAD) or ".rotary_emb." in new:
            left_out.append(name)
            continue
        if re.fullmatch(r"layers\.\d+\.self_attn\.o_proj\.bias", new):
            if bool(tensor.any()):
                raise CheckpointError(f"{name!r} is not zero: this toolkit's heads have no output bias in attention")
            left_out.append(name)
            continue
        if re.match(r"layers\.[1-9]\d*\.hidden_norm\.", new):
            new = new.replace("hidden_norm", "input_layernorm")
        if new == "mask_hidden":
            tensor = tensor.flatten()  # some tools keep axes of one in front
        if new in renamed and not torch.equal(renamed[new], tensor):
            raise CheckpointError(f"{name!r} and another name of {new!r} hold different values")
        renamed[new] = tensor
    return renamed, left_out


def check_names(tensors: dict[str, Tensor], config: DraftConfig, where: str) -> None:
    """Compare a file's tensors (module names, maps apart) with what the config asks for, by full name and shape.

    Raises:
        CheckpointError: names missing or unexpected, or shapes that differ, all listed.
    """
    expected = module_shapes(config)
    found = {n: tuple(t.shape) for n, t in tensors.items() if n not in ("d2t", "t2d")}
    problems = [f"missing {name} {list(shape)}" for name, shape in expected.items() if name not in found]
    problems += [f"unexpected {name} {list(shape)}" for name, shape in found.items() if name not in expected]
    problems += [
        f"{name} is {list(found[name])}, its config asks for {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if problems:
        more = f" and {len(problems) - 6} more" if len(problems) > 6 else ""
        raise CheckpointError(
            f"{where}: the tensors are not those of a {config.num_hidden_layers}-layer {config.decoder_type} "
            f"{algorithm_of(config).title} head as its config describes it: {'; '.join(problems[:6])}{more}"
        )


def module_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a head's tensors, the map apart."""
    with torch.device("meta"):  # sizes that no memory holds cost nothing
        state = bare_head(algorithm_of(config).module, config).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items() if name not in ("d2t", "t2d")}


def map_kind(tensors: dict[str, Tensor], draft_vocab_size: int | None, vocab_size: int | None) -> str:
    """``identity``, ``reduced`` or ``missing``, told from the tables and the head's rows, not from the config alone."""
    if "d2t" in tensors:
        whole = len(tensors.get("t2d", ())) or vocab_size
        return "identity" if not bool(tensors["d2t"].any()) and len(tensors["d2t"]) == whole else "reduced"
    return "identity" if draft_vocab_size == vocab_size else "missing"


def vocab_of(
    tensors: dict[str, Tensor], draft_vocab_size: int, vocab_size: int, where: str, convention: str | None = None
) -> DraftVocab:
    """The checked map of a head.

    Args:
        tensors: the head's, with ``d2t`` and ``t2d`` if it has them. A config that repeats the draft's size as
            ``vocab_size`` is overruled by the length of ``t2d``.
        convention: what ``d2t`` holds, for a head of another tool without ``t2d``: ``offset`` or ``absolute``.

    Raises:
        CheckpointError: no map for a reduced vocabulary, sizes that contradict, a broken invariant, or a table that
            reads as either convention.
    """
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None:
        if draft_vocab_size != vocab_size:
            raise CheckpointError(
                f"{where}: the head proposes {draft_vocab_size} of {vocab_size} tokens and holds no d2t: no engine can "
                "know which, and each serves nonsense; copy the map from the training checkpoint"
            )
        return DraftVocab.identity(vocab_size)
    if d2t.dim() != 1 or d2t.is_floating_point():
        raise CheckpointError(f"{where}: d2t must be integers of one dimension, found {d2t.dtype} {list(d2t.shape)}")
    d2t = d2t.to(torch.int64)
    if len(d2t) != draft_vocab_size:
        raise CheckpointError(f"{where}: d2t has {len(d2t)} entries, lm_head {draft_vocab_size} rows")
    if t2d is not None and len(t2d) != vocab_size:
        raise CheckpointError(f"{where}: t2d has {len(t2d)} entries, the target's vocabulary is {vocab_size}")
    if convention == "absolute":
        d2t = d2t - torch.arange(len(d2t))
    try:
        vocab = DraftVocab(d2t, t2d) if t2d is not None else DraftVocab.from_d2t(d2t, vocab_size)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error
    if (
        t2d is None
        and convention is None
        and len(d2t) > 1
        and bool((d2t.diff() > 0).all())
        and int(d2t[-1]) < vocab_size
    ):
        raise CheckpointError(
            f"{where}: d2t rises at every entry and there is no t2d to check it by, so it could hold offsets or "
            "target ids; which? answer with --d2t-convention offset|absolute"
        )
    return vocab
