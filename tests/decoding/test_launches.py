"""What a round waits for and moves: one copy to the host, one move of keys and values, no copy of the cache."""

import sys
from itertools import pairwise

import pytest
import torch
from heads import make_head
from test_architectures import PROMPTS as TEXTS
from test_architectures import build

from modelopt_eagle.decoding import PlainGenerator, PseudoSpeculativeGenerator, relocate, walk
from modelopt_eagle.decoding.row_cache import RowCache
from modelopt_eagle.kernels import relocate_kv as relocate_operation
from modelopt_eagle.kernels import verify_greedy as verify_operation


@pytest.fixture
def waits(monkeypatch):
    """Names of the calls that read a tensor back, those that a reference makes on the CPU only left out."""
    seen = []
    for name in ("tolist", "item", "__bool__", "__int__", "__float__", "nonzero", "cpu", "unique"):
        own = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda self, *a, own=own, name=name, **k: seen.append(name) or own(self, *a, **k)
        )
    monkeypatch.setattr(sys.modules[relocate_operation.__module__], "check_path", lambda *a: None)
    for module in (sys.modules[verify_operation.__module__], walk):
        monkeypatch.setattr(module, "nobody", lambda walking: False)
    monkeypatch.setattr(walk, "visiting", lambda walking: list(range(len(walking))))
    return seen


DRAWN = dict(sample_drafts=True)
SAMPLED = dict(temperature=[0.8, 0.0], top_k=[20, 0], min_p=[0.05, 0.0], seed=1)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "options",
    [
        None,
        dict(num_steps=3),
        dict(mode="tree", topk=3, depth=3),
        dict(DRAWN, num_steps=3),
        dict(DRAWN, mode="tree", topk=2, depth=3),
    ],
    ids=str,
)
def test_a_round_waits_once(target, good_head, prompts, waits, options, sampled):
    generator = PlainGenerator(target) if options is None else PseudoSpeculativeGenerator(target, good_head, **options)
    marks = []
    generator.generate(
        prompts[:2],
        24,
        on_tokens=lambda row, *a: row or marks.append(len(waits)),
        eos_token_id=[],
        **(SAMPLED if sampled else {}),
    )
    rounds = [after - before for before, after in pairwise(marks)]
    assert len(rounds) > 3
    moves = waits[marks[0] :].count(
        "nonzero"
    )  # the reference of the move looks for the rows to move; a kernel does not
    assert sum(rounds) - moves == len(rounds), waits[marks[0] :]


@pytest.mark.parametrize("kind", ["llama, grouped", "gemma3, mixed windows", "qwen2, mixed windows"])
def test_an_accepted_path_is_moved_in_one_call(kind, monkeypatch):
    """Layers with keys of one shape lie in one tensor, whatever their masks; 48 moves a round before."""
    target, moves, rounds = build(kind), [], []
    own = relocate.relocate_kv
    monkeypatch.setattr(relocate, "relocate_kv", lambda *a, **k: moves.append(1) or own(*a, **k))
    generator = PseudoSpeculativeGenerator(target, make_head(target), mode="tree", topk=2, depth=2)
    generator.generate(TEXTS[:1], 10, on_tokens=lambda *a: rounds.append(len(moves)))
    assert {after - before for before, after in pairwise(rounds)} == {1}


def test_rows_that_stay_are_not_copied():
    cache = RowCache(2, 8)
    with cache.writing([0], 4, torch.device("cpu")):
        for layer in cache.layers:
            layer.update(torch.randn(3, 2, 4, 5), torch.randn(3, 2, 4, 5))
    before = [pool.clone() for pool in cache.tensors()]
    places = [pool.data_ptr() for pool in cache.tensors()]
    cache.keep([0, 2], 4)
    assert places == [pool.data_ptr() for pool in cache.tensors()]
    for pool, old in zip(cache.tensors(), before, strict=True):
        assert torch.equal(pool[:, :, :4], old[[0, 2], :, :4])
    cache.keep([1], 4)
    for layer, first in zip(cache.layers, (0, 4), strict=True):  # keys of a layer, then its values
        assert torch.equal(layer.keys[0, :, :4], before[0][2, first : first + 2, :4])
        assert torch.equal(layer.values[0, :, :4], before[0][2, first + 2 : first + 4, :4])
        assert layer.keys.shape[0] == 1
