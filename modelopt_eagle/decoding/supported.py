"""What a target's own code can read: one list of the kinds that take more care than a mask and positions.

A round gives the target positions by depth and a mask of its own, and its rows have lengths of their own. Some
architectures do not read those: they count places in the cache, or choose numbers by the longest row. Each is named
here once; what would give another text than the target's own is refused before anything runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

from modelopt_eagle.decoding.masks import BOTH, STATES
from modelopt_eagle.decoding.recurrent import is_recurrent
from modelopt_eagle.errors import DecodingError
from modelopt_eagle.target.model import Target


@dataclass(frozen=True)
class Restriction:
    """A target that counts a token's place in the cache as its position, so trees and ragged rows are out of reach.

    Attributes:
        what: how it does so, for the message.
        beyond: slots up to which it makes no difference.
        own_mask: the model takes no mask of ours; it makes its own, which is right for rows of one length.
    """

    what: str
    beyond: int = 0
    own_mask: bool = False


def restrictions(target: Target) -> list[Restriction]:
    """Those of a target, empty for most."""
    config, found = target.config, []
    if is_recurrent(config):
        kinds = ", ".join(sorted({kind for kind in config.layer_types if kind in (*STATES, *BOTH)}))
        found.append(Restriction(f"its recurrent layers ({kinds}) keep one state a row"))
    if _has_alibi(config):
        found.append(Restriction("its attention bias (ALiBi) counts slots of the cache, and takes no mask", 0, True))
    elif "position_ids" not in inspect.signature(target.parts.backbone.forward).parameters:
        found.append(Restriction("its forward takes no position_ids: it counts slots of the cache"))
    if "local" in (getattr(config, "attention_layers", None) or ()):
        window = int(config.window_size)
        found.append(Restriction(f"its local layers count a window of {window} slots of the cache", window))
    rope_layers = getattr(config, "no_rope_layers", None)
    if getattr(config, "attn_temperature_tuning", False) and rope_layers is not None and not all(rope_layers):
        scale = int(config.floor_scale)
        what = f"its layers without rotary positions scale queries by slots of the cache from {scale} on"
        found.append(Restriction(what, scale - 1))
    return found


def takes_no_mask(target: Target) -> bool:
    """Whether the model must be run without a mask of ours."""
    return any(restriction.own_mask for restriction in restrictions(target))


def needs_numbers(target: Target, slots: int) -> str | None:
    """What a target's code takes from Python's numbers and not from positions and masks, so that a recording of its
    pass over ``slots`` slots would be wrong for other lengths; ``None``: nothing."""
    found = (one.what for one in restrictions(target) if not one.beyond or slots > one.beyond)
    return next(found, None)


def check_shape(target: Target, siblings: bool, ragged: bool, slots: int | None, instead: str = "") -> None:
    """Check that a target can read trees, or rows of different lengths.

    Args:
        siblings: trees whose nodes may have siblings.
        ragged: rows of different lengths.
        slots: most slots of a row; ``None``: not known yet.
        instead: of rows of different lengths, for the message: what to do.

    Raises:
        DecodingError: it cannot.
    """
    for restriction in restrictions(target):
        if restriction.beyond and (slots is None or slots <= restriction.beyond):
            continue
        reach = f" beyond {restriction.beyond} slots" if restriction.beyond else ""
        if siblings:
            raise DecodingError(
                f"{target.name} cannot verify trees with siblings{reach}: {restriction.what}. Draft a chain "
                '(mode="chain")'
            )
        if ragged:
            raise DecodingError(
                f"{target.name} cannot read rows of different lengths together{reach}: {restriction.what}. {instead}"
            )


def position_limit(target: Target, prompts: Sequence[int], tokens: Sequence[int]) -> int | None:
    """Positions that a run may use: below what the target's tables, or its rotary frequencies, were made for.

    Longrope takes other frequencies for the whole batch once one position lies beyond its original length, and keys
    read before are of no use then. So a call stays on one side: all answers end before that length, or all prompts
    reach beyond it.

    Args:
        target: the frozen target.
        prompts: tokens of each prompt.
        tokens: tokens of each prompt and its longest answer.

    Returns:
        The number of positions, ``None`` if any will do.

    Raises:
        DecodingError: more positions than the target was made for, or a call on both sides.
    """
    limit = _table_length(target.config)
    if limit is not None and max(tokens) > limit:
        raise DecodingError(
            f"prompt and max_new_tokens make {max(tokens)} positions, {target.name} was made for {limit}: "
            "shorten the prompt or lower max_new_tokens"
        )
    original = _longrope_length(target.config)
    if original is None or min(prompts) > original:
        return limit
    if max(tokens) <= original:
        return original
    if any(count <= original for count in tokens) or max(prompts) > original:
        raise DecodingError(
            f"{target.name} takes other rotary frequencies (longrope) for a whole batch once a row is longer than "
            f"{original} tokens: answer prompts that stay below and prompts above in calls of their own"
        )
    raise DecodingError(
        f"{target.name} takes other rotary frequencies (longrope) beyond {original} tokens, and what it read before "
        f"is of no use then: an answer must end before, found {min(prompts)} prompt tokens and {max(tokens)} with the "
        "answer; lower max_new_tokens, or go on in a new call from the longer text"
    )


def run_limit(target: Target, tokens: int) -> int | None:
    """The limit of :func:`position_limit` for a call of at most ``tokens`` positions that it let pass."""
    limits = (_longrope_length(target.config), _table_length(target.config))
    return min((limit for limit in limits if limit is not None and tokens <= limit), default=None)


def _table_length(config) -> int | None:
    return getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)


def _has_alibi(config) -> bool:
    return config.model_type in ("bloom", "mpt") or bool(getattr(config, "alibi", False))


def _longrope_length(config) -> int | None:
    """Tokens from which longrope changes its frequencies; ``None`` without longrope."""
    given = getattr(config, "rope_parameters", None) or {}
    kinds = [given, *(kind for kind in given.values() if isinstance(kind, dict))]  # one for all layers, or one a kind
    for kind in kinds:
        if kind.get("rope_type", kind.get("type")) == "longrope":
            return int(kind.get("original_max_position_embeddings") or config.original_max_position_embeddings)
    return None
