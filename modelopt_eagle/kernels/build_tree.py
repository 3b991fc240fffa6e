"""From the flat history of an EAGLE-2 expansion to the N nodes of a draft tree, in one launch for the batch.

The history has ``H = T + T*T*(D-1)`` entries (branching T, depth D): depth-1 child j has id j; layer i >= 1,
survivor slot a, rank b has id ``T + T*T*(i-1) + a*T + b``. ``parent_list[f // T]`` is the flat id of f's parent,
bucket 0 the root. With the selected ids ascending, every link has a closed form:

* depth of f: 1 if f < T, else 2 + (f - T) // T**2
* next sibling of node n: n + 1 if the next selected id has the same ``f // T``
* parent node: 0 for bucket 0, else 1 + the position of ``parent_list[f // T]`` among the selected ids

Scores that are no cumulative log-probabilities (a child above its parent) can leave a node whose parent was not
selected: it gets parent -1, attends only itself and is never walked to; ``debug=True`` turns it into an error.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from modelopt_eagle.common.trees import tree_node_bounds
from modelopt_eagle.errors import DecodingError
from modelopt_eagle.kernels.dispatch import (
    TritonKernel,
    choose_backend,
    power_of_two,
    require,
    require_integers,
    warps_for,
)
from modelopt_eagle.kernels.pack_mask import pack_mask_reference
from modelopt_eagle.kernels.select_nodes import row_block, select_nodes_reference, select_row

if TYPE_CHECKING:
    import triton.language as tl

Fields = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""The tensors of a :class:`DraftTree`, in their order."""

NODE_BLOCK, WORD_BLOCK = 128, 32  # nodes and mask words of one tile; larger trees take several


@dataclass(frozen=True)
class DraftTree:
    """A batch of draft trees of N nodes. Node 0 is the root; parents come before children, siblings stand together.

    All tensors are int32: tokens [B,N]; flat_ids [B,N-1] (ids in the history, ascending); parents [B,N] (-1 at the
    root); depths [B,N]; mask [B,N,ceil(N/32)] (bit c%32 of word c//32: the node attends node c, that is the root,
    itself and its ancestors); first_child and next_sibling [B,N] (-1: none). ``max_depth`` is D; None means that
    it is read from ``depths`` when needed, which waits for the device.
    """

    tokens: Tensor
    flat_ids: Tensor
    parents: Tensor
    depths: Tensor
    mask: Tensor
    first_child: Tensor
    next_sibling: Tensor
    max_depth: int | None = field(default=None, kw_only=True)

    @property
    def num_nodes(self) -> int:
        """N, the root included."""
        return self.tokens.shape[1]

    def depth_limit(self) -> int:
        """D: the longest path below the root that a walk can take."""
        return int(self.depths.max()) if self.max_depth is None else self.max_depth

    def check(self) -> None:
        """Raise unless each tree is whole: parents first, siblings together and of distinct tokens. Waits for the GPU.

        Raises:
            DecodingError: a node without its parent, scattered siblings, or two siblings with one token.
        """
        parents, tokens = self.parents[:, 1:].cpu(), self.tokens[:, 1:].cpu()  # [B,N-1]
        node = torch.arange(1, self.num_nodes)  # [N-1]
        self._refuse((parents < 0) | (parents >= node), "has no parent before it: scores must be cumulative")
        turned = parents[:, 1:] < parents[:, :-1]  # [B,N-2]
        self._refuse(torch.nn.functional.pad(turned, (1, 0)), "does not stand beside its siblings")
        twin = (parents[:, :, None] == parents[:, None]) & (tokens[:, :, None] == tokens[:, None])  # [B,N-1,N-1]
        self._refuse(twin.tril(-1).any(-1), "repeats the token of a sibling, which would bias sampling")

    @staticmethod
    def _refuse(bad: Tensor, complaint: str) -> None:
        """Raise for the first node that ``bad`` [B,N-1] (without the root) marks."""
        if bad.any():
            row, node = (int(i) for i in bad.nonzero()[0])
            raise DecodingError(f"draft tree {row}: node {node + 1} {complaint}")


def build_tree(
    scores: Tensor,
    tokens: Tensor,
    parent_list: Tensor,
    num_nodes: int,
    topk: int,
    *,
    root_tokens: Tensor | None = None,
    debug: bool = False,
    backend: str = "auto",
) -> DraftTree:
    """Keep the best N-1 entries of each history and link them (see ``select_nodes.py`` for the order).

    Args:
        scores: [B,H] float32 cumulative log-probabilities.
        tokens: [B,H] int32 or int64 token ids.
        parent_list: [B, at least T*(D-1)+1] int32 or int64 flat ids; entry 0 stands for the root and is not read.
        num_nodes: N, root included, D+1 <= N <= 1+H.
        topk: T, the branching of the expansion; D follows from H and T.
        root_tokens: [B] int32 or int64 tokens of node 0; -1 without.
        debug: check the finished trees (waits for the device).
        backend: see ``dispatch.py``.

    Returns:
        DraftTree with every element written.

    Raises:
        DecodingError: shapes that do not fit, N outside its bounds, or with ``debug`` a broken tree.
    """
    require(topk >= 1, lambda: f"topk must be at least 1, found {topk}")
    require(scores.dim() == 2, lambda: f"scores must have shape [B, H], found {list(scores.shape)}")
    require(scores.dtype.is_floating_point, lambda: f"scores must be floating point, found {scores.dtype}")
    batch, history = scores.shape
    depth = history_depth(history, topk)
    require_integers("tokens", tokens, batch, history)
    require_integers("parent_list", parent_list, batch, None)
    require(
        parent_list.shape[1] >= topk * (depth - 1) + 1,
        lambda: (
            f"parent_list needs at least T*(D-1)+1 = {topk * (depth - 1) + 1} columns for topk={topk} and "
            f"depth={depth}, found {parent_list.shape[1]}"
        ),
    )
    check_num_nodes(num_nodes, topk, depth)
    if root_tokens is not None:
        require_integers("root_tokens", root_tokens, batch)
    fields = torch.ops.modelopt_eagle.build_tree(scores, tokens, parent_list, root_tokens, num_nodes, topk, backend)
    tree = DraftTree(*fields, max_depth=depth)
    if debug:
        tree.check()
    return tree


def history_depth(history: int, topk: int) -> int:
    """D of a flat history of H = T + T*T*(D-1) entries; DecodingError if no depth gives this length."""
    below = history - topk
    require(
        below >= 0 and below % (topk * topk) == 0,
        lambda: (
            f"a history of topk={topk} has T + T*T*(D-1) entries for some depth D >= 1 "
            f"({topk}, {topk + topk * topk}, ...), found {history}"
        ),
    )
    return below // (topk * topk) + 1


def check_num_nodes(num_nodes: int, topk: int, depth: int) -> None:
    """Raise DecodingError unless D+1 <= N <= 1+H; the message gives the bounds."""
    least, most = tree_node_bounds(topk, depth)
    require(
        least <= num_nodes <= most,
        lambda: (
            f"num_nodes must lie in [D+1, 1+T+T*T*(D-1)] = [{least}, {most}] for topk={topk} and "
            f"depth={depth} (the root is counted), found {num_nodes}"
        ),
    )


@torch.library.custom_op("modelopt_eagle::build_tree", mutates_args=())
def _build_tree_op(
    scores: Tensor,
    tokens: Tensor,
    parent_list: Tensor,
    root_tokens: Tensor | None,
    num_nodes: int,
    topk: int,
    backend: str,
) -> Fields:
    if choose_backend(backend, scores.device) == "reference":
        return build_tree_reference(scores, tokens, parent_list, root_tokens, num_nodes, topk)
    batch, history = scores.shape
    fields = _empty_fields(scores, num_nodes)
    out_tokens, flat_ids, parents, depths, mask, first_child, next_sibling = fields
    block = row_block(history)
    node_block = min(power_of_two(num_nodes), NODE_BLOCK)
    word_block = min(power_of_two(mask.shape[2]), WORD_BLOCK)
    roots = tokens if root_tokens is None else root_tokens
    if batch:
        _build_tree_kernel[(batch,)](
            scores, tokens, parent_list, roots,
            out_tokens, flat_ids, parents, depths, mask, first_child, next_sibling,
            scores.stride(0), scores.stride(1), tokens.stride(0), tokens.stride(1),
            parent_list.stride(0), parent_list.stride(1), roots.stride(0),
            history, num_nodes, mask.shape[2], topk, history_depth(history, topk), num_nodes.bit_length(),
            HAS_ROOT=root_tokens is not None, BLOCK=block, ONE_BLOCK=history <= block,
            NODES=node_block, WORDS=word_block,
            num_warps=max(warps_for(block), warps_for(node_block * word_block)),
        )  # fmt: skip
    return fields


@_build_tree_op.register_fake
def _(scores, tokens, parent_list, root_tokens, num_nodes, topk, backend):
    return _empty_fields(scores, num_nodes)


def _empty_fields(scores: Tensor, num_nodes: int) -> Fields:
    """Uninitialised tensors of DraftTree's fields, in their order."""
    batch = scores.shape[0]

    def empty(*shape: int) -> Tensor:
        return torch.empty(batch, *shape, dtype=torch.int32, device=scores.device)

    return (
        empty(num_nodes), empty(num_nodes - 1), empty(num_nodes), empty(num_nodes),
        empty(num_nodes, -(-num_nodes // 32)), empty(num_nodes), empty(num_nodes),
    )  # fmt: skip


def build_tree_reference(scores, tokens, parent_list, root_tokens, num_nodes, topk):
    """The same fields with plain tensor operations; arguments and results as of ``build_tree``."""
    batch, history = scores.shape
    flat = select_nodes_reference(scores, num_nodes - 1).long()  # [B,N-1] ascending
    bucket = flat // topk  # [B,N-1]
    wanted = parent_list.long().gather(1, bucket).contiguous()  # [B,N-1] flat id of each parent
    place = torch.searchsorted(flat, wanted)  # [B,N-1]
    found = flat.gather(1, place.clamp(max=num_nodes - 2)) == wanted  # [B,N-1]
    parents = torch.where(bucket == 0, 0, torch.where(found, place + 1, -1))  # [B,N-1]
    parents = torch.nn.functional.pad(parents, (1, 0), value=-1)  # [B,N]
    depths = torch.where(flat < topk, 1, 2 + (flat - topk) // topk**2)  # [B,N-1]
    depths = torch.nn.functional.pad(depths, (1, 0))  # [B,N]

    node = torch.arange(num_nodes, device=scores.device)  # [N]
    together = bucket[:, 1:] == bucket[:, :-1]  # [B,N-2] node n and n+1 are siblings
    next_sibling = torch.full((batch, num_nodes), -1, device=scores.device)  # [B,N]
    next_sibling[:, 1:-1] = torch.where(together, node[2:], -1)
    eldest = torch.nn.functional.pad(~together, (2, 0), value=True) & (parents >= 0)  # [B,N]
    spare = torch.where(eldest, parents, num_nodes)  # [B,N] column N takes what links nothing
    first_child = torch.full((batch, num_nodes + 1), -1, device=scores.device)
    first_child = first_child.scatter(1, spare, node.expand(batch, -1))[:, :num_nodes]  # [B,N]

    attends = torch.zeros(batch, num_nodes, num_nodes + 1, dtype=torch.bool, device=scores.device)
    ancestor = node.expand(batch, -1)  # [B,N]
    for _ in range(history_depth(history, topk) + 1):
        attends.scatter_(2, torch.where(ancestor < 0, num_nodes, ancestor)[:, :, None], True)
        ancestor = torch.where(ancestor < 0, -1, parents.gather(1, ancestor.clamp(min=0)))  # [B,N]
    mask = pack_mask_reference(attends[:, :, :num_nodes])  # [B,N,W]

    root = torch.full((batch,), -1, device=scores.device) if root_tokens is None else root_tokens
    out_tokens = torch.cat([root[:, None].long(), tokens.gather(1, flat).long()], dim=1)  # [B,N]
    fields = (out_tokens, flat, parents, depths, mask, first_child, next_sibling)
    return tuple(field.to(torch.int32).contiguous() for field in fields)


@TritonKernel
def _build_tree_kernel(
    scores_ptr, tokens_ptr, parent_list_ptr, roots_ptr,
    out_tokens_ptr, flat_ptr, parents_ptr, depths_ptr, mask_ptr, first_child_ptr, next_sibling_ptr,
    stride_scores, stride_score, stride_tokens, stride_token, stride_lists, stride_list, stride_root,
    history, num_nodes, num_words, topk, depth, search_steps,
    HAS_ROOT: tl.constexpr, BLOCK: tl.constexpr, ONE_BLOCK: tl.constexpr, NODES: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """One program a row: select, link every node, then read the links back for first children and masks."""
    row = tl.program_id(0).to(tl.int64)
    tokens_ptr += row * stride_tokens
    parent_list_ptr += row * stride_lists
    drafted_count = num_nodes - 1
    flat_ptr += row * drafted_count
    out_tokens_ptr += row * num_nodes
    parents_ptr += row * num_nodes
    depths_ptr += row * num_nodes
    first_child_ptr += row * num_nodes
    next_sibling_ptr += row * num_nodes
    mask_ptr += row * num_nodes * num_words

    select_row(scores_ptr + row * stride_scores, stride_score, flat_ptr, history, drafted_count, BLOCK, ONE_BLOCK)
    tl.debug_barrier()  # the ids written by other threads are read below

    if HAS_ROOT:
        root_token = tl.load(roots_ptr + row * stride_root).to(tl.int32)
    else:
        root_token = tl.full((), -1, tl.int32)
    for start in range(0, num_nodes, NODES):
        node = start + tl.arange(0, NODES)
        live = node < num_nodes
        drafted = live & (node > 0)
        flat = tl.load(flat_ptr + node - 1, mask=drafted, other=0)
        bucket = flat // topk
        wanted = tl.load(parent_list_ptr + bucket * stride_list, mask=drafted, other=-1).to(tl.int64)
        low = tl.zeros([NODES], tl.int32)  # lower bound of `wanted` among the ascending ids
        high = tl.zeros([NODES], tl.int32) + drafted_count
        for _step in range(0, search_steps):
            middle = (low + high) // 2
            value = tl.load(flat_ptr + middle, mask=drafted & (low < high), other=0).to(tl.int64)
            right = (low < high) & (value < wanted)
            high = tl.where(right, high, middle)
            low = tl.where(right, middle + 1, low)
        candidate = tl.load(flat_ptr + low, mask=drafted & (low < drafted_count), other=-1).to(tl.int64)
        found = drafted & (low < drafted_count) & (candidate == wanted)
        parent = tl.where(bucket == 0, 0, tl.where(found, low + 1, -1))
        follower = tl.load(flat_ptr + node, mask=drafted & (node + 1 < num_nodes), other=-1)
        together = drafted & (node + 1 < num_nodes) & (follower // topk == bucket)
        level = tl.where(flat < topk, 1, 2 + (flat - topk) // (topk * topk))
        token = tl.load(tokens_ptr + flat.to(tl.int64) * stride_token, mask=drafted, other=-1).to(tl.int32)
        tl.store(out_tokens_ptr + node, tl.where(drafted, token, root_token), mask=live)
        tl.store(parents_ptr + node, tl.where(drafted, parent, -1), mask=live)
        tl.store(depths_ptr + node, tl.where(drafted, level, 0), mask=live)
        tl.store(next_sibling_ptr + node, tl.where(together, node + 1, -1), mask=live)
        tl.store(first_child_ptr + node, tl.zeros([NODES], tl.int32) - 1, mask=live)
    tl.debug_barrier()  # parents and the emptied first_child of other threads are used below

    for start in range(0, num_nodes, NODES):
        node = start + tl.arange(0, NODES)
        live = node < num_nodes
        drafted = live & (node > 0)
        parent = tl.load(parents_ptr + node, mask=live, other=-1)
        flat = tl.load(flat_ptr + node - 1, mask=drafted, other=0)
        before = tl.load(flat_ptr + node - 2, mask=live & (node > 1), other=0)
        eldest = drafted & (parent >= 0) & ((node == 1) | (before // topk != flat // topk))
        tl.store(first_child_ptr + parent, node, mask=eldest)
        for first_word in range(0, num_words, WORDS):
            word = first_word + tl.arange(0, WORDS)
            ancestor = node
            bits = tl.zeros([NODES, WORDS], tl.int32)
            for _level in range(0, depth + 1):
                here = (ancestor >> 5)[:, None] == word[None, :]  # -1 >> 5 is -1: no word
                bits |= tl.where(here, (1 << (ancestor & 31))[:, None], 0)
                ancestor = tl.load(parents_ptr + ancestor, mask=live & (ancestor >= 0), other=-1)
            place = node[:, None].to(tl.int64) * num_words + word[None, :]
            tl.store(mask_ptr + place, bits, mask=live[:, None] & (word < num_words)[None, :])
