"""``relocate_kv`` and ``repack_accepted`` against loops over single rows, for every cache layout."""

import pytest
import torch

from modelopt_eagle.errors import DecodingError
from modelopt_eagle.kernels import relocate_kv, repack_accepted
from modelopt_eagle.kernels.parity import Cases

NODES = torch.tensor([[0, 2, 5, -1], [0, 1, 2, 3], [0, 3, -1, -1]], dtype=torch.int32)
COUNTS = torch.tensor([2, 3, 1], dtype=torch.int32)
LENGTHS = torch.tensor([4, 1, 0], dtype=torch.int32)


def expected_rows(read, row: int, nodes, counts, lengths) -> dict[int, torch.Tensor]:
    """Position -> value after the move, of the positions that change, reading the old values by ``read``."""
    moved = {}
    for step in range(int(counts[row]) + 1):
        moved[int(lengths[row]) + step] = read(row, int(lengths[row]) + int(nodes[row, step])).clone()
    return moved


def test_contiguous_caches_of_any_heads_and_layout():
    for seed in range(60):
        cases = Cases(seed, "cpu")
        nodes, counts = cases.accepted(3, 20, 8)
        lengths = cases.integers(0, 9, 3)
        heads, width = cases.choose.choice([1, 2, 5]), cases.choose.choice([1, 6])
        cache = cases.place(torch.randn(3, heads, 30, width, generator=cases.generator))
        before, after = cache.clone(), cache.clone()
        for row in range(3):
            for place, value in expected_rows(
                lambda r, p, old=before: old[r, :, p], row, nodes, counts, lengths
            ).items():
                after[row, :, place] = value
        assert relocate_kv(cache, cases.place(nodes), counts, lengths) is None
        assert torch.equal(cache, after)


@pytest.mark.parametrize("heads_first", [False, True])
def test_paged_caches(heads_first):
    size, table = 4, torch.tensor([[7, 2, 0], [5, 1, 3], [4, 8, 6]])
    shape = (9, 2, size, 3) if heads_first else (9, size, 2, 3)
    cache = torch.randn(shape)
    places = cache.transpose(1, 2) if heads_first else cache  # [9,size,heads,d] a view
    after = places.clone()
    for row in range(3):

        def read(r, position):
            return places[table[r, position // size], position % size]

        for position, value in expected_rows(read, row, NODES, COUNTS, LENGTHS).items():
            after[table[row, position // size], position % size] = value
    relocate_kv(cache, NODES, COUNTS, LENGTHS, block_table=table, token_dim=2 if heads_first else None)
    assert torch.equal(places, after)


def test_latents_move_like_rows_of_one_head():
    latents = torch.randn(3, 12, 5)
    heads = latents[:, None].clone()
    relocate_kv(latents, NODES, COUNTS, LENGTHS)
    relocate_kv(heads, NODES, COUNTS, LENGTHS)
    assert torch.equal(latents, heads[:, 0])


def test_a_ring_wraps_around():
    ring = torch.arange(6.0).view(1, 1, 6, 1)
    relocate_kv(ring, torch.tensor([[0, 2, 4]]), torch.tensor([2]), torch.tensor([10]), window=6)
    # the tree's rows 10..15 lie at places 4 5 0 1 2 3; nodes 2 and 4 (places 0 and 2) go to places 5 and 0
    assert ring.flatten().tolist() == [2.0, 1.0, 2.0, 3.0, 4.0, 0.0]


def test_a_paged_ring_wraps_around_within_its_blocks():
    """A sliding layer of an engine: the window lies in blocks, and the table says where they are."""
    cache = torch.arange(18.0).view(6, 3, 1)
    table = torch.tensor([[4, 1]])  # places 0..2 in block 4, 3..5 in block 1
    ring = torch.cat([cache[4], cache[1]]).view(1, 1, 6, 1)
    path, count, length = torch.tensor([[0, 2, 4]]), torch.tensor([2]), torch.tensor([10])
    relocate_kv(ring, path, count, length, window=6)
    relocate_kv(cache, path, count, length, block_table=table, window=6)
    assert torch.equal(torch.cat([cache[4], cache[1]]).flatten(), ring.flatten())
    assert torch.equal(cache[[0, 2, 3, 5]].flatten(), torch.arange(18.0).view(6, 3)[[0, 2, 3, 5]].flatten())


def test_tables_that_name_no_block_are_refused_where_rows_move():
    cache = torch.randn(9, 4, 2, 3)
    for table, options, message in [
        ([[7, -1, 0], [5, 1, 3], [4, 8, 6]], {}, r"from 0 to 8 where rows are moved, found \[-1\]"),
        ([[7, 2, 9], [5, 1, 3], [4, 8, 6]], {}, r"found \[9\]"),
        ([[7, 1], [5, 2], [4, 3]], {}, r"end at \[10, 5, 4\], a row holds 8 positions"),
        ([[7], [5], [4]], {"window": 8}, "window 8 exceeds the 4 places of a row"),
    ]:
        before = cache.clone()
        with pytest.raises(DecodingError, match=message):
            relocate_kv(cache, NODES, COUNTS, LENGTHS, block_table=torch.tensor(table), **options)
        assert torch.equal(cache, before)
    unused = torch.tensor([[-1, 2, 1], [-1, -1, 3], [4, -1, 6]])  # a table may have holes where nothing moves
    relocate_kv(cache, NODES, COUNTS, LENGTHS, block_table=unused)
    assert torch.equal(cache[1, 2], before[1, 2]) and torch.equal(cache[2, 2], before[1, 1])


def test_keys_and_values_move_in_one_call_and_share_nothing():
    keys, values = torch.randn(3, 2, 12, 4), torch.randn(3, 1, 12, 8)
    alone = keys.clone()
    relocate_kv((keys, values), NODES, COUNTS, LENGTHS)
    relocate_kv(alone, NODES, COUNTS, LENGTHS)
    assert torch.equal(keys, alone)


def test_nothing_moves_when_the_path_lies_in_place():
    cache = torch.randn(3, 2, 12, 4)
    before, version = cache.clone(), cache._version
    relocate_kv(cache, torch.arange(4).expand(3, -1), torch.tensor([3, 0, -1]), LENGTHS)
    assert torch.equal(cache, before)
    assert cache[0].data_ptr() == cache.data_ptr()
    assert version <= cache._version


def test_dtypes_of_one_byte_move_too():
    cache = torch.randn(3, 2, 12, 4).to(torch.float8_e4m3fn)
    expected = cache.float()
    relocate_kv(cache, NODES, COUNTS, LENGTHS)
    relocate_kv(expected, NODES, COUNTS, LENGTHS)
    assert torch.equal(cache.float(), expected)


def test_bad_paths_and_caches_are_refused():
    cache = torch.randn(3, 2, 9, 4)
    for arguments, options, message in [
        (
            (cache, NODES, COUNTS, LENGTHS),
            {},
            r"cache too short: the accepted paths end at \[10, 5, 4\], a row holds 9",
        ),
        ((cache, NODES.flip(1), COUNTS, LENGTHS - LENGTHS), {}, "0 first, then strictly increasing"),
        ((cache, NODES, COUNTS + 1, LENGTHS), {}, "num_accepted must be below the 4 columns"),
        ((cache, NODES, COUNTS, -LENGTHS), {}, "lengths must not be negative"),
        ((cache[:2], NODES, COUNTS, LENGTHS), {}, "cache must have 3 rows"),
        ((cache, NODES, COUNTS, LENGTHS), {"window": 4}, "window must exceed the path's nodes"),
        ((cache, NODES, COUNTS, LENGTHS), {"token_dim": 0}, "token_dim must name an axis behind the first"),
        ((cache[0, 0], NODES, COUNTS, LENGTHS), {}, "three or four dimensions"),
        ((cache, NODES.float(), COUNTS, LENGTHS), {}, "nodes must be int32 or int64"),
    ]:
        before = cache.clone()
        with pytest.raises(DecodingError, match=message):
            relocate_kv(*arguments, **options)
        assert torch.equal(cache, before)


@pytest.mark.parametrize("trailing", [(), (5,), (2, 3)])
def test_repack_accepted_gathers_the_path_and_repeats_its_last_row(trailing):
    rows = torch.randn(3, 6, *trailing)
    packed = repack_accepted(rows, NODES, COUNTS)
    assert packed.shape == (3, 4, *trailing)
    for row, path in enumerate([[0, 2, 5, 5], [0, 1, 2, 3], [0, 3, 3, 3]]):
        assert torch.equal(packed[row], rows[row, path])


def test_repack_accepted_refuses_other_batches():
    with pytest.raises(DecodingError, match=r"nodes must have shape \[2, any\]"):
        repack_accepted(torch.randn(2, 6, 4), NODES, COUNTS)
