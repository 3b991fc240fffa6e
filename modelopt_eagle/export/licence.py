"""The licence of a target, from what lies beside it: it goes on the card of the heads made from it."""

from __future__ import annotations

from pathlib import Path

import yaml

LICENCE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE", "COPYING")
QUICKSTART = ("quickstart", "HuggingFaceTB/SmolLM2-135M-Instruct")
"""The bundled target under its short name and its own; its GGUF file says apache-2.0."""


def front_matter(readme: Path) -> dict:
    """The metadata at the head of a model card; empty if there is none that can be read."""
    try:
        text = readme.read_text(encoding="utf-8")
        head = text.split("---", 2)[1] if text.startswith("---") and text.count("---") >= 2 else ""
        data = yaml.safe_load(head)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return data if isinstance(data, dict) else {}


def said_by(readme: Path) -> str | None:
    """What a model card gives as its licence: ``license``, or the name that stands behind ``other``."""
    data = front_matter(readme)
    licence = data.get("license")
    if licence == "other":
        licence = data.get("license_name") or licence
    return str(licence) if licence else None


def licence_of(target: str | Path | None) -> str | None:
    """The licence of a target; ``None`` if nothing on this machine says it. The network is not asked.

    Args:
        target: a local folder, a hub id whose card is in the hub's cache, ``quickstart``, or ``None``.
    """
    if target is None:
        return None
    if str(target) in QUICKSTART:
        return "apache-2.0"
    folder = Path(target).expanduser()
    if folder.is_dir():
        found = said_by(folder / "README.md")
        if found:
            return found
        for name in LICENCE_FILES:
            if (folder / name).is_file():
                lines = (folder / name).read_text(encoding="utf-8", errors="replace").splitlines()
                first = next((line.strip(" #\t") for line in lines if line.strip(" #\t")), "")
                return f"{first} (its file {name})" if first else None
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(str(target), "README.md")
    except HFValidationError:
        return None
    return said_by(Path(cached)) if isinstance(cached, str) else None
