"""The kernels between the products of a layer, as ``training_kernels.py`` measures them: norms side by side, rotation.

Both only move numbers, so beside the least that they move stands what torch's operations move one by one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from training_cases import Case, Contestant, Passes, TrainingKernel  # scripts/benchmark/training_cases.py

from modelopt_eagle.draft.projections import rotate
from modelopt_eagle.kernels import norm_concat, norm_concat_work, rotate_heads, rotate_heads_work
from modelopt_eagle.kernels.dispatch import SWITCH


@dataclass(frozen=True)
class LayerInput:
    """Inputs of a kernel between two products of a layer.

    Attributes:
        tensors: with gradients.
        upstream: gradient of the output.
        fixed: arguments without a gradient, by name.
    """

    tensors: list[Tensor]
    upstream: Tensor
    fixed: dict[str, Any]


@dataclass(frozen=True)
class LayerSizes:
    """Rows of a head as wide as the target, its heads, and how many of their dimensions turn in pairs."""

    rows: int
    width: int
    heads: int
    dim: int
    pairs: int

    def norms(self, device: str) -> LayerInput:
        """What layer 0 reads: an embedding in float32, as the head's weights are, a state in the products' dtype."""
        dtype = torch.bfloat16 if device != "cpu" else torch.float32
        random = torch.Generator(device).manual_seed(0)
        drawn = [torch.randn(self.rows, part * self.width, generator=random, device=device) for part in (1, 1, 2)]
        embedding, state, upstream = drawn[0], drawn[1].to(dtype).requires_grad_(), drawn[2].to(dtype)
        weights = [torch.rand(self.width, generator=random, device=device).requires_grad_() for _ in range(2)]
        return LayerInput([state, *weights], upstream, {"embedding": embedding, "eps": 1e-5, "dtype": dtype})

    def turned(self, device: str) -> LayerInput:
        """Query heads, and where they stand."""
        dtype = torch.bfloat16 if device != "cpu" else torch.float32
        random, shape = torch.Generator(device).manual_seed(0), (self.rows, self.heads, self.dim)
        x, upstream = (torch.randn(shape, generator=random, device=device).to(dtype) for _ in range(2))
        angle = torch.rand(self.rows, self.pairs, generator=random, device=device) * 100
        fixed = {"cos": angle.cos(), "sin": angle.sin(), "interleaved": 2 * self.pairs < self.dim}
        return LayerInput([x.requires_grad_()], upstream, fixed)

    def norms_case(self) -> Case:
        """Two norms, a concatenation and the cast for the products, in bf16 with a float32 embedding.

        Torch's operations under autocast: the state's cast (2 bytes read, 4 written), two norms in float32 (4 + 4
        each), the concatenation (8 + 8), one cast of it (8 + 4; three products make it three times). Backward: the
        cast back (4 + 8), two norms (each reads gradient and input; the state's also writes 4), their weights' sums
        (4 + 4 more read each), the cast of the state's gradient (4 + 2).
        """
        elements, small = self.rows * self.width, LayerSizes(40, 48, 2, 8, 4)
        work = norm_concat_work(self.rows, self.width, 4, 2, 2)
        shape = f"{self.rows} rows of 2 x {self.width}"
        apart = {"forward": elements * (6 + 16 + 16 + 12), "backward": elements * (12 + 8 + 12 + 16 + 6)}
        return Case(shape, work, self.norms, small.norms, apart)

    def turned_case(self) -> Case:
        """The rotation of query heads in bf16.

        Torch's operations on halves: four products (read and write one half), a difference and a sum (read two, write
        one), the concatenation; in latent attention it also takes the rest. Backward: each half is read by two
        products, whose gradients are added, and the halves put together.
        """
        part, whole = 2 * self.rows * self.heads * self.pairs, 2 * self.rows * self.heads * self.dim  # bytes
        work = rotate_heads_work(self.rows, self.heads, self.dim, self.pairs, 2)
        shape = f"{self.rows} rows of {self.heads} heads of {self.dim}, {2 * self.pairs} turn"
        pairs = 4 if 2 * self.pairs == self.dim else 3
        small = LayerSizes(20, 8, 3, 8 if pairs == 4 else 10, pairs)
        apart = part * (4 * 2 + 2 * 3) + 2 * whole
        return Case(shape, {"forward": work, "backward": work}, self.turned, small.turned,
                    {"forward": apart, "backward": apart})  # fmt: skip


def layer_sizes() -> list[LayerSizes]:
    """One step of 4,096 anchors: an 8B target, a small one, and latent attention."""
    wide, latent = LayerSizes(4096, 4096, 32, 128, 64), LayerSizes(4096, 7168, 64, 192, 32)
    return [wide, LayerSizes(4096, 1024, 16, 128, 64), latent]


def by_layer(run: Callable[[LayerInput], Tensor]) -> Callable[[LayerInput], Passes]:
    """Both passes of a differentiable function."""

    def passes(given: LayerInput) -> Passes:
        out = run(given)

        def backward() -> Sequence[Tensor]:
            return torch.autograd.grad(out, given.tensors, given.upstream, retain_graph=True)

        return {"forward": lambda: [run(given)], "backward": backward}

    return passes


def norms_by(backend: str) -> Callable[[LayerInput], Tensor]:
    """The kernel or its reference."""

    def run(given: LayerInput) -> Tensor:
        state, *weights = given.tensors
        fixed = given.fixed
        return norm_concat(fixed["embedding"], state, *weights, fixed["eps"], fixed["dtype"], backend=backend)

    return run


def norms_by_torch(given: LayerInput) -> Tensor:
    """Torch's operations in the dtypes of autocast."""
    state, *weights = given.tensors
    width, halves = (state.shape[1],), (given.fixed["embedding"], state)
    normed = [
        torch.nn.functional.rms_norm(half.float(), width, weight, given.fixed["eps"])
        for half, weight in zip(halves, weights, strict=True)
    ]
    return torch.cat(normed, -1).to(given.fixed["dtype"])


def turned_by(backend: str) -> Callable[[LayerInput], Tensor]:
    """The kernel or its reference."""

    def run(given: LayerInput) -> Tensor:
        return rotate_heads(*given.tensors, **given.fixed, backend=backend)

    return run


def turned_by_torch(given: LayerInput) -> Tensor:
    """The plain code of training, whatever the device."""
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "reference"
    try:
        return rotate(*given.tensors, **given.fixed)
    finally:
        os.environ.pop(SWITCH) if before is None else os.environ.update({SWITCH: before})


NORM_CONCAT = TrainingKernel(
    name="norm_concat",
    cases=lambda: [size.norms_case() for size in layer_sizes()],
    reference=by_layer(norms_by("reference")),
    contestants={
        "kernel": Contestant(by_layer(norms_by("auto")), ours=True),
        "torch": Contestant(by_layer(norms_by_torch)),
    },
    tolerance=2e-2,
)

ROTATE_HEADS = TrainingKernel(
    name="rotate_heads",
    cases=lambda: [size.turned_case() for size in layer_sizes()],
    reference=by_layer(turned_by("reference")),
    contestants={
        "kernel": Contestant(by_layer(turned_by("auto")), ours=True),
        "torch": Contestant(by_layer(turned_by_torch)),
    },
    tolerance=2e-2,
)

LAYER_KERNELS = (NORM_CONCAT, ROTATE_HEADS)
