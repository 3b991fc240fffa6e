"""Every block of README.md and docs/ is run on tiny input, or parsed by the real parsers, or says what it needs.

A command of ``RUN`` is run as it stands on the page, with the tiny target in the place of names; any other is parsed by
its own parser, and its recipe and overrides are loaded. A line that is neither stands in a block with a mark
``# needs: ...``. Programs are run, here or by the test of their page.
"""

import argparse
import contextlib
import importlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from modelopt_eagle.cli.main import available_commands, run_command
from modelopt_eagle.export import load_draft
from modelopt_eagle.recipe import load_recipe
from modelopt_eagle.recipe.command_line import recipe_from_arguments, run_recipe
from tests.end_to_end import parse_only
from tests.training.runs import write_conversations

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

RUN = {
    "preview": [], "doctor": [], "estimate": ["eagle.draft_vocab_size=64"], "report": [], "dump": [], "diagnose": [],
    "features inspect": [], "features verify": [], "features merge": [], "inspect-checkpoint": [],
    "calibrate-draft-vocab": ["--draft_vocab_size", "64"],
    "synthesize-answers": ["--max_new_tokens", "4", "--output", "answers.jsonl"],
    "ar-validate": ["--num_samples", "2", "--max_new_tokens", "4", "--speedup_prompts", "0"],
}  # fmt: skip
"""Commands that take seconds on the tiny target, and what makes their work small."""
PARSED = {"--server", "--sweep"}
"""Options with which they need a server, or take long; tests of their own run them."""

BELOW_BOUND = {"ar-validate": {0, 1}, "doctor": {0, 1}}
"""Exit codes that say something of a head or of data and not of the command."""

PROGRAMS_ELSEWHERE = {
    ("docs/kernels.md", "CaptureBuffer"): "tests/decoding/test_engine_example.py",
    ("docs/library.md", "AutoModelForCausalLM"): "tests/end_to_end/test_library.py",
}
"""Programs that a test of their own runs: page, a word of the block, test."""

NEEDS = {"SLURM, GPUs": 3, "Docker, GPUs": 1, "a server, or vLLM": 1, "llama.cpp": 1, "llama.cpp, from here on": 1,
         "the network": 2, "vLLM (--print: only show it)": 1, "vLLM, which the first line makes": 1}  # fmt: skip
"""What blocks of the pages say that they need, and how many do."""


@dataclass(frozen=True)
class Block:
    """A fenced block: where it begins, its language and its text."""

    page: str
    line: int
    language: str
    text: str

    @property
    def needs(self) -> list[str]:
        return re.findall(r"# needs: (.*)", self.text)


def blocks_of(page: Path) -> list[Block]:
    text, name = page.read_text(encoding="utf-8"), str(page.relative_to(ROOT))
    return [
        Block(name, text.count("\n", 0, found.start()) + 1, found[1], found[2])
        for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, flags=re.M | re.S)
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def of(language):
    chosen = [block for block in BLOCKS if block.language == language]
    return pytest.mark.parametrize("block", chosen, ids=lambda block: f"{block.page}:{block.line}")


@pytest.fixture(scope="module")
def place(tiny_target_dir, tmp_path_factory):
    """A folder with everything under the names that the pages use: data, prompts, a finished run, its export."""
    folder = tmp_path_factory.mktemp("pages")
    for name in ("chats.jsonl", "FILE.jsonl", "conversations.jsonl"):
        write_conversations(folder / name, 12)
    prompts = "".join(json.dumps({"id": str(n), "turns": [f"say {n}"]}) + "\n" for n in range(3))
    for name in ("prompts.jsonl", "question.jsonl"):
        (folder / name).write_text(prompts)
    (folder / "recipes").symlink_to(ROOT / "recipes")
    run = folder / "ckpts" / "quickstart"
    command = ["--base_model", str(tiny_target_dir), "--data", str(folder / "chats.jsonl"), "--recipe", "eagle3",
               "--output_dir", str(run), "training.max_steps=2", "training.report_to=none", "eagle.draft_vocab_size=64",
               "validation.num_samples=2", "validation.max_new_tokens=4", "validation.speedup_prompts=1"]  # fmt: skip
    assert run_command("train_and_export", [*command, "-q"]) == 0
    for name in ("a", "b", "c", "run"):
        (folder / "ckpts" / name).symlink_to(run)
    for name in ("export", "DIR", "head", "their_head"):
        (folder / name).symlink_to(run / "export")
    written = f"model: {{base_model: {tiny_target_dir}}}\ndata: {{train_path: chats.jsonl}}\n"
    (folder / "R").write_text(written + "eagle: {draft_vocab_size: 64}\n")
    return folder


class Parsed(Exception):
    """Raised in place of what a command does, with what it has parsed."""


@contextlib.contextmanager
def only_parsing(monkeypatch, captured=None):
    """Commands stop behind their parser; with a list, before it, and the parser is put there."""
    with monkeypatch.context() as patch:
        for name in ("parse_args", "parse_intermixed_args"):
            original = getattr(argparse.ArgumentParser, name)

            def parse(self, args=None, namespace=None, original=original):
                if captured is not None:
                    captured.append(self)
                    raise Parsed
                raise Parsed(original(self, args, namespace))

            patch.setattr(argparse.ArgumentParser, name, parse)
        yield


def commands(block):
    """The commands of a block, as words; shell variables in front and comments are left out."""
    for line in re.sub(r"\\\n\s*", " ", block.text).splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a quoted text over several lines
            words = ["?"]
        while words:
            end = words.index("&&") if "&&" in words else len(words)
            words, left = words[:end], words[end + 1 :]
            while words and re.match(r"[A-Z_]+=", words[0]):
                del words[0]
            if words := [word for word in words if word not in ("...", "…", "&")]:
                yield words
            words = left


def command_of(words):
    """(name of our command, its arguments), ``None`` for anything else."""
    if words[0] == "modelopt-eagle":
        return words[1], words[2:]
    if words[:2] == ["bash", "train_eagle3_and_export.sh"]:
        return "train-and-export", words[2:]
    if words[0] in ("accelerate", "torchrun") and "modelopt_eagle" in words:
        place = words.index("modelopt_eagle")
        return words[place + 1], words[place + 2 :]
    if words[0] == "python" and len(words) > 1 and (found := re.fullmatch(r"scripts/(\w+)\.py", words[1])):
        name = found[1].replace("_", "-")
        return (name, words[2:]) if name in available_commands() else None
    return None


def filled(arguments, target):
    """The tiny target in the place of names."""
    named = [target if word in ("NAME", "NAME_OR_DIR", "M", "quickstart") else word for word in arguments]
    return [re.sub(r"^(model\.base_model=)\w+$", rf"\g<1>{target}", word) for word in named]


def run_or_parse(words, target, monkeypatch, runs=True):
    """``run`` or ``parsed``; ``None`` where a line is no command that can be looked at.

    Args:
        runs: false: nothing is run, as in a block that needs something.
    """
    if (found := command_of(words)) is not None:
        name, arguments = found
        arguments = filled(arguments, str(target))
        key = f"{name} {arguments[0]}" if name == "features" else name
        launched = words[0] in ("accelerate", "torchrun")  # one process here would be another command
        if key in RUN and runs and not launched and not PARSED & set(arguments):
            code = run_command(name.replace("-", "_"), [*arguments, *RUN[key]])
            assert code in BELOW_BOUND.get(name, {0}), words
            return "run"
        with only_parsing(monkeypatch), pytest.raises(Parsed) as parsed:
            importlib.import_module(f"modelopt_eagle.cli.{name.replace('-', '_')}").main(arguments)
        if hasattr(options := parsed.value.args[0], "overrides"):
            (run_recipe if hasattr(options, "offline_data") else recipe_from_arguments)(options)
        return "parsed"
    script = ROOT / words[1] if len(words) > 1 else ROOT
    if words[0] == "python" and (script.suffix == ".py" or words[1:2] == ["-m"]):
        program = [str(script), *words[2:]] if script.suffix == ".py" else words[2:]
        command = [sys.executable, "-m", "tests.end_to_end.parse_only", *program]
        process = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
        assert process.returncode == parse_only.PARSED, (words, process.stderr)
        return "parsed"
    if words[0] == "bash" and script.suffix == ".sh":
        known = script.read_text(encoding="utf-8")
        assert all(word in known for word in words[2:] if word.startswith("--")), words
        return "parsed"
    if words[0] == "pytest":
        assert all((ROOT / word).exists() for word in words[1:])
        return "parsed"
    return None


@of("bash")
def test_commands_are_run_or_parsed_or_marked(block, place, tiny_target_dir, monkeypatch, capfd):
    monkeypatch.chdir(place)
    runs = not block.needs
    seen = [(words, run_or_parse(words, tiny_target_dir, monkeypatch, runs)) for words in commands(block)]
    assert seen
    neither = [words for words, how in seen if how is None]
    assert not neither or block.needs, f"neither run nor parsed, and without a mark `# needs: ...`: {neither}"


@of("python")
def test_programs_are_run(block, place, tiny_target_dir, tiny_target, monkeypatch):
    for (page, word), test in PROGRAMS_ELSEWHERE.items():
        if block.page == page and word in block.text:
            assert Path(page).name in (ROOT / test).read_text(encoding="utf-8"), test
            return
    monkeypatch.chdir(place)
    identity = tiny_target.identity()
    names = {"target": tiny_target, "V": identity.vocab_size, "h": identity.tokenizer_hash}
    text = block.text.replace('"quickstart"', repr(str(tiny_target_dir)))
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(text, f"{block.page}:{block.line}", "exec"), names)


def test_other_blocks_are_recipes():
    for block in BLOCKS:
        assert block.language in ("bash", "python", "yaml", "text"), f"{block.page}:{block.line} says not what it is"
        if block.language == "yaml":
            load_recipe(yaml.safe_load(block.text))


def test_what_blocks_need_is_counted():
    found = Counter(need for block in BLOCKS for need in block.needs)
    assert found == Counter(NEEDS), "a new mark is a block that no test runs: is it needed?"
    assert len([block for block in BLOCKS if block.language == "bash"]) > 25


def test_no_command_hides_in_an_indented_block():
    """Markdown shows them alike, and only fenced ones are looked at here."""
    head = re.compile(r"^ {4}(?:[A-Z_]+=\S+ )?(?:modelopt-eagle|python3?|bash|accelerate|torchrun|pip|pytest) ", re.M)
    for page in PAGES:
        outside = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        assert head.findall(outside) == [], page.name


def options_of(name, monkeypatch):
    """Every option of a command and of its sub-commands, with dashes."""
    parsers = []
    with only_parsing(monkeypatch, parsers), pytest.raises(Parsed):
        importlib.import_module(f"modelopt_eagle.cli.{name.replace('-', '_')}").main([])
    for parser in parsers:
        parsers += [
            part for action in parser._actions if isinstance(action, argparse._SubParsersAction)
            for part in action.choices.values()
        ]  # fmt: skip
    found = {option.replace("_", "-") for parser in parsers for option in parser._option_string_actions}
    return found | ({"--model", "--base-model"} if found & {"--model", "--base-model"} else set())


def test_options_in_sentences_are_those_of_their_commands(monkeypatch):
    known, looked = {}, 0
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        for span in re.findall(r"`([^`]+)`", text):
            words = span.split()
            if words[0] not in ("modelopt-eagle", "python", "bash") or len(words) < 2 or "COMMAND" in words:
                continue
            if (found := command_of([word for word in words if word != "[OPTIONS]"])) is None:
                assert words[0] == "modelopt-eagle" or (ROOT / words[1]).exists() or words[1] == "-m", span
                continue
            name = found[0]
            assert name in available_commands(), span
            options = [word.partition("=")[0].replace("_", "-") for word in found[1] if word.startswith("--")]
            if options and name not in known:
                known[name] = options_of(name, monkeypatch)
            unknown = [option for option in options if option not in known[name] and option != "--python-env"]
            assert not unknown, f"{page.name}: {span}: {unknown}"
            looked += 1
    assert looked > 20


def test_the_pages_head_is_whole(place):
    """What the blocks worked on was really there."""
    assert load_draft(place / "export").config.vocab_size == 256
