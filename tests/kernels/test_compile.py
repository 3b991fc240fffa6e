"""The operations as ``torch.library`` ops: their schemas and fake forms hold, and torch.compile takes them whole."""

import pytest
import torch
import torch._dynamo.testing

from modelopt_eagle import kernels
from modelopt_eagle.kernels.column_attention import askers_of
from modelopt_eagle.kernels.parity import Cases
from tests.kernels.test_build_tree import worked_example

ops = torch.ops.modelopt_eagle


def arguments(name: str) -> tuple:
    """Arguments of an op, made for the reference."""
    scores, tokens, parent_list = worked_example()
    tree = kernels.build_tree(scores, tokens, parent_list, 6, 2)
    probs, uniforms = torch.rand(1, 6, 40).softmax(-1), torch.rand(1, 4)
    nodes, counts = Cases(0, "cpu").accepted(1, 6, 4)
    walk = (tree.tokens, tree.parents)
    rows, labels = torch.rand(3, 7), torch.tensor([2, 5])
    shapes = ((3, 4, 6), (5, 2, 6), (5, 2, 3), (3, 1, 2, 6), (3, 1, 2, 3))
    heads = [torch.randn(shape, requires_grad=True) for shape in shapes]
    last, start = torch.tensor([1, 3, 4]), torch.tensor([0, 2, 2])
    return {
        "distill_rows": (
            rows,
            rows[:2].clone(),
            torch.tensor([0, 0, 1]),
            torch.tensor([[0, 2], [2, 1]]),
            labels,
            rows[:, 0].clone(),
            rows[:, 1].clone(),
            True,
            True,
            True,
            2,
            "auto",
        ),
        "select_nodes": (scores, 5, "auto"),
        "build_tree": (scores, tokens, parent_list, None, 6, 2, "auto"),
        "verify_greedy": (*walk, torch.tensor([[12, 70, 23, 71, 50, 72]]), torch.tensor([True]), 3, "auto"),
        "sample_and_match": (*walk, probs, uniforms, None, 3, "auto"),
        "reject_target_only": (*walk, probs, uniforms[:, :3], uniforms[:, 3], None, 3, "auto"),
        "pack_mask": (torch.rand(2, 3, 40) < 0.5, "auto"),
        "unpack_mask": (torch.ones(2, 3, 2, dtype=torch.int32), 40, "auto"),
        "repack_mask": (torch.ones(2, 3, 2, dtype=torch.int32), torch.tensor([2, 1]), 3, 2, "auto"),
        "repack_accepted": (torch.rand(1, 6, 8), nodes, counts, "auto"),
        "relocate_kv": (torch.rand(1, 2, 9, 4), nodes, counts, torch.tensor([2]), None, 2, 0, False, "auto"),
        "norm_concat": (rows, rows[:, :7].clone().requires_grad_(), None, rows[0].clone(), 1e-5, torch.float32, "auto"),
        "rotate_heads": (heads[0], last[:, None].float(), start[:, None].float(), True, False, torch.float32, "auto"),
        "column_attention": (*heads, last, start, askers_of(last, start, 5), None, 0.4, "auto"),
    }[name]


NAMES = ("distill_rows", "select_nodes", "build_tree", "verify_greedy", "sample_and_match", "reject_target_only",
         "pack_mask", "unpack_mask", "repack_mask", "repack_accepted", "relocate_kv", "column_attention",
         "norm_concat", "rotate_heads")  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name):
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    found = torch.library.opcheck(getattr(ops, name), arguments(name), test_utils=tests)
    assert found == dict.fromkeys(tests, "SUCCESS")


def decode_step(scores, tokens, parent_list, predict, cache, lengths):
    """Build, verify, gather and relocate, as a decoding step does."""
    tree = kernels.build_tree(scores, tokens, parent_list, 6, 2)
    accepted = kernels.verify_greedy(tree, predict)
    kernels.relocate_kv(cache, accepted.nodes, accepted.num_accepted, lengths)
    rows = kernels.repack_accepted(predict, accepted.nodes, accepted.num_accepted)
    return kernels.unpack_mask(tree.mask), accepted.tokens, accepted.num_accepted, rows


def test_a_whole_step_compiles_without_graph_breaks():
    predict, lengths = torch.tensor([[12, 70, 23, 71, 50, 72]]), torch.tensor([3])
    caches = [torch.arange(20.0).view(1, 1, 20, 1) for _ in range(2)]
    compiled = torch.compile(decode_step, fullgraph=True, backend="aot_eager")
    found = compiled(*worked_example(), predict, caches[0], lengths)
    expected = decode_step(*worked_example(), predict, caches[1], lengths)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(caches[0], caches[1])
    assert caches[0].flatten()[3:6].tolist() == [3.0, 5.0, 7.0]


def test_one_compiled_step_takes_every_batch():
    """Batch sizes are symbols to the compiler: no size is baked in, and one graph serves the later ones."""
    torch._dynamo.reset()
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(decode_step, fullgraph=True, backend=graphs, dynamic=True)
    for batch in (2, 3, 5, 7):
        history = [part.repeat(batch, 1) for part in worked_example()]
        predict = torch.randint(10, 40, (batch, 6))
        predict[::2] = torch.tensor([12, 70, 23, 71, 50, 72])
        lengths = torch.arange(batch)
        caches = [torch.arange(20.0).view(1, 1, 20, 1).repeat(batch, 1, 1, 1) for _ in range(2)]
        found = compiled(*history, predict, caches[0], lengths)
        expected = decode_step(*history, predict, caches[1], lengths)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert torch.equal(*caches)
    assert graphs.frame_count == 1
