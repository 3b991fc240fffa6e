"""What each command says of itself, how its options may be spelt, and what it prints where to."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

from modelopt_eagle.cli import main as dispatcher
from modelopt_eagle.common.parser import CommandParser, command_parser
from modelopt_eagle.errors import RecipeError
from modelopt_eagle.recipe.command_line import train_arguments


@pytest.mark.parametrize("name", sorted(dispatcher.available_commands()))
def test_every_help_names_its_command_has_an_example_and_real_defaults(name, capsys):
    with pytest.raises(SystemExit) as left:
        dispatcher.run_command(name.replace("-", "_"), ["--help"])
    shown = capsys.readouterr().out
    assert left.value.code in (0, None)
    assert shown.startswith(f"usage: modelopt-eagle {name} ")
    assert "None" not in shown, "a default that is none is no default to show"
    found = re.search(r"^examples?:\n((?:  .*\n?)+)", shown, flags=re.M)
    calls = [line.strip() for line in found[1].splitlines() if line.strip()]
    assert calls and all(call.startswith(f"modelopt-eagle {name}") for call in calls)
    for option in {option for call in calls for option in re.findall(r"--[\w-]+", call)}:
        assert option in shown.replace(found[0], ""), f"{option} is no option of {name}"


def test_a_script_names_itself(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["scripts/ar_validate.py"])
    assert command_parser("ar-validate", "x", example="y").prog == "python scripts/ar_validate.py"
    assert command_parser("estimate", "x", example="y").prog == "modelopt-eagle estimate"


@pytest.mark.parametrize("word", ["--base-model", "--base_model"])
def test_options_are_taken_with_dashes_and_underscores(word):
    for argv in ([word, "NAME"], [f"{word}=NAME", "training.epochs=2", "--dry-run"]):
        recipe, _ = train_arguments(argv)
        assert recipe.model.base_model == "NAME" and recipe.training.dry_run == ("--dry-run" in argv)
    parser = command_parser("x", "", example="y")
    parser.add_argument("--cuda-graph")
    parser.add_argument("name", nargs="?")
    assert parser.parse_args(["--cuda_graph", "on"]).cuda_graph == "on"
    assert parser.parse_args(["--", "--cuda_graph"]).name == "--cuda_graph"
    with pytest.raises(SystemExit):
        parser.parse_args(["--cuda_graf"])


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("preview", []), ("doctor", []), ("estimate", []), ("ar-validate", ["--model_path", "head"]),
        ("diagnose", ["--model_path", "head"]),
        ("calibrate-draft-vocab", ["--data", "a.jsonl", "--save_dir", "map", "--draft_vocab_size", "64"]),
    ],
)  # fmt: skip
def test_the_target_is_taken_under_either_of_its_names(name, more, monkeypatch):
    found = {}

    class Parsed(Exception):
        pass

    def parse(self, args=None, namespace=None):
        words = [self.spelt(word) for word in args]
        found[name] = vars(self.parse_known_args(words)[0])
        raise Parsed

    monkeypatch.setattr(CommandParser, "parse_args", parse)
    monkeypatch.setattr(CommandParser, "parse_intermixed_args", parse)
    module = importlib.import_module(f"modelopt_eagle.cli.{name.replace('-', '_')}")
    for option in ("--model", "--base_model", "--base-model"):
        with pytest.raises(Parsed):
            module.main([option, "NAME", *more])
        assert "NAME" in (found[name].get("model"), found[name].get("base_model")), option
        assert found[name].get("model_path") in (None, "head", Path("head"))


@pytest.mark.parametrize("json_wanted", [False, True])
def test_the_result_is_printed_once_by_several_processes(json_wanted, monkeypatch, capsys, tmp_path):
    from modelopt_eagle.cli import train
    from modelopt_eagle.training import TrainingResult

    done = TrainingResult(tmp_path, tmp_path / "best", tmp_path / "last", 3, 1.0, [], [], 1.5, True, [])
    monkeypatch.setattr("modelopt_eagle.training.train", lambda *args, **kwargs: done)
    monkeypatch.setattr("modelopt_eagle.decoding.verifiable.refusal", lambda recipe: None)
    said = {}
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert train.main(["--output_dir", str(tmp_path), *(["--json"] if json_wanted else [])]) == 0
        said[rank] = capsys.readouterr()
    assert said["1"].out == "" and said["1"].err == ""
    assert said["0"].out.startswith('{"result": ' if json_wanted else "checkpoint: ")


def test_verbose_is_a_line_a_step():
    assert train_arguments(["-v"])[0].training.log_steps == 1
    assert train_arguments([])[0].training.log_steps != 1


def test_an_error_of_all_processes_is_printed_by_the_first(monkeypatch, capsys):
    waited = []
    monkeypatch.setattr(dispatcher.time, "sleep", waited.append)
    monkeypatch.setenv("WORLD_SIZE", "2")

    def fail():
        raise RecipeError("the same")

    for rank, said in (("0", "error: the same\n"), ("1", "process 1: error: the same\n")):
        monkeypatch.setenv("RANK", rank)
        assert dispatcher._guarded(fail) == 2
        assert capsys.readouterr().err == said
    assert waited == [dispatcher.GRACE_SECONDS]  # long enough for the launcher to end it


def test_json_and_quiet(tiny_target_dir, tmp_path, capsys):
    from tests.training.runs import write_conversations

    data = write_conversations(tmp_path / "rows.jsonl", 12)
    command = ["--base-model", str(tiny_target_dir), "--data", str(data), "--recipe", "eagle3", "training.max_steps=3",
               "training.report_to=none", "training.batch_size=4", "training.log_steps=1",
               "eagle.draft_vocab_size=64"]  # fmt: skip
    assert dispatcher.run_command("train", [*command, "--output_dir", str(tmp_path / "a"), "--json"]) == 0
    captured = capsys.readouterr()
    lines = [json.loads(line) for line in captured.out.splitlines()]
    assert [line["step"] for line in lines[:-1]] == [1, 2, 3] and lines[-1]["result"]["finished"]
    assert captured.err.startswith(f"{tiny_target_dir}: a run into") and "step 2/3" in captured.err
    assert dispatcher.run_command("train", [*command, "--output_dir", str(tmp_path / "b"), "-q"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "" and captured.out.startswith("checkpoint: ")
