"""Other forwards for a model's layers while it decodes on the CPU: linear layers, and decoder layers of known kinds.

``nn.Linear`` hands float32 products to BLAS, which on many processors is far from the memory's bandwidth at one row,
and everywhere at two to nine, the very sizes that verify drafts (``cpu_product.py``). And what stands between the
products costs as much as they do (``fused_layers.py``). :class:`FastLinears` lends both kinds of forward and takes
them back. Results differ from the layers' own by float rounding only.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from modelopt_eagle.decoding import cpu_product
from modelopt_eagle.decoding.cpu_product import Packed, Product, available, filled
from modelopt_eagle.decoding.fused_layers import FusedLayer, Products, Step, known, linears_of

SWITCH = ("auto", True, False)
LEAST_WEIGHTS = 1 << 16
"""Layers of fewer weights are left alone: there a call costs more than its arithmetic."""
PADDED_WEIGHTS = 1 << 18
"""One or two rows are filled up to four only for layers of so many weights."""
_SHARED: weakref.WeakKeyDictionary[nn.Module, weakref.ref[FastLinears]] = weakref.WeakKeyDictionary()


class FastLinears:
    """Another forward for a model's float32 linear layers on the CPU, and for decoder layers whose kind is known.

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
        self._packed: dict[tuple[nn.Linear, ...], Packed] = {}
        self._agrees: dict[nn.Module, bool] = {}  # decoder layers of a known kind: whether their trial went well

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
        """Memory of the copies, those that lie side by side for BLAS among them."""
        copies = self._packed.values()
        return sum(4 * copy.lying.numel() * (1 if len(copy.weights) == 1 else 2) for copy in copies)

    @contextmanager
    def use(self) -> Iterator[None]:
        """Lend the forwards; the layers' own are back on leaving, also after an exception."""
        changed: list[nn.Module] = []
        try:
            model = self._model()
            if model is not None:
                fused = self._fused(model)
                joint = {linear for layer in fused for linear in linears_of(layer)[:3]}  # read as one product
                for linear in eligible(model):
                    if linear not in joint:
                        linear.forward = _forward(self._product(linear), linear)
                        changed.append(linear)
                for layer, forward in fused.items():
                    layer.forward = forward
                    changed.append(layer)
            yield
        finally:
            for part in changed:
                part.__dict__.pop("forward", None)

    def _fused(self, model: nn.Module) -> dict[nn.Module, FusedLayer]:
        """Decoder layers that can be lent a forward, with it."""
        able, step, fused = set(eligible(model, 0)), Step(), {}
        for layer in model.modules():
            if not known(layer) or self._agrees.get(layer) is False:
                continue
            linears = linears_of(layer)
            least = min(
                sum(part.weight.numel() for part in linears[:3]), *(part.weight.numel() for part in linears[3:])
            )
            if least < LEAST_WEIGHTS or not able.issuperset(linears):
                continue
            forward = FusedLayer(layer, Products.of(linears, self._product), step)
            if layer not in self._agrees:
                self._agrees[layer] = forward.agrees()
            if self._agrees[layer]:
                fused[layer] = forward
        return fused

    def _product(self, *linears: nn.Linear) -> Product:
        """Linear layers of one input as one product, over a packed copy if they are packed."""
        weights = [linear.weight.detach() for linear in linears]
        if not self.pack or any(weight.is_inference() for weight in weights):  # they do not tell that they were changed
            return Product(linears, None)
        copy = self._packed.get(linears)
        if copy is None or not copy.is_of(weights):
            copy = self._packed[linears] = Packed.of(weights)
        return Product(linears, copy)


def _forward(product: Product, linear: nn.Linear):
    pads = linear.weight.numel() >= PADDED_WEIGHTS

    def forward(x: Tensor) -> Tensor:
        if x.dtype != torch.float32 or x.device.type != "cpu" or torch.is_grad_enabled():
            return nn.functional.linear(x, linear.weight, linear.bias)
        if x.numel() <= cpu_product.BLAS_ROWS * x.shape[-1]:
            return nn.functional.linear(x, linear.weight, linear.bias)
        rows = x.reshape(-1, x.shape[-1])  # [R,in]
        out = product(filled(rows) if pads else rows)
        return out[: len(rows)].view(*x.shape[:-1], -1)

    return forward


def eligible(model: nn.Module, least: int = LEAST_WEIGHTS) -> list[nn.Linear]:
    """Layers of a model of at least so many weights that can get another forward, each once."""
    return [
        part
        for part in model.modules()
        if type(part) is nn.Linear
        and "weight" in part._parameters  # else a hook computes it anew at each call (pruning, weight norm)
        and part.weight.dtype == torch.float32
        and part.weight.device.type == "cpu"
        and part.weight.numel() >= least
        and "forward" not in part.__dict__
    ]


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
