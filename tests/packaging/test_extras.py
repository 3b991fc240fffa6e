"""The extras: every one that code asks for exists, ``env`` lists them all, and the hint can be typed."""

import ast
import re
from pathlib import Path

import pytest

from modelopt_eagle.cli.env import EXTRAS
from modelopt_eagle.common import package
from modelopt_eagle.errors import MissingExtraError

ROOT = Path(__file__).parents[2]


def declared():
    """Names of the extras in pyproject.toml."""
    body = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]\n")[1].split("\n\n")[0]
    return {line.partition(" = ")[0] for line in body.splitlines()}


def asked():
    """Extras that the code names in ``require_extra``, with a place each."""
    for file in (ROOT / "modelopt_eagle").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "require_extra":
                yield node.args[1].value, f"{file.name}:{node.lineno}"


def test_extras_are_declared_listed_and_installed():
    assert set(EXTRAS) == declared() - {"dev"}
    assert not [place for extra, place in asked() if extra not in declared()]
    wanted = re.search(r'EXTRAS="(.*)"', (ROOT / "scripts" / "setup_env.sh").read_text()).group(1)
    assert set(wanted.split(",")) == declared()


def test_a_clone_is_named_by_its_path():
    with pytest.raises(MissingExtraError, match="no_such_module is needed here") as caught:
        package.require_extra("no_such_module", "lora")
    assert f'pip install -e "{ROOT}[lora]"' in str(caught.value)


def test_without_a_clone_the_packages_are_named(monkeypatch):
    monkeypatch.setattr(package, "checkout", lambda: None)
    lines = ["torch>=2.8", 'peft>=0.17; extra == "lora"', 'triton>=3.4; sys_platform == "nothing" and extra == "lora"']
    monkeypatch.setattr(package.importlib.metadata, "requires", lambda name: lines)
    assert package.install_command("lora") == 'pip install "peft>=0.17"'
