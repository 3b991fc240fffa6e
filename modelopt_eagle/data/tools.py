"""Tool calls and descriptions of tools, in the one form that chat templates take."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from modelopt_eagle.common.strict_json import parse_json
from modelopt_eagle.data.report import RowRejected

_NOTHING: tuple[Any, ...] = (None, [], {}, "", "[]", "{}", "null")


def tool_calls_of(turn: Mapping, place: str) -> tuple[dict, ...]:
    """The calls of an assistant's turn: ``tool_calls``, or the older ``function_call``.

    Returns:
        calls ``{"type": "function", "function": {"name", "arguments": {…}}}`` with their ids, arguments as an object.

    Raises:
        RowRejected: ``tool_role`` for a call without name or with arguments that are no JSON object.
    """
    calls = turn.get("tool_calls")
    if calls in _NOTHING:
        call = turn.get("function_call")
        calls = [] if call in _NOTHING else [call]
    if isinstance(calls, str):
        calls = _parsed(calls, place, "tool_calls")
    if isinstance(calls, Mapping):
        calls = [calls]
    if not isinstance(calls, list):
        raise RowRejected("tool_role", f"{place}: `tool_calls` must be a list, found {type(calls).__name__}")
    return tuple(tool_call(call, place) for call in calls)


def tool_call(call, place: str) -> dict:
    """One call in the form that templates take.

    Raises:
        RowRejected: see :func:`tool_calls_of`.
    """
    if isinstance(call, str):
        call = _parsed(call, place, "a tool call")
    inner = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str) or not inner["name"]:
        raise RowRejected("tool_role", f"{place}: a tool call must have a `name` and `arguments`, found {call!r:.80}")
    arguments: Any = next(
        (inner[key] for key in ("arguments", "parameters", "input") if inner.get(key) is not None), {}
    )
    if isinstance(arguments, str):
        arguments = _parsed(arguments or "{}", place, f"the arguments of {inner['name']}")
    if not isinstance(arguments, Mapping):
        raise RowRejected(
            "tool_role", f"{place}: the arguments of {inner['name']} must be a JSON object, found {arguments!r}"
        )
    check_plain(arguments, f"{place}: the arguments of {inner['name']}")
    made = {"type": "function", "function": {"name": inner["name"], "arguments": dict(arguments)}}
    return made | ({"id": call["id"]} if call.get("id") is not None else {})


def tools_of(row: Mapping, place: str) -> tuple[dict, ...]:
    """Descriptions of tools under ``tools`` or ``functions`` of a row.

    Raises:
        RowRejected: ``tool_role`` for anything but a list of described functions.
    """
    key = next((key for key in ("tools", "functions") if row.get(key) not in _NOTHING), None)
    if key is None:
        return ()
    tools = _parsed(row[key], place, key) if isinstance(row[key], str) else row[key]
    check_plain(tools, f"{place}: `{key}`")
    made = []
    for tool in tools if isinstance(tools, list) else [tools]:
        inner = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
            raise RowRejected(
                "tool_role", f"{place}: `{key}` must describe functions with a name, found {str(tool)[:80]}"
            )
        made.append({**tool, "type": "function", "function": dict(inner)} if "function" in tool
                    else {"type": "function", "function": dict(inner)})  # fmt: skip
    return tuple(made)


def _parsed(text: str, place: str, what: str):
    try:
        return parse_json(text, finite=False)
    except ValueError as error:
        raise RowRejected(
            "tool_role", f"{place}: {what} of this tool use is no JSON ({error}): {text[:80]!r}"
        ) from error


def check_plain(value, what: str) -> None:
    """Refuse what JSON does not have: a table or a program may hold dates and bytes.

    Raises:
        RowRejected: ``tool_role``.
    """
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise RowRejected("tool_role", f"{what} must be plain JSON values ({error})") from error
