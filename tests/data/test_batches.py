"""The plan of an epoch: a pure function, every row once, the same number of batches on every rank."""

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
