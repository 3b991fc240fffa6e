"""Self-check: every kernel against its reference on random trees, for users with a new GPU, driver or Triton.

    python -m modelopt_eagle.kernels.parity --device cuda --cases 50
    TRITON_INTERPRET=1 python -m modelopt_eagle.kernels.parity --device cpu --cases 50

Each case draws its shapes, layouts (transposed, strided, int32, int64) and values (ties, NaN, -inf) from a seed, so a
failure is repeated by its seed. Results must be equal element for element, those of attention within the
rounding of their dtype. Exit code 1 if any differs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import random
import sys

import torch
from torch import Tensor

from modelopt_eagle import kernels
from modelopt_eagle.common.trees import history_size
from modelopt_eagle.errors import EagleError
from modelopt_eagle.kernels.build_tree import DraftTree
from modelopt_eagle.kernels.distill_rows import FLOATS as distill_dtypes
from modelopt_eagle.kernels.distill_rows import describe
from modelopt_eagle.kernels.verify_greedy import Accepted


class ParityError(EagleError):
    """A kernel and its reference gave different results."""


class Cases:
    """Random inputs for the checks, all from one seed."""

    def __init__(self, seed: int, device: str) -> None:
        self.seed = seed
        self.choose = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.device = device

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Integers in [low, high) as int32 or int64, on the CPU."""
        values = torch.randint(low, high, shape, generator=self.generator)
        return values.to(self.choose.choice([torch.int32, torch.int64]))

    def uniform(self, *shape: int) -> Tensor:
        """Uniforms in [0, 1), half of the time multiples of 1/64 so that cumulated masses are met exactly."""
        if self.choose.random() < 0.5:
            return torch.randint(0, 64, shape, generator=self.generator) / 64
        return torch.rand(shape, generator=self.generator)

    def place(self, tensor: Tensor) -> Tensor:
        """Move to the device in one of several memory layouts; returns the same values."""
        tensor = tensor.to(self.device)
        layout = self.choose.choice(["plain", "strided", "transposed", "sliced"])
        if layout == "strided":  # every second element of the last dimension
            return torch.stack([tensor, torch.zeros_like(tensor)], dim=-1)[..., 0]
        if layout == "transposed" and tensor.dim() >= 2:
            return tensor.transpose(0, -1).contiguous().transpose(0, -1)
        if layout == "sliced":  # the middle of a larger tensor
            return torch.cat([torch.zeros_like(tensor[:1]), tensor, torch.zeros_like(tensor[:1])])[1:-1]
        return tensor

    def history(self, batch: int, topk: int, depth: int) -> tuple[Tensor, Tensor, Tensor]:
        """An EAGLE-2 expansion: scores [B,H] float32, tokens [B,H], parent_list [B,T*(D-1)+1]."""
        style = self.choose.choice(["smooth", "peaked", "tied", "missing"])
        layers, parents = [], [torch.full((batch, 1), -1)]
        base = torch.zeros(batch, 1)  # [B,survivors] cumulative scores of the nodes that are expanded
        for level in range(depth):
            logits = torch.randn(batch, base.shape[1], topk + 3, generator=self.generator)
            logits = logits * (6 if style == "peaked" else 1)
            steps = logits.log_softmax(-1).topk(topk, dim=-1).values  # [B,survivors,T]
            if style == "tied":
                steps = (steps * 2).round() / 2
            if style == "missing":
                odd = torch.rand(steps.shape, generator=self.generator)
                steps = steps.masked_fill(odd < 0.05, float("-inf")).masked_fill(odd > 0.95, float("nan"))
            scores = (base[:, :, None] + steps).flatten(1)  # [B,survivors·T]
            layers.append(scores)
            if level + 1 < depth:
                best = kernels.select_nodes(scores, topk, backend="reference").long()  # [B,T]
                base = scores.gather(1, best)
                parents.append(best + (0 if level == 0 else history_size(topk, level)))
        scores = torch.cat(layers, dim=1)  # [B,H]
        tokens = torch.arange(scores.shape[1]).expand(batch, -1) + self.choose.randrange(5)  # siblings differ
        dtype = self.choose.choice([torch.int32, torch.int64])
        return scores, tokens.to(dtype), torch.cat(parents, dim=1).to(dtype)

    def shape(self) -> tuple[int, int, int, int]:
        """B, T, D, N of a tree, small most of the time."""
        batch = self.choose.choice([1, 2, 3, 7])
        topk, depth = self.choose.choice([1, 2, 3, 4, 8]), self.choose.choice([1, 2, 3, 5])
        if self.choose.random() < 0.05:
            batch, topk, depth = 1, 12, 9  # 1164 entries, more than 1024 nodes possible
        history = history_size(topk, depth)
        limits = [n for n in (33, 64, 65, 130, 1025) if depth + 1 <= n <= 1 + history]
        nodes = self.choose.choice([*limits, self.choose.randint(depth + 1, 1 + history), 1 + history])
        return batch, topk, depth, nodes

    def tree(self, vocabulary: int = 0) -> DraftTree:
        """A tree on the device; tokens below ``vocabulary`` with distinct siblings, if it is given."""
        batch, topk, depth, nodes = self.shape()
        scores, tokens, parent_list = self.history(batch, topk, depth)
        if vocabulary:
            tokens = (tokens + torch.arange(batch, dtype=tokens.dtype)[:, None]) % max(vocabulary, topk)
        tree = kernels.build_tree(scores, tokens, parent_list, nodes, topk, backend="reference")
        names = ("tokens", "flat_ids", "parents", "depths", "mask", "first_child", "next_sibling")
        return DraftTree(**{name: self.place(getattr(tree, name)) for name in names}, max_depth=depth)

    def valid(self, batch: int) -> Tensor | None:
        """A validity mask, or None."""
        if self.choose.random() < 0.5:
            return None
        return self.place(torch.rand(batch, generator=self.generator) < 0.7)

    def accepted(self, batch: int, nodes: int, steps: int) -> tuple[Tensor, Tensor]:
        """Random increasing paths [B,steps] from node 0, -1 padded, and the number accepted [B]."""
        paths, counts = [], []
        for _ in range(batch):
            count = self.choose.randint(0, min(steps, nodes) - 1)
            path = [0, *sorted(self.choose.sample(range(1, nodes), count))]
            paths.append(path + [-1] * (steps - len(path)))
            counts.append(count)
        return torch.tensor(paths, dtype=torch.int32), torch.tensor(counts, dtype=torch.int32)

    def probabilities(self, batch: int, nodes: int) -> Tensor:
        """[B,N,V] rows whose sums are exact in float32: 64 units thrown on V tokens, most of them empty."""
        vocabulary = self.choose.choice([3, 17, 64, 100])
        hits = torch.randint(0, vocabulary, (batch, nodes, 64), generator=self.generator)
        counts = torch.zeros(batch, nodes, vocabulary).scatter_add_(2, hits, torch.ones(hits.shape))
        dtype = self.choose.choice([torch.float32, torch.float16, torch.float64])
        return (counts / 64).to(dtype)


def check_select_nodes(cases: Cases, backend: str) -> None:
    """One random case of ``select_nodes``."""
    batch, topk, depth, nodes = cases.shape()
    scores = cases.place(cases.history(batch, topk, depth)[0])
    compare("flat ids", *(kernels.select_nodes(scores, nodes - 1, backend=b) for b in (backend, "reference")))


def check_build_tree(cases: Cases, backend: str) -> None:
    """One random case of ``build_tree``."""
    batch, topk, depth, nodes = cases.shape()
    scores, tokens, parent_list = (cases.place(part) for part in cases.history(batch, topk, depth))
    root = cases.choose.choice([None, cases.place(cases.integers(0, 9, batch))])
    trees = [
        kernels.build_tree(scores, tokens, parent_list, nodes, topk, root_tokens=root, backend=b)
        for b in (backend, "reference")
    ]
    for field in ("flat_ids", "tokens", "parents", "depths", "mask", "first_child", "next_sibling"):
        compare(field, *(getattr(tree, field) for tree in trees))


def compare_accepted(run, backend: str) -> None:
    """Compare the fields of the two Accepted that ``run(backend)`` gives."""
    results: list[Accepted] = [run(backend), run("reference")]
    for field in ("num_accepted", "nodes", "tokens"):
        compare(field, *(getattr(result, field) for result in results))


def check_verify_greedy(cases: Cases, backend: str) -> None:
    """One random case of ``verify_greedy``, its predictions steered so that long paths occur."""
    tree = cases.tree(vocabulary=cases.choose.choice([4, 9]))
    guess = cases.integers(0, 12, *tree.tokens.shape)
    child = tree.first_child.cpu().long()  # [B,N]
    steer = (torch.rand(child.shape, generator=cases.generator) < 0.7) & (child >= 0)
    follow = tree.tokens.cpu().gather(1, child.clamp(min=0)).to(guess.dtype)
    predict, valid = cases.place(torch.where(steer, follow, guess)), cases.valid(len(guess))
    compare_accepted(lambda b: kernels.verify_greedy(tree, predict, valid, backend=b), backend)


def check_sample_and_match(cases: Cases, backend: str) -> None:
    """One random case of ``sample_and_match``."""
    tree = cases.tree(vocabulary=cases.choose.choice([3, 9]))
    batch, nodes = tree.tokens.shape
    probs, valid = cases.place(cases.probabilities(batch, nodes)), cases.valid(batch)
    uniforms = cases.place(cases.uniform(batch, tree.depth_limit() + 1))
    compare_accepted(lambda b: kernels.sample_and_match(tree, probs, uniforms, valid, backend=b), backend)


def check_reject_target_only(cases: Cases, backend: str) -> None:
    """One random case of ``reject_target_only``."""
    tree = cases.tree(vocabulary=3)
    batch, nodes = tree.tokens.shape
    probs, valid = cases.place(cases.probabilities(batch, nodes)), cases.valid(batch)
    if int(tree.tokens.max()) >= probs.shape[2]:
        probs = torch.nn.functional.pad(probs, (0, int(tree.tokens.max()) + 1 - probs.shape[2]))
    coins, lasts = cases.place(cases.uniform(batch, tree.depth_limit())), cases.place(cases.uniform(batch))
    compare_accepted(lambda b: kernels.reject_target_only(tree, probs, coins, lasts, valid, backend=b), backend)


def check_pack_mask(cases: Cases, backend: str) -> None:
    """One random case of ``pack_mask`` and ``unpack_mask``."""
    shape = [cases.choose.choice([1, 3, 7]), cases.choose.randint(1, 40), cases.choose.choice([1, 31, 32, 33, 65, 130])]
    mask = cases.place(torch.rand(shape, generator=cases.generator) < 0.5)
    packed = [kernels.pack_mask(mask, backend=b) for b in (backend, "reference")]
    compare("words", *packed)
    words = cases.place(packed[1].cpu())
    back = [kernels.unpack_mask(words, shape[2], backend=b) for b in (backend, "reference")]
    compare("mask", *back)
    compare("round trip", back[0], mask)


def check_repack_mask(cases: Cases, backend: str) -> None:
    """One random case of ``repack_mask``."""
    batch, most, words = cases.choose.choice([1, 3, 7]), cases.choose.randint(1, 70), cases.choose.randint(1, 4)
    width = cases.choose.randint(1, words)
    buffer = torch.randint(-(2**31), 2**31, (batch, most, words), generator=cases.generator).to(torch.int32)
    kinds: list[int | Tensor] = [cases.choose.randint(0, most), cases.place(cases.integers(0, most + 1, batch))]
    rows = cases.choose.choice(kinds)
    used = rows * batch if isinstance(rows, int) else int(rows.sum())
    buffers = [buffer.to(cases.device, copy=True) for _ in range(2)]
    tight = [
        kernels.repack_mask(b, rows, width, backend=name).reshape(-1, width)[:used]
        for b, name in zip(buffers, (backend, "reference"), strict=True)
    ]
    compare("rows", *tight)


def check_repack_accepted(cases: Cases, backend: str) -> None:
    """One random case of ``repack_accepted``."""
    batch, nodes, steps = cases.choose.choice([1, 3, 7]), cases.choose.randint(1, 40), cases.choose.randint(1, 9)
    trailing = cases.choose.choice([(), (5,), (33,), (2, 12)])
    rows = torch.randn(batch, nodes, *trailing, generator=cases.generator)
    rows = cases.place(rows.to(cases.choose.choice([torch.float32, torch.bfloat16, torch.int8, torch.int64])))
    paths, counts = (cases.place(part) for part in cases.accepted(batch, nodes, steps))
    compare("rows", *(kernels.repack_accepted(rows, paths, counts, backend=b) for b in (backend, "reference")))


def check_relocate_kv(cases: Cases, backend: str) -> None:
    """One random case of ``relocate_kv``: contiguous, paged, latent, or a ring."""
    choose, batch, nodes = cases.choose, cases.choose.choice([1, 3, 7]), cases.choose.randint(1, 40)
    steps, heads, width = choose.randint(1, 12), choose.choice([1, 2, 5]), choose.choice([1, 8, 24])
    paths, counts = (cases.place(part) for part in cases.accepted(batch, nodes, steps))
    room = nodes + choose.randint(0, 20)
    prefix = cases.place(cases.integers(0, room - nodes + 1, batch))
    kind = choose.choice(["contiguous", "latent", "ring", "paged", "paged latent", "paged heads first"])
    options: dict = {}
    shape: tuple[int, ...] = (batch, heads, room, width)
    if kind == "latent":
        shape = (batch, room, width)
    if kind == "ring":
        options["window"] = room
        prefix = cases.place(cases.integers(0, 1000, batch))
    if kind.startswith("paged"):
        size = choose.choice([1, 4, 16])
        each = -(-room // size)
        blocks = torch.randperm(batch * each + 2, generator=cases.generator)[: batch * each].view(batch, each)
        options["block_table"] = cases.place(blocks.to(torch.int32))
        shape = (batch * each + 2, size, heads, width)
        if kind == "paged latent":
            shape = (batch * each + 2, size, width)
        if kind == "paged heads first":
            shape, options["token_dim"] = (batch * each + 2, heads, size, width), 2
    cache = torch.randn(shape, generator=cases.generator)
    cache = cache.to(choose.choice([torch.float32, torch.bfloat16, torch.float16, torch.float64]))
    caches = [cases.place(cache) for _ in range(2)]
    caches[1] = caches[0].clone()
    for each_cache, name in zip(caches, (backend, "reference"), strict=True):
        kernels.relocate_kv(each_cache, paths, counts, prefix, debug=True, backend=name, **options)
    compare(kind, *caches)


def check_distill_rows(cases: Cases, backend: str) -> None:
    """One random case of ``distill_rows``: groups of one to four rows, every kind of term, values near and far."""
    choose, most = cases.choose, cases.choose.randint(1, 4)
    width = choose.choice([1, 2, 5, 31, 33, 64, 65, 130, 300])
    counts = torch.tensor([choose.randint(1, most) for _ in range(choose.choice([1, 2, 7]))])
    rows, first = int(counts.sum()), counts.cumsum(0) - counts
    places = len(counts) + choose.randint(0, 2)  # some rows of the target may have nobody to meet them
    taken = torch.randperm(places, generator=cases.generator)[: len(counts)]  # [g]
    spread = choose.choice([0.1, 3.0, 40.0])
    logits = [torch.randn(size, width, generator=cases.generator) * spread for size in (rows, places)]
    if choose.random() < 0.3:  # ties, also for the largest
        logits = [part.round() for part in logits]
    draft, teacher = logits[0].to(choose.choice(distill_dtypes)), logits[1].to(choose.choice(distill_dtypes))
    if choose.random() < 0.3 and width > 5:
        teacher[:, -3:] = float("-inf")  # tokens that the target never says
    if choose.random() < 0.3:
        teacher = cases.integers(0, width, places)
    groups = torch.stack((first, counts), 1).to(choose.choice([torch.int32, torch.int64]))  # [g,2]
    top = cases.integers(-1, width, places)
    if choose.random() < 0.6:  # the first of the largest, as the reference finds it
        top[taken] = draft.float().argmax(-1)[first].to(top.dtype)
    weight = torch.rand(rows, generator=cases.generator) * 3
    share = torch.rand(rows, generator=cases.generator) if choose.random() < 0.5 else None
    place = taken.repeat_interleave(counts).to(cases.device)
    given: list = [None if part is None else part.to(cases.device) for part in (groups, top, weight, share)]
    options: dict = {name: choose.random() < 0.7 for name in ("subtract_entropy", "gradient", "distance")}
    wide = torch.nn.functional.pad(draft, (0, choose.choice([0, 3])))  # rows may lie further apart than they are long
    results = []
    for name in (backend, "reference"):
        own = wide.to(cases.device, copy=True)[:, :width]
        found = kernels.distill_rows(own, teacher.to(cases.device), place, *given, **options, most=most, backend=name)
        results.append((*found, own))
    for what, one, other in zip(("terms", "hits", "distances", "gradient"), *results, strict=True):
        compare_close(f"{what} of {describe(draft)} meeting {describe(teacher)}", one, other)


def check_column_attention(cases: Cases, backend: str) -> None:
    """One random case of ``column_attention``: output and five gradients, within the rounding of the dtype.

    Seeds go through heads that share a key head, widths and columns in turn, so that a few seeds meet all of them.
    """
    choose, seed = cases.choose, cases.seed
    share, columns = (1, 3, 8, 2)[seed % 4], seed % 8
    dk = (64, 80, 16, 128, 96, 24, 256)[seed % 7]
    dv = dk if seed % 3 else choose.choice([16, 40, 64])
    groups, scale = choose.choice([1, 2]), dk**-0.5
    most = 24 if cases.device == "cpu" else 700
    lengths = [choose.randint(1, most) for _ in range(choose.randint(1, 3))]
    starts = torch.cat([torch.full((length,), sum(lengths[:i])) for i, length in enumerate(lengths)])  # [N]
    rows = (torch.rand(len(starts), generator=cases.generator) < choose.choice([0.4, 1.0])).nonzero()[:, 0]  # [n]
    starts = starts[rows]
    if choose.random() < 0.4:
        starts = torch.maximum(starts, rows - choose.randint(0, most))  # a window
    if seed % 24 == 5:  # a window of several blocks: masked ones on both sides of whole ones
        lengths, rows = [90], torch.arange(90)  # [n]
        starts = (rows - 44).clamp(min=0)
    sees = torch.rand(share, columns, generator=cases.generator) < 0.6 if choose.random() < 0.3 else None
    half = [torch.float16] if cases.device == "cpu" else [torch.float16, torch.bfloat16]  # the interpreter's limit
    dtype = choose.choice([torch.float32, *half]) if max(dk, dv) <= 128 else half[-1]
    shapes: list[tuple[int, ...]] = [
        (len(rows), groups * share, dk),
        (sum(lengths), groups, dk),
        (sum(lengths), groups, dv),
    ]
    shapes += [(len(rows), columns, groups, dk), (len(rows), columns, groups, dv), (len(rows), groups * share, dv)]
    drawn = [torch.randn(shape, generator=cases.generator).to(dtype) for shape in shapes]
    *tensors, upstream = (cases.place(tensor) for tensor in drawn)
    rows, starts = cases.place(rows), cases.place(starts)
    sees = sees if sees is None else sees.to(cases.device)
    results = []
    for name in (backend, "reference"):
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        q, k, v, ck, cv = leaves if name == backend else [leaf.float() for leaf in leaves]  # the reference in float32
        out = kernels.column_attention(q, k, v, ck, cv, rows, starts, scale, sees, backend=name).to(dtype)
        results.append((out, *torch.autograd.grad(out, leaves, upstream)))
    tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for what, found, expected in zip(
        ("out", "q", "keys", "values", "column keys", "column values"), *results, strict=True
    ):
        compare_within(what, found.detach(), expected.detach(), tolerance)


def check_norm_concat(cases: Cases, backend: str) -> None:
    """One random case of ``norm_concat``: the result and every gradient that is asked for."""
    choose = cases.choose
    width, rows = choose.choice([1, 3, 16, 31, 33, 64, 100, 257, 600]), choose.choice([0, 1, 2, 7, 13])
    dtypes = [torch.float32, torch.float16, torch.bfloat16]
    dtype = choose.choice(dtypes)
    drawn = [torch.randn(rows, width, generator=cases.generator) * choose.choice([0.01, 1.0, 30.0]) for _ in range(2)]
    drawn += [1 + torch.randn(width, generator=cases.generator) for _ in range(2)]
    tensors = [cases.place(tensor.to(choose.choice(dtypes))) for tensor in drawn]
    upstream = cases.place(torch.randn(rows, 2 * width, generator=cases.generator).to(dtype))
    plain, trained = choose.random() < 0.2, choose.random() < 0.5  # no norm of the embedding; its table learns
    results = []
    for name in (backend, "reference"):
        leaves = [tensor.detach().requires_grad_(i > 0 or trained) for i, tensor in enumerate(tensors)]
        embedding, state, by_embedding, by_state = leaves
        weight = None if plain else by_embedding
        out = kernels.norm_concat(embedding, state, weight, by_state, 1e-5, dtype, backend=name)
        wanted = [leaf for leaf in leaves if leaf.requires_grad and not (plain and leaf is by_embedding)]
        results.append((out, *torch.autograd.grad(out, wanted, upstream)))
    for number, (found, expected) in enumerate(zip(*results, strict=True)):
        what = f"{'result' if number == 0 else f'gradient {number}'} of {describe(tensors[1])}"
        tolerance = max(2e-5, 2 * torch.finfo(found.dtype).eps)
        compare_within(what, found.detach(), expected.detach(), tolerance)


def check_rotate_heads(cases: Cases, backend: str) -> None:
    """One random case of ``rotate_heads``: heads that turn whole or in part, and the gradient."""
    choose = cases.choose
    rows, heads = choose.choice([0, 1, 5, 40]), choose.choice([1, 3, 8])
    pairs = choose.choice([1, 2, 8, 20, 32])
    width = 2 * pairs + choose.choice([0, 0, 1, 24])
    dtypes = [torch.float32, torch.float16, torch.bfloat16]
    drawn = torch.randn(rows, heads, width, generator=cases.generator).to(choose.choice(dtypes))
    angle = torch.rand(rows, pairs, generator=cases.generator) * 100
    cos, sin, dtype = cases.place(angle.cos() * 1.2), cases.place(angle.sin() * 1.2), choose.choice(dtypes)
    x, upstream = cases.place(drawn), cases.place(torch.randn(drawn.shape, generator=cases.generator).to(dtype))
    interleaved, results = choose.random() < 0.5, []
    for name in (backend, "reference"):
        leaf = x.detach().requires_grad_()
        out = kernels.rotate_heads(leaf, cos, sin, interleaved, dtype, backend=name)
        results.append((out, *torch.autograd.grad(out, leaf, upstream)))
    for what, found, expected in zip(("result", "gradient"), *results, strict=True):
        compare_close(f"{what} of {describe(x)}", found.detach(), expected.detach())


CHECKS = {
    "distill_rows": check_distill_rows,
    "select_nodes": check_select_nodes,
    "build_tree": check_build_tree,
    "verify_greedy": check_verify_greedy,
    "sample_and_match": check_sample_and_match,
    "reject_target_only": check_reject_target_only,
    "pack_mask": check_pack_mask,
    "repack_mask": check_repack_mask,
    "repack_accepted": check_repack_accepted,
    "relocate_kv": check_relocate_kv,
    "column_attention": check_column_attention,
    "norm_concat": check_norm_concat,
    "rotate_heads": check_rotate_heads,
}

SMALL_BLOCKS = {  # tile sizes that make small inputs take every path for large ones
    "distill_rows": {"MAX_TILE": 64},
    "select_nodes": {"MAX_BLOCK": 32},
    "build_tree": {"NODE_BLOCK": 16, "WORD_BLOCK": 1},
    "verify_greedy": {"MAX_BLOCK": 8},
    "sample_and_match": {"MAX_BLOCK": 8},
    "reject_target_only": {"MAX_BLOCK": 8},
    "inverse_cdf": {"MAX_BLOCK": 16},
    "pack_mask": {"PACK_BLOCK": 16, "UNPACK_BLOCK": 256},
    "repack_mask": {"MAX_BLOCK": 16},
    "repack_accepted": {"MAX_BLOCK": 16},
    "relocate_kv": {"PATH_BLOCK": 2, "FEATURE_BLOCK": 16},
    "column_attention": {"MAX_BLOCK": 16},
    "norm_concat": {"RUNS": 4},
    "rotate_heads": {"MAX_TILE": 64},
}


def compare(what: str, found: Tensor, expected: Tensor) -> None:
    """Raise ParityError unless both tensors are equal in dtype, shape and every element."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        raise ParityError(f"{what}: {found.dtype} {list(found.shape)} against {expected.dtype} {list(expected.shape)}")
    differ = found != expected
    if differ.any():
        place = tuple(int(i) for i in differ.nonzero()[0])
        raise ParityError(
            f"{what}: {int(differ.sum())} of {differ.numel()} elements differ, first at {place}: "
            f"kernel {found[place].item()}, reference {expected[place].item()}"
        )


def compare_close(what: str, found: Tensor, expected: Tensor) -> None:
    """The same for floats that were added up in another order: as equal as their dtype lets them be.

    Two roundings of one value to a short float may differ by its last bit, twice 2**-9 of bfloat16.
    """
    if found.dtype != expected.dtype or found.shape != expected.shape or not found.is_floating_point():
        return compare(what, found, expected)
    relative = max(2e-5, 2 * torch.finfo(found.dtype).eps)
    close = torch.isclose(found.double(), expected.double(), rtol=relative, atol=2e-5)
    if not close.all():
        place = tuple(int(i) for i in (~close).nonzero()[0])
        raise ParityError(
            f"{what}: {int((~close).sum())} of {close.numel()} elements differ by more than {relative:.1g}, first at "
            f"{place}: kernel {found[place].item()}, reference {expected[place].item()}"
        )


def compare_within(what: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Raise ParityError unless both have one dtype and shape and differ by ``tolerance`` of the largest value."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        raise ParityError(f"{what}: {found.dtype} {list(found.shape)} against {expected.dtype} {list(expected.shape)}")
    if expected.numel():
        off = float((found.float() - expected.float()).abs().max())
        if not off <= tolerance * max(1.0, float(expected.float().abs().max())):
            raise ParityError(f"{what}: differs by up to {off:.3g}, the largest value is {expected.abs().max():.3g}")


@contextlib.contextmanager
def small_blocks():
    """Run the kernels with the tiles of SMALL_BLOCKS inside the block."""
    modules = {name: importlib.import_module(f"modelopt_eagle.kernels.{name}") for name in SMALL_BLOCKS}
    before = {name: {key: getattr(modules[name], key) for key in keys} for name, keys in SMALL_BLOCKS.items()}
    try:
        for name, sizes in SMALL_BLOCKS.items():
            vars(modules[name]).update(sizes)
        yield
    finally:
        for name, sizes in before.items():
            vars(modules[name]).update(sizes)


def run_checks(device: str, backend: str, cases: int, seed: int = 0, names=tuple(CHECKS)) -> dict[str, list[str]]:
    """Run ``cases`` cases of each named check, every second with small blocks: the failures of each, empty if none.

    Returns:
        the failures of each, empty if none.
    """
    failures: dict[str, list[str]] = {}
    for name in names:
        failures[name] = []
        for case in range(seed, seed + cases):
            try:
                with small_blocks() if case % 2 else contextlib.nullcontext():
                    CHECKS[name](Cases(case, device), backend)
            except Exception as error:  # a kernel that does not compile must not hide the checks behind it
                failures[name].append(f"seed {case}: {type(error).__name__}: {error}")
    return failures


def main(arguments: list[str] | None = None) -> int:
    """Command line of the self-check; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m modelopt_eagle.kernels.parity", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", default="triton", choices=["triton", "reference"])
    parser.add_argument("--cases", type=int, default=50, help="random cases for each kernel")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first case")
    parser.add_argument("--only", nargs="+", default=list(CHECKS), choices=list(CHECKS), metavar="KERNEL")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a line a kernel")
    options = parser.parse_args(arguments)
    strict = torch.are_deterministic_algorithms_enabled()
    try:
        if options.device == "cpu":  # uninitialised outputs then hold a telling value, not a lucky one
            torch.use_deterministic_algorithms(True)
        failures = run_checks(options.device, options.backend, options.cases, options.seed, options.only)
    finally:
        torch.use_deterministic_algorithms(strict)
    if options.json:
        print(json.dumps({"cases": options.cases, "failures": failures}))
    else:
        for name, lines in failures.items():
            print(f"{name:20} {options.cases - len(lines)} of {options.cases} cases equal", *lines[:3], sep="\n  ")
    return 1 if any(failures.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
