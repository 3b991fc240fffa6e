"""Looking at data before training: rows in colour, the count of every reason, and what makes heads fail later."""

import pytest
from data_toy import write_lines

from modelopt_eagle.cli import doctor, preview
from modelopt_eagle.cli.main import run_command


def row(question, answer, **more):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **more}


@pytest.fixture
def data(tmp_path):
    rows = [row(f"question {i}", f"answer {i} <b>", id=f"r{i}") for i in range(12)]
    return write_lines(tmp_path / "d.jsonl", *rows, {"messages": []})


def test_preview_shows_context_answers_and_ends_and_every_count(tiny_target_dir, data, tmp_path, capsys):
    page = tmp_path / "page.html"
    given = ["--data", str(data), "--model", str(tiny_target_dir), "-n", "2", "--html", str(page)]
    assert preview.main(given) == 0
    said = capsys.readouterr().out
    assert "assistant\n⟦answer 0 <b>⟧⟪<|im_end|>⟫" in said and said.count("--- r") == 2
    assert "1  dropped: no_messages" in said and "13  read" in said
    text = page.read_text(encoding="utf-8")
    assert '<span class="supervised">answer 0 &lt;b&gt;</span><span class="end">' in text and "no_messages" in text
    assert preview.main([*given[:4], "--row", "r7", "--colour", "always"]) == 0
    assert "\x1b[32manswer 7 <b>\x1b[0m\x1b[1;35m<|im_end|>" in capsys.readouterr().out
    assert run_command("preview", [*given[:4], "--row", "r77"]) == 2
    assert "no row 'r77' among the 12" in capsys.readouterr().err


def levels(argv, capsys):
    code = doctor.main(argv)
    lines = capsys.readouterr().out.splitlines()
    return code, {line[5:].split(":")[0]: line[:4].strip() for line in lines if line[:4] in ("ok  ", "warn", "FAIL")}


def test_doctor_finds_what_makes_heads_fail(tiny_target_dir, data, tmp_path, capsys):
    model = [
        "--model",
        str(tiny_target_dir),
        "--recipe",
        "eagle3",
        "eagle.draft_vocab_size=100",
        f"training.output_dir={tmp_path / 'run'}",
    ]
    code, found = levels(["--data", str(data), *model], capsys)
    assert code == 0
    assert {name for name, level in found.items() if level == "ok"} >= {
        "rows used", "supervised share", "lengths", "template of the data and of serving", "duplicates", "disk",
        "teacher parity", "captured layers", "validation",
    }  # fmt: skip
    assert found["whose text it is"] == "warn"  # a random target did not write this
    held = write_lines(tmp_path / "held.jsonl", row("question 3", "answer 3 <b>"), row("new", "answer"))
    many = write_lines(
        tmp_path / "many.jsonl", *[row("same", "answer", id=i) for i in range(9)], *[{"messages": []}] * 9
    )
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m.role + ': ' + m.content + '<|endoftext|>' }}{% endfor %}"
                        "{% if add_generation_prompt %}assistant: {{ '' }}{% endif %}")  # fmt: skip
    bad = [f"data.eval_path={held}", f"model.chat_template={template}", "data.max_length=4096",
           "eagle.draft_vocab_size=12", "data.train_path=" + str(many)]  # fmt: skip
    code, found = levels([*model, *bad], capsys)
    wrong = {name for name, level in found.items() if level != "ok"}
    assert wrong >= {"rows used", "duplicates", "lengths", "template of the data and of serving", "end of turn"}
    code, found = levels(["--data", str(data), *model, f"data.eval_path={held}", "--without-target"], capsys)
    assert found["evaluation"] == "warn" and "teacher parity" not in found
    code, found = levels(["--data", str(data), *model, "eagle.draft_vocab_size=300"], capsys)
    assert code == 1 and found["head"] == "FAIL"
