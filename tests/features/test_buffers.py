"""Memory of batches is used again, and never while somebody holds a tensor in it."""

import torch

from modelopt_eagle.features.prefetch import LEAST_BYTES, BufferPool

ROWS = LEAST_BYTES // 64


def test_memory_is_used_again_when_the_last_view_is_gone():
    pool = BufferPool(4)
    first = pool.empty((ROWS, 16), torch.float32)
    assert first.shape == (ROWS, 16) and first.dtype == torch.float32
    address, part = first.data_ptr(), first[3:5].view(2, 4, 4)[1:]
    part.fill_(7)
    del first
    second = pool.empty((ROWS, 16), torch.float32).zero_()  # a view of the first one lives
    assert second.data_ptr() != address and (part == 7).all()
    del part
    third = pool.empty((2 * ROWS, 16), torch.bfloat16)
    assert third.data_ptr() == address and third.dtype == torch.bfloat16


def test_buffers_grow_and_are_not_kept_beyond_the_number():
    pool = BufferPool(2)
    held = [pool.empty((ROWS, 16), torch.float32).fill_(number) for number in range(5)]
    assert [int(tensor[-1, -1]) for tensor in held] == list(range(5)) and len(pool._buffers) == 2
    del held
    large = pool.empty((3 * ROWS, 16), torch.float32)
    assert large.shape[0] == 3 * ROWS and sorted(map(len, pool._buffers)) == [64 * ROWS, 192 * ROWS]
    assert pool.empty((4, 4), torch.float32).numel() == 16  # small ones are not of the pool
