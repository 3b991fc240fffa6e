"""Names and categories that hold HTML, Markdown or orders to a terminal: shown as they are, never acted upon."""

import json
import os
import re
import subprocess
import sys

import pytest
import yaml

from modelopt_eagle.common.text import argument, markdown, visible
from modelopt_eagle.export import export_checkpoint
from modelopt_eagle.features.store import maintenance
from tests.export.conftest import build_head
from tests.features.rows import fill

CLI = [sys.executable, "-m", "modelopt_eagle.cli.main"]
BAD = [
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "![x](http://x/y.png)", "[click](javascript:alert(1))",
    "a | b", "a\n\n# Heading", "`code`", "**bold**", "\x1b]0;title\x07", "\x1b[2J\x1b[31mred", "\x9b31m", "a\u202eb",
    "a\r\nb", "--- \nlicense: mit", "$(reboot)", "; reboot", "'; reboot; '", '"); import os; os.abort() #', "\x00",
]  # fmt: skip
HIDDEN = [chr(code) for code in (*range(32), 127, *range(128, 160), 0x202E, 0x2066) if chr(code) not in "\n\t"]


def report(name):
    return {
        "acceptance_length": 2.0, "per_category": {name: 2.0}, "data": f"{name}; 3 rows", "recipe": name,
        "target_license": name, "commit": name,
    }  # fmt: skip


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("adapted", [False, True])
def test_the_card_shows_names_and_categories_as_they_are(tmp_path, name, adapted):
    head = build_head(target_name=name)
    if adapted:
        head.config.extra = {"target_adapter": {"rank": 4, "modules": [name], "first": 0}}
    export_checkpoint(head, None, tmp_path / "out", report=report(name))
    text = (tmp_path / "out" / "README.md").read_text()
    plain_head = build_head(target_name="x")
    plain_head.config.extra = head.config.extra and {"target_adapter": {"rank": 4, "modules": ["x"], "first": 0}}
    export_checkpoint(plain_head, None, tmp_path / "plain", report={**report("x"), "target_license": "A Licence"})
    plain = (tmp_path / "plain" / "README.md").read_text()
    assert text.count("\n") == plain.count("\n")  # no line of its own
    assert not [mark for mark in HIDDEN if mark in text]
    shown = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.S)  # code is shown as it stands
    assert "<script" not in shown and "<img" not in shown and "![x]" not in shown and "[click](" not in shown
    assert text.count("```") == plain.count("```")
    assert text.count("\n| ") == plain.count("\n| ")
    data = yaml.safe_load(text.split("---", 2)[1])
    assert data == {"tags": ["eagle3", "speculative-decoding"], **({"license": name} if name == "mit" else {})}
    for line in text.splitlines():
        if line.startswith(("base = ", "AutoTokenizer")):
            compile(line, "card", "exec")
            assert "os.abort()" not in line or '\\"' in line


@pytest.mark.parametrize("name", BAD)
def test_a_name_is_one_argument_of_a_shell(name):
    line = subprocess.run(["bash", "-c", f"printf '%s' {argument(name)}"], capture_output=True, text=True, check=True)
    assert line.stdout == visible(name).replace("`", "'") and line.stderr == ""


@pytest.mark.parametrize("name", BAD)
def test_tables_print_no_orders_to_the_terminal(tmp_path, name):
    fill(tmp_path)
    path = tmp_path / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["checksum"]
    manifest["contract"]["model"] = name
    for shard in manifest["shards"]:
        shard["categories"] = [name] * len(shard["categories"])
    path.write_text(json.dumps(manifest))
    lines = maintenance.summarise(tmp_path).lines()
    assert not [mark for line in lines for mark in [*HIDDEN, "\n", "\t"] if mark in line]
    assert any(visible(name) in line for line in lines)


def test_commands_print_no_orders_to_the_terminal(tmp_path):
    """Whatever prints: results, errors, and lines that are said."""
    (tmp_path / "\x1b[2Jfolder").mkdir()
    for command in (["features", "inspect"], ["inspect-checkpoint"], ["\x1b]0;x\x07"]):
        run = subprocess.run(
            [*CLI, *command, str(tmp_path / "\x1b[2Jfolder")], capture_output=True, text=True, timeout=120,
            env=os.environ | {"PYTHONIOENCODING": "utf-8"},
        )  # fmt: skip
        assert run.returncode == 2 and "\x1b" not in run.stdout + run.stderr, run.stderr
    code = (
        "from modelopt_eagle.common.output import guard_output; guard_output();"
        "from modelopt_eagle.common.console import shown, say\n"
        "with shown(): say('\\x1b[2Jx'); print('\\x1b[2Jy\\ta')"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "\\x1b[2Jy\ta\n" and run.stderr == "\\x1b[2Jx\n"


def test_ordinary_text_stays_as_it_is():
    for text in ("coding", "multi_turn", "C++ / C#", "日本語", "a-b.c (d)", "naïve", "50 %"):
        assert visible(text) == markdown(text) == text
