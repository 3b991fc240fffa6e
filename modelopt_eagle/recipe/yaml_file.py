"""Reading a YAML recipe with line numbers, refusing duplicate keys, taking ``1e-3`` for a number."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from modelopt_eagle.errors import RecipeError


class _Loader(yaml.SafeLoader):
    """YAML 1.1 whose floats may be written without a point, and whose mappings have each key once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key_node, _ in node.value:
            key, line = str(key_node.value), key_node.start_mark.line + 1
            if key in seen:
                raise _DuplicateKey(key, seen[key], line)
            seen[key] = line
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes the text that ``_Loader`` would take for a number."""


for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+[eE][-+]?\d+$"), list("-+0123456789"))


class _DuplicateKey(Exception):
    """A key that stands twice in one mapping."""

    def __init__(self, key: str, first: int, second: int):
        super().__init__(key)
        self.key, self.first, self.second = key, first, second


def parse_value(text: str) -> Any:
    """The YAML value of an override; text that is not YAML stands for itself.

    Raises:
        RecipeError: a flow mapping with a key twice, or one that is nested too deeply.
    """
    try:
        return yaml.load(text, _Loader)
    except _DuplicateKey as error:
        raise RecipeError(f"{text}: the key {error.key!r} stands twice") from None
    except RecursionError:
        raise RecipeError(f"{text[:40]}…: nested too deeply for a value") from None
    except (yaml.YAMLError, ValueError):
        return text


def dump_value(value: Any) -> str:
    """A value on one line of YAML, which ``read_yaml`` reads as the same value."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=float("inf"), allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Read a recipe file.

    Returns:
        The mapping as it stands, and the line (from 1) of each ``section`` and ``section.key``.

    Raises:
        RecipeError: a file that cannot be read, is not YAML, is not a mapping, or has a key twice; with the line.
    """
    loader = None
    try:
        loader = _Loader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        if node is None:
            return {}, {}
        content = loader.construct_document(node)
    except _DuplicateKey as error:
        raise RecipeError(
            f"{path}:{error.second}: the key {error.key!r} already stands in line {error.first}; keep one of them"
        ) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        raise RecipeError(f"{where}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: expected UTF-8 text: {error}") from None
    except RecursionError:
        raise RecipeError(f"{path}: nested too deeply; a recipe has sections with keys below them") from None
    except ValueError as error:  # a date that is none, a number of thousands of digits
        raise RecipeError(f"{path}: a value that cannot be read: {error}") from None
    except OSError as error:
        raise RecipeError(f"{path}: the recipe cannot be read: {error.strerror or error}") from None
    finally:
        if loader is not None:
            loader.dispose()
    if not isinstance(content, dict) or not isinstance(node, yaml.MappingNode):
        raise RecipeError(f"{path}: expected sections such as 'training:' with keys below them, found {_kind(content)}")
    return content, _lines(node)


def _lines(root: yaml.MappingNode) -> dict[str, int]:
    """Line of each key in the first two levels."""
    lines: dict[str, int] = {}
    for section_node, body in root.value:
        lines[str(section_node.value)] = section_node.start_mark.line + 1
        if isinstance(body, yaml.MappingNode):
            for key_node, _ in body.value:
                lines[f"{section_node.value}.{key_node.value}"] = key_node.start_mark.line + 1
    return lines


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return "a list"
    return "a piece of text" if isinstance(value, str) else f"{value!r}"
