"""Tensor parallelism of a target's decoder layers, by the plan that transformers has of its family.

Each process keeps some heads and some columns of the feed-forward part of every layer, and computes with these; what
they add up to is the layer's output, whole in each process. Nothing is gathered, so a process must run the forward
passes of all, see :class:`~modelopt_eagle.target.shards.Turns`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_eagle.common.text import first_line
from modelopt_eagle.errors import TargetError

INSTEAD = "set model.parallel: fsdp (of a dump --parallel fsdp), which needs no plan"


def plan_of_layers(model: Any, layers: str) -> dict[str, str]:
    """How transformers cuts what lies in the decoder layers of a model.

    Args:
        model: of transformers; its parameters may be without memory.
        layers: name of the list of layers inside it.

    Returns:
        name of each parameter that the plan speaks of, and of each module whose forward it changes, to the name of the
        style, parameters before their module; empty without a plan.
    """
    rules = getattr(model, "tp_plan", None) or {}
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        if not path.startswith(f"{layers}."):
            continue
        own = rules.get(_any_layer(path))
        for key, _ in module.named_parameters(recurse=False):
            style = rules.get(_any_layer(f"{path}.{key}"), own)
            if style is not None:
                found[f"{path}.{key}"] = style
        if own is not None:
            found[path] = own
    return found


def _any_layer(name: str) -> str:
    """A name with a star for each number, as the rules of a plan have it."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def is_cut(style: str | None, parameter: Tensor) -> bool:
    """Whether a style cuts a parameter: by rows all of them, by columns those that have columns."""
    return style is not None and ("colwise" in style or ("rowwise" in style and parameter.dim() > 1))


def check_plan(name: object, model: Any, config: Any, layers: str, size: int) -> dict[str, str]:
    """Refuse a target that transformers cannot cut for so many processes; nothing of it needs to be loaded.

    Args:
        name: to show.
        model: the model without memory for its parameters.
        config: its text config.
        layers: name of the list of layers inside it.
        size: the processes.

    Returns:
        the plan, see :func:`plan_of_layers`.

    Raises:
        TargetError: this transformers cannot, has no plan for the family's layers, or its heads do not divide.
    """
    from transformers import __version__

    _apply()
    plan, parameters = plan_of_layers(model, layers), dict(model.named_parameters())
    if not any(is_cut(style, parameters[key]) for key, style in plan.items() if key in parameters):
        raise TargetError(
            f"{name}: transformers {__version__} has no plan of tensor parallelism for the layers of "
            f"{type(model).__name__}: {INSTEAD}"
        )
    if any(style == "colwise" and "attn" in key for key, style in plan.items()):  # each process has whole heads
        for key in ("num_attention_heads", "num_key_value_heads"):
            counts = getattr(config, key, None)
            for count in counts if isinstance(counts, (list, tuple)) else [counts]:
                if isinstance(count, int) and count % size:
                    raise TargetError(
                        f"{name}: {key} is {count}, which {size} processes cannot share: set model.shards (of a "
                        f"dump --shards) to a divisor of it, or {INSTEAD}"
                    )
    return plan


def _apply() -> Any:
    """The function of transformers that cuts parameters and changes forwards.

    Raises:
        TargetError: this version has none.
    """
    try:
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism
    except ImportError as error:
        from transformers import __version__

        raise TargetError(
            f"model.parallel: tensor needs a transformers that cuts loaded models (5.24 does), found {__version__}: "
            f"update it, or {INSTEAD}"
        ) from error
    return apply_tensor_parallelism


def cut(model: nn.Module, plan: dict[str, str], mesh: Any) -> None:
    """Keep this process's parts of whole parameters, and let the rest of them go.

    Args:
        model: with whole parameters under the names of the plan.
        plan: what to cut, see :func:`plan_of_layers`.
        mesh: one-dimensional ``DeviceMesh`` of the processes.
    """
    from torch.distributed.tensor import DTensor

    _apply()(model, mesh, plan)
    for name in plan:
        owner, _, key = name.rpartition(".")
        held = model.get_submodule(owner)._parameters
        if isinstance(parameter := held.get(key), DTensor):
            own = DTensor.from_local(
                parameter.to_local().clone(),  # it may be a view, which keeps the whole
                mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride(),
            )  # fmt: skip
            held[key] = nn.Parameter(own, requires_grad=False)


@contextlib.contextmanager
def gathered(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, cut layers have whole parameters and their own forward; every process of the copy calls this."""
    from torch.distributed.tensor import DTensor

    kept: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for module in (module for layer in layers for module in layer.modules()):
            for key, parameter in list(module._parameters.items()):
                if isinstance(parameter, DTensor):
                    kept.append((module._parameters, key, parameter))
                    module._parameters[key] = nn.Parameter(parameter.full_tensor(), requires_grad=False)
            if getattr(module, "_is_hooked", False) and "forward" in vars(module):
                kept.append((vars(module), "forward", vars(module).pop("forward")))
        yield
    finally:
        for held, key, value in kept:
            held[key] = value


@torch.no_grad()
def check_slices(target: Any, length: int = 12) -> None:
    """Hold the output of every cut layer against that of the same layer with whole parameters.

    A plan says what is cut, and nothing in transformers holds it against the family's code. Every process of the copy
    calls this; one layer at a time is whole.

    Args:
        target: split by :func:`cut`.
        length: tokens of the text.

    Raises:
        TargetError: a layer that gives something else, or does not run.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, target.vocab_size, (1, length), generator=generator)  # [1,S]
    close = 1e-4 if target.dtype == torch.float32 else 5e-2
    who = f"{target.name}: transformers' plan of tensor parallelism for {type(target.model).__name__}"

    def compare(layer: nn.Module, inputs: tuple, named: dict[str, Any], output: Any) -> None:
        with gathered([layer]):
            whole = _state(layer.forward(*inputs, **named)).float()  # [1,S,Ht]
        difference, most = float((_state(output).float() - whole).abs().max()), float(whole.abs().max())
        if not difference <= close * most:
            number = next(n for n, other in enumerate(target.layers) if other is layer)
            raise TargetError(
                f"{who} changes what layer {number} gives, by {difference:.3g} of {most:.3g}, over "
                f"{target.shards.size} processes: {INSTEAD}"
            )

    handles = [layer.register_forward_hook(compare, with_kwargs=True) for layer in target.layers]
    try:
        target.features(ids, None, [0])
    except TargetError:
        raise
    except Exception as error:  # code of any family
        raise TargetError(
            f"{who} does not run over {target.shards.size} processes: {first_line(error)}; {INSTEAD}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()


def _state(output: Any) -> Tensor:
    """The state inside what a layer returned."""
    return output[0] if isinstance(output, (tuple, list)) else output
