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


ORDERS = set(
    "Add Apply Ask Begin Build Check Choose Close Compare Compute Convert Copy Count Cut Decode Draw Encode Expand "
    "Export Fill Find Flush Forget Give Join Keep Lend Let Load Look Make Map Measure Merge Move Narrow Open Pack "
    "Parse Prepare Print Put Quantise Read Refuse Release Remove Render Replace Run Save Say Send Serve Set Sort "
    "Split Start Take Tell Tokenise Train Try Turn Unpack Update Wait Walk Warm Write".split()
)
"""Verbs by which a summary says what is done rather than what comes back."""


def documented_by(classes, name, method):
    """Whether a class or one it is made from has words for a method."""
    words, bases = classes.get(name, ({}, ()))
    return bool(words.get(method)) or any(documented_by(classes, base, method) for base in bases)


def test_public_functions_say_what_they_are_and_what_they_return():
    """A summary is a phrase for what comes back, or an order with a word on what it returns (``Returns:``)."""
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in FILES}
    classes = {}
    for node in (node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        words = {item.name: ast.get_docstring(item) for item in node.body if isinstance(item, ast.FunctionDef)}
        about = ast.get_docstring(node) or ""
        words |= {name: about for name, said in words.items() if not said and re.search(rf"\b{name}\b", about)}
        classes[node.name] = (words, tuple(base.id for base in node.bases if isinstance(base, ast.Name)))
    faults = []
    for file, tree in trees.items():
        for name, node in public(tree):
            said, where = ast.get_docstring(node), f"{file.relative_to(ROOT)}:{node.lineno} {name}"
            owner, dot, method = name.rpartition(".")
            if said is None:
                if not (dot and documented_by(classes, owner.split(".")[-1], method)):
                    faults.append(f"{where}: no docstring")
            elif node.returns is not None and ast.unparse(node.returns) not in ("None", "NoReturn", "Iterator[None]"):
                tells = re.search(r"\b([Rr]eturn|[Yy]ield)", said)
                if said.split()[0] in ORDERS and not tells:
                    faults.append(f"{where}: {said.splitlines()[0]}")
    assert faults == []
