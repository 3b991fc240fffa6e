"""The package itself: the clone that it runs from, if any, and the optional packages that it asks for."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import subprocess
from pathlib import Path
from types import ModuleType

from modelopt_eagle.errors import MissingExtraError

NAME = "modelopt_eagle"


def checkout() -> Path | None:
    """The clone that this package runs from, or ``None`` where it was installed from a wheel."""
    root = Path(__file__).resolve().parents[2]
    page = root / "pyproject.toml"
    return root if page.is_file() and f'name = "{NAME}"' in page.read_text(encoding="utf-8") else None


def package_commit() -> str:
    """Commit of the checkout this package runs from, ``+changes`` if it was edited; else the package's version."""
    folder = Path(__file__).resolve().parents[1]
    version = f"{NAME} {importlib.import_module(NAME).__version__}"

    def git(*arguments: str) -> str:
        run = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20, check=True
        )
        return run.stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != folder.parent:
            return version  # installed inside somebody else's repository
        changed = git("status", "--porcelain", "--untracked-files=no", "--", str(folder))
        return git("rev-parse", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return version


def search_path(folder: Path) -> Path:
    """A folder by which another Python finds this package, and nothing else that is installed here.

    Args:
        folder: where a folder that holds only a link to the package is made, for a package installed from a wheel: all
            that lies beside it there would stand in for the other Python's own packages.

    Returns:
        the clone, or the folder with the link.
    """
    root = checkout()
    if root is not None:
        return root
    home = Path(__file__).resolve().parents[1]
    alone = folder / f"package-{hashlib.sha256(str(home).encode()).hexdigest()[:12]}"
    alone.mkdir(parents=True, exist_ok=True)
    link = alone / NAME
    with contextlib.suppress(FileExistsError):
        link.symlink_to(home, target_is_directory=True)
    return alone


def require_extra(module: str, extra: str) -> ModuleType:
    """Import an optional dependency, or raise an error with the command that installs it.

    Args:
        module: import name, such as ``"matplotlib.pyplot"``.
        extra: the name of the extra in ``pyproject.toml`` that brings it.

    Returns:
        The imported module.

    Raises:
        MissingExtraError: the module is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{module} is needed here and not installed: {install_command(extra)} ({error})"
        ) from error


def install_command(extra: str) -> str:
    """What to type to get an extra.

    The package is on no index. A clone is named by its path (editable, so that it stays what runs); installed from a
    wheel, the packages of the extra are named themselves.
    """
    root = checkout()
    if root is not None:
        return f'pip install -e "{root}[{extra}]"'
    return f"pip install {' '.join(extra_packages(extra)) or f'{NAME}[{extra}]'}"


def extra_packages(extra: str) -> list[str]:
    """The requirements that an extra adds on this system, quoted for a shell; empty where nothing is recorded."""
    from packaging.requirements import Requirement

    try:
        lines = importlib.metadata.requires(NAME) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    found = [Requirement(line) for line in lines]
    return [
        f'"{requirement.name}{requirement.specifier}"'
        for requirement in found
        if requirement.marker is not None
        and requirement.marker.evaluate({"extra": extra})
        and not requirement.marker.evaluate({"extra": ""})
    ]
