"""What attention of a rollout step has room for on a GPU: widths of heads, and tiles by kernel and generation."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from modelopt_eagle.kernels.dispatch import power_of_two

MAX_BYTES = 512
"""Widest key or value head: 256 in 16 bits, 128 in float32."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def supported(*tensors: Tensor) -> bool:
    """Whether the kernel takes tensors of these dtypes and widths."""
    dtypes = {tensor.dtype for tensor in tensors}
    return (
        len(dtypes) == 1
        and dtypes <= set(DTYPES)
        and all(0 < t.shape[-1] * t.element_size() <= MAX_BYTES for t in tensors)
    )


@dataclass(frozen=True)
class Tile:
    """Sizes of a program: queries (times the heads that share a key head), keys, warps, and stages of its loop."""

    queries: int
    keys: int
    warps: int
    stages: int


LEAST = (80, 99 << 10)
"""Compute capability and shared memory of a program that any GPU since capability 8 has."""


@functools.cache
def gpu_limits(device: torch.device) -> tuple[int, int]:
    """The compute capability of ``device`` (90 for 9.0), and bytes of shared memory that a program may have there."""
    if device.type != "cuda" or torch.version.hip:
        return LEAST
    facts = torch.cuda.get_device_properties(device)
    return 10 * facts.major + facts.minor, getattr(facts, "shared_memory_per_block_optin", LEAST[1])


# By kernel: the widest head in bytes, and the tile for heads up to it. What a thread holds of scores and sums fills its
# registers: with 16-bit inputs no tile spills on capability 8.0, 9.0 or 10.0; in float32 heads wider than 64 do.
BEFORE_HOPPER = {
    "forward": ((128, Tile(128, 64, 8, 3)), (256, Tile(128, 64, 8, 3)), (512, Tile(64, 32, 8, 2))),
    "queries": ((128, Tile(128, 64, 8, 3)), (256, Tile(128, 32, 8, 2)), (512, Tile(64, 32, 8, 2))),
    "keys": ((128, Tile(64, 128, 8, 2)), (256, Tile(64, 64, 8, 2)), (512, Tile(32, 32, 8, 2))),
}
SINCE_HOPPER = {
    "forward": ((128, Tile(128, 64, 4, 3)), (256, Tile(128, 64, 8, 3)), (512, Tile(64, 32, 8, 2))),
    "queries": ((128, Tile(128, 64, 8, 3)), (256, Tile(128, 64, 8, 2)), (512, Tile(32, 32, 8, 2))),
    "keys": ((128, Tile(64, 128, 8, 2)), (256, Tile(32, 128, 8, 2)), (512, Tile(32, 32, 8, 2))),
}


@functools.cache
def tiles(kernel: str, dk: int, dv: int, size: int, limits: tuple[int, int], most: int) -> Tile:
    """The tile of a kernel for these head widths and element size.

    Args:
        kernel: ``forward``, ``queries`` or ``keys``.
        size: bytes of an element.
        limits: :func:`gpu_limits`.
        most: queries or keys.
    """
    capability, shared = limits
    wanted = (SINCE_HOPPER if capability >= 90 else BEFORE_HOPPER)[kernel]
    tile = next(tile for width, tile in wanted if max(dk, dv) * size <= width)
    tile = Tile(min(tile.queries, most), min(tile.keys, most), tile.warps, tile.stages)
    widths = power_of_two(dk) + power_of_two(dv)

    def needed(tile: Tile) -> int:
        resident, streamed = (tile.keys, tile.queries) if kernel == "keys" else (tile.queries, tile.keys)
        scores = 0 if kernel == "forward" else 2 * tile.queries * tile.keys
        return size * (widths * (resident + tile.stages * streamed) + scores)

    while needed(tile) > shared and tile.queries * tile.keys > 256:
        if tile.stages > 2:
            tile = Tile(tile.queries, tile.keys, tile.warps, 2)
        elif tile.queries > tile.keys:
            tile = Tile(tile.queries // 2, tile.keys, tile.warps, 2)
        else:
            tile = Tile(tile.queries, tile.keys // 2, tile.warps, 2)
    return tile


def constants(share: int, dk: int, dv: int, tile: Tile) -> dict[str, int]:
    """Keyword arguments that every kernel takes."""
    return {
        "SHARE": share,
        "DK": dk,
        "DV": dv,
        "WIDE_K": max(16, power_of_two(dk)),
        "WIDE_V": max(16, power_of_two(dv)),
        "BLOCK_Q": tile.queries,
        "BLOCK_K": tile.keys,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def blocks(count: int, size: int) -> int:
    """Tiles of ``size`` that cover ``count``."""
    return -(-count // size)


def precision(dtype: torch.dtype) -> str:
    """How float32 products are made: as torch's own, in full or in TF32. Without meaning for 16-bit inputs."""
    return "tf32x3" if dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest" else "tf32"
