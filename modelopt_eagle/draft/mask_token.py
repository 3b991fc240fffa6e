"""The mask token of drafters that read one: an id of the target's vocabulary that its text does not use."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from modelopt_eagle.errors import RecipeError

MEANT_FOR_IT = ("mask", "unused", "reserved")
"""Words in the name of a token that was kept free for uses like this one."""


def settle_mask_token(config: Any, asked: int | None, tables: Any, counts: Tensor, key: str) -> None:
    """Choose the mask token of a new head, and hold a given one against the text.

    Args:
        config: of the head; its ``mask_token_id`` is filled in where it is ``None``.
        asked: the recipe's; ``None`` leaves the choice.
        tables: the target's, of which tokenizer and end tokens are read.
        counts: ``[V]`` how often each token is to be learned.
        key: of the recipe that names one.

    Raises:
        RecipeError: a mask token that the text uses, or another one than a continued head has.
    """
    if config.mask_token_id is None:
        config.mask_token_id = choose_mask_token(counts, tables.tokenizer, list(tables.end_token_ids), key)
    if asked not in (None, config.mask_token_id):
        raise RecipeError(f"{key} is {asked}, the head was trained with {config.mask_token_id}: leave it at null")
    check_mask_token(config.mask_token_id, counts, key)


def check_mask_token(token: int, counts: Tensor, key: str) -> None:
    """Refuse a mask token that the target writes itself.

    Args:
        token: its id.
        counts: ``[V]`` how often each token is to be learned.
        key: of the recipe that names another one.

    Raises:
        RecipeError: it lies outside the vocabulary, or is among the learned tokens.
    """
    if not 0 <= token < len(counts):
        raise RecipeError(f"{key} is {token}, the target has {len(counts)} tokens: name one that its text does not use")
    if used := int(counts[token]):
        raise RecipeError(
            f"{key} is {token}, which occurs {used} times in the text to be learned: a mask must mean nothing else; "
            "name a token that the target does not write, or null to have one chosen"
        )


def choose_mask_token(counts: Tensor, tokenizer: Any, reserved: list[int], key: str) -> int:
    """An id that the target's text does not use, the same for the same text and tokenizer.

    In order: a row of the embedding beyond the tokenizer; a special token that was kept free, then any other one that
    the chat template does not write; the highest id that the text does not use.

    Args:
        counts: ``[V]`` how often each token is to be learned.
        tokenizer: the target's, or ``None``.
        reserved: ids that are never taken, such as those that end an answer.
        key: of the recipe that names one.

    Raises:
        RecipeError: the text uses every token.
    """
    free = counts == 0
    free[[token for token in reserved if 0 <= token < len(free)]] = False
    if tokenizer is not None and len(tokenizer) < len(free):
        beyond = free[len(tokenizer) :].nonzero().flatten()
        if len(beyond):
            return len(tokenizer) + int(beyond[-1])
    ids = free.nonzero().flatten().tolist()
    if not ids:
        raise RecipeError(f"the text uses each of the {len(free)} tokens, none is left for a mask: name one with {key}")
    special = special_tokens(tokenizer)
    unwritten = [token for token in ids if token in special]
    named = [token for token in unwritten if any(word in special[token].lower() for word in MEANT_FOR_IT)]
    return (named or unwritten or ids)[-1]


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Ids and names of the tokenizer's added tokens that its chat template does not write, but for bos, eos and pad."""
    if tokenizer is None:
        return {}
    template = str(getattr(tokenizer, "chat_template", None) or "")
    taken = {getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad", "unk")}
    added = tokenizer.get_added_vocab() if hasattr(tokenizer, "get_added_vocab") else {}
    return {token: name for name, token in added.items() if token not in taken and name not in template}
