"""Looking at data before training: rows in colour, the count of every reason, and what makes heads fail later."""

import subprocess
import sys

import pytest
from data_toy import FORGETS_THINK, write_lines

from modelopt_eagle.cli import doctor, preview
from modelopt_eagle.cli.main import run_command
from modelopt_eagle.data import DataReport, TokenizedDataset
from modelopt_eagle.data.encode import TokenizedRow
from modelopt_eagle.data.images import RowImages
from modelopt_eagle.recipe import load_recipe
from modelopt_eagle.training.doctor import target_findings


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
    mixed = ["--model", str(tiny_target_dir), "--data", str(data), "data.max_rows=2", "-n", "1"]
    assert preview.main(mixed) == 0 and "2  read" in capsys.readouterr().out  # an override behind --data is none of it
    assert run_command("preview", [*given[:4], "--row", "r77"]) == 2
    assert "no row 'r77' among the 12" in capsys.readouterr().err


def test_preview_finds_every_id_shows_no_escapes_and_counts_rows_that_were_fanned_out(
    tiny_target_dir, tmp_path, capsys
):
    rows = [row("q", "first"), row("q", "red \x1b[31m\u202e", id="chat#7\x07")]
    given = ["--model", str(tiny_target_dir), "--data", str(write_lines(tmp_path / "d.jsonl", *rows))]
    assert preview.main([*given, "--row", "chat#7\x07"]) == 0
    said = capsys.readouterr().out
    assert "⟦red \\x1b[31m\\u202e⟧" in said and "--- chat#7\\x07: " in said and "fanned out" not in said
    forgets = tmp_path / "t.jinja"
    forgets.write_text(FORGETS_THINK)
    two = [*row("q", "<think>a</think>b")["messages"], *row("q", "<think>c</think>d")["messages"]]
    given[-1] = str(write_lines(tmp_path / "two.jsonl", {"id": "x", "messages": two}, {"messages": []}))
    assert preview.main([*given, "--row", "x", f"model.chat_template={forgets}"]) == 0
    said = capsys.readouterr().out
    assert said.count("--- x#") == 2
    counts = {line.split()[1]: int(line.split()[0]) for line in said.partition("---\n")[2].splitlines()}
    assert counts["used"] == counts["read"] + counts["fanned"] - counts["dropped:"] == 2
    assert run_command("preview", [*given, "--html", str(tmp_path / "no" / "x.html")]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_colours_reach_the_terminal_and_escapes_of_the_data_do_not(tiny_target_dir, tmp_path):
    data = write_lines(tmp_path / "d.jsonl", row("q", "red \x1b[31m"))
    command = [sys.executable, "-m", "modelopt_eagle.cli.main", "preview", "--colour", "always", "--data", str(data)]
    done = subprocess.run([*command, "--model", str(tiny_target_dir)], capture_output=True, text=True, check=True)
    assert "\x1b[32mred \\x1b[31m\x1b[0m\x1b[1;35m<|im_end|>\x1b[0m" in done.stdout


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
    assert {"teacher parity", "captured layers", "validation"} <= set(found)  # the target is looked at all the same


def test_doctor_looks_for_a_prompt_of_text(tiny_target_dir, tiny_target, tmp_path, capsys):
    made = [{"input_ids": [70] * (n + m), "loss_mask": [0] * n + [1] * m} for n, m in ((0, 9), (2046, 1))]
    rows = [*made, row("q", "a")]
    given = ["--model", str(tiny_target_dir), "--data", str(write_lines(tmp_path / "d.jsonl", *rows))]
    _, found = levels([*given, f"training.output_dir={tmp_path / 'run'}", "eagle.draft_vocab_size=null"], capsys)
    assert found["validation"] == "ok" and "captured layers" in found
    images = RowImages("", (), "", 2)
    pictured = [TokenizedRow("p", "all", [70, 71, 72], [False, True, True], 1, images)]
    data = TokenizedDataset(pictured, DataReport(read=1, rows=1, tokens=3, supervised=2), "")
    recipe = load_recipe("quickstart")
    findings = {f.title: f.level for f in target_findings(recipe, tiny_target, data, (1, 3, 4))}
    assert findings == {"teacher parity": "good", "captured layers": "warning"}
    assert doctor._can_be_validated(recipe, tiny_target, data).found == "not tried: no row has a prompt of text alone"
