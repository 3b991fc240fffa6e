"""The files that the package ships: enough of everything, and nothing validated that was trained on."""

import json
import re
from collections import Counter

from modelopt_eagle.data import load_prompts, read_conversations
from modelopt_eagle.data.files import ASSETS

MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}


def runs_of_words(text, length=6):
    """All runs of so many consecutive words."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + length]) for i in range(len(words) - length + 1)}


def test_eighty_validation_prompts_in_the_categories_of_mt_bench():
    prompts = load_prompts("quickstart")
    assert Counter(prompt.category for prompt in prompts) == dict.fromkeys(MT_BENCH, 10)
    assert all(len(prompt.turns) == 2 for prompt in prompts)


def test_no_validation_prompt_is_trained_on():
    trained = set()
    for conversation in read_conversations("quickstart").rows:
        for message in conversation.messages:
            if message.role == "user":
                trained |= runs_of_words(message.content)
    asked = [turn for prompt in load_prompts("quickstart") for turn in prompt.turns]
    assert trained and not [turn for turn in asked if runs_of_words(turn) & trained]


def test_every_training_conversation_answers_a_shipped_prompt():
    lines = (ASSETS / "train_prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = {row["messages"][0]["content"] for row in map(json.loads, lines)}
    found = read_conversations("quickstart")
    assert not found.report.dropped and len(found.rows) == found.report.read > 400
    assert {row.messages[0].content for row in found.rows} <= prompts
    assert set(Counter(row.category for row in found.rows)) == MT_BENCH
