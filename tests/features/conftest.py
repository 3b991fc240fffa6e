"""Conversations for the tiny target, as a file and as tokenised rows."""

import json
import random
from pathlib import Path

import pytest

from modelopt_eagle.data import prepare_dataset

ENGINE = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
collect_ignore = [] if ENGINE.is_file() else ["test_vllm.py"]

WORDS = "sun moon river stone cloud bird leaf wind rain fire snow tree".split()


@pytest.fixture(scope="session")
def conversations(tmp_path_factory):
    """A file of twelve conversations of different lengths, some with two turns."""
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("data") / "conversations.jsonl"
    with open(path, "w") as file:
        for number in range(12):
            messages = []
            for _ in range(1 + number % 2):
                messages.append({"role": "user", "content": " ".join(draw.choices(WORDS, k=draw.randint(1, 6)))})
                messages.append({"role": "assistant", "content": " ".join(draw.choices(WORDS, k=draw.randint(1, 9)))})
            row = {"id": f"talk-{number}", "category": ("chat", "sky")[number % 2], "messages": messages}
            file.write(json.dumps(row) + "\n")
    return path


@pytest.fixture(scope="session")
def dataset(tiny_target, conversations):
    """The same, tokenised for the tiny target."""
    return prepare_dataset(tiny_target.tokenizer, conversations)
