"""The import table: which room may import which, no circle, absolute imports only, few files with a single importer.

Imports inside functions and under ``TYPE_CHECKING`` count like those at the top of a file.
"""

import ast
import importlib
from collections import defaultdict
from pathlib import Path

import modelopt_eagle

PACKAGE = "modelopt_eagle"
ROOT = Path(modelopt_eagle.__file__).parent

STOREYS = (
    ("errors",),
    ("common",),
    ("recipe", "kernels"),
    ("draft",),
    ("target",),
    ("data",),
    ("features",),
    ("export",),
    ("training", "decoding"),
    ("validation",),
    ("serving",),
    ("report",),
    ("pipeline",),
    ("cli",),
    ("__main__",),
)
"""A room imports from itself and from the storeys below its own, never from a neighbour on its storey."""

MOST_SINGLE_IMPORTERS = 52
"""Files with one importer; tables of one file each (engines, drafters, sections) apart. It only goes down."""

PLUG_INS = ("export.engines.", "recipe.sections.", "draft.eagle3.", "draft.peagle.", "draft.dflash.", "draft.medusa.")


def modules() -> dict[str, Path]:
    """Module name below the package to its file; ``""`` is the package itself."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imported_by(path: Path) -> set[str]:
    """Modules of the package that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                names.add(inner if inner.removeprefix(f"{PACKAGE}.") in MODULES else base)
    inside = {name.removeprefix(PACKAGE).removeprefix(".") for name in names if name.split(".")[0] == PACKAGE}
    return inside & set(MODULES)


IMPORTS = {name: imported_by(path) - {name} for name, path in MODULES.items()}
STOREY = {room: level for level, rooms in enumerate(STOREYS) for room in rooms}


def room_of(module: str) -> str:
    return module.split(".")[0]


def test_every_room_stands_in_the_table():
    rooms = {room_of(name) for name in MODULES} - {""}
    assert rooms <= set(STOREY), f"no storey for {rooms - set(STOREY)}: add it to STOREYS"


def test_a_room_imports_only_from_the_storeys_below():
    wrong = [
        f"{name} imports {other}"
        for name, others in IMPORTS.items()
        for other in others
        if name and other and room_of(name) != room_of(other) and STOREY[room_of(other)] >= STOREY[room_of(name)]
    ]
    assert wrong == []


def test_what_is_imported_is_there():
    """Also inside functions, where a name that has moved would be missed only when a command runs."""
    missing = []
    scripts = sorted((ROOT.parent / "scripts").rglob("*.py"))
    for path in [*MODULES.values(), *scripts]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != PACKAGE:
                continue
            module = importlib.import_module(node.module)
            for alias in node.names:
                inner = f"{node.module}.{alias.name}".removeprefix(f"{PACKAGE}.")
                if inner not in MODULES and not hasattr(module, alias.name):
                    missing.append(f"{path.name}:{node.lineno}: {node.module}.{alias.name}")
    assert not missing


def test_no_module_imports_itself_by_way_of_others():
    state: dict[str, int] = {}
    circles = []

    def visit(name: str, path: tuple[str, ...]) -> None:
        state[name] = 1
        for other in sorted(IMPORTS[name]):
            if state.get(other) == 1:
                circles.append(" -> ".join((*path[path.index(other) :], other)))
            elif other not in state:
                visit(other, (*path, other))
        state[name] = 2

    for name in sorted(MODULES):
        if name not in state:
            visit(name, (name,))
    assert circles == []


def test_imports_are_absolute():
    relative = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in MODULES.values()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert relative == []


def test_few_files_serve_one_other_alone():
    importers = defaultdict(set)
    for name, others in IMPORTS.items():
        for other in others:
            importers[other].add(name)
    alone = sorted(
        name
        for name, path in MODULES.items()
        if len(importers[name]) == 1 and path.name != "__init__.py" and not name.startswith(PLUG_INS)
    )
    assert len(alone) <= MOST_SINGLE_IMPORTERS, f"{len(alone)}: {', '.join(alone)}"
