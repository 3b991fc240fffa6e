"""The plan of an epoch: a pure function, every row once, the same number of batches on every rank."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelopt_eagle.data import plan_batches
from modelopt_eagle.errors import DataError


@given(st.integers(1, 40), st.integers(1, 7), st.integers(1, 5), st.integers(0, 3), st.booleans())
def test_every_row_once_and_ranks_in_step(rows, batch_size, world, epoch, shuffle):
    options = {"batch_size": batch_size, "seed": 3, "epoch": epoch, "shuffle": shuffle}
    ranks = [plan_batches([1] * rows, rank=rank, world_size=world, **options) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1
    dealt = [ranks[step % world][step // world] for step in range(world * len(ranks[0]))]
    assert [batch for batch in dealt if batch] == plan_batches([1] * rows, **options)
    assert sorted(row for batch in dealt for row in batch) == list(range(rows))


def test_order_follows_seed_and_epoch_only():
    def plan(seed, epoch, **options):
        return plan_batches([5] * 20, batch_size=3, seed=seed, epoch=epoch, **options)

    assert plan(1, 2) == plan(1, 2)
    assert len({str(plan(seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}) == 4
    assert plan(1, 2, shuffle=False) == plan(9, 0, shuffle=False)
    assert plan(1, 2, shuffle=False)[0] == [0, 1, 2]


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [(0, {}, "no rows"), (2, {"batch_size": 0}, "found 0"), (2, {"rank": 2, "world_size": 2}, r"\[0, 2\), found 2")],
)
def test_bad_numbers(rows, options, message):
    with pytest.raises(DataError, match=message):
        plan_batches([1] * rows, **{"batch_size": 1, "seed": 0, "epoch": 0} | options)


def planned(lengths, world, window, max_tokens, epoch=0, **options):
    options = {"batch_size": 1, "seed": 3, "max_tokens": max_tokens, "window": window, "supervised": None} | options
    return [plan_batches(lengths, epoch=epoch, rank=rank, world_size=world, **options) for rank in range(world)]


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=60),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(60, 200),
    st.integers(0, 2),
    st.booleans(),
    st.booleans(),
)
def test_batches_of_tokens_hold_every_row_once(lengths, world, window, most, epoch, shuffle, weighed):
    supervised = [length // 2 for length in lengths] if weighed else None
    ranks = planned(lengths, world, window, most, epoch, shuffle=shuffle, supervised=supervised)
    assert len({len(batches) for batches in ranks}) == 1
    rows = [row for batches in ranks for batch in batches for row in batch]
    assert sorted(rows) == list(range(len(lengths)))
    sizes = [sum(lengths[row] for row in batch) for batches in ranks for batch in batches]
    assert max(sizes) <= most
    assert len(sizes) <= 2 * sum(lengths) // int(0.97 * most) + 1 + world  # two neighbours hold more
    assert ranks == planned(lengths, world, window, most, epoch, shuffle=shuffle, supervised=supervised)


@pytest.mark.parametrize(("world", "window"), [(2, 1), (4, 2), (8, 1)])
def test_processes_have_about_the_same_to_do_in_every_step(world, window):
    draw = random.Random(0)
    lengths = [min(4000, 30 + round(draw.expovariate(1 / 500))) for _ in range(4000)]
    supervised = [round(length * draw.uniform(0.2, 0.9)) for length in lengths]
    ranks = planned(lengths, world, window, 8192, supervised=supervised)
    spread, batches = {"tokens": [], "supervised": []}, len(ranks[0])
    for start in range(0, batches, window):
        for name, counted in (("tokens", lengths), ("supervised", supervised)):
            sums = [sum(counted[row] for batch in mine[start : start + window] for row in batch) for mine in ranks]
            spread[name].append(max(sums) / (sum(sums) / world))
    mean = {name: sum(values) / len(values) for name, values in spread.items()}
    assert max(spread["tokens"]) < 1.07 and mean["tokens"] < 1.04
    assert max(spread["supervised"]) < 1.3 and mean["supervised"] < 1.15
    assert batches * world <= 1.04 * sum(lengths) / 8192 + world * window  # hardly any room is left in a batch
    dealt = planned(lengths, world, window, 8192, supervised=supervised, epoch=1)
    together = [{frozenset(batch) for mine in plan for batch in mine} for plan in (ranks, dealt)]
    assert len(together[0] & together[1]) < 0.01 * batches * world  # other rows together in every epoch


def test_batches_of_tokens_keep_the_order_of_a_file_that_is_not_shuffled():
    (batches,) = planned([30, 30, 50, 10, 60], 1, 1, 60, shuffle=False)
    assert batches == [[0, 1], [2, 3], [4]]
    (levelled,) = planned([30, 30, 50, 10, 60], 1, 3, 60, shuffle=False)
    assert sorted(map(sorted, levelled)) == [[0, 1], [2, 3], [4]]


def test_a_row_longer_than_a_batch_is_refused():
    with pytest.raises(DataError, match="a row of 61 tokens does not fit into a batch of max_tokens 60"):
        planned([1, 61], 1, 1, 60)
