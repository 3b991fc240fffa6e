"""Bytes of the tensors that are alive at once: counted while something runs, or while it only goes through its shapes.

:class:`Allocations` counts the storages that operations make, until they are let go. What no operation makes is not
seen: the interpreter, libraries, scratch inside a kernel, and other threads. :class:`Shapes` runs the same code without
its numbers: tensors that were hollowed out have sizes and no memory, whatever is computed from them is hollow too, and
everything else, such as token ids and what is planned by them, is computed as ever.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LARGE = 2**22
"""Elements from which on :class:`Shapes` does not compute what it could, such as the mask of a padded batch."""


def tensors_in(*values: Any) -> list[Tensor]:
    """The tensors in nested values."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


class Allocations(TorchDispatchMode):
    """Counts bytes of tensors made inside ``with``, in this thread.

    Attributes:
        now: bytes alive.
        peak: the most that were alive at once since :meth:`forget_peak`.
    """

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._alive: dict[int, int] = {}

    def forget_peak(self) -> None:
        """Begin the peak anew."""
        self.peak = self.now

    def add(self, tensor: Tensor, known: Iterable[Tensor] = ()) -> None:
        """Count a tensor's memory, unless it is counted or that of one that is known."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive or any(other.untyped_storage()._cdata == key for other in known):
            return
        self._alive[key] = size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key).atexit = False

    def _gone(self, key: int) -> None:
        self.now -= self._alive.pop(key)

    def run(self, function, args: tuple, kwargs: dict) -> Any:
        """What the operation gives."""
        return function(*args, **kwargs)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = self.run(function, args, kwargs or {})
        given = None
        for tensor in tensors_in(result):
            if given is None:
                given = tensors_in(args, kwargs)
            self.add(tensor, given)
        return result


class Shapes(Allocations):
    """Runs code over hollow tensors, see the module.

    A number that is read back from a hollow tensor is taken as true, or as one: checks that all is well pass.
    """

    def __init__(self):
        super().__init__()
        self.hollow = FakeTensorMode(allow_non_fake_inputs=True)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32, requires_grad: bool = False) -> Tensor:
        """A hollow tensor on the CPU."""
        with self.hollow:
            tensor = torch.empty(shape, dtype=dtype, requires_grad=requires_grad)
        self.add(tensor)
        return tensor

    def fill(self, module: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
        """Give a module that was built on the device ``meta`` hollow parameters and buffers; tied ones stay tied.

        Args:
            dtype: of parameters; default their own.

        Returns:
            the module.
        """
        made: dict[int, Any] = {}
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None and parameter.is_meta:
                    if id(parameter) not in made:
                        wanted = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
                        tensor = self.empty(*parameter.shape, dtype=wanted)
                        made[id(parameter)] = parameter, nn.Parameter(tensor, parameter.requires_grad)
                    part._parameters[name] = made[id(parameter)][1]
            for name, buffer in part._buffers.items():
                if buffer is not None and buffer.is_meta:
                    part._buffers[name] = self.empty(*buffer.shape, dtype=buffer.dtype)
        return module

    def run(self, function, args: tuple, kwargs: dict) -> Any:
        """What the operation gives, hollow if an input is, or if it would be large."""
        given = tensors_in(args, kwargs)
        if not any(isinstance(tensor, FakeTensor) for tensor in given) and _size(given) <= LARGE:
            return function(*args, **kwargs)
        if function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default):
            return True if given[0].dtype == torch.bool else 1.0 if given[0].is_floating_point() else 1
        if function is torch.ops.aten.equal.default:
            return True
        if function in _BY_PLACES:  # a mask that is there tells how many places it chooses
            args = (args[0], [_places(index) for index in args[1]], *args[2:])
            args = (args[0], [part for index in args[1] for part in index], *args[2:])
        with self.hollow:
            return function(*args, **kwargs)


_BY_PLACES = (
    torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default,
)  # fmt: skip


def _places(index: Tensor | None) -> tuple[Tensor | None, ...]:
    """A mask as the indices of its set places, anything else as it is."""
    if index is None or isinstance(index, FakeTensor) or index.dtype != torch.bool:
        return (index,)
    return index.nonzero(as_tuple=True)


def _size(tensors: list[Tensor]) -> int:
    """Elements of what tensors broadcast to, or of the largest where they do not."""
    try:
        return math.prod(torch.broadcast_shapes(*(tensor.shape for tensor in tensors)))
    except RuntimeError:
        return max(tensor.numel() for tensor in tensors)
