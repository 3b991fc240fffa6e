"""What stands beside the text of a turn: reasoning, whether it is to be learned, how it ended, and keys nobody reads.

Data sets name these in many ways. Every name that is known is read; a key that is not is named in the report, and one
that looks like reasoning refuses the row, since the text alone would then not be all that was written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from modelopt_eagle.common.strict_json import parse_json
from modelopt_eagle.data.report import RowRejected

REASONING_KEYS = (
    "reasoning_content", "reasoning", "thinking", "thought", "thoughts", "thinking_content", "reasoning_text",
    "reasoning_details", "thinking_blocks", "think",
)  # fmt: skip
"""Names under which an assistant's turn holds its reasoning, besides parts of its content."""

_LOOKS_LIKE_REASONING = re.compile(r"reason|think|thought|cot\b|chain_of|rationale", re.IGNORECASE)

_LEARNED_KEYS = (
    "weight", "train", "trainable", "training", "loss", "loss_mask", "loss_weight", "learn", "supervise", "supervised",
)  # fmt: skip
_MASKED_KEYS = ("masked", "mask", "ignore", "no_loss")
_SPELLED = {"true": 1, "yes": 1, "1": 1, "1.0": 1, "false": 0, "no": 0, "0": 0, "0.0": 0}

_FINISH_KEYS = ("finish_reason", "stop_reason", "finishReason", "stopReason")
_CUT = {
    "length", "max_tokens", "max_new_tokens", "max_output_tokens", "max_length", "model_length", "token_limit",
    "truncated", "incomplete", "content_filter", "abort", "aborted", "cancelled", "error", "timeout",
}  # fmt: skip
_ENDED = {
    "stop", "end_turn", "eos", "eos_token", "end", "stop_sequence", "tool_calls", "tool_use", "function_call",
    "complete", "completed", "finished", "tool_call", "",
}  # fmt: skip

_OTHER_KEYS = {"role", "from", "content", "value", "text", "name", "tool_calls", "function_call", "tool_call_id",
               "parts", "token_ids", "images", "image"}  # fmt: skip
# what describes a turn and changes nothing of what was written
_DESCRIPTIONS = {
    "id", "uuid", "message_id", "parent_id", "timestamp", "created", "created_at", "updated_at", "date", "time",
    "model", "index", "turn", "lang", "language", "source", "metadata", "meta", "usage", "logprobs", "score", "rating",
    "refusal", "annotations", "audio", "object", "type", "status", "end_turn", "author", "tokens",
    "num_tokens", "token_count", "citations",
}  # fmt: skip
_KNOWN = {*REASONING_KEYS, *_LEARNED_KEYS, *_MASKED_KEYS, *_FINISH_KEYS, *_OTHER_KEYS, *_DESCRIPTIONS}


def reasoning_of(turn: Mapping, place: str) -> str | None:
    """The reasoning that a turn holds in a field of its own, whatever the field's name.

    Raises:
        RowRejected: ``separate_reasoning`` where two fields hold different ones, or one holds no text, or a field
            looks like reasoning and is none that is known.
    """
    found: dict[str, str] = {}
    for key in REASONING_KEYS:
        value = turn.get(key)
        if value in (None, "", [], {}, False, True):  # a flag is no text
            continue
        text = _reasoning_text(value)
        if text is None:
            raise RowRejected(
                "separate_reasoning", f"{place}: `{key}` holds no plain text ({type(value).__name__}): write it as text"
            )
        if text.strip():
            found[key] = text
    for key, value in turn.items():
        if (
            key not in _KNOWN
            and _LOOKS_LIKE_REASONING.search(str(key))
            and isinstance(value, (str, list, dict))
            and value
        ):
            raise RowRejected(
                "separate_reasoning",
                f"{place}: `{key}` looks like reasoning, and no such key is known: rename it to `reasoning`, or remove "
                "it if the target did not write it",
            )
    if len({text.strip() for text in found.values()}) > 1:
        raise RowRejected("separate_reasoning", f"{place}: {' and '.join(found)} hold different reasoning: keep one")
    return next(iter(found.values()), None)


def _reasoning_text(value) -> str | None:
    """A text, or the texts of a list of parts as some servers give reasoning; ``None`` for anything else."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list):
        return None
    parts = []
    for part in value:
        if isinstance(part, str):
            parts.append(part)
            continue
        if not isinstance(part, Mapping):
            return None
        text = next((part[key] for key in ("text", "thinking", "content", "summary") if part.get(key)), None)
        if not isinstance(text, str):
            return None
        parts.append(text)
    return "".join(parts)


def is_learned(turn: Mapping, place: str) -> bool | None:
    """Whether a turn says that it is to be learned; ``None`` if it says nothing.

    Raises:
        RowRejected: ``turn_weight`` for a mark that is neither on nor off: answers are learned or context, there are no
            shares between; ``malformed_message`` for two marks that contradict each other.
    """
    said: dict[str, bool] = {}
    for key in (*_LEARNED_KEYS, *_MASKED_KEYS):
        if turn.get(key) is not None:
            value = _truth(turn[key])
            if value is None:
                raise RowRejected(
                    "turn_weight",
                    f"{place}: `{key}` must be 0 or 1 (or true, false), found {turn[key]!r:.80}: answers are learned "
                    "or not, no weight between is trained; round it, or take it out",
                )
            said[key] = value if key in _LEARNED_KEYS else not value
    if len(set(said.values())) > 1:
        raise RowRejected("malformed_message", f"{place}: {' and '.join(sorted(said))} contradict each other")
    return next(iter(said.values()), None)


def _truth(value) -> bool | None:
    if isinstance(value, str):
        value = _SPELLED.get(value.strip().lower())
    return bool(value) if isinstance(value, (bool, int, float)) and value in (0, 1) else None


def finish_reason(value: Mapping) -> tuple[str | None, str | None]:
    """How a turn or a row says that it ended.

    Args:
        value: a turn or a row; its ``metadata`` is looked at, too, also where it is JSON text.

    Returns:
        ``"length"`` for an answer that was cut before the target ended it, ``"stop"`` for a whole one, ``None`` if
        nothing is said; and a reason that is not known, if there is one.
    """
    for place in (value, _object(value.get("metadata")), _object(value.get("meta"))):
        if place is None:
            continue
        for key in _FINISH_KEYS:
            reason = place.get(key)
            if isinstance(reason, list) and len(reason) == 1:
                (reason,) = reason
            if not isinstance(reason, str):
                if reason is not None and key.lower().startswith("finish"):
                    return None, f"{reason!r:.80}"
                continue  # a number is the token that an engine stopped at
            name = reason.strip().lower()
            if name in _CUT:
                return "length", None
            if name in _ENDED:
                return "stop", None
            if key.lower().startswith("finish"):
                return None, reason
        if place.get("truncated") is True:
            return "length", None
    return None, None


def _object(value: Any) -> Mapping | None:
    """A mapping, or the one that a JSON text holds."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = parse_json(value)
        except ValueError:
            return None
    return value if isinstance(value, Mapping) else None


def unread_keys_of_a_row(row: Mapping, pair: bool) -> list[str]:
    """Keys beside the turns of a row that would change what is learned of it if they stood in a turn: marks, reasoning.

    Args:
        pair: the row is a question and its answer, whose reasoning is read from beside them.
    """
    marks = [key for key in (*_LEARNED_KEYS, *_MASKED_KEYS) if row.get(key) is not None]
    thoughts = [
        str(key) for key, value in row.items()
        if (key in REASONING_KEYS or _LOOKS_LIKE_REASONING.search(str(key))) and isinstance(value, (str, list, dict))
        and value and not (pair and key in REASONING_KEYS) and key not in _FINISH_KEYS
    ]  # fmt: skip
    return sorted({*marks, *thoughts} - {"loss_mask"})  # that one is of rows of ids


def unread_keys(turn: Mapping) -> list[str]:
    """Keys of a turn that hold something and that nobody here reads."""
    return sorted(str(key) for key, value in turn.items() if key not in _KNOWN and value not in (None, "", [], {}))
