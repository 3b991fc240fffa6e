"""Prefixes that rows of a shard have in common: a causal target gives them equal states, which are stored once.

A row names an earlier row of its shard and a length; its own span of ``aux_hidden`` holds only what follows. The
earlier row may itself begin with a prefix of a third one. Nothing reaches outside the shard: shards stay independent.
"""

from __future__ import annotations

from torch import Tensor

from modelopt_eagle.common.dtypes import STATE_DTYPES

BLOCK = 8
"""Tokens by which prefixes are looked up; a shorter common prefix is stored again."""


class PrefixIndex:
    """Token ids of the rows of a growing shard, to find an earlier row that begins like a new one."""

    def __init__(self):
        self._rows: list[Tensor] = []
        self._nodes: dict[tuple[int, bytes], tuple[int, int]] = {}  # (node, next block) -> (node, first row there)

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, input_ids: Tensor) -> tuple[int, int]:
        """Take in a row.

        Args:
            input_ids: [s] int32 on the CPU.

        Returns:
            an earlier row and the number of tokens, at least ``BLOCK``, that both begin with; (-1, 0) without one.
        """
        number, (node, row) = len(self._rows), (0, -1)
        self._rows.append(input_ids)
        content = input_ids.numpy().tobytes()
        width = BLOCK * input_ids.element_size()
        for at in range(0, len(content) - width + 1, width):
            key = (node, content[at : at + width])
            node, first = self._nodes.setdefault(key, (len(self._nodes) + 1, number))
            if first != number:
                row = first
        if row < 0:
            return -1, 0
        other = self._rows[row]
        most = min(len(other), len(input_ids))
        differing = (other[:most] != input_ids[:most]).nonzero()
        return row, int(differing[0]) if len(differing) else most


def segments(prefix_row: Tensor, prefix_length: Tensor, number: int, length: int) -> list[tuple[int, int, int]]:
    """Where the first ``length`` states of a row lie: (row, start, stop), positions of the rows, in order.

    Args:
        prefix_row, prefix_length: [R] int64, for each row an earlier one and how many states it gives.
        number: the row.
        length: states wanted.
    """
    parts = []
    while length > 0:
        begin = int(prefix_length[number])
        if length > begin:
            parts.append((number, begin, length))
            length = begin
        number = int(prefix_row[number])
    return parts[::-1]


def agreeing(ours: Tensor, theirs: Tensor, groups: int, dtype: str) -> int:
    """Positions from the first on at which two computations of the same states agree.

    A target that looks ahead of a token is off by far more than the tolerance, and its rows share nothing.

    Args:
        ours, theirs: [n, groups*width] floating.
        groups: layers side by side.
        dtype: storage dtype, which sets the tolerance.
    """
    theirs = theirs.float().unflatten(-1, (groups, -1))  # [n,groups,width]
    difference = (ours.float().unflatten(-1, (groups, -1)) - theirs).norm(dim=-1)  # [n,groups]
    apart = (difference > STATE_DTYPES[dtype].same * theirs.norm(dim=-1)).any(-1)  # [n]
    found = apart.nonzero()
    return int(found[0]) if len(found) else len(apart)
