"""Which tokens are learned: exactly what the target writes, under templates of every shape."""

import pytest
from data_toy import (
    EMPTY_THINK,
    FORGETS_THINK,
    HISTORY_ONLY_THINK,
    PLAIN,
    PROMPT_ONLY_THINK,
    REASONING_PROMPT,
    TAGGED,
    TEMPLATES,
    UNSTABLE,
    learned,
    make_word_tokenizer,
    talk,
    tokenizer_with,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from modelopt_eagle.data import Conversation, Message, render, template_hash, tokenize_conversations
from modelopt_eagle.errors import DataError
from modelopt_eagle.target import identity
from modelopt_eagle.target.tiny import CHATML_TEMPLATE, make_byte_tokenizer

THREE = ("first?", "one", "second?", "two", "third?", "three")


@pytest.mark.parametrize("name", TEMPLATES)
def test_three_turns_under_three_templates(name):
    tokenizer = tokenizer_with(TEMPLATES[name])
    (row,) = render(tokenizer, talk(*THREE, system="rules"))
    lead = " " if name == "inst" else ""  # the space after [/INST] is not supplied by the generation prompt
    assert learned(tokenizer, row) == [f"{lead}{text}<|im_end|>" for text in ("one", "two", "three")]
    prompt = tokenizer.apply_chat_template(
        [{"role": "system", "content": "rules"}, {"role": "user", "content": "first?"}],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert row.input_ids[: row.prompt_length] == prompt
    assert not any(row.supervised[: row.prompt_length]) and row.supervised[row.prompt_length]


def test_what_the_generation_prompt_supplies_is_context():
    for template in (EMPTY_THINK, PROMPT_ONLY_THINK, HISTORY_ONLY_THINK):
        tokenizer = tokenizer_with(template)
        (row,) = render(tokenizer, talk("hi", "hello"))
        assert learned(tokenizer, row) == ["hello<|im_end|>"]
        assert tokenizer.decode(row.input_ids[: row.prompt_length]).endswith("assistant\n<think></think>")


def test_prompt_supplied_text_missing_from_history_makes_a_row_per_answer():
    tokenizer = tokenizer_with(PROMPT_ONLY_THINK)
    rows = render(tokenizer, talk("a", "b", "c", "d"))
    texts = [tokenizer.decode(row.input_ids) for row in rows]
    assert [learned(tokenizer, row) for row in rows] == [["b<|im_end|>"], ["d<|im_end|>"]]
    assert texts[0].endswith("<think></think>b<|im_end|>\n")
    assert "assistant\nb<|im_end|>" in texts[1] and texts[1].endswith("<think></think>d<|im_end|>\n")


@pytest.mark.parametrize("opening", ["", "<think>\n"])
def test_reasoning_that_finished_turns_lose_is_learned(opening):
    tokenizer = tokenizer_with(REASONING_PROMPT)
    rows = render(tokenizer, talk("q1", f"{opening}hm</think>yes", "q2", f"{opening}oh</think>no"))
    assert [learned(tokenizer, row) for row in rows] == [["hm</think>yes<|im_end|>"], ["oh</think>no<|im_end|>"]]
    text = tokenizer.decode(rows[1].input_ids)
    assert "assistant\nyes<|im_end|>" in text and text.endswith("assistant\n<think>\noh</think>no<|im_end|>\n")
    always = tokenizer_with(REASONING_PROMPT.replace("<think>\n' }}", "' }}"))
    (row,) = render(always, talk("q1", "<think>hm</think>yes"))
    assert learned(always, row) == ["<think>hm</think>yes<|im_end|>"]


def test_a_template_that_rewrites_history_is_trained_as_served():
    tokenizer = tokenizer_with(FORGETS_THINK)
    conversation = talk("q1", "<think>x</think>a1", "q2", "<think>y</think>a2")
    rows = render(tokenizer, conversation)
    assert [row.id for row in rows] == ["c#0", "c#1"]
    assert [learned(tokenizer, row) for row in rows] == [
        ["<think>x</think>a1<|im_end|>"],
        ["<think>y</think>a2<|im_end|>"],
    ]
    for row, turns in zip(rows, (1, 3), strict=True):
        served = [{"role": m.role, "content": m.content} for m in conversation.messages[:turns]]
        prompt = tokenizer.apply_chat_template(served, add_generation_prompt=True, return_dict=False)
        assert row.input_ids[: row.prompt_length] == prompt
    report = tokenize_conversations(tokenizer, [conversation]).report
    assert (report.read, report.rows, report.fanned_out) == (1, 2, 1)
    assert "a row of its own" in report.header()


def test_the_same_template_packs_what_it_does_not_rewrite():
    tokenizer = tokenizer_with(FORGETS_THINK)
    (row,) = render(tokenizer, talk("q1", "a1", "q2", "<think>y</think>a2"))
    assert learned(tokenizer, row) == ["a1<|im_end|>", "<think>y</think>a2<|im_end|>"]


def test_an_unstable_template_is_refused_with_its_place():
    with pytest.raises(DataError, match="here:1, turn 1: the rendered answer does not follow the generation prompt"):
        render(tokenizer_with(UNSTABLE), talk("hi", "hello"))


def test_a_template_that_raises_drops_the_row():
    template = "{{ raise_exception('no system turns') if messages[0].role == 'system' }}" + CHATML_TEMPLATE
    data = tokenize_conversations(tokenizer_with(template), [talk("a", "b", system="s"), talk("a", "b")])
    assert data.report.dropped == {"template_refused": 1} and len(data.rows) == 1
    assert "no system turns" in data.header() and "here:1" in data.header()


def test_no_template_is_an_error():
    with pytest.raises(DataError, match="has no chat template"):
        render(tokenizer_with(None), talk("a", "b"))


def test_a_leading_answer_is_context():
    tokenizer = make_byte_tokenizer()
    (row,) = render(tokenizer, talk("welcome", "hi", "hello", first="assistant"))
    assert learned(tokenizer, row) == ["hello<|im_end|>"]
    assert "welcome" in tokenizer.decode(row.input_ids)


def test_a_cut_answer_has_no_end_of_turn_to_learn():
    tokenizer = make_byte_tokenizer()
    cut = talk("a", "b", "c", "d and so", finish="length")
    (row,) = render(tokenizer, cut)
    assert learned(tokenizer, row) == ["b<|im_end|>", "d and so"]
    (row,) = render(tokenizer, cut, supervise_cut_ends=True)
    assert learned(tokenizer, row) == ["b<|im_end|>", "d and so<|im_end|>"]
    assert tokenize_conversations(tokenizer, [cut]).report.notes == {"cut_answers": 1}


def test_end_of_turn_without_a_special_token():
    plain = PLAIN.replace("<|im_end|>", "")
    tokenizer = tokenizer_with(plain)
    (row,) = render(tokenizer, talk("a", "b", "c", "d"))
    assert learned(tokenizer, row) == ["b", "d"]  # the line break is the template's
    spelled = tokenizer_with(PLAIN.replace("<|im_end|>", "</s>"))
    assert learned(spelled, render(spelled, talk("a", "b", "c", "d"))[0]) == ["b</s>", "d</s>"]


def test_an_answer_ended_by_the_next_role_token():
    template = (
        "{% for m in messages %}{{ ('<|im_start|>' if m.role == 'user' else '<unk>') + m.content }}{% endfor %}"
        "{{ '<unk>' if add_generation_prompt }}"
    )
    tokenizer = tokenizer_with(template)
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    (row,) = render(tokenizer, talk("a", "b", "c", "d"), end_token_ids=[start])
    assert learned(tokenizer, row) == ["b<|im_start|>", "d<|im_start|>"]  # the last answer stops as any other
    (row,) = render(tokenizer, talk("a", "b", "c", "d"))  # a special token that is no end token
    assert learned(tokenizer, row) == ["b", "d"]


def test_an_answer_that_would_join_the_prompts_last_token_stands_behind_the_prompts_ids():
    tokenizer = make_word_tokenizer(CHATML_TEMPLATE)
    data = tokenize_conversations(tokenizer, [talk("q", "\nanswer", "r", "b")])  # "\n\n" is one token
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "q"}], add_generation_prompt=True, return_dict=False
    )
    first, second = data.rows  # the server of the second turn reads the first one as one text
    assert first.input_ids[: len(prompt)] == prompt and first.supervised.index(True) == len(prompt)
    assert learned(tokenizer, first) == ["\nanswer<|im_end|>"] and learned(tokenizer, second) == ["b<|im_end|>"]
    assert data.report.notes == {"answers_whose_tokens_need_a_row_of_their_own": 1}
    assert (data.report.read, data.report.rows, data.report.fanned_out) == (1, 2, 1)


@pytest.mark.parametrize("trim", [False, True])
def test_a_boundary_token_is_found_even_if_offsets_hide_it(trim):
    tokenizer = make_word_tokenizer(PLAIN, trim_offsets=trim)  # "Bot: " + "hi there" makes the token " hi"
    data = tokenize_conversations(tokenizer, [talk("q", "hi there")])
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "q"}], add_generation_prompt=True, return_dict=False
    )
    assert learned(tokenizer, data.rows[0]) == ["hi there<|im_end|>"]
    assert data.rows[0].input_ids[: len(prompt)] == prompt and data.rows[0].prompt_length == len(prompt)


def test_a_token_across_the_end_of_an_answer_is_not_learned():
    tokenizer = make_word_tokenizer(PLAIN.replace("<|im_end|>", ""))
    (row,) = render(tokenizer, talk("q", "so."))  # ".\n" is one token, its second half is the template's
    assert learned(tokenizer, row) == ["so"]


class _WithoutOffsets:
    """A Python tokenizer: the byte tokenizer, refusing to give offsets."""

    is_fast = False

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def __call__(self, text, add_special_tokens=True, return_offsets_mapping=False):
        assert not return_offsets_mapping
        return self._inner(text, add_special_tokens=add_special_tokens)


@pytest.mark.parametrize("template", [*TEMPLATES.values(), EMPTY_THINK, FORGETS_THINK])
def test_a_tokenizer_without_offsets_gives_the_same_rows(template):
    tokenizer = tokenizer_with(template)
    for conversation in (talk(*THREE, system="rules"), talk("ä", "ö 漢", "c", "d", finish="length")):
        assert render(_WithoutOffsets(tokenizer), conversation) == render(tokenizer, conversation)


def test_generation_tags_are_used_and_cross_checked():
    tokenizer = tokenizer_with(TAGGED)
    (row,) = render(tokenizer, talk(*THREE))
    assert learned(tokenizer, row) == ["one<|im_end|>", "two<|im_end|>", "three<|im_end|>"]
    partly = TAGGED.replace(
        "{% generation %}{{ m.content }}",
        "{{ m.content.split('</think>')[0] + '</think>' }}{% generation %}{{ m.content.split('</think>')[1] }}",
    )
    tokenizer = tokenizer_with(partly)
    (row,) = render(tokenizer, talk("q", "<think>hm</think>yes"))
    assert learned(tokenizer, row) == ["yes<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (TAGGED.replace("m.role == 'assistant'", "m.role == 'user'"), "generation tags mark nothing"),
        (TAGGED.replace("{% if m.role == 'assistant' %}", "{% if true %}"), "mark 'q', which is no part of an answer"),
    ],
)
def test_generation_tags_that_mark_other_text_are_refused(template, message):
    with pytest.raises(DataError, match=message):
        render(tokenizer_with(template), talk("q", "answer"))


_words = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="<|>"), min_size=1, max_size=12).filter(
    str.strip
)


@settings(max_examples=60, deadline=None)
@given(turns=st.lists(st.tuples(_words, _words), min_size=1, max_size=4), name=st.sampled_from([*TEMPLATES, "think"]))
def test_the_flags_are_the_answers_and_their_ends(turns, name):
    tokenizer = tokenizer_with(TEMPLATES.get(name, EMPTY_THINK))
    (row,) = render(tokenizer, talk(*(text for turn in turns for text in turn)))
    expected, ids, messages = [], [], []
    lead = " " if name == "inst" else ""
    for asked, answered in turns:
        messages.append({"role": "user", "content": asked})
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        answer = tokenizer(lead + answered + "<|im_end|>", add_special_tokens=False)["input_ids"]
        expected += [False] * (len(prompt) - len(ids)) + [True] * len(answer)
        ids = prompt + answer
        messages.append({"role": "assistant", "content": answered})
    assert row.input_ids[: len(ids)] == ids
    assert row.supervised == expected + [False] * (len(row.input_ids) - len(ids))


def test_windows_truncate_or_drop_with_a_count():
    tokenizer = make_byte_tokenizer()
    long, short, asked = talk("q", "x" * 100), talk("q", "x"), talk("q" * 100, "x")
    items = [Conversation(str(i), c.messages) for i, c in enumerate((long, short, asked))]
    cut = tokenize_conversations(tokenizer, items, max_length=64)
    assert [len(row.input_ids) for row in cut.rows] == [64, len(render(tokenizer, short)[0].input_ids)]
    assert (cut.report.truncated, cut.report.dropped) == (1, {"prompt_fills_window": 1})
    assert "50.0% truncated at 64 tokens" in cut.header()
    dropped = tokenize_conversations(tokenizer, items, max_length=64, overlong="drop")
    assert (len(dropped.rows), dropped.report.dropped, dropped.report.truncated) == (1, {"too_long": 2}, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overlong": "wrap"}, "truncate or drop"),
        ({"max_length": 1}, "at least 2"),
        ({"workers": 0}, "workers must be"),
        ({"max_length": 8}, "no supervised token.*no answer begins within 8"),
    ],
)
def test_bad_options_and_nothing_to_learn_stop_the_run(options, message):
    with pytest.raises(DataError, match=message):
        tokenize_conversations(make_byte_tokenizer(), [talk("question", "answer")], **options)


def test_everything_supervised_warns():
    template = "{% for m in messages if m.role == 'assistant' %}{{ m.content + '<|im_end|>' }}{% endfor %}"
    with pytest.warns(UserWarning, match="every token of the data is supervised"):
        found = tokenize_conversations(tokenizer_with(template), [talk("question", "answer")])
    assert "warning: every token is supervised" in found.header()  # said for stored features, too


def test_workers_change_nothing(tmp_path):
    tokenizer = make_byte_tokenizer()
    items = [
        Conversation(str(i), (Message("user", "q" * (i % 7 + 1)), Message("assistant", f"answer {i}")))
        for i in range(300)
    ]
    alone, shared = (tokenize_conversations(tokenizer, items, workers=n) for n in (1, 2))
    assert alone == shared and alone.report.rows == 300


def test_header_preview_and_hash():
    tokenizer = make_byte_tokenizer()
    data = tokenize_conversations(tokenizer, [talk("q", "a")])
    tokens = len(data.rows[0].input_ids)
    assert (
        data.header() == f"data: 1 conversations read, 0 dropped, 1 rows, {tokens} tokens, {2 / tokens:.1%} supervised"
    )
    assert data.preview(tokenizer).endswith("<|im_start|>assistant\n⟦a<|im_end|>⟧\n")
    assert data.lengths == [tokens]
    assert data.template_hash == template_hash(tokenizer) == identity.template_hash(tokenizer)
    assert template_hash(tokenizer_with(PLAIN)) != data.template_hash
