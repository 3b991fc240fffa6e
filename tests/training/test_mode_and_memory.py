"""The head's mode in the loop, and what the rollout's attention allocates."""

import pytest
import torch
from accelerate import Accelerator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from modelopt_eagle.data import TokenizedRow
from modelopt_eagle.draft.attention import QueryPlan, column_attention
from modelopt_eagle.errors import TrainingError
from modelopt_eagle.features import OnlineSource
from modelopt_eagle.training.acceptance import evaluate
from modelopt_eagle.training.trainer import Trainer
from tests.training.test_step import make_step


def test_an_evaluation_leaves_the_head_in_training_and_the_loop_checks_it(tiny_target):
    """B110."""
    step = make_step(tiny_target).train()
    rows = [TokenizedRow("a", "", list(range(10, 30)), [False] * 8 + [True] * 12, 8)]
    walk = evaluate(step, OnlineSource(tiny_target, rows), Accelerator(cpu=True), batch_size=1, num_steps=2)
    assert walk.steps and step.training and step.module.training
    trainer = object.__new__(Trainer)
    trainer.wrapped = step.eval()
    with pytest.raises(TrainingError, match="evaluation mode"):
        trainer.optimise(0, [])


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that an operation made."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(t.numel() for t in tree_leaves(result) if isinstance(t, torch.Tensor))])
        return result


def largest_tensor(length: int) -> int:
    shapes = [(length, 2, 4), (length, 1, 4), (length, 1, 4), (length, 2, 1, 4), (length, 2, 1, 4)]
    tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]
    rows = torch.arange(length)
    with Largest() as seen:
        column_attention(*tensors, QueryPlan.make(rows, torch.zeros_like(rows)), 0.5).sum().backward()
    return seen.numel


def test_memory_grows_with_the_length_and_not_with_its_square():
    """B117."""
    short, long = largest_tensor(512), largest_tensor(2048)
    assert short <= long <= 4 * short
    assert long < 2048 * 2048
