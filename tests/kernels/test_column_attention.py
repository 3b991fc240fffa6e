"""The rollout attention's plain parts: gradients of the reference, ranges of askers, tiles, and when training takes it.

The kernel itself is interpreted and compiled in test_backends.py.
"""

import importlib
import itertools

import pytest
import torch

from modelopt_eagle import kernels
from modelopt_eagle.draft import attention
from modelopt_eagle.errors import DecodingError
from modelopt_eagle.kernels import column_attention as operation
from modelopt_eagle.kernels.column_attention import askers_of
from modelopt_eagle.kernels.column_reference import dense_column_attention
from modelopt_eagle.kernels.column_tiles import tiles


def inputs(dtype=torch.float64, columns=2):
    """Six queries on nine keys of two documents, four query heads on two key heads."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(6, 4, 5), (9, 2, 5), (9, 2, 3), (6, columns, 2, 5), (6, columns, 2, 3)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    rows, starts = torch.tensor([0, 2, 3, 4, 6, 8]), torch.tensor([0, 0, 0, 4, 4, 6])
    return [tensor.requires_grad_() for tensor in tensors], rows, starts


@pytest.mark.parametrize("seen", [False, True])
def test_the_references_gradient_is_that_of_autograd(seen):
    tensors, rows, starts = inputs()
    sees = torch.tensor([[True, False], [True, True]]) if seen else None
    out = operation(*tensors, rows, starts, 0.7, sees)
    expected = dense_column_attention(*tensors, rows, starts, 0.7, sees)
    torch.testing.assert_close(out, expected)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    found = torch.autograd.grad(out, tensors, upstream)
    for one, other in zip(found, torch.autograd.grad(expected, tensors, upstream), strict=True):
        torch.testing.assert_close(one, other)


def test_askers_are_the_queries_that_see_a_key():
    _, rows, starts = inputs()
    first, last = askers_of(rows, starts, 9)
    for key in range(9):
        seen = [i for i in range(6) if starts[i] <= key <= rows[i]]
        assert list(range(first[key], last[key])) == seen


def test_shapes_and_dtypes_that_do_not_fit_are_refused(monkeypatch):
    tensors, rows, starts = inputs(torch.float32)
    with pytest.raises(DecodingError, match=r"keys must have shape \[9, 2, 5\], found \[8, 2, 5\]"):
        operation(tensors[0], tensors[1][:8], *tensors[2:], rows, starts, 1.0)
    with pytest.raises(DecodingError, match="3 query heads do not share 2 key heads"):
        operation(tensors[0][:, :3], *tensors[1:], rows, starts, 1.0)
    with pytest.raises(DecodingError, match="sees must be bool"):
        operation(*tensors, rows, starts, 1.0, torch.ones(2, 2))
    module = importlib.import_module("modelopt_eagle.kernels.column_attention")
    monkeypatch.setattr(module, "choose_backend", lambda backend, device: "triton")
    with pytest.raises(DecodingError, match="one dtype among .* found 5 and 3 in torch.float64"):
        operation(*inputs()[0], rows, starts, 1.0)


def test_every_tile_fits_into_the_shared_memory_of_its_gpu():
    limits = [(80, 163 << 10), (86, 99 << 10), (90, 227 << 10), (100, 227 << 10), (120, 99 << 10)]
    for kernel, (width, size), limit in itertools.product(
        ("forward", "queries", "keys"), [(w, 2) for w in (64, 80, 96, 128, 192, 256)] + [(64, 4), (128, 4)], limits
    ):
        tile = tiles(kernel, width, width, size, limit, 128)
        assert 16 <= tile.queries <= 128 and 16 <= tile.keys <= 128
        wide = 1 << (width - 1).bit_length()
        rest, moving = (tile.keys, tile.queries) if kernel == "keys" else (tile.queries, tile.keys)
        assert 2 * wide * size * (rest + tile.stages * moving) <= limit[1], (kernel, width, size, limit, tile)


def test_training_takes_the_kernel_and_never_reads_the_plan(monkeypatch):
    tensors, rows, starts = inputs(torch.float32)
    plain = attention.QueryPlan.make(rows, starts)
    expected = attention.column_attention(*tensors, plain, 0.7)
    assert "chunks" in vars(plain)
    calls = []

    def run(*arguments, backend, **options):
        calls.append([tensor.dtype for tensor in arguments[:5]])
        return operation(*arguments, backend="reference", **options)

    monkeypatch.setattr(attention, "choose_backend", lambda backend, device: "triton")
    monkeypatch.setattr(attention, "kernel", run)
    plan = attention.QueryPlan.make(rows, starts)
    out = attention.column_attention(*tensors, plan, 0.7)
    torch.testing.assert_close(out, expected)
    upstream = torch.ones_like(out)
    for one, other in zip(*(torch.autograd.grad(o, tensors, upstream) for o in (out, expected)), strict=True):
        torch.testing.assert_close(one, other)
    assert "chunks" not in vars(plan) and plan.askers(9) is plan.askers(9)

    mixed = [tensors[0].to(torch.bfloat16), *tensors[1:]]
    assert attention.column_attention(*mixed, plan, 0.7).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert attention.column_attention(*mixed, plan, 0.7).dtype == torch.bfloat16
    assert calls == [[torch.float32] * 5, [torch.float32] * 5, [torch.bfloat16] * 5]
    attention.column_attention(*inputs()[0], plan, 0.7)  # float64: the chunks
    assert len(calls) == 3 and "chunks" in vars(plan)


def test_the_operation_is_public():
    assert kernels.column_attention is operation
