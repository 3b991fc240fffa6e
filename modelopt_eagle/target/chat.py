"""What a chat template is rendered with beside the messages: arguments such as ``enable_thinking``, and the date.

Both belong to a tokenizer as its template does: whoever renders with the tokenizer renders with them. The arguments
are part of the template's hash (:func:`modelopt_eagle.target.identity.template_hash`), the date is not: it changes a
line of text, not what a template is.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from modelopt_eagle.common.files import read_json, write_whole
from modelopt_eagle.errors import DataError

_ATTRIBUTE = "modelopt_eagle_chat_settings"
_DATE_CALL = re.compile(r"strftime_now\(\s*(?:'([^']*)'|\"([^\"]*)\")\s*\)")
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize", "conversation")


@dataclass(frozen=True)
class ChatSettings:
    """What every rendering of a tokenizer's template is given.

    Attributes:
        arguments: variables of the template, plain JSON values.
        date: ``YYYY-MM-DD`` that a template which asks for today's date is told; ``None``: the real one.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    date: str | None = None


def chat_settings(tokenizer) -> ChatSettings:
    """The settings of a tokenizer; none if it was given none."""
    return getattr(tokenizer, _ATTRIBUTE, None) or ChatSettings()


def set_chat_settings(tokenizer, arguments: Mapping[str, Any] | None = None, date: str | None = None) -> None:
    """Give a tokenizer's template its arguments and date, in place of those it had.

    Raises:
        DataError: an argument that is no plain value or has a name of the renderer's own; or no date.
    """
    arguments = dict(arguments or {})
    check_arguments(arguments)
    if date is not None:
        _parse_date(date)
    setattr(tokenizer, _ATTRIBUTE, ChatSettings(arguments, date))


def check_arguments(arguments: Mapping[str, Any], place: str = "template arguments") -> None:
    """Refuse arguments that cannot be passed to a template and recorded.

    Raises:
        DataError: see :func:`set_chat_settings`.
    """
    if wrong := [name for name in arguments if name in _RESERVED or not str(name).isidentifier()]:
        raise DataError(f"{place}: {wrong[0]!r} is no name of a template's variable; use names like enable_thinking")
    try:
        json.dumps(arguments)
    except (TypeError, ValueError) as error:
        raise DataError(f"{place}: expected plain JSON values, found {arguments!r} ({error})") from error


def asks_for_date(template: str) -> bool:
    """Whether a template prints today's date."""
    return "strftime_now" in template


@lru_cache(maxsize=64)
def dated_template(template: str, date: str | None) -> str:
    """A template with its calls for today's date replaced by a day.

    Args:
        template: Jinja source.
        date: ``YYYY-MM-DD``, or ``None`` to leave it as it is.

    Raises:
        DataError: a call whose format is no literal text, so that it cannot be replaced.
    """
    if date is None or not asks_for_date(template):
        return template
    day = _parse_date(date)
    fixed = _DATE_CALL.sub(lambda found: json.dumps(day.strftime(found[1] or found[2] or "")), template)
    if re.search(r"strftime_now\s*\(", fixed):
        raise DataError(
            "the chat template asks for the date with a format that is no literal text, so it cannot be pinned: give a "
            "template without it (model.chat_template)"
        )
    return fixed


def today() -> str:
    """Today as ``YYYY-MM-DD``."""
    return datetime.date.today().isoformat()


def _parse_date(date: str) -> datetime.datetime:
    try:
        return datetime.datetime.strptime(date, "%Y-%m-%d")
    except (TypeError, ValueError) as error:
        raise DataError(f"expected a date as YYYY-MM-DD, such as 2026-01-31; found {date!r}") from error


def chat_record(tokenizer) -> dict[str, Any]:
    """What a head remembers of how its rows were rendered, besides the template's hash; empty where nothing was set."""
    settings = chat_settings(tokenizer)
    template = getattr(tokenizer, "chat_template", None) and tokenizer.get_chat_template()
    record: dict[str, Any] = {}
    if settings.arguments:
        record["template_arguments"] = dict(settings.arguments)
    if settings.date is not None and template and asks_for_date(template):
        record["template_date"] = settings.date
    return record


RECORD_KEYS = ("template_arguments", "template_date")
"""Keys of :func:`chat_record` in a head's config."""


def use_chat_record(tokenizer, record: Mapping[str, Any]) -> None:
    """Render as a head's rows were: with the arguments and the date in its config."""
    if tokenizer is not None and any(record.get(key) for key in RECORD_KEYS):
        set_chat_settings(tokenizer, record.get("template_arguments"), record.get("template_date"))


DATE_FILE = "template_date.json"
"""File in a run's or a store's folder with the day that its chat template was told."""


def kept_date(folder: Path) -> str | None:
    """The day that a folder's rows were rendered with, ``None`` if it says nothing.

    Raises:
        DataError: its file is broken; another day would make other rows.
    """
    path = folder / DATE_FILE
    if not path.is_file():
        return None
    return read_json(path, DataError, "remove it, and rows are rendered with today's date").get("template_date")


def keep_date(folder: Path, date: str) -> None:
    """Write it, so that the run or the dump goes on with the same one tomorrow."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / DATE_FILE, json.dumps({"template_date": date}) + "\n")
