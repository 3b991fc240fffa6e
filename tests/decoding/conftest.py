"""A tiny target and heads for it."""

import pytest
import torch
from heads import PROMPTS, learn_answers, make_head

from modelopt_eagle.target.tiny import make_tiny_target


@pytest.fixture(scope="session")
def target():
    return make_tiny_target()


@pytest.fixture(scope="session")
def head(target):
    """Random: accepts rarely."""
    return make_head(target)


@pytest.fixture(scope="session")
def good_head(target):
    """Knows the answers to ``PROMPTS``: accepts often."""
    return learn_answers(target, make_head(target), PROMPTS)


@pytest.fixture(scope="session")
def prompts():
    return [list(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="session")
def greedy(target, prompts):
    """What the model itself says, by transformers' own ``generate``."""
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = target.model.generate(ids, max_new_tokens=48, do_sample=False, attention_mask=torch.ones_like(ids))
        answers.append(out[0, len(prompt) :].tolist())
    return answers
