"""Answers by the target: equal to plain decoding, whatever the batch, and resumable at any byte."""

import json
import re

import pytest
import torch
from data_toy import write_lines

from modelopt_eagle.cli.main import run_command
from modelopt_eagle.data import load_prompts
from modelopt_eagle.data.prompts import Prompt
from modelopt_eagle.decoding import PlainGenerator
from modelopt_eagle.errors import DataError
from modelopt_eagle.validation import synthesis
from modelopt_eagle.validation.synthesis import decode_batch, prepare_output

PROMPTS = [[4, 50, 60], [70] * 9, [9, 8, 100, 101, 102, 103]]


@torch.no_grad()
def plain_decoding(model, prompt, stops, limit):
    """One row, no cache, no batch."""
    ids = list(prompt)
    for _ in range(limit):
        token = int(model(torch.tensor([ids])).logits[0, -1].argmax())
        if token in stops:
            return ids[len(prompt) :], "stop"
        ids.append(token)
    return ids[len(prompt) :], "length"


def test_batched_answers_equal_plain_decoding(tiny_target):
    free = [plain_decoding(tiny_target.model, prompt, set(), 12)[0] for prompt in PROMPTS]
    stops = {free[0][5], free[2][2]}  # rows end at different steps, one may not end
    expected = [plain_decoding(tiny_target.model, prompt, stops, 12) for prompt in PROMPTS]
    assert {reason for _, reason in expected} >= {"stop"} and len({len(ids) for ids, _ in expected}) > 1
    assert decode_batch(PlainGenerator(tiny_target), PROMPTS, stops, 12) == expected


def test_sampling_depends_on_the_seed_and_not_on_the_batch(tiny_target):
    model = PlainGenerator(tiny_target)
    together = decode_batch(model, PROMPTS, set(), 8, temperature=1.5, seeds=[1, 2, 3])
    alone = [decode_batch(model, [p], set(), 8, temperature=1.5, seeds=[s])[0] for s, p in enumerate(PROMPTS, 1)]
    assert together == alone
    assert together != decode_batch(model, PROMPTS, set(), 8, temperature=1.5, seeds=[4, 5, 6])


def test_what_could_never_be_answered_is_refused(monkeypatch, tiny_target):
    generator, prompt = PlainGenerator(tiny_target), Prompt("q", "", ("why?",))
    settings = synthesis.SynthesisSettings("toy", max_new_tokens=3000)
    (dialogue,) = synthesis.answer_prompts(generator, [prompt], settings)
    assert re.match(r"turn 1: \d+ tokens and 3000 new ones do not fit the 2048", dialogue.trouble)
    monkeypatch.setattr(type(tiny_target), "end_token_ids", ())
    with pytest.raises(DataError, match="name an end token"):
        synthesis.answer_prompts(generator, [prompt], synthesis.SynthesisSettings("toy"))


@pytest.fixture
def questions(tmp_path):
    rows = [{"question_id": i, "category": "c", "turns": ["ask " * (i + 1), "and?"][: 1 + i % 2]} for i in range(5)]
    return write_lines(tmp_path / "questions.jsonl", *rows)


def synthesize(target, questions, output, *more):
    arguments = ["--model", str(target), "--input", str(questions), "--output", str(output), "--max_new_tokens", "6"]
    return run_command("synthesize_answers", [*arguments, "--batch_size", "2", *more])


def test_rows_hold_every_turn_answered_in_order(tiny_target_dir, tiny_target, questions, tmp_path):
    assert synthesize(tiny_target_dir, questions, tmp_path / "out.jsonl") == 0
    rows = {row["id"]: row for row in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    assert sorted(rows) == ["0", "1", "2", "3", "4"]
    for prompt in load_prompts(questions):
        row = rows[prompt.id]
        assert [m["content"] for m in row["messages"] if m["role"] == "user"] == list(prompt.turns)
        assert [m["role"] for m in row["messages"]] == ["user", "assistant"] * len(prompt.turns)
        assert row["finish_reason"] == row["messages"][-1].get("finish_reason", "stop")
        tokenizer = tiny_target.tokenizer
        for end in range(1, len(row["messages"]), 2):
            before = [{"role": m["role"], "content": m["content"]} for m in row["messages"][:end]]
            ids = tokenizer.apply_chat_template(before, add_generation_prompt=True, return_dict=False)
            answer, reason = plain_decoding(tiny_target.model, ids, {tokenizer.eos_token_id}, 6)
            text = tokenizer.decode(answer, skip_special_tokens=True)
            assert row["messages"][end]["content"] == (text.rstrip("\ufffd") if reason == "length" else text)


def test_an_interrupted_run_goes_on(tiny_target_dir, questions, tmp_path, monkeypatch, capsys):
    whole = tmp_path / "whole.jsonl"
    synthesize(tiny_target_dir, questions, whole)
    output, calls, answer = tmp_path / "out.jsonl", [], synthesis.answer_prompts

    def second_call_fails(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return answer(*arguments)

    monkeypatch.setattr(synthesis, "answer_prompts", second_call_fails)
    assert synthesize(tiny_target_dir, questions, output) == 130
    assert "goes on from" in capsys.readouterr().err
    assert len(output.read_text().splitlines()) == 2
    with open(output, "a") as handle:
        handle.write('{"id": "4", "messa')  # the process died while writing
    assert synthesize(tiny_target_dir, questions, output) == 0
    assert "2 answered before, 3 to do" in capsys.readouterr().out
    assert output.read_text() == whole.read_text()
    assert synthesize(tiny_target_dir, questions, output) == 0
    assert "5 prompts: 0 answered, 0 failed, 5 answered before" in capsys.readouterr().out


def test_settings_cannot_be_mixed(tiny_target_dir, questions, tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    synthesize(tiny_target_dir, questions, output)
    assert synthesize(tiny_target_dir, questions, output, "--temperature", "0.5") == 2
    assert "temperature=0.0, this run has temperature=0.5" in capsys.readouterr().err
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert synthesize(tiny_target_dir, questions, output, "--chat_template", str(template)) == 2
    assert "chat_template=None, this run has chat_template=" in capsys.readouterr().err
    assert synthesize(tiny_target_dir, questions, output, "--chat_template", "nowhere.jinja") == 2
    assert "found no file 'nowhere.jinja'" in capsys.readouterr().err
    (tmp_path / "out.jsonl.settings.json").write_text("{")
    assert synthesize(tiny_target_dir, questions, output) == 2
    assert "is not JSON" in capsys.readouterr().err
    (tmp_path / "out.jsonl.settings.json").unlink()
    assert synthesize(tiny_target_dir, questions, output) == 2
    assert "another command made it" in capsys.readouterr().err


def test_a_broken_row_in_the_middle_is_named(tmp_path):
    settings = synthesis.SynthesisSettings("toy")
    output = tmp_path / "out.jsonl"
    prepare_output(output, settings)
    write_lines(output, {"id": "a"}, "{broken", {"id": "b"})
    with pytest.raises(ValueError, match=r"out\.jsonl:2: not a row of this command"):
        prepare_output(output, settings)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--max_new_tokens", "0"], "--max_new_tokens must be at least 1"),
        (["--batch_size", "0"], "--batch_size must be at least 1"),
        (["--temperature", "-1"], "--temperature must be 0"),
        (["--num_samples", "0"], "at least 1, found 0"),
    ],
)
def test_bad_numbers(tiny_target_dir, questions, tmp_path, capsys, more, message):
    assert synthesize(tiny_target_dir, questions, tmp_path / "o.jsonl", *more) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--concurrency", "4"], "--concurrency says how servers are asked"),
        (["--retries", "1", "--timeout", "9"], "--retries, --timeout says how servers are asked"),
        (["--server", "http://localhost:1"], "--batch_size is for the model in this process"),
    ],
)
def test_options_of_the_other_way_are_refused(tiny_target_dir, questions, tmp_path, capsys, more, message):
    assert synthesize(tiny_target_dir, questions, tmp_path / "o.jsonl", *more) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "o.jsonl").exists()


def test_a_prompt_past_the_window_fails_alone_and_is_tried_again(tiny_target_dir, tmp_path, capsys):
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    long = {"id": "long", "turns": ["well?", "very " * 700]}
    write_lines(prompts, {"id": "a", "prompt": "one?"}, long, {"id": "b", "prompt": "two?"})
    for before in (0, 2):
        assert synthesize(tiny_target_dir, prompts, output) == 1
        said = f"3 prompts: {2 - before} answered, 1 failed, {before} answered before"
        assert said in capsys.readouterr().out
        (failed,) = map(json.loads, (tmp_path / "out.jsonl.errors.jsonl").read_text().splitlines())
        assert failed["id"] == "long" and failed["error"].startswith("turn 2: 3")
        assert {json.loads(line)["id"] for line in output.read_text().splitlines()} == {"a", "b"}
    long["turns"][1] = "short"
    write_lines(prompts, {"id": "a", "prompt": "one?"}, long, {"id": "b", "prompt": "two?"})
    assert synthesize(tiny_target_dir, prompts, output) == 0
    assert not (tmp_path / "out.jsonl.errors.jsonl").exists()


def test_two_processes_cannot_write_one_output(tiny_target_dir, questions, tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    settings = synthesis.SynthesisSettings("toy")
    with synthesis.AnswerFile(output, settings, []):
        assert synthesize(tiny_target_dir, questions, output) == 2
        assert "another process writes into" in capsys.readouterr().err
    with synthesis.AnswerFile(output, settings, []):
        pass


@pytest.mark.parametrize("place", ["/proc/x.jsonl", "file/x.jsonl"])
def test_an_output_that_cannot_be_written_is_told(tiny_target_dir, questions, tmp_path, capsys, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert synthesize(tiny_target_dir, questions, place) == 2
    assert f"error: cannot write {place}: " in capsys.readouterr().err


def test_answers_are_resumed_by_what_is_asked_and_not_by_where_it_stands(tiny_target_dir, tmp_path):
    asked = [{"messages": [{"role": "user", "content": text}]} for text in ("one?", "two?", "three?")]
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    synthesize(tiny_target_dir, write_lines(prompts, *asked[1:]), output)
    synthesize(tiny_target_dir, write_lines(prompts, *asked, asked[0]), output)  # one put in front, and asked twice
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert sorted(row["messages"][0]["content"] for row in rows) == ["one?", "one?", "three?", "two?"]
    assert len({row["id"] for row in rows}) == 4
    synthesize(tiny_target_dir, write_lines(prompts, {"id": 0, "prompt": "new?"}), output)
    named = write_lines(prompts, {"id": 0, "prompt": "newer?"}, {"id": 0.5, "prompt": "new?"})
    synthesize(tiny_target_dir, named, output)
    names = [json.loads(line)["id"] for line in output.read_text().splitlines()][4:]
    assert names[0] == "0" and names[1].startswith("0-") and len(names) == 2


def test_written_ids_are_kept_and_trained_on(tiny_target_dir, tiny_target, questions, tmp_path):
    from modelopt_eagle.data import prepare_dataset

    synthesize(tiny_target_dir, questions, tmp_path / "out.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    written = {tuple(m["token_ids"]) for row in rows for m in row["messages"] if m["role"] == "assistant"}
    data = prepare_dataset(tiny_target.tokenizer, tmp_path / "out.jsonl", end_token_ids=tiny_target.end_token_ids)
    learned = set()
    for row in data.rows:
        runs = "".join("x" if flag else " " for flag in row.supervised)
        for start in [i for i, c in enumerate(runs) if c == "x" and (i == 0 or runs[i - 1] == " ")]:
            end = runs.find(" ", start)
            learned.add(tuple(row.input_ids[start : end if end >= 0 else None]))
    assert learned == written and not data.report.dropped


FINAL = "<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("style", "text", "reasoning", "content"),
    [
        ("channels", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant" + FINAL + "ans", "hm", "ans"),
        ("channels", FINAL + "ans", None, "ans"),
        ("hybrid, with reasoning", "<think>\nhm\n</think>\n\nans", "hm", "ans"),
        ("always thinks", "hm\n</think>\n\nans", "hm", "ans"),
        ("brackets that think", "[THINK]hm[/THINK]ans", "hm", "ans"),
        ("chatml", "<think>hm</think>ans", None, "<think>hm</think>ans"),
        ("next role ends", "\nans", None, "ans"),
    ],
)  # fmt: skip
def test_what_was_written_becomes_the_message_that_renders_to_it(style, text, reasoning, content):
    from template_styles import STYLES

    from modelopt_eagle.data import Message, render_text
    from modelopt_eagle.data.written import written_message

    tokenizer = STYLES[style].tokenizer()
    end = tokenizer.convert_tokens_to_ids(STYLES[style].end)
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], end]
    asked = [Message("user", "q")]
    message = written_message(tokenizer, asked, ids, end_token_ids=[end])
    assert (message.reasoning, message.content, message.token_ids) == (reasoning, content, tuple(ids))
    after = render_text(tokenizer, [*asked, message, Message("user", "r")], True)
    assert "analysishm" not in after and content in after
