"""Special tokens of a tokenizer, by their ids and by their texts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SpecialTokens:
    """What can end a turn.

    Attributes:
        special: ids of all special tokens, and of those that the target stops at.
        ends: ids that the target is known to stop at.
        texts: text → id of the special ones.
    """

    special: frozenset[int]
    ends: frozenset[int]
    texts: dict[str, int]

    @classmethod
    def of(cls, tokenizer, end_token_ids: Sequence[int] = ()) -> SpecialTokens:
        """The tokenizer's, with further end tokens such as those of the target's generation config."""
        added = {i for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special}
        ends = {*end_token_ids} | ({tokenizer.eos_token_id} - {None})
        special = {*tokenizer.all_special_ids, *added, *ends}
        texts = {}
        for i in sorted(special):
            text = tokenizer.decode([i])  # "" for an id that the tokenizer does not have
            if text.strip():
                texts[text] = i
        return cls(frozenset(special), frozenset(ends), texts)

    def end_at(self, text: str, position: int) -> str:
        """The text of the end token that stands at a position, ``""`` if there is none."""
        fitting = [token for token, i in self.texts.items() if i in self.ends and text.startswith(token, position)]
        return max(fitting, key=len, default="")

    def last_in(self, text: str) -> str:
        """A text's end from its last special token on, where only white space follows that; ``""`` otherwise."""
        if not self.texts:
            return ""
        pattern = "|".join(re.escape(token) for token in sorted(self.texts, key=len, reverse=True))
        found = re.search(rf"(?:{pattern})\s*\Z", text)
        return found[0] if found else ""
