"""Fields and templates as public data sets and models have them: learned as written, or refused by name."""

import datetime
import json

import pytest
from data_toy import learned, make_word_tokenizer, tokenizer_with, write_lines
from template_styles import STYLES

from modelopt_eagle.data import prepare_dataset, prepare_rows, read_conversations
from modelopt_eagle.errors import DataError
from modelopt_eagle.target import identity
from modelopt_eagle.target.chat import dated_template, set_chat_settings
from modelopt_eagle.target.tiny import CHATML_TEMPLATE

ASKED = {"role": "user", "content": "q"}
OPENS = CHATML_TEMPLATE.replace("assistant\n' }}", "assistant\n<think>\n' }}")
TOOLS = (
    "{%- if tools -%}{{- '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' -}}{%- endif -%}"
    "{%- for turn in messages -%}{{- '<|im_start|>' + turn.role + '\\n' + turn.content -}}"
    "{%- for call in turn.tool_calls or [] -%}{{- '\\n<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' -}}"
    "{%- endfor -%}{{- '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
WEATHER = {"name": "weather", "description": "of a place", "parameters": {"type": "object", "properties": {}}}


def answered(content, **more):
    return {"messages": [ASKED, {"role": "assistant", "content": content, **more}]}


def texts(template, *rows, **options):
    """The supervised runs of each row, and the report."""
    tokenizer = template if hasattr(template, "chat_template") else tokenizer_with(template)
    found = prepare_rows(tokenizer, rows, **options)
    return [learned(tokenizer, row) for row in found.rows], found.report


@pytest.mark.parametrize(
    "content", ["<think>\nhm\n</think>\n\nans", "<think>hm\n</think>\n\nans", "hm\n</think>\n\nans"]
)
@pytest.mark.parametrize("finished", ["", "<think>\n"])
def test_a_tag_that_the_prompt_supplies_is_neither_doubled_nor_learned(content, finished):
    template = OPENS.replace(
        "message['role'] + '\n' +", f"message['role'] + '\n{finished}' +" if not finished else
        "message['role'] + '\n' + ('<think>\n' if message['role'] == 'assistant' else '') +",
    )  # fmt: skip
    tokenizer = tokenizer_with(template)
    row = prepare_rows(tokenizer, [answered(content)]).rows[0]
    prompt = tokenizer.apply_chat_template([ASKED], add_generation_prompt=True, return_dict=False)
    written = tokenizer("hm\n</think>\n\nans<|im_end|>", add_special_tokens=False)["input_ids"]
    assert row.input_ids[: row.prompt_length] == prompt
    assert [i for i, flag in zip(row.input_ids, row.supervised, strict=True) if flag] == written


@pytest.mark.parametrize(
    "key", ["reasoning", "reasoning_content", "thinking", "thoughts", "thinking_content", "reasoning_text"]
)
def test_reasoning_under_any_name_goes_where_the_template_puts_it(key):
    tokenizer = STYLES["hybrid, with reasoning"].tokenizer()
    found, _ = texts(tokenizer, answered("ans", **{key: "hm"}))
    assert found == [["<think>\nhm\n</think>\n\nans<|im_end|>"]]
    with pytest.raises(DataError, match="no place for reasoning in a field of its own"):
        texts(CHATML_TEMPLATE, answered("ans", **{key: "hm"}))


def test_reasoning_in_parts_twice_the_same_and_contradictory():
    tokenizer = STYLES["hybrid, with reasoning"].tokenizer()
    details = [{"type": "reasoning.text", "text": "h"}, {"type": "reasoning.text", "text": "m"}]
    parts = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "ans"}]
    found, _ = texts(tokenizer, answered("ans", reasoning="hm", reasoning_details=details), answered(parts))
    assert found == [["<think>\nhm\n</think>\n\nans<|im_end|>"]] * 2
    _, report = texts(
        tokenizer,
        answered("ans"),
        answered("ans", reasoning="hm", thinking="oh"),
        answered("ans", chain_of_thought="hm"),
        answered("ans", reasoning_details=[{"type": "reasoning.encrypted", "data": "xyz"}]),
    )
    assert report.dropped == {"separate_reasoning": 3}


def test_keys_that_nobody_reads_are_named():
    _, report = texts(CHATML_TEMPLATE, answered("a", mood="good", id=7, finish_reason="stop"))
    assert report.notes == {"unread_key_of_a_turn_mood": 1} and "nothing reads `mood`" in report.header()
    called = {"role": "function_call", "content": json.dumps(CALL["function"]), "recipient": "x"}
    row = {"messages": [ASKED, called, {"role": "observation", "content": "grey", "channel": "y"},
                        {"role": "assistant", "content": "ok", "content_type": "z"}]}  # fmt: skip
    _, report = texts(TOOLS, row)
    assert report.notes == {f"unread_key_of_a_turn_{key}": 1 for key in ("recipient", "channel", "content_type")}


def test_marks_and_reasoning_beside_the_turns_are_named_or_read():
    _, report = texts(
        CHATML_TEMPLATE, answered("a") | {"weight": 0, "chain_of_thought": "hm", "reasoning_effort": None}
    )
    assert report.notes == {"unread_key_of_a_row_weight": 1, "unread_key_of_a_row_chain_of_thought": 1}
    tokenizer = STYLES["hybrid, with reasoning"].tokenizer()
    pair = {"question": "q", "answer": "ans"}
    for key in ("reasoning", "thinking", "reasoning_content"):
        found, report = texts(tokenizer, pair | {key: "hm"})
        assert found == [["<think>\nhm\n</think>\n\nans<|im_end|>"]] and not report.notes
    found, report = texts(tokenizer, pair | {"rationale": "hm"}, pair | {"reasoning": "hm", "thinking": "oh"})
    assert found == [["ans<|im_end|>"]] and report.notes["unread_key_of_a_row_rationale"] == 1
    assert report.dropped == {"separate_reasoning": 1}


@pytest.mark.parametrize("content", ["a<|im_end|>", "a<|im_end|>\n<|im_start|>user\nb"])
def test_an_answer_that_goes_on_behind_its_end_is_counted(content):
    _, report = texts(CHATML_TEMPLATE, answered("a"), answered(content))
    assert report.notes == {"answers_with_an_end_token_inside": 1}
    assert "rows[1], turn 1: the target stops at '<|im_end|>'" in report.header()
    asked = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "a"}]}
    assert not texts(CHATML_TEMPLATE, asked)[1].notes  # servers read it so, too
    tokenizer = tokenizer_with(CHATML_TEMPLATE)
    ids = tokenizer("a", add_special_tokens=False)["input_ids"]
    assert not texts(tokenizer, recorded(tokenizer, "a", ids))[1].notes


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (answered([{"type": "text", "text": None}]), "non_text_content"),
        (answered([{"type": "text", "content": "a"}]), "non_text_content"),
        (answered([{"type": "output_text", "text": None}]), "non_text_content"),
        (answered([{"type": "text", "text": 5}]), "non_text_content"),
        ({"instruction": "i", "input": {"a": 1}, "output": "o"}, "non_text_content"),
        (answered("a", token_ids=[2**31]), "malformed_message"),
        ({"messages": "[" * 10**5}, "malformed_message"),
        (answered("a") | {"chat_template_kwargs": "[" * 10**5}, "malformed_message"),
        (answered("a") | {"tools": "[" * 10**5}, "tool_role"),
        (answered("a", tool_calls="[" * 10**5), "tool_role"),
        (answered("a", tool_calls=[{"name": "f", "arguments": {"day": datetime.date(2026, 1, 1)}}]), "tool_role"),
        (answered("a", tool_calls=[{"day": datetime.date(2026, 1, 1)}]), "tool_role"),
        (answered("a") | {"tools": [{"name": "f", "default": datetime.date(2026, 1, 1)}]}, "tool_role"),
        ({"messages": [ASKED, {"role": "tool", "content": {"day": datetime.date(2026, 1, 1)}}]}, "tool_role"),
        ({"messages": [ASKED, {"role": "tool", "content": [{"type": "text", "text": None}]}]}, "tool_role"),
    ],
)
def test_values_that_no_text_is_made_of_drop_the_row_by_name(row, reason):
    assert texts(CHATML_TEMPLATE, answered("b"), row)[1].dropped == {reason: 1}


def test_a_turn_of_a_call_says_how_it_ended_and_what_was_written():
    tokenizer = tokenizer_with(TOOLS)
    ids = tokenizer(WRITTEN, add_special_tokens=False)["input_ids"]
    called = {"role": "function_call", "content": json.dumps(CALL["function"])}
    for more, wanted in (
        ({"finish_reason": "length"}, WRITTEN.removesuffix("<|im_end|>")),
        ({"token_ids": ids[:-1], "finish_reason": "length"}, WRITTEN.removesuffix("<|im_end|>")),
        ({"token_ids": ids}, WRITTEN),
    ):
        assert texts(tokenizer, {"messages": [ASKED, called | more]})[0] == [[wanted]]
    _, report = texts(tokenizer, answered("a"), {"messages": [ASKED, called | {"token_ids": ids[3:]}]},
                      {"messages": [ASKED, called | {"reasoning": "hm"}]})  # fmt: skip
    assert report.dropped == {"written_ids_differ": 1, "separate_reasoning": 1}


@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}, {"trainable": "false"}, {"loss": False},
                                  {"loss_mask": 0}, {"masked": True}])  # fmt: skip
def test_turns_marked_as_not_to_be_learned_are_context(mark):
    turns = [ASKED, {"role": "assistant", "content": "no", **mark}, ASKED, {"role": "assistant", "content": "yes"}]
    found, report = texts(CHATML_TEMPLATE, {"messages": turns})
    assert found == [["yes<|im_end|>"]] and report.notes == {"answers_marked_as_not_learned": 1}
    _, report = texts(CHATML_TEMPLATE, answered("a"), {"messages": turns[:2]}, answered("a", weight=0, train=True))
    assert report.dropped == {"nothing_to_learn": 1, "malformed_message": 1}
    found, _ = texts(CHATML_TEMPLATE, answered("a", weight=1.0), answered("b", masked=False))
    assert found == [["a<|im_end|>"], ["b<|im_end|>"]]


@pytest.mark.parametrize("weight", [0.5, 2, -1, float("nan"), float("inf"), "0.5"])
def test_a_weight_that_is_neither_0_nor_1_is_not_taken_for_either(weight):
    for key in ("weight", "loss_mask", "masked"):
        found, report = texts(CHATML_TEMPLATE, answered("a"), answered("b", **{key: weight}))
        assert found == [["a<|im_end|>"]] and report.dropped == {"turn_weight": 1}
        assert f"`{key}` must be 0 or 1 (or true, false)" in report.examples["turn_weight"]


@pytest.mark.parametrize(
    ("row", "cut"),
    [
        (answered("a", finish_reason="length"), True),
        (answered("a", stop_reason="max_tokens"), True),
        (answered("a", metadata={"finish_reason": "length"}), True),
        (answered("a") | {"metadata": {"finish_reason": "max_tokens"}}, True),
        (answered("a") | {"stop_reason": "max_tokens"}, True),
        (answered("a", finish_reason=["length"]), True),
        (answered("a") | {"metadata": '{"finish_reason": "length"}'}, True),
        (answered("a", finish_reason="stop") | {"finish_reason": "length"}, False),
        (answered("a", stop_reason="end_turn"), False),
        (answered("a", stop_reason=2), False),
    ],
)
def test_a_cut_answer_teaches_no_end_wherever_that_is_said(row, cut):
    found, _ = texts(CHATML_TEMPLATE, row)
    assert found == [["a" if cut else "a<|im_end|>"]]


@pytest.mark.parametrize("reason", [["length", "stop"], {"type": "length"}, 3])
def test_a_finish_reason_of_no_known_form_is_counted(reason):
    found, report = texts(CHATML_TEMPLATE, answered("a", finish_reason=reason))
    assert found == [["a<|im_end|>"]] and report.notes["unknown_finish_reason"] == 1


def test_reasoning_that_was_cut_has_no_closing_tag():
    tokenizer = STYLES["hybrid, with reasoning"].tokenizer()
    found, _ = texts(tokenizer, answered("", reasoning="hm", finish_reason="length"))
    assert found == [["<think>\nhm"]]


def test_a_system_field_beside_a_system_turn_is_not_lost():
    turns = [{"role": "system", "content": "two"}, *answered("a")["messages"]]
    for row, wanted in (
        ({"messages": turns, "system": "one"}, ["one", "two"]),
        ({"messages": turns, "system": "two"}, ["two"]),
        (answered("a") | {"system_prompt": "one"}, ["one"]),
        (answered("a") | {"system_prompt": "one", "system": "one"}, ["one"]),
    ):
        messages = prepare_messages(row)
        assert [m.content for m in messages if m.role == "system"] == wanted


def prepare_messages(row):
    from modelopt_eagle.data import conversations_of

    return conversations_of([row]).rows[0].messages


def test_ids_of_two_files_may_both_begin_at_0(tmp_path):
    one = write_lines(tmp_path / "one.jsonl", answered("a") | {"id": 0}, answered("b") | {"id": 1})
    two = write_lines(tmp_path / "two.jsonl", answered("c") | {"id": 0}, answered("b") | {"id": 1})
    found = read_conversations([one, two])
    assert [row.id for row in found.rows] == ["0", "1", "0@2"]
    assert found.report.dropped == {"duplicate_id": 1} and found.report.notes == {"ids_renamed": 1}


def test_conversations_of_one_id_are_the_same_only_if_they_are_rendered_alike(tmp_path):
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    same = {"id": 0, "chat_template_kwargs": {"a": 1, "b": 2}}
    files = [
        write_lines(tmp_path / f"{number}.jsonl", answered("a") | same | more)
        for number, more in enumerate(
            [{}, {"chat_template_kwargs": {"b": 2, "a": 1}}, {"chat_template_kwargs": {"a": 1, "b": 3}},
             {"tools": [tool]}]
        )
    ]  # fmt: skip
    found = read_conversations(files)
    assert [row.id for row in found.rows] == ["0", "0@3", "0@4"] and found.report.dropped == {"duplicate_id": 1}


def test_arguments_of_a_row_and_of_a_run_are_rendered_with():
    tokenizer = STYLES["hybrid, with reasoning"].tokenizer()
    plain, closed = answered("a"), answered("a") | {"chat_template_kwargs": {"enable_thinking": False}}
    rows = prepare_rows(tokenizer, [plain, closed]).rows
    assert rows[0].prompt_length == rows[1].prompt_length and rows[1].template_arguments == {"enable_thinking": False}
    opens = STYLES["always thinks"].template.replace(
        "{{- '<think>\\n' -}}", "{{- '<think>\\n' + ('\\n</think>\\n\\n' if enable_thinking is false else '') -}}"
    )
    tokenizer = tokenizer_with(opens)
    found, report = texts(tokenizer, plain, closed)
    assert found == [["a<|im_end|>"]] and report.dropped == {"reasoning_missing": 1}
    assert "data.template_arguments: {enable_thinking: false} mends it" in report.examples["reasoning_missing"]
    before = identity.template_hash(tokenizer)
    set_chat_settings(tokenizer, {"enable_thinking": False})
    assert texts(tokenizer, plain, closed)[0] == [["a<|im_end|>"]] * 2
    assert identity.template_hash(tokenizer) != before
    with pytest.raises(DataError, match="no name of a template's variable"):
        set_chat_settings(tokenizer, {"messages": []})
    _, report = texts(tokenizer, plain, answered("a") | {"chat_template_kwargs": [1]})
    assert report.dropped == {"malformed_message": 1}


def test_a_template_that_refuses_rows_without_reasoning_names_its_argument():
    refuses = (
        "{% if not allow_no_reasoning %}{{ raise_exception('reasoning is missing') }}{% endif %}" + CHATML_TEMPLATE
    )
    with pytest.raises(DataError, match=r"reasoning is missing; data.template_arguments: {allow_no_reasoning: true}"):
        texts(refuses, answered("a"))


@pytest.mark.parametrize("change", ["|upper", "|replace('a', 'b')", ".split(' ')[0]", "|title"])
def test_a_template_that_changes_the_assistants_words_is_refused(change):
    template = CHATML_TEMPLATE.replace("message['content']", f"message['content']{change}")
    with pytest.raises(DataError, match="which the target did not write"):
        texts(template, answered("a word to change"))
    found, _ = texts(CHATML_TEMPLATE.replace("message['content']", "message['content']|trim"), answered(" a b "))
    assert found == [["a b<|im_end|>"]]


def test_an_end_of_turn_that_is_no_single_token_is_said_with_its_ids():
    tokenizer = tokenizer_with(CHATML_TEMPLATE.replace("<|im_end|>", "<|eot_id|>"))
    _, report = texts(tokenizer, answered("a"))
    ids = tokenizer("<|eot_id|>", add_special_tokens=False)["input_ids"]
    assert report.notes == {"ends_of_turn_that_are_no_single_token": 1}
    assert f"in {len(ids)} tokens ({', '.join(map(str, ids))})" in report.header()
    _, report = texts(CHATML_TEMPLATE.replace("<|im_end|>", "<|endoftext|>"), answered("a"))
    assert report.notes == {"ends_that_the_target_does_not_stop_at": 1}


def test_leading_white_space_belongs_to_the_answer():
    tokenizer = STYLES["hybrid, without reasoning"].tokenizer()
    assert texts(tokenizer, answered("\n a"), answered("a"))[0][1] == ["a<|im_end|>"]
    between = CHATML_TEMPLATE.replace(
        "+ message['content'] +",
        "+ ('<think></think>' if message['role'] == 'assistant' else '') + message['content'] +",
    )
    assert texts(between, answered("  a"))[0] == [["  a<|im_end|>"]]


def test_a_prompt_that_ends_in_two_line_breaks_keeps_its_own_ids():
    template = CHATML_TEMPLATE.replace("assistant\n' }}", "assistant\n\n' }}").replace(
        "message['role'] + '\n' +", "message['role'] + ('\n\n' if message['role'] == 'assistant' else '\n') +"
    )
    tokenizer = make_word_tokenizer(template)
    for content in ("a", "\na", "\n\na"):
        row = prepare_rows(tokenizer, [answered(content)]).rows[0]
        prompt = tokenizer.apply_chat_template([ASKED], add_generation_prompt=True, return_dict=False)
        assert row.input_ids[: row.prompt_length] == prompt
        assert learned(tokenizer, row) == [f"{content}<|im_end|>"]


CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Oslo"}'}}
RESULT = {"role": "tool", "tool_call_id": "1", "content": '{"sky": "grey"}'}
WRITTEN = '\n<tool_call>\n{"name": "weather", "arguments": {"place": "Oslo"}}\n</tool_call><|im_end|>'


@pytest.mark.parametrize("call", [{"tool_calls": [CALL]}, {"function_call": CALL["function"]}])
def test_calls_and_results_of_tools_are_rendered_and_calls_learned(call):
    turns = [ASKED, {"role": "assistant", "content": "look", **call}, RESULT, {"role": "assistant", "content": "grey"}]
    row = {"messages": turns, "tools": [WEATHER]}
    tokenizer = tokenizer_with(TOOLS)
    assert texts(tokenizer, row)[0] == [["look" + WRITTEN, "grey<|im_end|>"]]
    assert texts(tokenizer, row, supervise_tool_calls=False)[0] == [["look", "grey<|im_end|>"]]
    text = tokenizer.decode(prepare_rows(tokenizer, [row]).rows[0].input_ids)
    assert '"description": "of a place"' in text and '"sky": "grey"' in text
    made = {"messages": [ASKED, {"role": "assistant", "content": None, **call}], "tools": json.dumps([WEATHER])}
    assert texts(tokenizer, made)[0] == [[WRITTEN]]
    said = json.dumps(CALL["function"])
    shared = {"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": said},
                                {"from": "observation", "value": "grey"}, {"from": "gpt", "value": "ok"}]}  # fmt: skip
    assert texts(tokenizer, shared)[0] == [[WRITTEN, "ok<|im_end|>"]]


def test_tool_use_that_the_template_leaves_out_is_refused():
    turns = [ASKED, {"role": "assistant", "content": "look", "tool_calls": [CALL]}]
    _, report = texts(CHATML_TEMPLATE, answered("a"), {"messages": turns}, answered("a") | {"tools": [WEATHER]},
                      answered("look", function_call=CALL["function"]))  # fmt: skip
    assert report.dropped == {"tool_role": 3}
    results = TOOLS.replace("+ turn.content -", "+ (turn.content if turn.role != 'tool' else '') -")
    row = {"messages": [*turns, RESULT, {"role": "assistant", "content": "grey"}]}
    found, report = texts(results, row)
    assert found == [["look" + WRITTEN]] and report.notes == {"answers_left_out_tool_role": 1}


def test_the_date_of_a_template_is_pinned():
    template = "{{ 'Today is ' + strftime_now('%d %B %Y') + '.' }}" + CHATML_TEMPLATE
    tokenizer = tokenizer_with(template)
    made = []
    for date in ("2026-01-31", "2025-02-28", "2026-01-31"):
        set_chat_settings(tokenizer, date=date)
        made.append(tokenizer.decode(prepare_rows(tokenizer, [answered("a")]).rows[0].input_ids))
    assert made[0].startswith("Today is 31 January 2026.") and made[0] == made[2] != made[1]
    with pytest.raises(DataError, match="no literal text, so it cannot be pinned"):
        dated_template("{{ strftime_now(form) }}", "2026-01-31")
    with pytest.raises(DataError, match="expected a date as YYYY-MM-DD"):
        set_chat_settings(tokenizer, date="yesterday")


def test_settings_of_the_tokenizer_go_along_to_other_processes(tmp_path):
    tokenizer = STYLES["hybrid, without reasoning"].tokenizer()
    set_chat_settings(tokenizer, {"enable_thinking": False})
    data = write_lines(tmp_path / "d.jsonl", *[answered(f"a{i}") for i in range(200)])
    alone, shared = (prepare_dataset(tokenizer, data, workers=n) for n in (1, 2))
    assert alone == shared and alone.report.notes == {}


def recorded(tokenizer, content, ids, **more):
    return answered(content, token_ids=[*ids, tokenizer.eos_token_id], **more)


def test_ids_that_were_written_are_trained_on_without_a_second_tokenisation():
    tokenizer = make_word_tokenizer(CHATML_TEMPLATE)
    spelled = [i for letter in "hi hi" for i in tokenizer(letter, add_special_tokens=False)["input_ids"]]
    assert spelled != tokenizer("hi hi", add_special_tokens=False)["input_ids"]
    row = prepare_rows(tokenizer, [recorded(tokenizer, "hi hi", spelled)]).rows[0]
    assert [i for i, flag in zip(row.input_ids, row.supervised, strict=True) if flag] == [
        *spelled,
        tokenizer.eos_token_id,
    ]
    _, report = texts(tokenizer, answered("a"), recorded(tokenizer, "other", spelled))
    assert report.dropped == {"written_ids_differ": 1}
    two = [*recorded(tokenizer, "hi hi", spelled)["messages"], *answered("b")["messages"]]
    found = prepare_rows(tokenizer, [{"messages": two}])
    assert [learned(tokenizer, row) for row in found.rows] == [["hi hi<|im_end|>"], ["b<|im_end|>"]]


def test_written_reasoning_can_be_left_out():
    tokenizer = STYLES["hybrid, with reasoning"].tokenizer()
    text = "<think>\nhm\n</think>\n\nans"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    for row in (recorded(tokenizer, text, ids), recorded(tokenizer, "ans", ids, reasoning="hm")):
        assert texts(tokenizer, row)[0] == [[text + "<|im_end|>"]]
        assert texts(tokenizer, row, supervise_reasoning=False)[0] == [["ans<|im_end|>"]]


def test_the_shipped_conversations_hold_nothing_that_is_not_read():
    report = read_conversations("quickstart").report
    assert report.read == 640 and not report.dropped and not [name for name in report.notes if "unread" in name]
