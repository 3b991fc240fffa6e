"""One dialect across the package: names of types, signs in shapes, and docstrings that say what comes back."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "modelopt_eagle"
FILES = sorted(ROOT.rglob("*.py"))
FAULT = re.compile(r"\bB\d{2,3}\b")
"""Numbers of docs/faults.md, which mean nothing to who reads a docstring."""


def public(tree, owner=""):
    """Public functions and methods of public classes, with their names."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            yield owner + node.name, node
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public(node, f"{node.name}.")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_the_dialect_of_a_file(file):
    text = file.read_text(encoding="utf-8")
    assert "torch.Tensor" not in text.replace("`torch.Tensor", ""), "from torch import Tensor"
    assert "A*Ht" not in text, "write A·Ht"
    tree = ast.parse(text)
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    said = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]
    assert not [found for text in said for found in FAULT.findall(text)], "say it in words, without the fault's number"
