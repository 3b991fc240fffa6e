"""A wheel is built, installed into an environment of its own and used from another folder.

The environment sees the packages of the one that runs the tests by a ``.pth`` file, so that torch is not installed
again; ``modelopt_eagle`` itself comes from the wheel, and the first test checks it.
"""

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from modelopt_eagle.recipe.docs import recipe_docs

ROOT = Path(__file__).parents[2]
SOURCES = ("modelopt_eagle", "pyproject.toml", "README.md", "LICENSE")


def ask(*command, cwd, code=0):
    """Run a command without the tests' own search path; its standard output."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    environment = kept | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == code, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout if code == 0 else done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy, so that what earlier builds left in the clone is no part of it."""
    folder = tmp_path_factory.mktemp("build")
    compiled = shutil.ignore_patterns("__pycache__")  # other processes of tests write there
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=compiled)
        else:
            shutil.copy(ROOT / name, folder / name)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    ask(sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", folder / "dist", folder, cwd=folder)
    return next((folder / "dist").glob("modelopt_eagle-*.whl"))


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """Folder of the programs of an environment that has the wheel."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    packages = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    own = Path(ask(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    (own / "of_the_tests.pth").write_text("\n".join(packages) + "\n")
    options = ["--no-deps", "--no-index", "--quiet"]
    ask(sys.executable, "-m", "pip", "--python", python, "install", *options, wheel, cwd=folder)
    return folder / "bin"


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """A folder that is no clone, with conversations for the tiny target."""
    folder = tmp_path_factory.mktemp("elsewhere")
    words = ["sun", "rain", "snow", "wind", "fog", "hail"]
    rows = [
        {"messages": [{"role": "user", "content": f"More {word}?"}, {"role": "assistant", "content": f"Yes, {word}!"}]}
        for word in words
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = [{"prompt": f"More {word}?", "category": "weather"} for word in words[:2]]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    return folder


def test_the_package_comes_from_the_wheel_alone(environment, elsewhere):
    script = """
import sys, modelopt_eagle
from modelopt_eagle.common.package import checkout, install_command
assert checkout() is None
assert install_command("lora").startswith('pip install "peft>='), install_command("lora")
assert install_command("kernels").startswith('pip install "triton>='), install_command("kernels")
print(modelopt_eagle.__file__)
"""
    place = Path(ask(environment / "python", "-c", script, cwd=elsewhere).strip())
    assert place.is_relative_to(environment.parent) and not place.is_relative_to(ROOT)


def test_another_python_is_shown_the_package_and_nothing_beside_it(environment, elsewhere):
    script = """
import os, sys
from pathlib import Path
from modelopt_eagle.common.package import search_path
for _ in range(2):
    folder = search_path(Path("cache"))
print(*os.listdir(folder), (folder / "modelopt_eagle" / "errors.py").is_file())
"""
    assert ask(environment / "python", "-c", script, cwd=elsewhere).split() == ["modelopt_eagle", "True"]


def test_every_file_of_the_package_is_in_the_wheel(wheel):
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    files = [path for path in (ROOT / "modelopt_eagle").rglob("*") if "__pycache__" not in path.parts]
    ours = {str(path.relative_to(ROOT)) for path in files if path.is_file()}
    assert not ours - inside
    assert {name.partition("/")[0] for name in inside - ours} == {wheel.name.rsplit("-", 3)[0] + ".dist-info"}


def test_recipes_and_assets_are_found(environment, elsewhere):
    script = """
from modelopt_eagle.data import load_prompts, read_conversations
from modelopt_eagle.recipe import load_recipe
names = ("quickstart", "eagle3", "eagle3_offline", "eagle3_streaming")
print(*[load_recipe(name).training.batch_size > 0 for name in names])
print(len(load_prompts("quickstart")), len(read_conversations("quickstart").rows) > 100)
"""
    out = ask(environment / "python", "-c", script, cwd=elsewhere)
    assert out.split() == ["True"] * 4 + ["80", "True"]


def test_the_page_of_options_is_printed_or_written_where_asked(environment, elsewhere):
    command = environment / "modelopt-eagle"
    assert ask(command, "recipe-docs", cwd=elsewhere) == recipe_docs()
    ask(command, "recipe-docs", "--output", "pages", cwd=elsewhere)
    assert (elsewhere / "pages" / "recipes.md").read_text(encoding="utf-8") == recipe_docs()
    assert "no clone" in ask(command, "recipe-docs", "--check", cwd=elsewhere, code=2)


def test_estimate_train_validate(environment, elsewhere, tiny_target_dir):
    command = environment / "modelopt-eagle"
    run = [f"model.base_model={tiny_target_dir}", "eagle.draft_vocab_size=64", "training.max_steps=1"]
    run += ["data.train_path=rows.jsonl", "training.output_dir=run", "training.report_to=none"]
    sizes = ask(command, "estimate", "--recipe", "eagle3", *run, cwd=elsewhere)
    assert "head" in sizes
    ask(command, "train", "--recipe", "eagle3", *run, cwd=elsewhere)
    measured = ["--model_path", "run", "--base_model", tiny_target_dir, "--prompts", "prompts.jsonl"]
    measured += ["--max_new_tokens", "8", "--turns", "1", "--speedup_prompts", "0"]
    ask(command, "ar-validate", *measured, cwd=elsewhere)
    numbers = json.loads((elsewhere / "acceptance.json").read_text())
    assert numbers["acceptance_length"] >= 1
    assert list(elsewhere.glob("run/checkpoint-*"))
