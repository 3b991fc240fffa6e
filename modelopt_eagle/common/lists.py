"""Lists that are written as text with commas between, in options and in recipes."""

from __future__ import annotations

from modelopt_eagle.errors import EagleError


def split_list(text: str) -> list[str]:
    """``"q_proj, v_proj" -> ["q_proj", "v_proj"]``; parts may be empty, so that the caller can refuse them."""
    return [part.strip() for part in text.split(",")]


def parse_ids(text: str | None, option: str, error: type[EagleError]) -> tuple[int, ...] | None:
    """``"1, 14,26"`` or ``"1 14 26"`` as ``(1, 14, 26)``, in the order of the text.

    Args:
        text: what was given; ``None``: nothing.
        option: where, for the message.
        error: what is raised.

    Raises:
        EagleError: of the given class: no numbers, or a part that is none.
    """
    if text is None:
        return None
    parts = text.replace(",", " ").split()
    if not parts or not all(part.removeprefix("-").isdecimal() for part in parts):
        raise error(f"{option} takes numbers such as 1,14,26; found {text!r}")
    return tuple(map(int, parts))
