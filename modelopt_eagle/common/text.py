"""Text that others wrote, made fit for a terminal, a Markdown page and a shell."""

from __future__ import annotations

import html
import re
import shlex

_HIDDEN = [*range(0x20), 0x7F, *range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x2028, 0x2029]
_ESCAPES = {code: repr(chr(code))[1:-1] for code in _HIDDEN}
_LINES = {code: escape for code, escape in _ESCAPES.items() if chr(code) not in "\n\t"}
_MARKDOWN = re.compile(r"([\\`*\[\]|~$]|(?<!\w)_|_(?!\w))")


def visible(text: str, lines: bool = False) -> str:
    """A text whose control characters, and marks that turn the direction of writing, are shown as escapes.

    Printed raw, they move the cursor, colour or hide what stands before, or give orders to the terminal.

    Args:
        lines: let newlines and tabs be what they are.
    """
    return text.translate(_LINES if lines else _ESCAPES)


def markdown(text: str) -> str:
    """A text inside a line of Markdown, shown as it is: no HTML, link, image, table cell or formatting of its own."""
    return _MARKDOWN.sub(r"\\\1", html.escape(visible(text), quote=False))


def markdown_with_code(text: str) -> str:
    """:func:`markdown` of a text whose parts between backticks stay code, if every backtick has its partner."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        return markdown(text)
    return "".join(f"`{visible(part)}`" if number % 2 else markdown(part) for number, part in enumerate(parts))


def argument(text: str) -> str:
    """A text as one argument of a shell command that people copy; control characters are shown as escapes."""
    return shlex.quote(visible(text).replace("`", "'"))


def first_line(error: object) -> str:
    """The first line of an error's text that says something, or the error's type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def byte_text(count: float) -> str:
    """Bytes as people read them."""
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"
