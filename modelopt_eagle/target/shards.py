"""Processes that hold one copy of a target together, and so run each of its forward passes together.

With FSDP2 every layer is gathered by all processes of a group in the moment in which it runs, so all of them must run
as many forward passes as the one with the most to do, or they would wait for each other for ever.
:meth:`Lockstep.together` sees to it: whoever has nothing to run while others do runs a token along with them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from modelopt_eagle.errors import TargetError

PATIENCE = timedelta(hours=4)
"""How long processes wait for each other; one of them may tokenise, load or compute features for long."""


@dataclass(frozen=True)
class Shards:
    """The processes that hold one copy of a target.

    Attributes:
        kind: ``fsdp``, each layer in slices that are gathered to run.
        rank, size: place of this process among those of its copy, and how many they are.
        copies: how many such groups there are.
        mesh: the group as a one-dimensional ``DeviceMesh``.
        group: of ``torch.distributed``, over gloo: for words between its processes, beside the tensors of the mesh.
    """

    kind: str
    rank: int
    size: int
    copies: int
    mesh: Any
    group: Any

    @classmethod
    def make(cls, kind: str, size: int, device_type: str) -> Shards:
        """Groups of ``size`` neighbouring processes; every process of the launch calls this.

        Args:
            kind: ``fsdp``.
            size: a divisor of the number of processes.
            device_type: ``cpu``, ``cuda``, ...
        """
        from torch.distributed.device_mesh import init_device_mesh

        world, rank = dist.get_world_size(), dist.get_rank()
        grid = init_device_mesh(device_type, (world // size, size), mesh_dim_names=("copies", "shards"))
        ranks = [range(first, first + size) for first in range(0, world, size)]
        groups = [dist.new_group(members, timeout=PATIENCE, backend="gloo") for members in ranks]
        return cls(kind, rank % size, size, len(groups), grid["shards"], groups[rank // size])

    @property
    def first(self) -> int:
        """Number of the first process of this group among all of the launch."""
        return dist.get_rank() - self.rank

    @property
    def line(self) -> str:
        """How the target lies, for the head of a run."""
        copies = "" if self.copies == 1 else f", {self.copies} such copies"
        return f"split by FSDP2 over {self.size}{copies}"


class Lockstep:
    """Makes the processes of a copy run the same number of forward passes.

    Args:
        backbone: the module that each forward pass of the target runs once.
        shards: the processes.
        device: where token ids go.
    """

    def __init__(self, backbone: nn.Module, shards: Shards, device: torch.device):
        self._backbone, self._shards, self._device = backbone, shards, device
        self._running = False  # a forward pass is under way: the others are in it too
        self._told = False  # somebody's failure is known to all

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Inside, each process runs as many forward passes as it likes; at the end it waits for the others in step.

        Every process of the copy enters and leaves this as often as the others. A failure between two passes, here or
        in another process, is known to all of them at the next pass.

        Raises:
            TargetError: another process failed; its words are in it.
        """
        handles = [
            self._backbone.register_forward_pre_hook(lambda module, inputs: self._begin(), prepend=True),
            self._backbone.register_forward_hook(lambda module, inputs, output: self._end()),
        ]
        self._running = self._told = False
        try:
            yield
        except Exception as error:
            if not (self._running or self._told):
                self._exchange(failure=f"{type(error).__name__}: {error}")
            raise
        finally:
            for handle in handles:
                handle.remove()
        while self._exchange():
            with torch.no_grad():
                self._backbone(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=self._device), use_cache=False)

    def _begin(self) -> None:
        self._exchange(runs=True)
        self._running = True

    def _end(self) -> None:
        self._running = False

    def _exchange(self, runs: bool = False, failure: str | None = None) -> bool:
        """Say what this process is about to do; returns whether any of them runs a forward pass now."""
        states = torch.tensor([int(runs), int(failure is not None)])  # [2]
        dist.all_reduce(states, group=self._shards.group)
        running, failed = states.tolist()
        if failed:
            self._told = True
            words: list[str | None] = [None] * self._shards.size
            dist.all_gather_object(words, failure, group=self._shards.group)
            if failure is None:
                number, text = next((i, text) for i, text in enumerate(words) if text is not None)
                raise TargetError(f"process {self._shards.first + number} failed, so all end: {text}")
        return bool(running)


def together(target: Any) -> AbstractContextManager:
    """:meth:`Lockstep.together` of a target that is split so that its processes must keep step; else nothing."""
    lockstep = getattr(target, "lockstep", None)
    return contextlib.nullcontext() if lockstep is None else lockstep.together()


_LOST = ("connection closed by peer", "connection reset by peer", "broken pipe", "pair closure")
"""What gloo says of a process that is gone."""


@contextlib.contextmanager
def ended_peers() -> Iterator[None]:
    """Inside, that another process of the launch has ended in the middle of things is told in one line.

    Raises:
        TargetError: in place of the error that the collective operation raised.
    """
    try:
        yield
    except RuntimeError as error:
        lost = isinstance(error, dist.DistError) or any(text in str(error).lower() for text in _LOST)
        if not (lost and dist.is_initialized()):
            raise
        raise TargetError(
            "another process of this run has ended, so this one ends too: what it met stands in its own words; the "
            "same command goes on from the newest checkpoint"
        ) from error


def check_quantised(name: object, config: Any) -> None:
    """Refuse to split a quantised target.

    Raises:
        TargetError: its config says that it is quantised.
    """
    found = getattr(config, "quantization_config", None)
    if found is not None:
        method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
        raise TargetError(
            f"{name} is quantised ({method}), and such weights are not split: give its checkpoint in bfloat16, leave "
            "model.parallel at none, or train from features that a serving engine makes (docs/features.md)"
        )


def local_bytes(module: nn.Module) -> tuple[int, int]:
    """Bytes of a module's parameters in this process, and of the whole of them; each tied one is counted once."""
    own = whole = 0
    for parameter in module.parameters():
        whole += parameter.numel() * parameter.element_size()
        local: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        own += local.numel() * local.element_size()
    return own, whole


@contextlib.contextmanager
def whole_layers(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, layers split by FSDP2 have all of their weights; every process of the copy calls this."""
    from torch.distributed.fsdp import FSDPModule

    split: list[Callable[[], Any]] = []
    for layer in layers:
        if isinstance(layer, FSDPModule):
            layer.unshard()
            split.append(layer.reshard)
    try:
        yield
    finally:
        for reshard in split:
            reshard()
