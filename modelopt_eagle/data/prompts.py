"""Prompts to be answered: the questions of a validation run, or what answers are synthesised for.

Row formats, detected per row:

* ``{"id", "category", "turns": [str, ...]}``: ours, and MT-Bench's ``question.jsonl`` (``question_id``, not ``id``);
* ``{"prompt": str or [str, ...]}``, the same under another name, of rows without messages;
* ``{"messages": [...]}`` or ``{"conversations": [...]}``: the user turns are taken, the assistant turns are left out;
* ``{"task_id", "prompt"}``: HumanEval's, the prompt as it stands; ``{"question", "answer"}``: GSM8K's.

``system``, ``tools`` and ``chat_template_kwargs`` beside them are read as in conversations, and so are images where
they can be used (``docs/data.md``).
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from modelopt_eagle.data.conversations import template_arguments_of
from modelopt_eagle.data.files import ASSETS, SourceRow, read_rows
from modelopt_eagle.data.roles import ID_KEYS, Message, messages_of, refuse_half_characters, row_id
from modelopt_eagle.data.tools import tools_of
from modelopt_eagle.errors import DataError

_NAMES: dict[str, str | Path] = {"quickstart": ASSETS / "prompts.jsonl", "mt_bench": "HuggingFaceH4/mt_bench_prompts"}
_NO_IMAGES = "prompts with images are not supported here, only by validation (ar_validate): give prompts of text"


@dataclass(frozen=True)
class Prompt:
    """A conversation without its answers.

    Attributes:
        turns: the user's texts, asked one after the other.
        system: a system text before them.
        parts: of each turn, its texts and images in order, empty for a turn of text; empty without any image.
        numbered: whether the id was made from the row's number, since the row has none.
        tools: descriptions of tools.
        template_arguments: variables of the chat template for this prompt alone.
    """

    id: str
    category: str
    turns: tuple[str, ...]
    system: str | None = None
    parts: tuple[tuple, ...] = ()
    numbered: bool = False
    tools: tuple[dict, ...] = ()
    template_arguments: Mapping[str, Any] = field(default_factory=dict)

    def message(self, turn: int) -> Message:
        """The user's turn."""
        return Message("user", self.turns[turn], None, self.parts[turn] if self.parts else ())

    @property
    def beginning(self) -> list[Message]:
        """The turns before the first question."""
        return [Message("system", self.system)] if self.system else []

    @property
    def digest(self) -> str:
        """Hash of what is asked, whatever the prompt is called."""
        asked = [self.system, self.turns, [[str(part) for part in parts] for parts in self.parts], self.tools,
                 dict(self.template_arguments)]  # fmt: skip
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def load_prompts(
    source: str | Path | Sequence[str | Path], limit: int | None = None, *, images: bool = False
) -> list[Prompt]:
    """Read prompts from files, or by name.

    Args:
        source: one or several files; ``"quickstart"`` for the 80 prompts the package ships; ``"mt_bench"`` for MT-Bench
            from the hub (extra ``data``); without a network give the path of its ``question.jsonl``.
        limit: take this many, spread evenly over the file, so that files sorted by category keep their mix.
        images: whether prompts may have images.

    Returns:
        the prompts, in the order of the files.

    Raises:
        DataError: missing, empty or broken file (with line), a row in none of the formats, an id used twice,
            or an image that is missing or not wanted.
    """
    prompts = [prompt_of(row, index, images) for index, row in enumerate(read_rows(source, _NAMES))]
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise DataError(f"the id {prompt.id!r} stands twice in {source}; ids must be unique")
        seen.add(prompt.id)
    if limit is not None and limit < 1:
        raise DataError(f"the number of prompts must be at least 1, found {limit}")
    if limit is not None and limit < len(prompts):
        prompts = [prompts[index * len(prompts) // limit] for index in range(limit)]
    return prompts


def as_prompts(prompts: str | Path | Sequence[Prompt | str]) -> list[Prompt]:
    """Prompts as they are, texts as prompts of one turn, a file or a name as :func:`load_prompts` reads it.

    Raises:
        DataError: something else in the list.
    """
    if isinstance(prompts, (str, Path)):
        return load_prompts(prompts, images=True)
    made = [Prompt(f"prompt-{i}", "all", (p,)) if isinstance(p, str) else p for i, p in enumerate(prompts)]
    if wrong := next((p for p in made if not isinstance(p, Prompt)), None):
        raise DataError(f"expected prompts or texts, found {type(wrong).__name__}: load_prompts(FILE) reads them")
    return made


def prompt_of(row: SourceRow, index: int, images: bool = False) -> Prompt:
    """The prompt in a row.

    Raises:
        DataError: see :func:`load_prompts`.
    """
    value = row.value
    identifier = row_id(row, index)
    numbered = not any(value.get(key) is not None for key in ID_KEYS)
    if numbered and value.get("task_id") is not None:
        identifier, numbered = str(value["task_id"]), False
    category = str(value.get("category") or "all")
    refuse_half_characters(row.place, identifier, category)
    tools, arguments = tools_of(value, row.place), template_arguments_of(row)
    turns = value.get("turns")
    if turns is None and not (value.get("messages") or value.get("conversations")):
        turns = value.get("prompt")  # beside messages it is the first of them alone
        if turns is None and "answer" in value:
            turns = value.get("question")
    if isinstance(turns, str):
        turns = [turns]
    if turns is not None:
        if not (isinstance(turns, list) and turns and all(isinstance(turn, str) and turn.strip() for turn in turns)):
            raise DataError(f"{row.place}: `turns` must be a non-empty list of non-empty texts")
        row = replace(row, value=value | {"messages": [{"role": "user", "content": turn} for turn in turns]})
    messages = messages_of(row)
    if not images and any(message.images for message in messages):
        raise DataError(f"{row.place}: {_NO_IMAGES}")
    system = "\n\n".join(message.content for message in messages if message.role == "system") or None
    asked = [message for message in messages if message.role == "user"]
    if not asked:
        raise DataError(f"{row.place}: no user turn to answer")
    parts = tuple(message.parts for message in asked) if any(message.images for message in asked) else ()
    texts = tuple(message.content for message in asked)
    return Prompt(identifier, category, texts, system, parts, numbered, tools, arguments)
