"""Processes that hold one copy of a target together, and so run each of its forward passes together.

With FSDP2 every layer is gathered by all processes of a group in the moment in which it runs, so all of them must run
as many forward passes as the one with the most to do, or they would wait for each other for ever.
:meth:`Lockstep.together` sees to it: whoever has nothing to run while others do runs a token along with them.

With tensor parallelism each process computes a part of every pass, so all of them run the passes of all, in turns
(:class:`Turns`).
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from modelopt_eagle.errors import TargetError
from modelopt_eagle.target.tensor_parallel import gathered

PATIENCE = timedelta(hours=4)
"""How long processes wait for each other; one of them may tokenise, load or compute features for long."""


@dataclass(frozen=True)
class Shards:
    """The processes that hold one copy of a target.

    Attributes:
        kind: ``fsdp``, each layer in slices that are gathered to run; ``tensor``, in slices that each compute a part.
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
            kind: ``fsdp`` or ``tensor``.
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
        return f"split by {WAYS[self.kind]} over {self.size}{copies}"


WAYS = {"fsdp": "FSDP2", "tensor": "tensor parallelism"}
"""The kinds of splitting, in words."""

_FOR_ANOTHER: ContextVar[bool] = ContextVar("for_another", default=False)


def for_another() -> bool:
    """Whether the forward pass under way is another process's, whose states are none of this one's."""
    return _FOR_ANOTHER.get()


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
        self._later: list[tuple[int, bytes]] = []  # passes of others that follow the one under way
        self.active = False  # inside `together`

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Inside, each process runs as many forward passes as it likes; at the end it waits for the others in step.

        Every process of the copy enters and leaves this as often as the others. A failure between two passes, here or
        in another process, is known to all of them at the next pass.

        Raises:
            TargetError: another process failed; its words are in it.
        """
        handles = [
            self._backbone.register_forward_pre_hook(
                lambda module, inputs, named: self._begin(inputs, named), prepend=True, with_kwargs=True
            ),
            self._backbone.register_forward_hook(lambda module, inputs, output: self._end()),
        ]
        self._running = self._told = False
        self.active = True
        try:
            yield
        except Exception as error:
            if not (self._running or self._told):
                self._tell(f"{type(error).__name__}: {error}")
            raise
        finally:
            self.active = False
            for handle in handles:
                handle.remove()
        self._await_others()

    def _begin(self, inputs: tuple, named: dict[str, Any]) -> None:
        """A forward pass of this process is to begin."""
        self._exchange(runs=True)
        self._running = True

    def _end(self) -> None:
        """It has ended."""
        self._running = False

    def _tell(self, failure: str) -> None:
        """Say that this process has failed."""
        self._exchange(failure=failure)

    def _await_others(self) -> None:
        """Run along until no process has a pass left."""
        while self._exchange():
            with torch.no_grad():
                self._backbone(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=self._device), use_cache=False)

    def _exchange(self, runs: bool = False, failure: str | None = None) -> bool:
        """Say what this process is about to do; returns whether any of them runs a forward pass now."""
        states = torch.tensor([int(runs), int(failure is not None)])  # [2]
        dist.all_reduce(states, group=self._shards.group)
        running, failed = states.tolist()
        if failed:
            self._told = True
            self._heed(self._gather(failure), failure)
        return bool(running)

    def _gather(self, value: Any) -> list[Any]:
        """What each process of the copy gave here, in their order."""
        values: list[Any] = [None] * self._shards.size
        dist.all_gather_object(values, value, group=self._shards.group)
        return values

    def _heed(self, words: list[str | None], own: str | None) -> None:
        """End with the words of a process that failed, if it was not this one."""
        if own is None:
            number, text = next((i, text) for i, text in enumerate(words) if text is not None)
            raise TargetError(f"process {self._shards.first + number} failed, so all end: {text}")


class Turns(Lockstep):
    """The same where each process computes a part of every pass: all run the passes of all, one after the other.

    What a process is about to run is told to all, and each of them runs it in the order of the processes. Passes with
    the same inputs, those of processes that share a batch, are run once for all that asked. So a process may make
    features of rows of its own, as if its copy were whole.
    """

    def _begin(self, inputs: tuple, named: dict[str, Any]) -> None:
        own = pickle.dumps(_on_host((inputs, named)))
        passes = self._passes(own)
        place = next(n for n, (_, packed) in enumerate(passes) if packed == own)
        self._running = True
        self._run(passes[:place])
        self._later = passes[place + 1 :]

    def _end(self) -> None:
        self._run(self._later)
        self._running = False

    def _tell(self, failure: str) -> None:
        self._passes(failure=failure)

    def _await_others(self) -> None:
        while passes := self._passes():
            self._run(passes)

    def _passes(self, own: bytes | None = None, failure: str | None = None) -> list[tuple[int, bytes]]:
        """The passes to run now, each once: the first process that asked, and its inputs."""
        told = self._gather((own, failure))
        if any(text is not None for _, text in told):
            self._told = True
            self._heed([text for _, text in told], failure)
        passes: dict[bytes, int] = {}
        for number, (packed, _) in enumerate(told):
            if packed is not None:
                passes.setdefault(packed, number)
        return [(number, packed) for packed, number in passes.items()]

    @torch.no_grad()
    def _run(self, passes: list[tuple[int, bytes]]) -> None:
        """Compute this process's part of others' passes; hooks of captures let them by, see :func:`for_another`."""
        token = _FOR_ANOTHER.set(True)
        try:
            for number, packed in passes:
                inputs, named = _on_device(pickle.loads(packed), self._device)
                try:
                    self._backbone.forward(*inputs, **named)
                except Exception as error:  # it meets the same
                    raise TargetError(
                        f"process {self._shards.first + number} failed, so all end: {type(error).__name__}: {error}"
                    ) from error
        finally:
            _FOR_ANOTHER.reset(token)


def lockstep_of(backbone: nn.Module, shards: Shards, device: torch.device) -> Lockstep:
    """What keeps the forward passes of a split target in step."""
    return (Turns if shards.kind == "tensor" else Lockstep)(backbone, shards, device)


@dataclass(frozen=True)
class _Numbers:
    """A tensor as plain bytes: pickled tensors differ by where they lie, and the same inputs are to be recognised."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, tensor: Tensor) -> _Numbers:
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)  # [bytes]
        return cls(tensor.dtype, tuple(tensor.shape), flat.numpy().tobytes())

    def tensor(self, device: torch.device) -> Tensor:
        flat = torch.frombuffer(bytearray(self.data), dtype=torch.uint8) if self.data else torch.empty(0).byte()
        return flat.view(self.dtype).reshape(self.shape).to(device)


def _on_host(value: Any) -> Any:
    """Inputs of a forward pass as other processes can take them.

    Raises:
        TargetError: an input that holds something else than tensors and plain values, such as a cache.
    """
    if isinstance(value, Tensor):
        return _Numbers.of(value)
    if isinstance(value, (tuple, list)):
        return type(value)(map(_on_host, value))
    if isinstance(value, dict):
        return {key: _on_host(part) for key, part in value.items()}
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return value
    raise TargetError(
        f"a forward pass with a {type(value).__name__} cannot be run by all processes of a target that is split by "
        "tensor parallelism: set model.parallel: fsdp (of a dump --parallel fsdp)"
    )


def _on_device(value: Any, device: torch.device) -> Any:
    """Such inputs, their tensors on a device."""
    if isinstance(value, _Numbers):
        return value.tensor(device)
    if isinstance(value, (tuple, list)):
        return type(value)(_on_device(part, device) for part in value)
    if isinstance(value, dict):
        return {key: _on_device(part, device) for key, part in value.items()}
    return value


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
            "same command goes on from what is saved"
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
            "model.parallel (of a dump --parallel) at none, or train from features that a serving engine makes "
            "(docs/features.md)"
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
    """Inside, split layers have all of their weights; every process of the copy calls this."""
    from torch.distributed.fsdp import FSDPModule

    split: list[Callable[[], Any]] = []
    others: list[nn.Module] = []
    for layer in layers:
        if isinstance(layer, FSDPModule):
            layer.unshard()
            split.append(layer.reshard)
        else:
            others.append(layer)
    try:
        with gathered(others):
            yield
    finally:
        for reshard in split:
            reshard()
