"""Images in a conversation: where they stand in a turn, the files they come from, and their place in a rendered row.

A target's processor puts many placeholder tokens where the chat template wrote one. The text is rendered first, as for
any row; then each placeholder is replaced as the processor does, the answers' positions move along, and the row is
tokenised like any other. No position is guessed: the ids must equal the processor's own.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modelopt_eagle.common.package import require_extra
from modelopt_eagle.data.report import RowRejected
from modelopt_eagle.errors import DataError, ImageError

MARK = "<image>"
"""How texts of the LLaVA layout say where an image of the row stands."""

_PATH_KEYS = ("image", "path", "url", "image_url")


@dataclass(frozen=True)
class Image:
    """An image in a turn: a local file, or ``""`` while it waits for the next one of the row's ``images``."""

    path: str


@dataclass(frozen=True)
class RowImages:
    """The images of a tokenised row.

    Attributes:
        text: the rendered row with one placeholder an image, which the target's processor turns into its inputs.
        paths: the files, in the order of the text.
        digest: hash of their bytes, so that another image under the same name is noticed.
        end: tokens of the row up to its last placeholder; a row may be cut only behind it.
    """

    text: str
    paths: tuple[str, ...]
    digest: str
    end: int = 0

    def read(self) -> list:
        """The images as RGB pictures of Pillow.

        Raises:
            DataError: a file is gone, cannot be read, or is another one than when the row was tokenised.
        """
        pictures, digest = read_pictures(self.paths)
        if digest != self.digest:
            raise DataError(f"{', '.join(self.paths)}: an image has changed since the data were read; run it again")
        return pictures


def parts_of(content: list, folder: Path | None, place: str) -> tuple[str | Image, ...] | None:
    """A turn's ``content`` list as texts and images in their order; ``None`` if it holds anything else.

    Args:
        content: parts ``{"type": "text", "text"}`` and ``{"type": "image", "image" | "path" | "url"}`` (or OpenAI's
            ``image_url``); an image without a file takes the next one of the row's ``images``.
        folder: what relative file names are relative to.

    Raises:
        RowRejected: ``image_not_local``, ``image_missing``.
    """
    parts: list[str | Image] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            parts.append(part["text"])
        elif kind in ("image", "image_url"):
            value = next((part[key] for key in _PATH_KEYS if part.get(key) is not None), None)
            if isinstance(value, Mapping):
                value = value.get("url")
            parts.append(Image("") if value is None else local_image(value, folder, place))
        else:
            return None
    return tuple(parts)


def local_image(value, folder: Path | None, place: str) -> Image:
    """The image that a row names.

    Raises:
        RowRejected: ``image_not_local`` for anything but a file name, ``image_missing``.
    """
    if not isinstance(value, str) or value.startswith(("http://", "https://", "data:")):
        found = f"{value[:40]!r}" if isinstance(value, str) else type(value).__name__
        raise RowRejected("image_not_local", f"{place}: expected the name of an image file, found {found}: save it")
    path = Path(value.removeprefix("file://")).expanduser()
    path = path if folder is None else folder / path
    if not path.is_file():
        raise RowRejected("image_missing", f"{place}: no image file {path} (names are relative to the data file)")
    return Image(str(path))


def fill_in(turns: list[tuple[str | Image, ...]], value: dict, folder: Path | None, place: str, first_user: int):
    """Give the images under a row's ``image`` or ``images`` their places in its turns.

    They go to the parts that are images without a file, or else to the ``<image>`` marks in the texts, in order; where
    there is neither, they stand before the first user turn's text.

    Args:
        turns: parts of each turn.
        first_user: index of the first user turn.

    Returns:
        the turns with every image named.

    Raises:
        RowRejected: ``image_count``, and those of :func:`local_image`.
    """
    named: Any = next((value[key] for key in ("images", "image") if value.get(key)), [])
    images = [local_image(name, folder, place) for name in (named if isinstance(named, list) else [named])]
    waiting = sum(part == Image("") for parts in turns for part in parts)
    if images and not waiting:
        turns = [_split_marks(parts) for parts in turns]
        waiting = sum(part == Image("") for parts in turns for part in parts)
        if not waiting and first_user < len(turns):
            turns[first_user] = (*images, *turns[first_user])
            return turns
    if waiting != len(images):
        raise RowRejected("image_count", f"{place}: {waiting} places for images, {len(images)} under `images`")
    files = iter(images)
    return [tuple(next(files) if part == Image("") else part for part in parts) for parts in turns]


def _split_marks(parts: tuple[str | Image, ...]) -> tuple[str | Image, ...]:
    """Texts cut at their ``<image>`` marks, an image without a file in place of each."""
    result: list[str | Image] = []
    for part in parts:
        pieces: Sequence[str | Image] = part.split(MARK) if isinstance(part, str) else [part]
        for number, piece in enumerate(pieces):
            result += [Image("")] * (number > 0)
            result += [piece] if piece else []
    return tuple(result)


def read_pictures(paths: tuple[str, ...]) -> tuple[list, str]:
    """Upright RGB pictures of Pillow, and the hash of the files.

    Raises:
        RowRejected: ``image_missing``, ``image_unreadable``.
        MissingExtraError: Pillow is not installed.
    """
    pil, operations = require_extra("PIL.Image", "vision"), require_extra("PIL.ImageOps", "vision")
    pictures, digest = [], hashlib.sha256()
    for path in paths:
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise RowRejected("image_missing", f"{path}: the image cannot be opened: {error.strerror}") from error
        try:
            with pil.open(io.BytesIO(data)) as picture:
                pictures.append(_on_white(operations.exif_transpose(picture), pil))
        except Exception as error:  # Pillow raises many kinds for damaged files
            raise RowRejected("image_unreadable", f"{path}: not an image that Pillow can read: {error}") from error
        digest.update(hashlib.sha256(data).digest())
    return pictures, digest.hexdigest()[:16]


def _on_white(picture, pil):
    """A picture as RGB; what is transparent becomes white, as in vLLM."""
    if "A" not in picture.getbands() and "transparency" not in picture.info:
        return picture.convert("RGB")
    picture = picture.convert("RGBA")
    white = pil.new("RGBA", picture.size, (255, 255, 255, 255))
    return pil.alpha_composite(white, picture).convert("RGB")


def expand_images(row, vision):
    """A rendered row as the target reads it: each placeholder replaced as the target's processor does.

    Args:
        row: ``RenderedRow`` whose messages hold images.
        vision: the target's ``VisionProcessor``.

    Returns:
        the row with its text expanded, its spans moved and ``images`` set, and the processor's ids of that text.

    Raises:
        RowRejected: ``image_missing``, ``image_unreadable``, ``image_not_rendered``, ``image_in_answer``,
            ``image_refused``.
    """
    paths = tuple(image.path for message in row.messages for image in message.images)
    pictures, digest = read_pictures(paths)
    mark = vision.image_token
    written = row.text.count(mark)
    if written != len(paths):
        raise RowRejected(
            "image_not_rendered", f"the chat template wrote {written} placeholders {mark!r} for {len(paths)} images"
        )
    try:
        replaced, ids = vision.expand(row.text, pictures)
    except ImageError as error:
        raise RowRejected("image_refused", str(error)) from error
    starts = []
    for _ in paths:
        starts.append(row.text.index(mark, starts[-1] + len(mark) if starts else 0))
    pieces, end = [], 0
    for start, new in zip(starts, replaced, strict=True):
        pieces += [row.text[end:start], new]
        end = start + len(mark)

    def moved(position: int) -> int:
        gained = [len(new) - len(mark) for start, new in zip(starts, replaced, strict=True) if start < position]
        return position + sum(gained)

    spans = []
    for span in row.spans:
        if any(span.start <= start < span.tail_end for start in starts):
            raise RowRejected("image_in_answer", f"turn {span.turn}: the answer holds the image placeholder {mark!r}")
        spans.append(
            replace(span, start=moved(span.start), body_end=moved(span.body_end), tail_end=moved(span.tail_end))
        )
    seen = [place for place, token in enumerate(ids) if token in vision.image_token_ids]
    if not seen:
        raise RowRejected("image_refused", "the target's processor put no image token into the text")
    images = RowImages(row.text, paths, digest, seen[-1] + 1)
    return replace(row, text="".join([*pieces, row.text[end:]]), spans=spans, images=images), ids
