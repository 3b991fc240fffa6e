"""A tiny target, prompts for it, and a head that has learnt its answers."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "decoding"))

from heads import learn_answers, make_head

from modelopt_eagle.data import Prompt
from modelopt_eagle.target.tiny import make_tiny_target
from modelopt_eagle.validation.dialogues import first_turn


@pytest.fixture(scope="session")
def target():
    return make_tiny_target()


@pytest.fixture(scope="session")
def prompts():
    return [
        Prompt("a", "writing", ("Say a word.", "And another.")),
        Prompt("b", "writing", ("Hello",)),
        Prompt("c", "math", ("1+1?",), system="Be brief."),
        Prompt("d", "math", ("Count to three, slowly.",)),
    ]


@pytest.fixture(scope="session")
def good_head(target, prompts):
    inputs = [first_turn(target, prompt) for prompt in prompts]
    return learn_answers(target, make_head(target), inputs, length=32, updates=80)
