"""Tensor names: the module's own against those in files.

The module says ``layers.N.*``. One-layer heads are written as ``midlayer.*``: vLLM and TensorRT-LLM rename it, SGLang
reads only this name and drops ``layers.0.*`` without a word. Above layer 0 the same norm is called
``input_layernorm`` by vLLM and ``hidden_norm`` by TensorRT-LLM, so the tensor is written under both names.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from modelopt_eagle.draft import DraftConfig, EagleModule
from modelopt_eagle.errors import CheckpointError

LAYER_NAMES = ("midlayer", "layers")
PREFIXES = ("model.", "module.", "eagle_module.", "draft_model.")
NOT_OF_THE_HEAD = ("verifier_norm.", "verifier_lm_head.", "rotary_emb.")
"""Copies of the target's tensors, and tables that are computed; left out, and counted, when reading."""


def file_tensors(module: EagleModule, dtype: torch.dtype, layer_names: str = "midlayer") -> dict[str, Tensor]:
    """The module's tensors under the names that engines read, floating ones in ``dtype``, contiguous, on the CPU.

    Args:
        layer_names: ``midlayer`` (one-layer heads) or ``layers``; heads of more layers are always ``layers.N``.

    Raises:
        CheckpointError: the vocabulary map is unset or breaks an invariant.
    """
    config, vocab = module.config, module.vocab
    tensors: dict[str, Tensor] = {}
    for name, tensor in module.state_dict().items():
        if name in ("d2t", "t2d"):
            continue
        tensors[name] = tensor
        if re.match(r"layers\.[1-9]\d*\.input_layernorm\.", name):
            tensors[name.replace("input_layernorm", "hidden_norm")] = tensor
    if config.attention_bias:  # engines give o_proj a bias with the others; the head has none
        for index in range(config.num_hidden_layers):
            name = f"layers.{index}.self_attn.o_proj.bias"
            tensors[name] = torch.zeros(config.hidden_size)
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous().clone() for name, tensor in tensors.items()}
    if not vocab.is_identity:
        tensors["d2t"] = vocab.d2t.cpu().clone()
        tensors["t2d"] = vocab.t2d.cpu().clone()
    if layer_names == "midlayer" and config.num_hidden_layers == 1:
        tensors = {re.sub(r"^layers\.0\.", "midlayer.", name): tensor for name, tensor in tensors.items()}
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
        if new in renamed and not torch.equal(renamed[new], tensor):
            raise CheckpointError(f"{name!r} and another name of {new!r} hold different values")
        renamed[new] = tensor
    return renamed, left_out


def check_names(tensors: dict[str, Tensor], config: DraftConfig, module: EagleModule, where: str) -> None:
    """Compare a file's tensors (module names, maps apart) with what the config asks for, by full name and shape.

    Raises:
        CheckpointError: names missing or unexpected, or shapes that differ, all listed.
    """
    expected = {n: tuple(t.shape) for n, t in module.state_dict().items() if n not in ("d2t", "t2d")}
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
            f"{where}: the tensors are not those of a {config.num_hidden_layers}-layer {config.decoder_type} EAGLE-3 "
            f"head as its config describes it: {'; '.join(problems[:6])}{more}"
        )


def module_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a head's tensors, the map apart."""
    with torch.random.fork_rng(devices=[]):  # its numbers are thrown away; leave the caller's stream alone
        state = EagleModule(config).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items() if name not in ("d2t", "t2d")}
