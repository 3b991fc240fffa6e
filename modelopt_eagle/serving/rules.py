"""An engine's rules held against the source of a release: where each was found, and which targets came or went.

The rules are data in ``export/engines``; each engine's file also keeps the lines of code that they were read from
(``Engine.evidence``). Here these lines are looked for in an installed engine, in a downloaded package or in a folder of
its source; nothing of it is run.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from modelopt_eagle.errors import ExportError
from modelopt_eagle.export.engines.profile import Engine, Evidence, Targets

NO_TARGETS = re.compile(r"Eagle|EAGLE|DFlash|DSpark|Peagle|MTP|NextN|Assistant|Embed|ForcedAligner|MindSpore")
"""Names of drafts and of models that answer nothing, which share classes with targets."""


class Source:
    """The files of an engine's code, in a folder, a wheel or a source package.

    Args:
        path: a wheel, a ``.tar.gz``, or a folder with the code (``site-packages``, a repository, the code itself).
        engine: whose it is.

    Raises:
        ExportError: none of them holds it.
    """

    def __init__(self, path: Path, engine: Engine):
        root = engine.code or engine.package
        self._texts: dict[str, Callable[[], bytes]] = {}
        if path.is_file() and path.suffix == ".whl":
            archive = zipfile.ZipFile(path)
            for name in archive.namelist():
                self._take(name, root, functools.partial(archive.read, name))
        elif path.is_file() and path.name.endswith(".tar.gz"):
            with tarfile.open(path) as packed:
                for member in packed:
                    if member.isfile() and member.name.endswith((".py", ".cpp", ".h")):
                        text = packed.extractfile(member)
                        self._take(member.name, root, functools.partial(bytes, text.read() if text else b""))
        else:
            folder = path if path.name == root else path / root
            for file in sorted(folder.rglob("*")) if folder.is_dir() else ():
                if file.suffix in (".py", ".cpp", ".h"):
                    self._texts[file.relative_to(folder).as_posix()] = file.read_bytes
        if not self._texts:
            raise ExportError(
                f"{path} holds no {root}: name a package of {engine.name}, or the folder in which it lies"
            )
        self.version = self._version(path, engine)

    def _take(self, name: str, root: str, read: Callable[[], bytes]) -> None:
        """A file of an archive, if it is of the code, which lies there by itself or in one folder."""
        for prefix in (f"{root}/", f"{name.partition('/')[0]}/{root}/"):
            if name.startswith(prefix):
                self._texts.setdefault(name.removeprefix(prefix), read)

    def _version(self, path: Path, engine: Engine) -> str | None:
        """The release, by the name of the package or the metadata beside an installed one."""
        if path.is_file():
            found = re.match(r"[^-]+-(\d[^-]*?)(-|\.tar\.gz$)", path.name)
            return found[1] if found else None
        home = path.parent if path.name == (engine.code or engine.package) else path
        beside = sorted(home.glob(f"{engine.package.replace('-', '_')}*.dist-info"))
        return beside[0].name.removesuffix(".dist-info").split("-")[-1] if beside else None

    def read(self, file: str) -> str | None:
        """A file's text by its path within the code; ``None`` if there is no such file."""
        read = self._texts.get(file)
        return None if read is None else read().decode("utf-8", errors="replace")

    def files(self, folder: str) -> Iterator[str]:
        """Paths within the code of the Python files below a folder."""
        yield from (name for name in self._texts if name.startswith(folder + "/") and name.endswith(".py"))


@dataclass
class RuleReport:
    """What a release's source says of the rules.

    Attributes:
        version: of the release; ``None`` if nothing names it.
        found: rule to the place that it was held against, ``file:line: text``, or what is not to be found and is not.
        broken: rule to what was looked for and where.
        gone, new: targets that are named and not found any more, and found and not named; ``None``: not looked at.
    """

    engine: str
    read: str
    version: str | None
    found: dict[str, str] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    gone: list[str] | None = None
    new: list[str] | None = None

    @property
    def checked(self) -> int:
        """Rules that were looked for."""
        return len(self.found) + len(self.broken)

    @property
    def passed(self) -> bool:
        """Whether every rule matches and no target is gone. New targets break nothing."""
        return not self.broken and not self.gone

    def text(self) -> str:
        """The report as lines."""
        lines = [f"{self.engine} {self.version or '(no version found)'} against the rules of {self.read}"]
        lines.append(f"rules       {len(self.found)} of {self.checked} match")
        lines += [f"  holds     {rule}\n            {place}" for rule, place in self.found.items()]
        lines += [f"  BROKEN    {rule}\n            {why}" for rule, why in self.broken.items()]
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
    report = RuleReport(engine.key, engine.version, source.version)
    for evidence in engine.evidence:
        place, holds = held(evidence, source.read(evidence.file))
        (report.found if holds else report.broken)[evidence.rule] = place
    if engine.targets.interface is not None:
        serving = {name for name in serving_classes(source, engine.targets) if not NO_TARGETS.search(name)}
        named = {name for names in engine.targets.first.values() for name in names}
        report.gone = sorted(named - serving)
        report.new = sorted(n for n in serving - named if n.endswith(("ForCausalLM", "ForConditionalGeneration")))
    return report


def held(evidence: Evidence, text: str | None) -> tuple[str, bool]:
    """Where a rule was looked for and what stands there, and whether it holds.

    Args:
        text: of the evidence's file; ``None``: there is no such file.
    """
    if text is None:
        return f"{evidence.file} is not there", False
    match = re.search(evidence.pattern, text)
    if match is None:
        return f"{evidence.file} has no {evidence.pattern!r}", not evidence.present
    number = text.count("\n", 0, match.start()) + 1
    line = text.splitlines()[number - 1].strip()
    return f"{evidence.file}:{number}: {line[:100]}", evidence.present


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
def downloaded(engine: Engine, version: str, python: str = sys.executable) -> Iterator[Path]:
    """A release's wheel, or the source package of an engine that has no other, for as long as the block runs.

    What it depends on is left out.

    Raises:
        ExportError: pip finds or delivers none (its own words are kept).
    """
    requirement = f"{engine.package}=={version}"
    kinds = ["--only-binary", ":all:"] if engine.code is None else ["--no-binary", engine.package]
    with tempfile.TemporaryDirectory(prefix="engine-rules-") as folder:
        command = [python, "-m", "pip", "download", "--no-deps", *kinds, "-q", "-d", folder, requirement]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        packages = sorted(file for file in Path(folder).iterdir() if file.name.endswith((".whl", ".tar.gz")))
        if done.returncode or not packages:
            said = [line for line in done.stderr.splitlines() if line.strip()][-2:]
            raise ExportError(f"pip delivered no package of {requirement}: {' '.join(said) or 'it said nothing'}")
        yield packages[0]
