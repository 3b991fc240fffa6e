"""Where reasoning begins and ends in a text, by its tags alone: a tag, and the same with a stroke before its name."""

from __future__ import annotations

import re

_TAG = re.compile(r"([<\[◁])(\|?)(\w+)(\|?)([>\]▷])")


def open_tag(text: str) -> tuple[str, str] | None:
    """The tag that a text ends with, white space apart, and the one that closes it; ``None`` if it ends otherwise."""
    end = text.rstrip()
    found = None
    for match in _TAG.finditer(end, max(0, len(end) - 40)):
        if match.end() == len(end):
            found = match
    return None if found is None else (found[0], _closing(found))


def _closing(match: re.Match) -> str:
    left, bar, name, other, right = match.groups()
    return f"{left}{bar}/{name}{other}{right}"


def reasoning_end(before: str, answer: str) -> int:
    """Characters of an answer up to the end of the reasoning that it begins with, white space behind it included.

    Args:
        before: the prompt, which may have opened the reasoning.
        answer: what stands behind it.

    Returns:
        0 if the answer begins with no reasoning.
    """
    opened = open_tag(before)
    if opened is None or opened[1] not in answer:
        match = _TAG.match(answer, len(answer) - len(answer.lstrip()))
        if match is None or _closing(match) not in answer:
            return 0
        closing = _closing(match)
    else:
        closing = opened[1]
    end = answer.index(closing) + len(closing)
    return end + len(answer[end:]) - len(answer[end:].lstrip())


def is_empty_pair(text: str) -> bool:
    """Whether a text is an opening tag and its closing one with nothing but white space inside."""
    text = text.strip()
    match = _TAG.match(text)
    if match is None:
        return False
    rest = text[match.end() :]
    return rest.strip() == _closing(match)
