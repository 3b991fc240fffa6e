"""Per-request trees in fixed tensors ``[slots + 1, …]``, for engines that batch requests by slot.

A slot without a tree holds a linear chain and ``has_tree`` false, so that a kernel that reads it anyway sees a legal
tree. The last slot is a dummy with a regular T-ary tree (the parent of node n is ``(n-1) // T``): captured graphs pad
their batches with it and keep their shapes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from modelopt_eagle.errors import DecodingError
from modelopt_eagle.kernels import DraftTree, chain_tree, regular_tree

__all__ = ["FIELDS", "TreeSlots", "regular_tree"]
FIELDS = ("tokens", "flat_ids", "parents", "depths", "mask", "first_child", "next_sibling")


class TreeSlots:
    """Trees of up to N nodes for a number of requests.

    Attributes:
        tokens, parents, depths, first_child, next_sibling: ``[slots+1, N]`` int32; ``flat_ids [slots+1, N-1]``,
            ``mask [slots+1, N, ceil(N/32)]``, as in ``DraftTree``.
        has_tree: ``[slots+1]`` bool.
        held: ``[slots+1]`` bool, slots that a request holds.
        dummy: number of the last slot.

    Args:
        slots: requests at a time.
        num_nodes: N, the largest tree, root included.
        topk: T of the dummy's tree.
        device: of the tensors.
        depth: D, the longest path of a tree that is stored: what the walks over :meth:`gather`'s trees have room for,
            whatever is in the slots, so that their shapes never change. ``None``: N - 1, which any tree fits.

    Raises:
        DecodingError: a size below 1.
    """

    def __init__(
        self,
        slots: int,
        num_nodes: int,
        topk: int,
        device: torch.device | str = "cpu",
        depth: int | None = None,
    ):
        depth = max(1, num_nodes - 1) if depth is None else depth
        for name, value in (("slots", slots), ("num_nodes", num_nodes), ("topk", topk), ("depth", depth)):
            if value < 1:
                raise DecodingError(f"{name} must be at least 1, found {value}")
        self.slots, self.num_nodes, self.depth, self.dummy = slots, num_nodes, depth, slots
        self._chain = chain_tree(torch.full((1, num_nodes), -1, device=device))
        for name in FIELDS:
            line = getattr(self._chain, name)  # [1,...]
            setattr(self, name, line.repeat(slots + 1, *[1] * (line.dim() - 1)))
        self.has_tree = torch.zeros(slots + 1, dtype=torch.bool, device=device)
        self.held = torch.zeros(slots + 1, dtype=torch.bool, device=device)
        self._free = list(range(slots - 1, -1, -1))
        self._put(torch.tensor([self.dummy], device=device), regular_tree(num_nodes, topk, device))

    @property
    def free(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    def acquire(self) -> int:
        """A slot for a new request; it holds the default chain.

        Raises:
            DecodingError: all are taken.
        """
        if not self._free:
            raise DecodingError(f"all {self.slots} slots are taken: release one, or make more of them")
        slot = self._free.pop()
        self.held[slot] = True
        return slot

    def release(self, slot: int) -> None:
        """Give a slot back and restore its defaults.

        Raises:
            DecodingError: the slot is not held.
        """
        self._check([slot])
        self._reset(torch.tensor([slot], device=self.tokens.device))
        self.held[slot] = False
        self._free.append(slot)

    def store(self, slots: Sequence[int] | Tensor, tree: DraftTree) -> None:
        """Put the trees of a batch into their requests' slots, in place.

        A smaller tree than N is continued by its own chain of nothing: nodes behind it have token -1 and are nobody's
        child, so that nothing of an older tree can be reached or attended.

        Args:
            slots: B held slots, distinct. A tensor ``[B]`` of ids on the slots' device is not read back, so that the
                call can stand in a graph: ids that are not held (-1 too) leave every slot as it is, and naming a slot
                twice is the caller's fault.
            tree: B trees of at most N nodes.

        Raises:
            DecodingError: slots not held or named twice, or a tree that is too large or too deep.
        """
        if not isinstance(slots, Tensor):
            self._check(slots)
        if len(slots) != len(tree.tokens) or (not isinstance(slots, Tensor) and len(set(slots)) != len(slots)):
            raise DecodingError(f"one distinct slot a tree is needed: {len(tree.tokens)} trees, slots {list(slots)}")
        if tree.num_nodes > self.num_nodes:
            raise DecodingError(f"a tree of {tree.num_nodes} nodes does not fit slots of {self.num_nodes}")
        if tree.depth_limit() > self.depth:
            raise DecodingError(f"a tree of depth {tree.depth_limit()} does not fit slots of depth {self.depth}")
        if isinstance(slots, Tensor):
            self._put_where_held(slots, tree)
        else:
            self._put(torch.tensor(list(slots), device=self.tokens.device), tree)

    def gather(self, slots: Sequence[int] | Tensor, out: DraftTree | None = None) -> tuple[DraftTree, Tensor]:
        """The trees of some slots as a batch, and ``tree_valid [B]``; a free slot or -1 reads as the dummy, invalid.

        Args:
            slots: B ids, or a tensor ``[B]`` of ids on the slots' device, which is not read back.
            out: a batch of B trees of N nodes that is written instead of a new one, for a graph with fixed addresses.
        """
        index = self._or_dummy(slots)  # [B]
        if out is None:
            tree = DraftTree(*(getattr(self, name)[index] for name in FIELDS), max_depth=self.depth)
        else:
            tree = out
            for name in FIELDS:
                torch.index_select(getattr(self, name), 0, index, out=getattr(out, name))
        return tree, self.has_tree[index] & (index != self.dummy)

    def batch(self, size: int) -> DraftTree:
        """Memory for :meth:`gather` to write B trees into."""
        dummies = torch.full((size,), self.dummy, device=self.tokens.device)
        return DraftTree(*(getattr(self, name)[dummies] for name in FIELDS), max_depth=self.depth)

    def _or_dummy(self, slots: Sequence[int] | Tensor) -> Tensor:
        """``[B]`` int64 ids, the dummy's for those that nobody holds.

        Raises:
            DecodingError: a tensor of another kind, or on another device.
        """
        if not isinstance(slots, Tensor):
            held = set(range(self.slots)) - set(self._free)
            return torch.tensor([s if s in held else self.dummy for s in slots], device=self.tokens.device)
        if slots.dim() != 1 or slots.dtype not in (torch.int32, torch.int64) or slots.device != self.tokens.device:
            raise DecodingError(
                f"slots must be integers of shape [B] on {self.tokens.device}, found {slots.dtype} "
                f"{list(slots.shape)} on {slots.device}"
            )
        index = slots.long()
        inside = (index >= 0) & (index < self.slots)
        return torch.where(inside & self.held[index.clamp(0, self.slots)], index, self.dummy)

    def _put_where_held(self, slots: Tensor, tree: DraftTree) -> None:
        """:meth:`_put` for ids that are not read: what no held slot takes falls on the dummy, which is restored."""
        index = self._or_dummy(slots)
        dummy = {name: getattr(self, name)[self.dummy].clone() for name in FIELDS}
        self._put(index, tree)
        for name, value in dummy.items():
            getattr(self, name)[self.dummy] = value

    def _check(self, slots: Sequence[int]) -> None:
        wrong = [slot for slot in slots if not 0 <= slot < self.slots or slot in self._free]
        if wrong:
            raise DecodingError(f"slot {wrong[0]} is not held: acquire() gives slots from 0 to {self.slots - 1}")

    def _reset(self, index: Tensor) -> None:
        for name in FIELDS:
            getattr(self, name)[index] = getattr(self._chain, name)
        self.has_tree[index] = False

    def _put(self, index: Tensor, tree: DraftTree) -> None:
        count = tree.num_nodes
        for name in FIELDS:
            field, value = getattr(self, name), getattr(tree, name)
            if name == "mask":
                whole = value.new_zeros(len(index), self.num_nodes, field.shape[-1])
                whole[:, :count, : value.shape[-1]] = value
                node = torch.arange(count, self.num_nodes, device=value.device)
                word = (torch.ones_like(node) << node % 32).to(torch.int64)  # nodes behind the tree see themselves
                word = torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)
                whole[:, node, node // 32] = word
            elif name == "depths":
                whole = value.new_zeros(len(index), self.num_nodes)
                whole[:, :count] = value
            else:
                size = field.shape[1]
                whole = value.new_full((len(index), size), -1)
                whole[:, : value.shape[1]] = value
            field[index] = whole
        self.has_tree.index_fill_(0, index, True)  # not by assignment, which copies the True from the host
