"""The ``modelopt-eagle`` dispatcher: commands found, errors without a traceback, exit codes."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from modelopt_eagle.cli import main as dispatcher
from modelopt_eagle.errors import RecipeError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def command(monkeypatch):
    """Put a command ``stand_in`` in place, whose main is what the test gives."""

    def place(function):
        module = type(sys)("modelopt_eagle.cli.stand_in")
        module.main = function
        monkeypatch.setitem(sys.modules, "modelopt_eagle.cli.stand_in", module)

    return place


def raising(error):
    def main(argv):
        raise error

    return main


def test_exit_codes(command, capsys):
    for result, code in ((0, 0), (None, 0), (3, 3)):
        command(lambda argv, result=result: result)
        assert dispatcher.run_command("stand_in", []) == code
    command(raising(RecipeError("what was found")))
    assert dispatcher.run_command("stand_in", []) == 2
    assert capsys.readouterr().err == "error: what was found\n"
    command(raising(KeyboardInterrupt()))
    assert dispatcher.run_command("stand_in", []) == 130
    command(raising(ZeroDivisionError("a fault of ours")))
    with pytest.raises(ZeroDivisionError):
        dispatcher.run_command("stand_in", [])


def test_arguments_reach_the_command(command):
    seen = []
    command(lambda argv: seen.extend(argv))
    dispatcher.run_command("stand_in", ["--a", "b.c=d"])
    assert seen == ["--a", "b.c=d"]


def test_commands_are_listed_with_their_help(capsys):
    assert dispatcher.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name, help_line in dispatcher.available_commands().items():
        assert name in shown and help_line.strip(), name
    assert "recipe-docs" in shown
    assert dispatcher.main([]) == 2


def test_the_readme_has_every_command():
    """A row names the command, or the script of the same name."""
    rows = "\n".join(line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("|"))
    own = {"train-and-export": "train_eagle3_and_export.sh"}
    for name in dispatcher.available_commands():
        script = own.get(name, f"scripts/{name.replace('-', '_')}.py")
        assert f"`{script}`" in rows or f"`modelopt-eagle {name}`" in rows or f"`{name}`" in rows, name


def test_an_unknown_command_names_the_nearest(capsys):
    assert dispatcher.main(["recipe-dogs"]) == 2
    assert "no such command: recipe-dogs; nearest: recipe-docs" in capsys.readouterr().err


SCRIPTS = sorted([*ROOT.glob("scripts/*.py"), *ROOT.glob("collect_hidden_states/*.py")])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_imported_again_by_a_spawned_process_runs_nothing(script):
    """Tokenising workers and engines start processes by spawn, which import the main script under another name."""
    runpy.run_path(str(script), run_name="__mp_main__")
    wanted = re.findall(r'run_script\("(\w+)"\)', script.read_text())
    assert {name.replace("_", "-") for name in wanted} <= set(dispatcher.available_commands())


def test_version(capsys):
    from modelopt_eagle import __version__

    assert dispatcher.main(["--version"]) == 0 and __version__ in capsys.readouterr().out


def test_recipe_docs_writes_and_checks(tmp_path, capsys):
    page = tmp_path / "docs" / "recipes.md"
    assert dispatcher.main(["recipe-docs", "--output", str(page)]) == 0
    assert dispatcher.main(["recipe_docs", "--output", str(page), "--check"]) == 0
    page.write_text(page.read_text() + "edited\n")
    assert dispatcher.main(["recipe-docs", "--output", str(page), "--check"]) == 2
    assert "differs from the schema" in capsys.readouterr().err


def test_listing_commands_imports_no_torch():
    code = "import sys; from modelopt_eagle.cli.main import main; main(['--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


@pytest.mark.parametrize("command", ["train", "train_and_export"])
def test_a_run_says_something_before_it_imports_anything_large(command):
    code = (
        f"import sys; from modelopt_eagle.cli import {command} as run\n"
        "begin = run.begin\n"
        "def stop(*args):\n    begin(*args)\n    sys.exit('torch' in sys.modules or 'transformers' in sys.modules)\n"
        f"run.begin = stop\nfrom modelopt_eagle.cli.main import run_command\nsys.exit(run_command({command!r}, []))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr.endswith("a run into ckpts/quickstart (loading)\n")


def test_a_closed_pipe_is_no_error():
    code = "from modelopt_eagle.cli.main import main; import sys; sys.exit(main(['--help']))"
    done = subprocess.run(["bash", "-c", f'set -o pipefail; {sys.executable} -c "{code}" | true'], capture_output=True)
    assert b"Traceback" not in done.stderr


def test_data_beside_offline_data_is_not_ignored():
    from modelopt_eagle.errors import RecipeError
    from modelopt_eagle.recipe import train_recipe

    both = ["--data", "chats.jsonl", "--offline_data", "store"]
    with pytest.raises(RecipeError, match="train_path is chats.jsonl, and the rows are those of offline_data_path"):
        train_recipe(both)
    filled = train_recipe([*both, "data.on_missing=skip"])
    assert (filled.data.train_path, filled.data.offline_data_path) == ("chats.jsonl", "store")
