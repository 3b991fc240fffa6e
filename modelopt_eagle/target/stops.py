"""What ends an answer: one rule, whoever asks.

A model names its end tokens in three places, written by different hands: its tokenizer (the token that closes a text or
a turn), ``generation_config.json`` (what its makers stop at when they serve it, often several) and ``config.json``
(what it was pre-trained with). They often disagree: a chat model closes its turns with one token and its documents with
another. All of them end an answer: none is ever part of one, and an engine stops at those of the tokenizer and of the
generation config too, so that a head trained, measured and served sees the same ends. Only ids that a user gives
replace them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from modelopt_eagle.common.text import first_line
from modelopt_eagle.errors import TargetError
from modelopt_eagle.target.checkpoint_files import hub_file

GENERATION_CONFIG = "generation_config.json"


def find_end_token_ids(tokenizer: Any, generation_config: Any, *configs: Any) -> tuple[int, ...]:
    """The ids that end an answer of a model, ascending: those of all its sources together.

    Args:
        tokenizer: with ``eos_token_id``; ``None`` if the model has none.
        generation_config: of transformers, with ``eos_token_id`` (one id, several or ``None``); ``None`` without one.
        configs: the model's config, and its text config if that is another.

    Returns:
        Ids; empty if no source names one. Negative ones, by which some configs say "none", are left out.
    """
    ids: set[int] = set()
    for source in (tokenizer, generation_config, *configs):
        named = getattr(source, "eos_token_id", None)
        ids.update(named if isinstance(named, (list, tuple)) else () if named is None else (named,))
    return tuple(sorted(int(token) for token in ids if token >= 0))


def read_generation_config(place: Path | str, revision: str | None = None) -> Any:
    """The ``GenerationConfig`` in a model's files, ``None`` if they hold none.

    Args:
        place: folder or hub id, from :func:`~modelopt_eagle.target.load.resolve`.
        revision: branch, tag or commit on the hub.

    Raises:
        TargetError: the file cannot be read; without it the model would stop elsewhere.
    """
    from transformers import GenerationConfig

    path = place / GENERATION_CONFIG if isinstance(place, Path) else hub_file(place, GENERATION_CONFIG, revision)
    if path is None or not path.is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(str(path.parent))
    except (OSError, ValueError, TypeError) as error:
        raise TargetError(
            f"{path} cannot be read ({first_line(error)}): fetch it again, or remove it to stop at the end "
            "tokens of tokenizer and config.json alone"
        ) from error
