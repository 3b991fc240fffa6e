"""Products of few rows with float32 weights on the CPU: by BLAS or by oneDNN, whichever is faster there.

One row only reads the weights, so the memory's bandwidth is the floor. On Intel's processors MKL keeps up with it for
one to three rows; from four on it copies the weights before it multiplies, unless they were copied once for that many
rows (:data:`PACK_ROWS`, a chain of three drafts), or are given in blocks that stay in the cache. On others oneDNN is
the faster from one row on, best over weights that were laid out for it; it takes an activation or a sum into the same
pass (``docs/decoding.md`` has the numbers).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

LAYOUT_ROWS = 8
"""Rows that the packed layout is chosen for; it serves other numbers as well."""
FEW_ROWS, PADDED_ROWS = 3, 4
"""Where oneDNN is to take one or two rows they go as four: it is up to a quarter faster at three to six."""
SAMPLE = 64
NOTHING = ("none", "")
ACTIVATIONS = {
    NOTHING: lambda x: x,
    ("swish", ""): lambda x: nn.functional.silu(x, inplace=True),
    ("relu", ""): torch.relu_,
    ("gelu", "none"): nn.functional.gelu,
    ("gelu", "tanh"): lambda x: nn.functional.gelu(x, approximate="tanh"),
}
"""Activations by oneDNN's names for them and their algorithms, and as functions that may write over their input."""


def mkl_on_intel() -> bool:
    """Whether float32 products go to MKL on a processor that it is made for."""
    if not torch.backends.mkl.is_available():
        return False
    try:
        with open("/proc/cpuinfo") as file:
            return any("GenuineIntel" in line for line in file if line.startswith("vendor_id"))
    except OSError:
        return False


def packs_for_mkl() -> bool:
    """Whether this build of PyTorch can lay weights out for MKL."""
    return (
        torch.backends.mkl.is_available()
        and hasattr(torch.ops.mkl, "_mkl_linear")
        and hasattr(torch.ops.mkl, "_mkl_reorder_linear_weight")
    )


BLAS_ROWS = 3 if mkl_on_intel() else 0
"""Rows up to which BLAS is the faster."""
BLOCK_ROWS = 9 if mkl_on_intel() else 0
"""Rows up to which BLAS is the faster over blocks of a weight."""
PACK_ROWS = 4 if mkl_on_intel() and packs_for_mkl() else 0
"""Rows that MKL lays out copies of weights for, and multiplies over them; 0: copies are laid out for oneDNN."""
BLOCKS = (96, 64, 128, 48)
"""Rows of such a block, the best first: one must divide the weight's."""


class Product:
    """One linear layer, or several of one input side by side.

    Args:
        linears: the layers.
        copy: their weights in one, laid out for MKL or oneDNN; ``None``: they are read as they lie.
    """

    def __init__(self, linears: Sequence[nn.Linear], copy: Packed | None):
        lying = [(linear.weight.detach(), linear.bias) for linear in linears]
        self.bias = lying[0][1]
        if len(lying) > 1 and any(bias is not None for _, bias in lying):
            self.bias = torch.cat([weight.new_zeros(len(weight)) if b is None else b for weight, b in lying])
        self.lying = lying if copy is None else [(copy.lying, self.bias)]
        self.blocked = all(block_rows(weight) for weight, _ in self.lying)
        self.rows = 0 if copy is None else copy.rows
        self.packed = copy.packed if copy is not None and copy.rows else None
        self.weight = lying[0][0] if len(lying) == 1 else None
        if copy is not None:
            self.weight = copy.lying if copy.rows else copy.packed

    def __call__(self, x: Tensor, activation: tuple[str, str] = NOTHING) -> Tensor:
        """``[R, in]`` to ``[R, out]``, through an activation of :data:`ACTIVATIONS`."""
        if self._by_blas(x):
            return ACTIVATIONS[activation](self._blas(x))
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, activation[0], [], activation[1])

    def combined(self, x: Tensor, other: Tensor, how: str) -> Tensor:
        """The same added to (``"add"``) or multiplied by (``"mul"``) ``other [R, out]``."""
        if self._by_blas(x):
            out = self._blas(x)
            return out.add_(other) if how == "add" else out.mul_(other)
        return torch.ops.mkldnn._linear_pointwise.binary(x, other, self.weight, self.bias, how)

    def _by_blas(self, x: Tensor) -> bool:
        """Whether ``[R, in]`` goes to BLAS."""
        rows = x.shape[0]
        few = rows <= BLAS_ROWS or (self.blocked and rows <= BLOCK_ROWS) or rows == self.rows
        return few or self.weight is None

    def _blas(self, x: Tensor) -> Tensor:
        """``[R, in]`` to ``[R, out]`` by BLAS."""
        rows = x.shape[0]
        if rows == self.rows:
            return torch.ops.mkl._mkl_linear(x.contiguous(), self.packed, self.weight, self.bias, rows)
        blocks = self.blocked and BLAS_ROWS < rows <= BLOCK_ROWS and self.weight is not None
        parts = [(by_blocks if blocks else nn.functional.linear)(x, *part) for part in self.lying]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def block_rows(weight: Tensor) -> int:
    """Rows of the blocks that a weight ``[out, in]`` is taken in; 0 if it has none."""
    return next((size for size in BLOCKS if len(weight) % size == 0), 0) if weight.is_contiguous() else 0


def by_blocks(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x [R, in]`` through a linear layer, by BLAS, a block of its weight ``[out, in]`` after the other."""
    blocks = weight.view(-1, block_rows(weight), weight.shape[1])  # [C,b,in]
    out = torch.bmm(x.expand(len(blocks), *x.shape), blocks.transpose(1, 2))  # [C,R,b]
    out = out.transpose(0, 1).reshape(len(x), -1)  # [R,out]
    return out if bias is None else out.add_(bias)


def rows_through(rows: int) -> int:
    """How many rows so many go as."""
    return PADDED_ROWS if BLAS_ROWS < rows < FEW_ROWS else rows


def filled(x: Tensor) -> Tensor:
    """``[R, in]`` with as many rows as :func:`rows_through` says, zeros behind."""
    rows = x.shape[0]
    missing = rows_through(rows) - rows
    return nn.functional.pad(x, (0, 0, 0, missing)) if missing else x


@dataclass(frozen=True)
class Packed:
    """A weight, or several side by side, laid out for MKL or oneDNN, and what it was made from."""

    weights: list[Tensor]  # held, so that no other weight comes to lie at their addresses
    versions: list[int]
    samples: list[Tensor]
    packed: Tensor
    lying: Tensor
    """Side by side as BLAS reads them; the weight itself if it is one."""
    rows: int
    """Rows that MKL multiplies over it; 0: laid out for oneDNN."""

    @classmethod
    def of(cls, weights: list[Tensor]) -> Packed:
        """Lay out ``[out, in]`` weights of one width."""
        whole = weights[0] if len(weights) == 1 else torch.cat(weights)
        if PACK_ROWS:
            packed = torch.ops.mkl._mkl_reorder_linear_weight(whole, PACK_ROWS)
        else:
            packed = torch.ops.mkldnn._reorder_linear_weight(whole, LAYOUT_ROWS)
        versions, samples = [weight._version for weight in weights], [sample(weight).clone() for weight in weights]
        return cls(weights, versions, samples, packed, whole, PACK_ROWS)

    def is_of(self, weights: list[Tensor]) -> bool:
        """Whether weights are still what was laid out. PyTorch does not count what is written through ``.data``, as
        adapters do when they are merged; that is seen by a sample of the numbers."""
        return all(
            old.data_ptr() == weight.data_ptr() and version == weight._version and torch.equal(numbers, sample(weight))
            for old, version, numbers, weight in zip(self.weights, self.versions, self.samples, weights, strict=True)
        )


def sample(weight: Tensor) -> Tensor:
    """Up to some 100 numbers of a matrix, from all over it."""
    diagonal = weight.diagonal()
    return diagonal[:: max(1, len(diagonal) // SAMPLE)]


def available() -> bool:
    """Whether this build of PyTorch has oneDNN and its operators."""
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )
