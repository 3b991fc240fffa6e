"""Packed masks: bit positions, any width, round trips, and the in-place repack."""

import pytest
import torch

from modelopt_eagle.errors import DecodingError
from modelopt_eagle.kernels import pack_mask, repack_mask, unpack_mask


def test_every_bit_has_its_place():
    words = pack_mask(torch.eye(70, dtype=torch.bool))
    assert words.shape == (70, 3)
    assert words.dtype == torch.int32
    for column in range(70):
        value = 1 << (column % 32)
        expected = [0, 0, 0]
        expected[column // 32] = value - 2**32 if value >= 2**31 else value
        assert words[column].tolist() == expected


@pytest.mark.parametrize("columns", [1, 31, 32, 33, 64, 65, 130, 1025])
def test_round_trip(columns):
    mask = torch.rand(3, 5, columns) < 0.5
    assert torch.equal(unpack_mask(pack_mask(mask), columns), mask)
    turned = torch.rand(columns, 5, 3).permute(2, 1, 0) < 0.5
    assert torch.equal(unpack_mask(pack_mask(turned), columns), turned)


def test_square_masks_need_no_width():
    mask = torch.rand(2, 40, 40) < 0.5
    assert torch.equal(unpack_mask(pack_mask(mask)), mask)


def test_bits_beyond_the_columns_are_zero():
    assert pack_mask(torch.ones(1, 33, dtype=torch.bool)).tolist() == [[-1, 1]]


def test_bad_masks_are_refused():
    with pytest.raises(DecodingError, match="mask must be bool"):
        pack_mask(torch.ones(2, 2))
    with pytest.raises(DecodingError, match="words must be int32"):
        unpack_mask(torch.ones(2, 2))
    with pytest.raises(DecodingError, match=r"\[0, 64\], found num_nodes=65"):
        unpack_mask(torch.ones(2, 2, dtype=torch.int32), 65)


def test_repack_moves_used_rows_together_in_the_same_storage():
    buffer = torch.arange(3 * 4 * 2, dtype=torch.int32).view(3, 4, 2)
    expected = torch.cat([buffer[0, :2, :1], buffer[1, :0, :1], buffer[2, :4, :1]])
    tight = repack_mask(buffer, torch.tensor([2, 0, 4]), 1)
    assert torch.equal(tight[:6], expected)
    assert tight.data_ptr() == buffer.data_ptr()
    assert tight.shape == (12, 1)


def test_repack_with_one_size_for_all():
    buffer = torch.arange(3 * 4 * 2, dtype=torch.int32).view(3, 4, 2)
    expected = buffer[:, :3, :].clone()
    assert torch.equal(repack_mask(buffer, 3), expected)
    same = torch.arange(24, dtype=torch.int32).view(3, 4, 2)
    assert torch.equal(repack_mask(same, 4), torch.arange(24).view(3, 4, 2))


def test_bad_repacks_are_refused():
    buffer = torch.zeros(2, 4, 2, dtype=torch.int32)
    for arguments, message in [
        ((buffer, 5), r"rows must lie in \[0, 4\], found 5"),
        ((buffer, torch.tensor([1, 5])), r"rows must lie in \[0, 4\], found \[1, 5\]"),
        ((buffer, 1, 3), r"width must lie in \[0, 2\], found 3"),
        ((buffer.transpose(0, 1), 1), "buffer must be contiguous int32"),
        ((buffer, torch.tensor([1])), r"rows must have shape \[2\]"),
    ]:
        with pytest.raises(DecodingError, match=message):
            repack_mask(*arguments)
