"""Loading a target so that each process keeps its slices of the decoder layers, by FSDP2 or tensor parallelism.

The first process reads the checkpoint as ever, with whatever transformers converts on the way, into its main memory.
The others build the model without memory for its parameters. Then layer after layer goes to all devices and is cut
there, so that a device holds its slices and one whole layer at most. Token table, final norm, output head and what lies
beside the text model stay whole in each process: the loss and the head read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from modelopt_eagle.common.package import require_extra
from modelopt_eagle.common.text import first_line
from modelopt_eagle.errors import TargetError
from modelopt_eagle.target.parts import TargetParts, find_parts
from modelopt_eagle.target.shards import Shards, check_quantised
from modelopt_eagle.target.tensor_parallel import check_plan, cut, is_cut, plan_of_layers


@dataclass(frozen=True)
class Held:
    """One tensor of the loaded model.

    Attributes:
        names: where it hangs, several if it is tied.
        shape, dtype: of it.
        learns: a parameter, not a buffer.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    learns: bool


@dataclass(frozen=True)
class Described:
    """What the other processes must know of the model that the first one loaded."""

    tensors: list[Held]
    dtype: torch.dtype
    attention: str | None
    generation: Any


def load_split(load: Callable[[], nn.Module], build: Callable[[Described], nn.Module], shards: Shards, device: str):
    """A model whose layers are split over the processes of a copy; every process of the launch calls this.

    Args:
        load: loads the whole model in main memory; called on the first process.
        build: makes the model without memory for its parameters; called on the others.
        shards: the processes.
        device: where the model goes.

    Raises:
        TargetError: what the first process met, on all of them; or a model that cannot be split.
    """
    require_extra("accelerate", "train")
    told: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            model = load()
            told = [describe(model)]
        except Exception as error:  # the others wait for the answer
            told = [str(error) if isinstance(error, TargetError) else f"{type(error).__name__}: {first_line(error)}"]
    dist.broadcast_object_list(told)
    if isinstance(told[0], str):
        raise TargetError(told[0])
    if dist.get_rank():
        model = build(told[0])
    model.requires_grad_(False)
    return _cut(model, told[0], shards, torch.device(device))


def check_split(name: object, model_class, config, shards: Shards, trust_remote_code: bool = False) -> None:
    """Refuse a target that cannot be split so, from its configuration alone.

    Raises:
        TargetError: its weights are quantised, or transformers has no plan for them.
    """
    check_quantised(name, config)
    if shards.kind == "tensor":
        model = without_memory(model_class, config, trust_remote_code)
        check_plan(name, model, config.get_text_config(decoder=True), _parts_of(model).names["layers"], shards.size)


def without_memory(model_class, config, trust_remote_code: bool = False) -> Any:
    """The model of a configuration, its parameters without memory and tied as ever."""
    with torch.device("meta"):
        model = model_class.from_config(config, trust_remote_code=trust_remote_code)
    model.tie_weights()
    return model


def build_empty(model_class, config, described: Described, trust_remote_code: bool) -> nn.Module:
    """The model without memory for its parameters; buffers are made as ever."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model = model_class.from_config(
            config, dtype=described.dtype, attn_implementation=described.attention, trust_remote_code=trust_remote_code
        )
    if described.generation is not None:
        model.generation_config = described.generation
    return model


def describe(model: Any) -> Described:
    """Every tensor of a model in the order of its modules, tied ones once."""
    held: dict[int, tuple[list[str], Tensor, bool]] = {}
    for path, module in model.named_modules():
        for store, learns in ((module._parameters, True), (module._buffers, False)):
            for key, value in store.items():
                if value is not None:
                    name = f"{path}.{key}" if path else key
                    held.setdefault(id(value), ([], value, learns))[0].append(name)
    tensors = [Held(tuple(names), tuple(x.shape), x.dtype, learns) for names, x, learns in held.values()]
    attention = getattr(model.config, "_attn_implementation", None)
    return Described(tensors, model.dtype, attention, getattr(model, "generation_config", None))


def _cut(model: Any, described: Described, shards: Shards, device: torch.device) -> nn.Module:
    """Give every process the tensors, a layer at a time, and cut each layer."""
    from torch.distributed.fsdp import fully_shard

    parts = _parts_of(model)
    waiting = list(described.tensors)
    options = {"mesh": shards.mesh, "reshard_after_forward": True}
    plan = plan_of_layers(model, parts.names["layers"]) if shards.kind == "tensor" else {}
    for number, layer in enumerate(parts.layers):
        prefix = f"{parts.names['layers']}.{number}."
        inside = [held for held in waiting if held.names[0].startswith(prefix)]
        waiting = [held for held in waiting if not held.names[0].startswith(prefix)]
        _send(model, inside, device)
        if shards.kind == "tensor":
            cut(model, {name: style for name, style in plan.items() if name.startswith(prefix)}, shards.mesh)
        else:
            fully_shard(layer, ignored_params=_single(layer), **options)
    _send(model, waiting, device)
    if left := [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]:
        raise TargetError(
            f"{type(model).__name__} has {left[0]} here and not in the first process: are the versions of transformers "
            "the same on all machines?"
        )
    if shards.kind == "fsdp":
        fully_shard(parts.backbone, ignored_params=_whole(parts) | _single(parts.backbone), **options)
    return model


def _send(model: nn.Module, tensors: Iterable[Held], device: torch.device) -> None:
    """Bring some tensors of the first process to the devices of all."""
    first = dist.get_rank() == 0
    for held in tensors:
        if first:
            value = getattr(model.get_submodule(_owner(held.names[0])), _key(held.names[0])).detach()
            value = value.to(device).contiguous()
        else:
            value = torch.empty(held.shape, dtype=held.dtype, device=device)
        dist.broadcast(value.reshape(-1).view(torch.uint8), 0)
        settled = nn.Parameter(value, requires_grad=False) if held.learns else value
        for name in held.names:
            module = model.get_submodule(_owner(name))
            (module._parameters if held.learns else module._buffers)[_key(name)] = settled


def _parts_of(model: Any) -> TargetParts:
    return find_parts(model, model.config.get_text_config(decoder=True))


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _key(name: str) -> str:
    return name.rpartition(".")[2]


def _whole(parts: TargetParts) -> set[nn.Parameter]:
    """Parameters that the head and the loss read, and so each process keeps."""
    return {p for module in (parts.embedding, parts.final_norm, parts.head) for p in module.parameters()}


def _single(module: nn.Module) -> set[nn.Parameter]:
    """Parameters without a dimension to cut."""
    return {p for p in module.parameters() if p.dim() == 0}


def weight_bytes(model_class, config, dtype: torch.dtype, trust_remote_code: bool = False) -> int:
    """Bytes of a target's parameters in a dtype, from its configuration alone."""
    return sum(p.numel() for p in without_memory(model_class, config, trust_remote_code).parameters()) * dtype.itemsize


def layer_shares(model_class, config, trust_remote_code: bool = False) -> tuple[int, int, int]:
    """Parameters of all decoder layers, of the largest one, and of the whole target, from its configuration alone."""
    model = without_memory(model_class, config, trust_remote_code)
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in _parts_of(model).layers]
    return sum(sizes), max(sizes), sum(p.numel() for p in model.parameters())


def tensor_shares(name: object, model_class, config, size: int, trust_remote_code: bool = False) -> tuple[int, int]:
    """Parameters of the decoder layers that tensor parallelism cuts, and of the whole target, from its configuration.

    Raises:
        TargetError: see :func:`~modelopt_eagle.target.tensor_parallel.check_plan`.
    """
    model = without_memory(model_class, config, trust_remote_code)
    text = config.get_text_config(decoder=True)
    plan = check_plan(name, model, text, _parts_of(model).names["layers"], size)
    cut_ones = sum(p.numel() for key, p in model.named_parameters() if is_cut(plan.get(key), p))
    return cut_ones, sum(p.numel() for p in model.parameters())
