"""Files, folders and layouts of public data sets: read whole, or refused with their names; every row accounted for."""

import csv
import gzip
import io
import json

import pytest
from data_toy import learned, write_lines
from hypothesis import given, settings
from hypothesis import strategies as st

from modelopt_eagle.data import conversations_of, prepare_dataset, prepare_rows, read_conversations
from modelopt_eagle.data.files import check_sources
from modelopt_eagle.errors import DataError
from modelopt_eagle.target.tiny import make_byte_tokenizer

ROWS = [
    {"id": str(i), "messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i}"}]}
    for i in range(5)
]


def answers(found):
    return [row.messages[-1].content for row in found.rows]


def packed(path, rows=ROWS):
    """The rows in a file of the kind that its name says."""
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text))
    elif path.suffix == ".zst":
        import zstandard

        path.write_bytes(zstandard.compress(text))
    elif path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_bytes(text)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "unnamed"])
def test_a_file_is_read_by_what_it_is(tmp_path, name):
    found = read_conversations(packed(tmp_path / name))
    assert answers(found) == [f"a{i}" for i in range(5)] and found.report.read == 5
    cut = tmp_path / f"cut-{name}"
    whole = (tmp_path / name).read_bytes()
    cut.write_bytes(whole[: len(whole) * 2 // 3])
    with pytest.raises(DataError, match=rf"cut-{name}"):
        read_conversations(cut)


def test_keys_that_only_other_rows_of_a_table_have_are_nothing(tmp_path):
    marked = [ROWS[1]["messages"][0], {"role": "assistant", "content": "b", "weight": 0.0}]
    rows = [ROWS[0], {"id": "x", "messages": marked}, ROWS[2]]
    found = read_conversations(packed(tmp_path / "a.parquet", rows))
    assert answers(found) == ["a0", "a2"] and found.report.dropped == {"nothing_to_learn": 1}


def test_patterns_stand_for_the_files_that_they_match(tmp_path):
    for name in ("b.jsonl", "a.jsonl"):
        write_lines(tmp_path / name, {**ROWS[0], "id": name})
    assert [row.id for row in read_conversations(tmp_path / "*.jsonl").rows] == ["a.jsonl", "b.jsonl"]
    with pytest.raises(DataError, match="no file matches"):
        read_conversations(tmp_path / "*.parquet")
    odd = tmp_path / "odd[1].jsonl"
    write_lines(odd, ROWS[0])
    assert len(read_conversations(odd).rows) == 1


def test_a_misspelt_file_that_could_be_a_hub_name_is_found_at_once(tmp_path, monkeypatch):
    """Without reading, so that no target is loaded for it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats" / "train.jsonl").write_text("")
    with pytest.raises(DataError, match="is chats/train.jsonl meant"):
        check_sources("chats/train.jsnl")
    check_sources(["chats/train.jsonl", "chats/another-set", "owner/set:config:split"])


def test_a_folder_of_several_kinds_of_files_is_refused(tmp_path):
    """``datasets`` reads those of one kind, and says nothing of the others."""
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "README.txt").write_text("about")
    (tmp_path / "dataset_infos.json").write_text("{}")
    (tmp_path / "b.csv").write_text("question,answer\nhow?,so\n")
    with pytest.raises(DataError, match=r"several kinds \(.csv: b.csv; .json: a.jsonl\)"):
        read_conversations(tmp_path)
    both = read_conversations([tmp_path / "a.jsonl", tmp_path / "b.csv"])
    assert both.report.read == len(ROWS) + 1


def test_folders_of_data_sets(tmp_path):
    import datasets

    saved = datasets.Dataset.from_list(ROWS)
    saved.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train_sft": saved, "test": saved.select([0])}).save_to_disk(tmp_path / "two")
    assert len(read_conversations(tmp_path / "one").rows) == 5
    assert len(read_conversations(f"{tmp_path / 'two'}:test").rows) == 1
    with pytest.raises(DataError, match="splits train_sft, test: name one as"):
        read_conversations(tmp_path / "two")
    with pytest.raises(DataError, match="splits train_sft, test"):
        read_conversations(f"{tmp_path / 'two'}:dev")
    (tmp_path / "clone").mkdir()
    packed(tmp_path / "clone" / "train.jsonl")
    assert len(read_conversations(tmp_path / "clone").rows) == 5


def test_a_hub_data_set_with_configuration_and_split(monkeypatch):
    import datasets

    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, split: asked.append((*names, split)) or ROWS)
    assert read_conversations("owner/chats:en:train_sft").report.read == 5
    assert asked == [("owner/chats", "en", "train_sft")]


def test_a_table_with_named_columns(tmp_path):
    table = tmp_path / "t.csv"
    with open(table, "w", newline="", encoding="utf-8") as handle:
        writer = csv.writer(handle)
        writer.writerows([["question", "best"], ["007?", 'a "quoted"\nanswer, long'], ["q", "b"]])
    found = read_conversations(table, columns={"prompt": "question", "completion": "best"})
    assert answers(found) == ['a "quoted"\nanswer, long', "b"] and found.rows[0].messages[0].content == "007?"
    with pytest.raises(DataError, match=r"no column 'answer' \(data.columns\), found best, question"):
        read_conversations(table, columns={"prompt": "question", "completion": "answer"})
    with pytest.raises(DataError, match="'promt' is none of"):
        read_conversations(table, columns={"promt": "question"})
    table.write_text("prompt,completion\na,b,c\n")
    with pytest.raises(DataError, match=r"t.csv:2: another number of values"):
        read_conversations(table)


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        ({"prompt": "q", "completion": "a"}, ["q", "a"]),
        ({"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}],
          "completion": [{"role": "assistant", "content": "a"}]}, ["s", "q", "a"]),
        ({"instruction": "do", "input": "", "output": "a"}, ["do", "a"]),
        ({"instruction": "do", "input": "this", "output": "a", "system": "s"}, ["s", "do\n\nthis", "a"]),
        ({"question": "q", "answer": "a"}, ["q", "a"]),
        ({"query": "q", "response": "a"}, ["q", "a"]),
        ({"messages": json.dumps(ROWS[0]["messages"]), "prompt": "q0"}, ["q0", "a0"]),
    ],
)  # fmt: skip
def test_pairs_of_columns_are_conversations(row, turns):
    assert [m.content for m in conversations_of([row]).rows[0].messages] == turns


def test_formatted_text_is_learned_behind_its_mark():
    tokenizer = make_byte_tokenizer()
    head = "<|im_start|>assistant\n"
    row = {"text": f"<|im_start|>user\nq<|im_end|>\n{head}a<|im_end|>\nU: r\n{head}b<|im_end|>\n"}
    found = prepare_rows(tokenizer, [row], text_boundary=["<|im_start|>assistant\n", "<|im_end|>"])
    assert learned(tokenizer, found.rows[0]) == ["a<|im_end|>", "b<|im_end|>"]
    assert tokenizer.decode(found.rows[0].input_ids) == row["text"]
    once = prepare_rows(tokenizer, [{"text": "### Q: x\n### A: y</s>"}], text_boundary=["### A: "])
    assert learned(tokenizer, once.rows[0]) == ["y</s>"]
    report = prepare_rows(tokenizer, [{"text": "### A: y"}, row, {"text": "A: A: "}], text_boundary=["A: "]).report
    assert report.dropped == {"text_boundary": 2}
    with pytest.raises(DataError, match="say with data.text_boundary"):
        prepare_rows(tokenizer, [row])


def test_rows_that_another_tool_tokenised():
    tokenizer = make_byte_tokenizer()
    rows = [
        {"id": "a", "input_ids": [70, 71, 72], "loss_mask": [0, 1, 1]},
        {"id": "b", "input_ids": [70, 71, 72], "labels": [-100, 71, -100]},
        {"id": "c", "input_ids": [70, 71, 72], "labels": [71, 72, -100]},
        {"id": "d", "input_ids": [70, 71]},
        {"id": "e", "input_ids": [70, 71], "loss_mask": [1]},
        {"id": "f", "input_ids": [70, 9999], "loss_mask": [0, 1]},
        {"id": "g", "input_ids": [70, 71], "loss_mask": [0, 0]},
    ]
    found = prepare_rows(tokenizer, rows)
    assert [(row.id, row.supervised) for row in found.rows] == [("a", [False, True, True]), ("b", [False, True, False])]
    assert found.report.dropped == {"malformed_message": 4, "no_supervised_token": 1}
    assert found.report.read == 7


KEYS = (
    "messages conversations role from content value tool_calls function name arguments reasoning weight finish_reason "
    "metadata system tools id text prompt completion input_ids loss_mask type chat_template_kwargs token_ids"
).split()
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(KEYS),
        inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
_turn = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool", "function_call"]) | _json},
    optional={"content": st.text(max_size=6) | _json, "tool_calls": _json, "function_call": _json, "reasoning": _json,
              "weight": _json, "token_ids": _json, "finish_reason": _json, "metadata": _json},
)  # fmt: skip
_row = st.dictionaries(st.sampled_from(["a", "id", "system", "tools", "text", "input_ids"]), _json, max_size=3).flatmap(
    lambda row: st.lists(_turn, max_size=4).map(lambda turns: {**row, "messages": turns}) | _json
)


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(_row, min_size=1, max_size=4))
def test_whatever_a_row_holds_is_used_or_dropped_by_name(rows):
    tokenizer = make_byte_tokenizer()
    try:
        report = prepare_rows(tokenizer, rows, unknown_role="drop", text_boundary=["A"]).report
    except DataError:
        return
    assert report.read == len(rows) and report.rows == report.read + report.fanned_out - sum(report.dropped.values())


@settings(max_examples=80, deadline=None)
@given(kind=st.sampled_from([".jsonl", ".gz", ".zst", ".parquet", ".csv"]), data=st.data())
def test_no_damage_to_a_file_is_more_than_an_error_with_its_name(kind, data, tmp_path_factory):
    path = tmp_path_factory.mktemp("damaged") / f"rows{kind}"
    content = bytearray(packed(path).read_bytes() if kind != ".csv" else b'prompt,completion\nq,"a"\n')
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
        if not content:
            break
    path.write_bytes(bytes(content))
    try:
        report = prepare_dataset(make_byte_tokenizer(), path, unknown_role="drop").report
    except DataError as error:
        assert "rows" in str(error) or "no usable" in str(error)
        return
    assert report.rows == report.read + report.fanned_out - sum(report.dropped.values())


def test_only_rows_asked_for_are_read(tmp_path):
    text = io.StringIO("".join(json.dumps(row) + "\n" for row in ROWS) + "{broken\n").getvalue()
    (tmp_path / "d.jsonl").write_text(text)
    assert read_conversations(tmp_path / "d.jsonl", max_rows=5).report.read == 5


def test_a_packed_file_may_have_several_frames_and_must_not_end_within_one(tmp_path):
    import zstandard

    lines = ["".join(json.dumps(row) + "\n" for row in part).encode() for part in (ROWS[:2], ROWS[2:])]
    for name, pack in (("f.gz", gzip.compress), ("f.zst", zstandard.compress)):
        (tmp_path / name).write_bytes(b"".join(map(pack, lines)))
        assert answers(read_conversations(tmp_path / name)) == [f"a{i}" for i in range(5)]
    begun = zstandard.ZstdCompressor().compressobj()
    part = begun.compress(lines[0]) + begun.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)  # whole lines, the frame is open
    for name, content in (("one.zst", part), ("two.zst", zstandard.compress(lines[1]) + part)):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=rf"{name}: damaged or cut off \(EOFError"):
            read_conversations(tmp_path / name)
