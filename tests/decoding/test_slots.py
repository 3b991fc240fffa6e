"""Slots never show anything of an older tree; released ones hold a legal chain; nothing leaks."""

import random
import subprocess
import sys

import pytest
import torch
from tracing import Tape

from modelopt_eagle.decoding.slots import FIELDS, TreeSlots, regular_tree
from modelopt_eagle.draft.trees import chain_tree
from modelopt_eagle.errors import DecodingError
from modelopt_eagle.kernels import build_tree, unpack_mask, verify_greedy

TOPK, DEPTH, LARGEST = 3, 4, 30


def random_tree(nodes, seed, batch=1):
    """A tree of a random expansion, cumulative scores."""
    generator = torch.Generator().manual_seed(seed)
    history = TOPK + TOPK * TOPK * (DEPTH - 1)
    scores = torch.zeros(batch, history)
    parents = torch.full((batch, TOPK * (DEPTH - 1) + 1), -1)
    drawn = torch.rand(batch, history, generator=generator).log()
    for row in range(batch):
        survivors = list(range(TOPK))
        scores[row, :TOPK] = drawn[row, :TOPK]
        for layer in range(1, DEPTH):
            start = TOPK + TOPK * TOPK * (layer - 1)
            parents[row, 1 + TOPK * (layer - 1) : 1 + TOPK * layer] = torch.tensor(survivors)
            for slot, flat in enumerate(survivors):
                own = slice(start + slot * TOPK, start + (slot + 1) * TOPK)
                scores[row, own] = scores[row, flat] + drawn[row, own]
            order = scores[row, start : start + TOPK * TOPK].argsort(descending=True, stable=True)[:TOPK]
            survivors = sorted((start + order).tolist(), key=lambda f: -scores[row, f])
    tokens = torch.arange(history).expand(batch, -1) + 100
    return build_tree(scores, tokens, parents, nodes, TOPK)


def fields(slots, slot):
    return {name: getattr(slots, name)[slot].clone() for name in FIELDS}


def test_nothing_of_an_older_tree_is_seen():
    used, fresh = TreeSlots(4, LARGEST, TOPK), TreeSlots(4, LARGEST, TOPK)
    held = [used.acquire() for _ in range(4)]
    assert held == [fresh.acquire() for _ in range(4)]
    used.store(held, random_tree(LARGEST, 0, batch=4))  # the largest tree everywhere
    for nodes in (12, 5):
        small = random_tree(nodes, nodes, batch=2)
        for slots in (used, fresh):
            slots.store([held[2], held[0]], small)
        for slot in (held[2], held[0]):
            mine, theirs = fields(used, slot), fields(fresh, slot)
            assert all(torch.equal(mine[name], theirs[name]) for name in FIELDS)
        tree, valid = used.gather([held[2], held[0]])
        assert valid.all()
        for name in ("tokens", "parents", "depths", "first_child", "next_sibling"):
            assert torch.equal(getattr(tree, name)[:, :nodes], getattr(small, name))
        assert torch.equal(unpack_mask(tree.mask, LARGEST)[:, :nodes, :nodes], unpack_mask(small.mask, nodes))
        assert not unpack_mask(tree.mask, LARGEST)[:, :nodes, nodes:].any()  # no node attends what lies behind
        predict = torch.arange(2 * LARGEST).view(2, LARGEST) % 40 + 100
        padded, own = verify_greedy(tree, predict), verify_greedy(small, predict[:, :nodes])
        assert torch.equal(padded.num_accepted, own.num_accepted)


def test_released_and_unused_slots_hold_a_chain():
    slots = TreeSlots(3, LARGEST, TOPK)
    line = chain_tree(torch.full((1, LARGEST), -1))
    slot = slots.acquire()
    slots.store([slot], random_tree(LARGEST, 1))
    assert slots.has_tree[slot]
    slots.release(slot)
    for number in range(3):
        assert not slots.has_tree[number]
        for name in FIELDS:
            assert torch.equal(getattr(slots, name)[number], getattr(line, name)[0]), name


def test_dummy_is_a_regular_tree_and_never_valid():
    slots = TreeSlots(2, 11, 3)
    assert slots.parents[slots.dummy].tolist() == [-1, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3]
    assert slots.depths[slots.dummy].tolist() == [0, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2]
    regular_tree(11, 3).check()
    tree, valid = slots.gather([-1, 0])  # neither is held
    assert not valid.any() and torch.equal(tree.parents[0], tree.parents[1])
    walked = verify_greedy(tree, torch.zeros(2, 11, dtype=torch.int64), valid)
    assert walked.num_accepted.tolist() == [0, 0]


def test_slots_are_conserved_over_a_hundred_requests():
    """B157."""
    slots, held, chance = TreeSlots(5, 12, TOPK), [], random.Random(0)
    served = 0
    while served < 100:
        if slots.free and chance.random() < 0.6:
            held.append(slots.acquire())
            served += 1
        elif held:
            slots.store([held[0]], random_tree(chance.choice([5, 8, 12]), served))
            slots.release(held.pop(chance.randrange(len(held))))
    for slot in held:
        slots.release(slot)
    assert slots.free == 5 and sorted(slots.acquire() for _ in range(5)) == list(range(5))


def test_bad_use_is_refused():
    slots = TreeSlots(1, 8, 2)
    slot = slots.acquire()
    with pytest.raises(DecodingError, match="all 1 slots are taken"):
        slots.acquire()
    with pytest.raises(DecodingError, match="does not fit slots of 8"):
        slots.store([slot], random_tree(12, 0))
    with pytest.raises(DecodingError, match="distinct slot"):
        slots.store([slot, slot], random_tree(6, 0, batch=2))
    slots.release(slot)
    with pytest.raises(DecodingError, match="not held"):
        slots.release(slot)
    with pytest.raises(DecodingError, match="not held"):
        slots.store([slots.dummy], random_tree(6, 0))
    with pytest.raises(DecodingError, match="num_nodes"):
        TreeSlots(1, 0, 2)
    with pytest.raises(DecodingError, match="depth must be at least 1"):
        TreeSlots(1, 8, 2, depth=0)
    shallow = TreeSlots(1, 8, TOPK, depth=3)
    with pytest.raises(DecodingError, match="depth 4 does not fit slots of depth 3"):
        shallow.store([shallow.acquire()], random_tree(8, 0))


def test_walks_over_slots_keep_their_shapes():
    """What the slots hold does not matter: a walk has room for D tokens, and is never told to read the device."""
    slots = TreeSlots(3, LARGEST, TOPK, depth=DEPTH)
    held = [slots.acquire() for _ in range(2)]
    shapes = set()
    for trees in ((), held[:1], held):
        if trees:
            slots.store(trees, random_tree(12, 3, batch=len(trees)))
        tree, valid = slots.gather([*held, -1])
        assert tree.max_depth == DEPTH and valid.tolist() == [slot in trees for slot in held] + [False]
        shapes.add(verify_greedy(tree, torch.zeros(3, LARGEST, dtype=torch.int64), valid).nodes.shape)
    assert shapes == {(3, DEPTH + 1)}


def test_slots_named_by_a_device_tensor():
    """The same trees as by a list; ids that nobody holds read as the dummy and write nowhere; nothing is read back."""
    by_list, by_tensor = TreeSlots(4, LARGEST, TOPK, depth=DEPTH), TreeSlots(4, LARGEST, TOPK, depth=DEPTH)
    held = [by_list.acquire() for _ in range(3)]
    assert held == [by_tensor.acquire() for _ in range(3)]
    trees = random_tree(12, 5, batch=2)
    by_list.store([held[2], held[0]], trees)
    by_tensor.store(torch.tensor([held[2], held[0]]), trees)
    before = {name: getattr(by_tensor, name).clone() for name in FIELDS}
    by_tensor.store(torch.tensor([-1, 3]), random_tree(LARGEST, 6, batch=2))  # neither is held
    for name in FIELDS:
        assert torch.equal(getattr(by_tensor, name), before[name]) and torch.equal(before[name], getattr(by_list, name))
    asked = [held[0], -1, held[1], 3, 99, held[2]]
    expected, valid = by_list.gather(asked)
    assert valid.tolist() == [True, False, False, False, False, True]
    out = by_tensor.batch(6)
    places = [getattr(out, name).data_ptr() for name in FIELDS]
    for dtype, given in ((torch.int64, None), (torch.int32, out)):
        found, also = by_tensor.gather(torch.tensor(asked, dtype=dtype), out=given)
        assert torch.equal(also, valid)
        for name in FIELDS:
            assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert places == [getattr(out, name).data_ptr() for name in FIELDS]
    by_tensor.release(held[2])
    assert not by_tensor.gather(torch.tensor([held[2]]))[1].any()
    with pytest.raises(DecodingError, match=r"slots must be integers of shape \[B\] on cpu"):
        by_tensor.gather(torch.tensor([0.0]))


def test_a_tensor_of_slots_is_never_read_back():
    slots = TreeSlots(2, 12, TOPK, depth=DEPTH)
    slot = torch.tensor([slots.acquire(), -1])
    tree, out = random_tree(12, 1, batch=2), slots.batch(2)
    with Tape([slot]):  # raises where a value is read back
        slots.store(slot, tree)
        slots.gather(slot, out=out)
    for name in FIELDS:
        assert torch.equal(getattr(out, name)[0], getattr(tree, name)[0]), name


def test_slots_and_buffer_need_no_transformers():
    code = (
        "import sys; sys.modules['transformers'] = None; "
        "from modelopt_eagle.decoding import CaptureBuffer, TreeSlots; "
        "TreeSlots(2, 8, 2).gather([0]); CaptureBuffer(8, 4, 3, 2, 5); print('made')"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "made"
