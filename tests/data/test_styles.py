"""What is trained equals the prompt's ids and what the target writes, under templates of every style of the field."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from template_styles import STYLES

from modelopt_eagle.data import Conversation, Message, tokenize_conversations
from modelopt_eagle.errors import DataError
from modelopt_eagle.target.chat import set_chat_settings

_TOKENIZERS = {name: style.tokenizer() for name, style in STYLES.items()}
# characters of tags are left out: a text that holds a tag of its template is another matter
_texts = st.text(
    st.characters(exclude_categories=("Cs",), exclude_characters="<|>[]｜"), min_size=1, max_size=10
).filter(str.strip)


def learned_pieces(rows):
    """``(ids before, supervised ids)`` of every run of supervised tokens."""
    pieces = []
    for row in rows:
        start = None
        for i, flag in enumerate([*row.supervised, False]):
            if flag and start is None:
                start = i
            if not flag and start is not None:
                pieces.append((row.input_ids[:start], row.input_ids[start:i]))
                start = None
    return pieces


def oracle(style, tokenizer, conversation):
    """The same by the words of the style: each prompt by the tokenizer itself, and what the target writes behind it."""
    pieces, messages = [], []
    for message in conversation.messages:
        if message.role == "assistant":
            prompt = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False, **style.arguments
            )
            written = style.writes(message.content, message.reasoning)
            pieces.append((prompt, tokenizer(written, add_special_tokens=False)["input_ids"]))
        turn = {"role": message.role, "content": message.content}
        if message.reasoning is not None:
            turn["reasoning_content"] = turn["thinking"] = message.reasoning
        messages.append(turn)
    return pieces


def conversation_of(turns, system, reasons):
    messages = [Message("system", system)] if system else []
    for number, (asked, answered) in enumerate(turns):
        why = reasons[number % len(reasons)] if reasons else None
        messages += [Message("user", asked), Message("assistant", answered, reasoning=why)]
    return Conversation("c", tuple(messages), place="here:1")


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from(sorted(STYLES)),
    turns=st.lists(st.tuples(_texts, _texts), min_size=1, max_size=4),
    system=st.none() | _texts,
    reasons=st.lists(_texts.map(str.strip), min_size=1, max_size=2),
)
def test_what_is_trained_is_what_was_served_and_written(name, turns, system, reasons):
    style, tokenizer = STYLES[name], _TOKENIZERS[name]
    if style.trims:
        turns = [(asked, answered) for asked, answered in turns]
    wants_reasons = style.thinks and style.writes_reasoning is not None
    if name == "forgets reasoning":
        turns = [(asked, f"{reasons[0]}\n</think>\n\n{answered}") for asked, answered in turns]
    conversation = conversation_of(turns, system, reasons if wants_reasons else [])
    set_chat_settings(tokenizer, style.arguments)
    found = tokenize_conversations(tokenizer, [conversation], end_token_ids=style.end_ids(tokenizer))
    assert learned_pieces(found.rows) == oracle(style, tokenizer, conversation)
    assert found.report.rows - found.report.fanned_out == 1 and not found.report.dropped
    if not style.rewrites:
        assert len(found.rows) == 1


@pytest.mark.parametrize("name", [name for name, style in STYLES.items() if style.writes_reasoning])
def test_reasoning_and_answer_are_learned_as_they_are_written(name):
    style, tokenizer = STYLES[name], _TOKENIZERS[name]
    set_chat_settings(tokenizer, {})
    conversation = conversation_of([("q", "a"), ("r", "b")], None, ["hm", "oh"])
    found = tokenize_conversations(tokenizer, [conversation], end_token_ids=style.end_ids(tokenizer))
    assert [tokenizer.decode(ids) for _, ids in learned_pieces(found.rows)] == [
        style.writes("a", "hm"),
        style.writes("b", "oh"),
    ]
    only = tokenize_conversations(
        tokenizer, [conversation], end_token_ids=style.end_ids(tokenizer), supervise_reasoning=False
    )
    assert [tokenizer.decode(ids) for _, ids in learned_pieces(only.rows)] == [f"a{style.end}", f"b{style.end}"]


def test_there_are_styles_enough():
    assert len({style.template for style in STYLES.values()}) >= 24


@pytest.mark.parametrize("name", ["always thinks", "forgets reasoning"])
def test_a_prompt_that_begins_reasoning_refuses_an_answer_without(name):
    tokenizer = _TOKENIZERS[name]
    with pytest.raises(DataError, match="begins reasoning with '<think>' and the answer has none"):
        tokenize_conversations(tokenizer, [conversation_of([("q", "a")], None, [])])
