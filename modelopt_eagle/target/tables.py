"""The target's tables read straight from its safetensors, for training from stored features without the target."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, nn

from modelopt_eagle.common.dtypes import MODEL_DTYPES
from modelopt_eagle.common.text import first_line
from modelopt_eagle.errors import TargetError
from modelopt_eagle.target import identity
from modelopt_eagle.target.checkpoint_files import CheckpointFiles, content_revision
from modelopt_eagle.target.head import TargetHead
from modelopt_eagle.target.identity import TargetIdentity
from modelopt_eagle.target.load import causal_class, check_device, load_config, load_tokenizer, resolve
from modelopt_eagle.target.parts import TargetParts, find_parts
from modelopt_eagle.target.stops import find_end_token_ids, read_generation_config
from modelopt_eagle.target.vision import VisionProcessor, vision_of

_DTYPES = {**MODEL_DTYPES, "auto": None}


class LayerFiles(Sequence[nn.Module]):
    """The decoder layers of a target, each read from its safetensors when it is asked for, and kept by nobody.

    The modules are frozen, on the CPU, and hold what the files hold; they are there to be copied from, not to be run.

    Args:
        empty: the layers without memory, as the model's class builds them.
        place, revision: of the checkpoint.
        prefix: of the first layer's keys, without its number, such as ``model.layers.``.
        dtype: of their weights.
    """

    def __init__(
        self, empty: Sequence[nn.Module], place: Path | str, revision: str | None, prefix: str,
        dtype: torch.dtype,
    ):  # fmt: skip
        self._empty, self._place, self._revision = empty, place, revision
        self._prefix, self._dtype = prefix, dtype

    def __len__(self) -> int:
        return len(self._empty)

    @overload
    def __getitem__(self, index: int) -> nn.Module: ...
    @overload
    def __getitem__(self, index: slice) -> list[nn.Module]: ...
    def __getitem__(self, index: int | slice) -> nn.Module | list[nn.Module]:
        """A layer, or those of a slice.

        Raises:
            TargetError: the files lack a tensor of it under the name that the model's class gives it, or hold it
                quantised or of another size.
        """
        numbers = range(len(self))[index]
        if isinstance(numbers, int):
            return self._read(CheckpointFiles(self._place, self._revision), numbers)
        files = CheckpointFiles(self._place, self._revision)
        return [self._read(files, number) for number in numbers]

    def _read(self, files: CheckpointFiles, number: int) -> nn.Module:
        layer = copy.deepcopy(self._empty[number]).to_empty(device="cpu").to(self._dtype)
        for key, own in layer.state_dict().items():
            stored = files.tensor(f"{self._prefix}{number}.{key}")
            if stored.shape != own.shape:
                raise TargetError(
                    f"{self._place}: {self._prefix}{number}.{key} is {list(stored.shape)} in the files, "
                    f"{list(own.shape)} in the model"
                )
            own.copy_(stored)
        return layer.eval().requires_grad_(False)


@dataclass(frozen=True)
class TargetTables:
    """What training from stored features needs of a target.

    Attributes:
        embedding_weight: [V, Ht] the token table, unscaled.
        final_norm: the norm after the last layer, frozen; turns pre-norm final states into post-norm ones.
        head: ``TargetHead`` with the weight [V, Ht]; it shares storage with ``embedding_weight`` if they are tied.
        config: the text config.
        tokenizer: with the chat template in effect.
        name: of the model.
        revision: commit hash on the hub, or a fingerprint of the local content.
        end_token_ids: the ids that end an answer, ascending; see :mod:`modelopt_eagle.target.stops`.
        vision: the ``VisionProcessor`` of a vision-language model, to read rows with images.
        layers: the decoder layers, each read from the files when it is asked for.
    """

    embedding_weight: Tensor
    final_norm: nn.Module
    head: TargetHead
    config: Any
    tokenizer: Any
    name: str
    revision: str
    end_token_ids: tuple[int, ...]
    vision: VisionProcessor | None = None
    layers: Sequence[nn.Module] = ()

    @property
    def hidden_size(self) -> int:
        """Ht."""
        return self.config.hidden_size

    @property
    def num_layers(self) -> int:
        """Decoder layers of the model."""
        return self.config.num_hidden_layers

    @property
    def vocab_size(self) -> int:
        """V, rows of the output head."""
        return self.head.weight.shape[0]

    def identity(self) -> TargetIdentity:
        """The same as ``Target.identity()`` of the same model."""
        return TargetIdentity(
            model=self.name,
            revision=self.revision,
            tokenizer_hash=identity.tokenizer_hash(self.tokenizer),
            template_hash=identity.template_hash(self.tokenizer),
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            vocab_size=self.vocab_size,
        )


def load_target_tables(
    name: str | Path,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    revision: str | None = None,
    trust_remote_code: bool = False,
    chat_template: str | Path | None = None,
) -> TargetTables:
    """Read embedding, final norm and output head of a target, and nothing else of its weights before it is asked for.

    The structure comes from the config (the model is built without memory); its tables are then looked for in the
    checkpoint under the one prefix that also holds the text model's last layer and final norm, so that keys nested in
    a wrapper, or a second table named alike, lead to the right one.

    Args:
        name, dtype, device, revision, trust_remote_code, chat_template: as in ``load_target``; ``device`` is a device.

    Returns:
        the tables, frozen, with config, tokenizer and identity.

    Raises:
        TargetError: no safetensors, a file that is cut short, a table that is missing, ambiguous, of another size, or
            quantised; near matches are listed.
    """
    if dtype not in _DTYPES:
        raise TargetError(f"expected a dtype of {', '.join(_DTYPES)}; found {dtype!r}")
    check_device(device)
    place = resolve(name)
    config = load_config(place, revision, trust_remote_code)
    model = _skeleton(causal_class(config, name, trust_remote_code), config, name, trust_remote_code)
    text_config = config.get_text_config(decoder=True)
    text_config.architectures = text_config.architectures or config.architectures  # of the whole model
    parts = find_parts(model, text_config)
    files = CheckpointFiles(place, revision)
    prefix = _text_prefix(files, parts, (text_config.vocab_size, text_config.hidden_size))

    embedding = files.tensor(prefix + _leaf(parts, "embedding") + ".weight")  # [V,Ht]
    head_weight, head_bias = _read_head(files, parts, prefix, embedding)  # [V,Ht], [V] or None
    norm_prefix = prefix + _leaf(parts, "final_norm") + "."
    final_norm = parts.final_norm.to_empty(device="cpu")
    state = {key: files.tensor(norm_prefix + key) for key in final_norm.state_dict()}
    final_norm.load_state_dict(state)

    kind = _DTYPES[dtype] or embedding.dtype
    tied = head_weight is embedding
    embedding = embedding.to(device, kind)
    head_weight = embedding if tied else head_weight.to(device, kind)
    head_bias = None if head_bias is None else head_bias.to(device, kind)
    tokenizer = load_tokenizer(place, revision, trust_remote_code, chat_template)
    return TargetTables(
        embedding,
        final_norm.to(device, kind).eval().requires_grad_(False),
        TargetHead.from_config(text_config, head_weight, head_bias),
        text_config,
        tokenizer,
        identity.local_name(place) if isinstance(place, Path) else str(name),
        content_revision(place, revision),
        find_end_token_ids(tokenizer, read_generation_config(place, revision), config, text_config),
        vision_of(tokenizer, place, config, revision, trust_remote_code),
        LayerFiles(tuple(parts.layers), place, revision, f"{prefix}{_leaf(parts, 'layers')}.", kind),
    )


def _skeleton(model_class, config, name, trust_remote_code: bool) -> nn.Module:
    """The model with all parameters on the meta device, tied as the config says."""
    try:
        with torch.device("meta"):
            model = model_class.from_config(config, trust_remote_code=trust_remote_code)
        model.tie_weights()
    except Exception as error:  # model code raises many kinds for sizes that do not fit together
        raise TargetError(f"{name}: config.json does not describe a model: {first_line(error)}") from error
    return model


def _leaf(parts: TargetParts, part: str) -> str:
    """The name of a part inside its backbone, such as ``embed_tokens``."""
    return parts.names[part].rsplit(".", 1)[-1]


def _text_prefix(files: CheckpointFiles, parts: TargetParts, shape: tuple[int, int]) -> str:
    """The prefix (``""``, ``"model."``, ...) of the text model's keys in the checkpoint."""
    ending = _leaf(parts, "embedding") + ".weight"
    last_layer = f"{_leaf(parts, 'layers')}.{len(parts.layers) - 1}."
    norm_keys = [f"{_leaf(parts, 'final_norm')}.{key}" for key in parts.final_norm.state_dict()]
    prefixes = []
    for key in files.keys:
        if key != ending and not key.endswith("." + ending):
            continue
        prefix = key[: -len(ending)]
        whole = any(other.startswith(prefix + last_layer) for other in files.keys)
        if whole and all(prefix + norm in files.keys for norm in norm_keys) and _fits(files.shape(key), shape):
            prefixes.append(prefix)
    own = parts.names["backbone"] + "." if parts.names["backbone"] else ""
    if len(prefixes) > 1 and own in prefixes:
        prefixes = [own]
    if len(prefixes) == 1:
        return prefixes[0]
    found = "none" if not prefixes else "several: " + ", ".join(prefix + ending for prefix in prefixes)
    raise TargetError(
        f"{files.place}: expected one table …{ending} of {shape[0]} x {shape[1]} beside …{last_layer}* and "
        f"{', '.join('…' + key for key in norm_keys)}; found {found}. Near matches: {_near(files, ending)}. "
        "Check that config.json belongs to these weights"
    )


def _read_head(files: CheckpointFiles, parts: TargetParts, prefix: str, embedding: Tensor):
    """Weight [V,Ht] and bias [V] (or None) of the output head; ``embedding`` itself if the two are tied."""
    ending = _leaf(parts, "head") + ".weight"
    keys = [key for key in files.keys if key == ending or key.endswith("." + ending)]
    if not keys:  # GPT-NeoX calls it embed_out in the file and lm_head in memory
        outside = [key for key in files.keys if key.endswith(".weight") and not _inside_layer(key)]
        keys = [key for key in outside if any(word in key.split(".")[-2] for word in ("head", "out"))]
    keys = [key for key in keys if _fits(files.shape(key), tuple(embedding.shape))]
    tied = parts.head.weight is parts.embedding.weight
    exact = parts.names["head"] + ".weight"
    if len(keys) > 1:  # the head that stands nearest to the text model, or under the very name that the model gives it
        nearness = {key: _common(key, prefix) for key in keys}
        nearest = [key for key in keys if nearness[key] == max(nearness.values())]
        keys = [exact] if exact in nearest else nearest
    if len(keys) > 1 or (not keys and not tied):
        found = ", ".join(keys) if keys else "none, and the config does not tie it to the embedding"
        raise TargetError(
            f"{files.place}: expected one output head …{ending} of {tuple(embedding.shape)}; found {found}. "
            f"Near matches: {_near(files, ending)}"
        )
    if not keys:
        return embedding, None
    weight = files.tensor(keys[0])  # [V,Ht]
    bias_key = keys[0][: -len("weight")] + "bias"
    bias = files.tensor(bias_key) if getattr(parts.head, "bias", None) is not None else None  # [V]
    if tied and weight.shape == embedding.shape and torch.equal(weight, embedding):
        weight = embedding  # stored twice
    return weight, bias


def _fits(found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether a table has the width wanted and at least the rows."""
    return len(found) == 2 and found[1] == wanted[1] and found[0] >= wanted[0]


def _common(key: str, prefix: str) -> int:
    """How many leading components two dotted names share."""
    count = 0
    for left, right in zip(key.split("."), prefix.split("."), strict=False):
        if left != right:
            break
        count += 1
    return count


def _inside_layer(key: str) -> bool:
    """Whether a key belongs to a numbered module."""
    return any(part.isdigit() for part in key.split("."))


def _near(files: CheckpointFiles, ending: str) -> str:
    """Keys outside the layers that look like tables, with their shapes."""
    words = ("embed", "wte", "head", "output", "norm", ending.split(".")[0])
    outside = [key for key in files.keys if not _inside_layer(key)]
    near = [key for key in outside if any(word in key for word in words)]
    return ", ".join(f"{key} {files.shape(key)}" for key in near[:10]) or "none"
