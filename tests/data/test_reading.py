"""Files in: both schemas, every bad input with its place, every row accounted for."""

import json

import datasets
import pytest
from data_toy import write_lines

from modelopt_eagle.data import conversations_of, load_prompts, prepare_rows, read_conversations
from modelopt_eagle.data.files import ASSETS
from modelopt_eagle.errors import DataError
from modelopt_eagle.target.tiny import make_byte_tokenizer

GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}


def shared(*pairs):
    return {"conversations": [{"from": role, "value": text} for role, text in pairs]}


def test_rows_of_both_schemas_in_one_file(tmp_path):
    gpt = shared(("human", "one"), ("gpt", "two"))
    found = read_conversations(write_lines(tmp_path / "mixed.jsonl", GOOD, gpt, "", GOOD))
    assert [[(m.role, m.content) for m in row.messages] for row in found.rows] == [
        [("user", "hi"), ("assistant", "hello")],
        [("user", "one"), ("assistant", "two")],
        [("user", "hi"), ("assistant", "hello")],
    ]
    assert (found.report.read, sum(found.report.dropped.values())) == (3, 0)
    assert len({row.id for row in found.rows}) == 3


def test_system_field_five_turns_and_a_first_turn_by_the_assistant(tmp_path):
    turns = (("gpt", "welcome"), ("human", "a"), ("gpt", "b"), ("human", "c"), ("gpt", "d"), ("human", "unanswered"))
    row = shared(*turns) | {"system": "be kind", "category": "chat", "id": 7}
    found = read_conversations(write_lines(tmp_path / "data.jsonl", row))
    conversation = found.rows[0]
    assert [m.role for m in conversation.messages] == ["system", "assistant", "user", "assistant", "user", "assistant"]
    assert conversation.prompted == [3, 5]
    assert (conversation.id, conversation.category) == ("7", "chat")
    assert found.report.notes == {"leading_assistant_turns_not_learned": 1, "trailing_turns_cut": 1}


def test_json_arrays_byte_order_mark_and_several_files(tmp_path):
    array = tmp_path / "array.json"
    array.write_bytes(b"\xef\xbb\xbf \n" + json.dumps([GOOD, GOOD]).encode())
    lines = tmp_path / "lines.json"
    lines.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\r\n" + json.dumps(GOOD).encode())
    assert read_conversations([array, lines]).report.read == 4
    assert read_conversations([array, lines], max_rows=3).report.read == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b'{"messages": []}\n{"messages": [\n', r"data\.jsonl:2: broken JSON"),
        (b"[1, 2]", r"data\.jsonl\[0\]: expected a JSON object"),
        (b'[{"a": 1},\n{"b" 2}]', r"data\.jsonl:2: broken JSON array"),
        (b"[]", "empty array"),
        (b'"text"\n', r"data\.jsonl:1: expected a JSON object on each line, found str"),
        (b'{"messages": "\xff"}\n', r"data\.jsonl:1: not UTF-8"),
    ],
)
def test_broken_files_are_named_with_their_line(tmp_path, content, message):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_conversations(path)


def test_a_missing_file_a_folder_and_an_empty_list(tmp_path):
    for name in (tmp_path / "no.jsonl", "nowhere/no.jsonl"):
        with pytest.raises(DataError, match="no such file"):
            read_conversations(name)
    with pytest.raises(DataError, match="is a folder"):
        read_conversations(tmp_path)
    with pytest.raises(DataError, match="no data file"):
        read_conversations([])


def test_a_hub_name_that_cannot_be_loaded_says_what_to_do():
    with pytest.raises(DataError, match="owner/name:split|modelopt_eagle\\[data\\]"):
        read_conversations("nobody-here/no-such-set:train")


def test_a_hub_data_set_is_read_by_split(monkeypatch):
    import datasets

    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: asked.append((name, split)) or [GOOD, GOOD])
    assert read_conversations("owner/chats:train_sft").report.read == 2
    assert asked == [("owner/chats", "train_sft")]


def test_rows_in_memory_are_read_like_a_file(tmp_path):
    rows = [GOOD, shared(("human", "one"), ("gpt", "two")), {"messages": []}]
    found = conversations_of(iter(rows))
    read = read_conversations(write_lines(tmp_path / "data.jsonl", *rows))
    assert [(row.id, row.messages) for row in found.rows] == [(row.id, row.messages) for row in read.rows]
    assert (found.report.read, found.report.dropped, found.rows[1].place) == (3, {"no_messages": 1}, "rows[1]")
    made = prepare_rows(make_byte_tokenizer(), rows, max_rows=2, max_length=64)
    assert [row.id for row in made.rows] == ["row-000000", "row-000001"]
    with pytest.raises(DataError, match=r"rows\[1\]: expected a dictionary as a row, found str"):
        conversations_of([GOOD, "text"])


def test_rows_in_memory_may_be_lists_of_messages_and_data_sets():
    messages = GOOD["messages"]
    listed = conversations_of([messages, tuple(messages)], name="data")
    held = conversations_of(datasets.Dataset.from_list([{"messages": messages, "category": "math"}] * 2))
    streamed = conversations_of(
        datasets.Dataset.from_list([{"messages": messages}] * 3).to_iterable_dataset(), max_rows=2
    )
    for found in (listed, held, streamed):
        assert [row.messages for row in found.rows] == [listed.rows[0].messages] * 2
    assert listed.rows[1].place == "data[1]" and held.rows[0].category == "math"
    for rows, says in (
        (messages, r"data\[0\] is a single message"),
        ({"train": [], "test": []}, r"data: .* mapping with the keys train, test; give one split .* data\['train'\]"),
        ("data.jsonl", "data: expected a list of rows, found str"),
        (None, "data: expected a list of rows, found NoneType"),
        ([[]], r"data\[0\]: expected a dictionary as a row, found list"),
    ):
        with pytest.raises(DataError, match=says):
            conversations_of(rows, name="data")
    with pytest.raises(DataError, match="were given in Python"):
        read_conversations("in-memory")


def test_an_unknown_role_fails_is_dropped_or_is_mapped(tmp_path):
    strange = shared(("human", "q"), ("my_model_v2", "a"))
    path = write_lines(tmp_path / "data.jsonl", GOOD, strange, strange)
    with pytest.raises(DataError, match=r"data\.jsonl:2, turn 1: unknown role 'my_model_v2'.*my_model_v2=assistant"):
        read_conversations(path)
    dropped = read_conversations(path, unknown_role="drop").report
    assert (dropped.read, dropped.dropped) == (3, {"unknown_role": 2})
    mapped = read_conversations(path, role_aliases={"my_model_v2": "assistant"})
    assert [row.messages[1].content for row in mapped.rows] == ["hello", "a", "a"]
    with pytest.raises(DataError, match="must map to system, user or assistant"):
        read_conversations(path, role_aliases={"my_model_v2": "robot"})
    with pytest.raises(DataError, match="must be fail or drop"):
        read_conversations(path, unknown_role="ignore")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "no turns"}, "no_messages"),
        ({"messages": []}, "no_messages"),
        ({"messages": {"role": "user"}}, "malformed_message"),
        ({"messages": [{"content": "no role"}]}, "malformed_message"),
        ({"messages": ["hi"]}, "malformed_message"),
        ({"messages": [{"role": "user", "content": 3}]}, "non_text_content"),
        ({"messages": [GOOD["messages"][0], {"role": "assistant", "content": "cut \ud83d"}]}, "non_text_content"),
        (GOOD | {"system": "\udc4d"}, "non_text_content"),
        (GOOD | {"system": ["rules"]}, "malformed_message"),
        (GOOD | {"system_prompt": {"text": "rules"}}, "malformed_message"),
        (GOOD | {"id": "\ud83d"}, "non_text_content"),
        (GOOD | {"category": "\ud83d"}, "non_text_content"),
        ({"messages": [*GOOD["messages"], {"role": "tool", "content": "42"}]}, "tool_role"),
        (
            {"messages": [GOOD["messages"][0], {"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}]},
            "tool_role",
        ),
        (shared(("human", "q"), ("function_call", "f()")), "tool_role"),
        ({"messages": [{"role": "user", "content": "alone"}]}, "no_assistant_turn"),
        ({"messages": [{"role": "assistant", "content": "unasked"}]}, "no_assistant_turn"),
        ({"messages": [GOOD["messages"][0], {"role": "assistant", "content": " \n"}]}, "empty_answer"),
        (GOOD | {"id": "row-000000"}, "duplicate_id"),
        (GOOD | {"tools": [{"title": "f"}]}, "tool_role"),
        (
            {"messages": [GOOD["messages"][0], {"role": "assistant", "content": "4", "my_reasoning": "2+2"}]},
            "separate_reasoning",
        ),
    ],
)
def test_a_row_that_cannot_be_used_is_counted_under_its_reason(tmp_path, row, reason):
    found = read_conversations(write_lines(tmp_path / "data.jsonl", GOOD, row))
    assert found.report.dropped == {reason: 1}
    assert "data.jsonl:2" in found.report.examples[reason]
    assert len(found.rows) == 1 and found.report.read == 2


def test_empty_tools_and_empty_reasoning_are_nothing(tmp_path):
    turns = [GOOD["messages"][0], {"role": "assistant", "content": "4", "reasoning_content": None, "tool_calls": []}]
    rows = [GOOD | {"tools": []}, {"messages": turns, "tools": "[]", "functions": None}]
    assert len(read_conversations(write_lines(tmp_path / "data.jsonl", *rows)).rows) == 2


def test_no_usable_row_stops_with_the_reasons(tmp_path):
    with pytest.raises(DataError, match="no usable conversation among 1 rows.*tool use"):
        read_conversations(write_lines(tmp_path / "d.jsonl", {"messages": [{"role": "tool", "content": "x"}]}))


def test_text_parts_are_joined_and_cut_answers_are_marked(tmp_path):
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    row = {"messages": [GOOD["messages"][0], {"role": "assistant", "content": parts}], "finish_reason": "length"}
    message = read_conversations(write_lines(tmp_path / "d.jsonl", row)).rows[0].messages[1]
    assert (message.content, message.finish_reason) == ("hello", "length")


def test_two_thousand_rows_come_out(tmp_path):
    found = read_conversations(write_lines(tmp_path / "d.jsonl", *[GOOD] * 2000))
    assert len(found.rows) == found.report.read == 2000


def test_prompts_in_three_formats(tmp_path):
    bench = {"question_id": 81, "category": "writing", "turns": ["one", "two"], "reference": ["x", "y"]}
    path = write_lines(
        tmp_path / "q.jsonl", bench, GOOD | {"system": "s"}, {"id": "h", "prompt": ["p"], "category": "c"}
    )
    prompts = load_prompts(path)
    assert [(p.id, p.category, p.turns, p.system) for p in prompts] == [
        ("81", "writing", ("one", "two"), None),
        ("row-000001", "all", ("hi",), "s"),
        ("h", "c", ("p",), None),
    ]


def test_beside_a_prompt_stands_what_stands_beside_messages(tmp_path):
    tool = {"name": "f", "parameters": {}}
    beside = {"system": "s", "system_prompt": "t", "tools": [tool], "chat_template_kwargs": {"x": 1}}
    asked = [{"role": "user", "content": text} for text in ("p", "and?")]
    rows = [{"prompt": "p"}, {"turns": ["p"]}, {"messages": asked[:1]}, {"prompt": "p", "messages": asked}]
    one, two, three, whole = load_prompts(write_lines(tmp_path / "q.jsonl", *(row | beside for row in rows)))
    assert one.digest == two.digest == three.digest
    assert (one.system, len(one.tools), one.template_arguments) == ("s\n\nt", 1, {"x": 1})
    assert whole.turns == ("p", "and?"), "the prompt of public sets is the first of the messages alone"


def test_rows_of_gsm8k_and_humaneval_are_prompts(tmp_path):
    rows = [
        {"question": "How many?", "answer": "#### 3"},
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "    pass"},
        {"id": "own", "task_id": "T/1", "messages": [{"role": "user", "content": "asked"}], "question": "not asked"},
    ]
    prompts = load_prompts(write_lines(tmp_path / "q.jsonl", *rows))
    assert [(p.id, p.turns, p.numbered) for p in prompts] == [
        ("row-000000", ("How many?",), True), ("HumanEval/0", ("def f():\n",), False), ("own", ("asked",), False),
    ]  # fmt: skip


def test_a_limit_is_spread_over_the_prompts():
    prompts = load_prompts("quickstart", limit=8)
    assert len({prompt.category for prompt in prompts}) == 8
    assert len(load_prompts(ASSETS / "prompts.jsonl")) == 80


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"id": 1, "turns": []}], "`turns` must be"),
        ([{"id": 1, "turns": ["a", " "]}], "`turns` must be"),
        ([{"id": 1, "turns": ["a \ud83d"]}], r"q.jsonl:1: \\ud83d is one half"),
        ([{"id": 1, "turns": ["a"]}] * 2, "stands twice"),
        ([{"messages": [{"role": "system", "content": "s"}]}], "no user turn"),
        ([{"question": "?"}], "found the keys question"),
        ([{"id": 1, "turns": ["a"], "system": ["s"]}], "`system` must be text, found list"),
    ],
)
def test_bad_prompts(tmp_path, rows, message):
    with pytest.raises(DataError, match=message):
        load_prompts(write_lines(tmp_path / "q.jsonl", *rows))


def test_a_limit_below_one_is_refused():
    with pytest.raises(DataError, match="at least 1, found 0"):
        load_prompts("quickstart", limit=0)
