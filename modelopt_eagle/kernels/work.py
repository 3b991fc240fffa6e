"""What an operation cannot do without: bytes moved once, multiplications and additions, and the time of both.

The floor of an operation on a machine is the longer of its bytes at the memory's rate and its arithmetic at the
matrix units' rate. No kernel is faster; a good one is near it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """Rates of a GPU by its data sheet.

    Attributes:
        flops: dense bf16 multiplications and additions a second.
        bandwidth: bytes a second of its memory.
    """

    name: str
    flops: float
    bandwidth: float


MACHINES = {
    machine.name: machine
    for machine in (
        Machine("A100", 312e12, 2.04e12),
        Machine("H100", 989e12, 3.35e12),
        Machine("H200", 989e12, 4.8e12),
        Machine("B200", 2250e12, 8.0e12),
    )
}


@dataclass(frozen=True)
class Work:
    """The least an operation does.

    Attributes:
        bytes: read and written, each tensor once.
        flops: multiplications and additions of the matrix products, two for each pair.
    """

    bytes: int
    flops: int

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops)

    def floor(self, machine: Machine) -> float:
        """Seconds below which no implementation comes on ``machine``."""
        return max(self.bytes / machine.bandwidth, self.flops / machine.flops)
