"""Prompts to be answered: the questions of a validation run, or what answers are synthesised for.

Three row formats, detected per row:

* ``{"id", "category", "turns": [str, ...]}``: ours, and MT-Bench's ``question.jsonl`` (``question_id``, not ``id``);
* ``{"messages": [...]}`` or ``{"conversations": [...]}``: the user turns are taken, the assistant turns are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from modelopt_eagle.data.files import ASSETS, SourceRow, read_rows
from modelopt_eagle.data.roles import messages_of, row_id
from modelopt_eagle.errors import DataError

_NAMES = {"quickstart": ASSETS / "prompts.jsonl", "mt_bench": "HuggingFaceH4/mt_bench_prompts"}
_NO_IMAGES = (
    "prompts with images are not supported, the generator reads text only; training and its evaluation take rows with "
    "images, here give prompts without"
)


@dataclass(frozen=True)
class Prompt:
    """A conversation without its answers: ``turns`` are the user's, asked one after the other."""

    id: str
    category: str
    turns: tuple[str, ...]
    system: str | None = None


def load_prompts(source: str | Path | Sequence[str | Path], limit: int | None = None) -> list[Prompt]:
    """Read prompts from files, or by name.

    Args:
        source: one or several files; ``"quickstart"`` for the 80 prompts the package ships; ``"mt_bench"`` for MT-Bench
            from the hub (extra ``data``); without a network give the path of its ``question.jsonl``.
        limit: take this many, spread evenly over the file, so that files sorted by category keep their mix.

    Raises:
        DataError: missing, empty or broken file (with line), a row in none of the three formats, or an id used twice.
    """
    prompts = [_prompt(row, index) for index, row in enumerate(read_rows(source, _NAMES))]
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
        return load_prompts(prompts)
    made = [Prompt(f"prompt-{i}", "all", (p,)) if isinstance(p, str) else p for i, p in enumerate(prompts)]
    if wrong := next((p for p in made if not isinstance(p, Prompt)), None):
        raise DataError(f"expected prompts or texts, found {type(wrong).__name__}: load_prompts(FILE) reads them")
    return made


def _prompt(row: SourceRow, index: int) -> Prompt:
    value = row.value
    identifier = row_id(row, index)
    category = str(value.get("category") or "all")
    turns = value.get("turns", value.get("prompt"))
    if turns is not None and (value.get("image") or value.get("images")):
        raise DataError(f"{row.place}: {_NO_IMAGES}")
    if isinstance(turns, str):
        turns = [turns]
    if turns is not None:
        if not (isinstance(turns, list) and turns and all(isinstance(turn, str) and turn.strip() for turn in turns)):
            raise DataError(f"{row.place}: `turns` must be a non-empty list of non-empty texts")
        return Prompt(identifier, category, tuple(turns))
    messages = messages_of(row)
    if any(message.images for message in messages):
        raise DataError(f"{row.place}: {_NO_IMAGES}")
    system = "\n\n".join(message.content for message in messages if message.role == "system") or None
    asked = tuple(message.content for message in messages if message.role == "user")
    if not asked:
        raise DataError(f"{row.place}: no user turn to answer")
    return Prompt(identifier, category, asked, system)
