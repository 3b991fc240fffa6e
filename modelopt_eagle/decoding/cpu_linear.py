"""Linear layers of few rows on the CPU, by oneDNN instead of BLAS.

Decoding reads every weight for a handful of rows, so its floor is the memory's bandwidth. ``nn.Linear`` hands float32
products to BLAS, which reaches a third of it at one row and far less at two to nine, the very sizes that verify
drafts. oneDNN's inner product reads weights about twice as fast, and nearly at the bandwidth if they were laid out for
it before (``docs/decoding.md`` has the numbers). :class:`FastLinears` lends its forward to a model's layers while it
decodes. Results differ from ``nn.Linear`` by float rounding only.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

SWITCH = ("auto", True, False)
LEAST_WEIGHTS = 1 << 16
"""Layers of fewer weights are left alone: there a call costs more than its arithmetic."""
LAYOUT_ROWS = 8
"""Rows that the packed layout is chosen for; it serves other numbers as well."""
FEW_ROWS, PADDED_ROWS, PADDED_WEIGHTS = 3, 4, 1 << 18
"""One or two rows go as four through layers of so many weights: oneDNN is up to a quarter faster at three to six."""
SAMPLE = 64
_SHARED: weakref.WeakKeyDictionary[nn.Module, weakref.ref[FastLinears]] = weakref.WeakKeyDictionary()


class FastLinears:
    """Another forward for a model's float32 linear layers on the CPU.

    Layers that are no plain ``nn.Linear`` (quantised, parametrised, adapted), that already have a forward of their own
    or that are small keep theirs. A packed copy takes as much memory as its weight, and lives as long as this object;
    a weight that moved or was changed is packed again at the next :meth:`use`.

    Args:
        model: whose layers.
        pack: keep packed copies; else oneDNN reads the weights as they lie, at about two thirds of the speed.
    """

    def __init__(self, model: nn.Module, pack: bool):
        self.pack = pack
        self._model = weakref.ref(model)
        self._packed: dict[nn.Linear, _Copy] = {}

    @classmethod
    def shared(cls, model: nn.Module, switch: str | bool) -> FastLinears | None:
        """The object of all who decode with ``model``, as long as one of them holds it; ``None``: nothing to gain.

        Args:
            switch: ``True``: packed copies; ``False``: off; ``"auto"``: packed if the copies take at most half of
                the memory that is free now, else without copies.
        """
        if switch is False or not available():
            return None
        found = _SHARED.get(model)
        fast = None if found is None else found()
        if fast is None or (switch is True and not fast.pack):
            size = sum(linear.weight.numel() * 4 for linear in eligible(model))
            if size == 0:
                return None
            fast = cls(model, switch is True or 2 * size <= free_memory())
            _SHARED[model] = weakref.ref(fast)
        return fast

    @property
    def packed_bytes(self) -> int:
        """Memory of the copies."""
        return sum(weight.numel() * 4 for weight in (linear.weight for linear in self._packed))

    @contextmanager
    def use(self) -> Iterator[None]:
        """Lend the forwards; the layers' own are back on leaving, also after an exception."""
        changed = []
        try:
            for linear in eligible(self._model()):
                linear.forward = _forward(self._weight(linear), linear)
                changed.append(linear)
            yield
        finally:
            for linear in changed:
                linear.__dict__.pop("forward", None)

    def _weight(self, linear: nn.Linear) -> Tensor:
        weight = linear.weight.detach()
        if not self.pack or weight.is_inference():  # inference tensors do not tell that they were changed
            return weight
        copy = self._packed.get(linear)
        if copy is None or not copy.is_of(weight):
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, LAYOUT_ROWS)
            copy = self._packed[linear] = _Copy(weight, weight._version, _sample(weight).clone(), packed)
        return copy.packed


@dataclass(frozen=True)
class _Copy:
    """A packed weight and what it was made from."""

    weight: Tensor  # held, so that no other weight comes to lie at its address
    version: int
    sample: Tensor
    packed: Tensor

    def is_of(self, weight: Tensor) -> bool:
        """Whether a weight is still what was packed. PyTorch does not count what is written through ``.data``, as
        adapters do when they are merged; that is seen by a sample of the numbers."""
        return (
            self.weight.data_ptr() == weight.data_ptr()
            and self.version == weight._version
            and torch.equal(self.sample, _sample(weight))
        )


def _sample(weight: Tensor) -> Tensor:
    """Up to some 100 numbers of a matrix, from all over it."""
    diagonal = weight.diagonal()
    return diagonal[:: max(1, len(diagonal) // SAMPLE)]


def _forward(weight: Tensor, linear: nn.Linear):
    bias, multiply = linear.bias, torch.ops.mkldnn._linear_pointwise
    pads = linear.weight.numel() >= PADDED_WEIGHTS

    def forward(x: Tensor) -> Tensor:
        if x.dtype != torch.float32 or x.device.type != "cpu" or torch.is_grad_enabled():
            return nn.functional.linear(x, linear.weight, bias)
        rows = x.numel() // x.shape[-1]
        if pads and 0 < rows < FEW_ROWS:
            padded = nn.functional.pad(x.reshape(rows, -1), (0, 0, 0, PADDED_ROWS - rows))  # [4,in]
            return multiply(padded, weight, bias, "none", [], "")[:rows].view(*x.shape[:-1], -1)
        return multiply(x, weight, bias, "none", [], "")

    return forward


def eligible(model: nn.Module) -> list[nn.Linear]:
    """Layers of a model that can get another forward, each once."""
    return [
        part
        for part in model.modules()
        if type(part) is nn.Linear
        and "weight" in part._parameters  # else a hook computes it anew at each call (pruning, weight norm)
        and part.weight.dtype == torch.float32
        and part.weight.device.type == "cpu"
        and part.weight.numel() >= LEAST_WEIGHTS
        and "forward" not in part.__dict__
    ]


def available() -> bool:
    """Whether this build of PyTorch has oneDNN and the two operators."""
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def free_memory() -> int:
    """Bytes that can be had without swapping (0 if the system does not say)."""
    try:
        with open("/proc/meminfo") as file:
            sizes = dict(line.split(":") for line in file)
        return 1024 * int(sizes["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        try:
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, OSError, ValueError):
            return 0
