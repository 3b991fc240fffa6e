"""An engine's rules held against the source of a release: which no longer match, and which targets came or went.

The rules are data in ``export/engines``; each engine's file also keeps the lines of code that they were read from
(``Engine.evidence``). Here these lines are looked for in an installed engine, in a downloaded wheel or in a folder of
its source; nothing of it is run.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from modelopt_eagle.errors import ExportError
from modelopt_eagle.export.engines.profile import Engine, Targets

NO_TARGETS = re.compile(r"Eagle|EAGLE|DFlash|DSpark|Peagle|MTP|NextN|Assistant|Embed|ForcedAligner|MindSpore")
"""Names of drafts and of models that answer nothing, which share classes with targets."""


class Source:
    """The Python files of an engine's package, in a folder or a wheel.

    Args:
        path: a wheel, or a folder that holds the package (``site-packages``, a repository, the package itself).
        package: its name.

    Raises:
        ExportError: neither holds the package.
    """

    def __init__(self, path: Path, package: str):
        self._wheel = zipfile.ZipFile(path) if path.suffix == ".whl" and path.is_file() else None
        self._root = path if path.name == package else path / package
        if self._wheel is None and not self._root.is_dir():
            raise ExportError(f"{path} holds no {package}: name a wheel of it, or the folder in which it is installed")
        self._prefix = f"{package}/"
        self.version = self._version(path, package)

    def _version(self, path: Path, package: str) -> str | None:
        """The release, from the metadata beside the package."""
        if self._wheel is not None:
            found = re.match(r"[^-]+-([^-]+)-", path.name)
            return found[1] if found else None
        beside = sorted(self._root.parent.glob(f"{package}*.dist-info"))
        return beside[0].name.removesuffix(".dist-info").split("-")[-1] if beside else None

    def read(self, file: str) -> str | None:
        """A file's text by its path within the package; ``None`` if there is no such file."""
        try:
            if self._wheel is not None:
                return self._wheel.read(self._prefix + file).decode("utf-8", errors="replace")
            return (self._root / file).read_text(encoding="utf-8", errors="replace")
        except (KeyError, OSError):
            return None

    def files(self, folder: str) -> Iterator[str]:
        """Paths within the package of the Python files below a folder."""
        if self._wheel is not None:
            below = self._prefix + folder + "/"
            yield from (
                n.removeprefix(self._prefix)
                for n in self._wheel.namelist()
                if n.startswith(below) and n.endswith(".py")
            )
            return
        for path in sorted((self._root / folder).rglob("*.py")):
            yield path.relative_to(self._root).as_posix()


@dataclass
class RuleReport:
    """What a release's source says of the rules.

    Attributes:
        version: of the release; ``None`` if nothing names it.
        checked: rules looked for.
        broken: rule to what was looked for and where.
        gone, new: targets that are named and not found any more, and found and not named; ``None``: not looked at.
    """

    engine: str
    read: str
    version: str | None
    checked: int
    broken: dict[str, str] = field(default_factory=dict)
    gone: list[str] | None = None
    new: list[str] | None = None

    @property
    def passed(self) -> bool:
        """Whether every rule matches and no target is gone. New targets break nothing."""
        return not self.broken and not self.gone

    def text(self) -> str:
        """The report as lines."""
        lines = [f"{self.engine} {self.version or '(no version found)'} against the rules of {self.read}"]
        lines.append(f"rules       {self.checked - len(self.broken)} of {self.checked} match")
        lines += [f"            - {rule}: {why}" for rule, why in self.broken.items()]
        if self.gone is None or self.new is None:
            lines.append("targets     not looked at")
        else:
            lines.append(f"gone        {', '.join(self.gone) or 'no target'}")
            lines.append(f"new         {', '.join(self.new) or 'no target'}")
        return "\n".join(lines)


def check_rules(engine: Engine, source: Source) -> RuleReport:
    """Hold an engine's rules against a release.

    Raises:
        ExportError: no evidence is kept for this engine.
    """
    if not engine.evidence:
        raise ExportError(f"of {engine.name} no lines of code are kept to look for; {engine.source}")
    report = RuleReport(engine.key, engine.version, source.version, len(engine.evidence))
    for evidence in engine.evidence:
        text = source.read(evidence.file)
        if text is None:
            report.broken[evidence.rule] = f"{evidence.file} is not there"
        elif bool(re.search(evidence.pattern, text)) != evidence.present:
            report.broken[evidence.rule] = (
                f"{evidence.file} {'has no' if evidence.present else 'has'} {evidence.pattern!r}"
            )
    if engine.targets.interface is not None:
        serving = {name for name in serving_classes(source, engine.targets) if not NO_TARGETS.search(name)}
        named = {name for names in engine.targets.first.values() for name in names}
        report.gone = sorted(named - serving)
        report.new = sorted(n for n in serving - named if n.endswith(("ForCausalLM", "ForConditionalGeneration")))
    return report


@dataclass(frozen=True)
class _Class:
    """A class in an engine's source: names of its bases and methods, and what its file imports."""

    bases: tuple[str, ...]
    methods: frozenset[str]
    imports: dict[str, tuple[str, str]]


def serving_classes(source: Source, targets: Targets) -> set[str]:
    """Architectures whose class has the interface: as a base, as a method, or inherited."""
    classes: dict[tuple[str, str], _Class] = {}
    entries: set[tuple[str, str, str]] = set()  # architecture, module, class
    for file in source.files(targets.folder):
        text = source.read(file) or ""
        module = Path(file).stem
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue  # newer syntax than this interpreter's; what it holds counts as not found
        imports = {
            alias.asname or alias.name: ((node.module or "").rpartition(".")[2], alias.name)
            for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
        }  # fmt: skip
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                bases = tuple(b.id for b in map(_bare, node.bases) if isinstance(b, ast.Name))
                methods = frozenset(part.name for part in node.body if isinstance(part, ast.FunctionDef))
                classes[module, node.name] = _Class(bases, methods, imports)
            elif isinstance(node, ast.Assign) and "EntryClass" in [getattr(name, "id", None) for name in node.targets]:
                listed = node.value.elts if isinstance(node.value, (ast.List, ast.Tuple)) else [node.value]
                entries |= {(e.id, module, e.id) for e in listed if isinstance(e, ast.Name)}
        if module == "registry":
            for name, place, held in re.findall(r'"(\w+)":\s*\(\s*"([\w.]+)",\s*"(\w+)",?\s*\)', text):
                entries.add((name, place.rpartition(".")[2], held))

    def has(key: tuple[str, str], seen: frozenset = frozenset()) -> bool:
        found = classes.get(key)
        if found is None or key in seen:
            return False
        if targets.interface in found.bases or targets.interface in found.methods:
            return True
        above = [(key[0], base) for base in found.bases] + [found.imports[b] for b in found.bases if b in found.imports]
        return any(has(other, seen | {key}) for other in above)

    return {name for name, module, held in entries if has((module, held))}


def _bare(base: ast.expr) -> ast.expr:
    """A base class without its type parameters."""
    return base.value if isinstance(base, ast.Subscript) else base


@contextmanager
def downloaded(requirement: str, python: str = sys.executable) -> Iterator[Path]:
    """The wheel of a requirement such as ``vllm==0.33.0``, without what it depends on, for as long as the block runs.

    Raises:
        ExportError: pip finds or delivers none (its own words are kept).
    """
    with tempfile.TemporaryDirectory(prefix="engine-rules-") as folder:
        command = [
            python,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--only-binary",
            ":all:",
            "-q",
            "-d",
            folder,
            requirement,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = sorted(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            said = [line for line in done.stderr.splitlines() if line.strip()][-2:]
            raise ExportError(f"pip delivered no wheel of {requirement}: {' '.join(said) or 'it said nothing'}")
        yield wheels[0]
