"""The account of a data set: every row read is either kept or dropped for a named reason."""

from collections import Counter
from dataclasses import dataclass, field

from modelopt_eagle.errors import DataError

REASONS = {
    "no_messages": "no turns under `messages` or `conversations`",
    "malformed_message": "a turn without role and text",
    "non_text_content": "a turn whose content is neither text nor images",
    "tool_role": "tool use that cannot be rendered",
    "separate_reasoning": "reasoning that cannot be rendered where the target writes it",
    "reasoning_missing": "the generation prompt begins reasoning, and the answer has none",
    "words_changed": "the chat template changes the assistant's own words",
    "written_ids_differ": "the rendering does not give back the token ids that were written",
    "boundary_unclear": "the answer's tokens behind the prompt cannot be told",
    "text_boundary": "the mark of data.text_boundary does not stand where an answer begins",
    "turn_weight": "a turn's weight or mark that is neither 0 nor 1",
    "nothing_to_learn": "every answer is marked as not to be learned",
    "unknown_role": "a role that is neither known nor aliased",
    "no_assistant_turn": "nothing to learn from",
    "empty_answer": "an assistant turn without text",
    "duplicate_id": "an id that an earlier row has",
    "template_refused": "the chat template raised an error",
    "template_unstable": "the answer could not be found behind the generation prompt",
    "generation_tags_disagree": "the template's generation tags mark other text than the answers",
    "no_supervised_token": "no token lies wholly within an answer",
    "too_long": "longer than max_length, and overlong is drop",
    "prompt_fills_window": "no answer begins within max_length",
    "image_not_local": "an image that is no local file",
    "image_missing": "an image file that is not there",
    "image_unreadable": "a file that is no image, or a damaged one",
    "image_count": "other numbers of images and of places for them",
    "image_in_answer": "an image in an assistant's turn",
    "image_without_processor": "images, and nothing here that reads them",
    "image_not_rendered": "the chat template leaves images out",
    "image_refused": "the target's processor raised an error",
    "out_of_time": "training.run_budget_minutes gave no time for its features",
    "image_past_window": "an image lies behind max_length",
}
"""What each drop reason means."""


class RowRejected(DataError):
    """A row that cannot be used, with the ``reason`` under which it is counted."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


@dataclass
class DataReport:
    """Counts over one data set; conversations until they are rendered, rows after.

    Attributes:
        read: conversations found in the files.
        dropped: reason → conversations (or, of a conversation rendered as several rows, rows) left out.
        examples: reason (or note) → message of the first one, with file and line.
        notes: what was changed without dropping a row, such as ``trailing_turns_cut``; name → count.
        rows: tokenised rows kept.
        fanned_out: rows beyond the first of a conversation whose template rewrites history.
        tokens: tokens of the rows kept.
        supervised: those the draft learns to predict.
        truncated: rows cut at ``max_length``.
        max_length: the window, or None.
        tokens_cut: tokens of the rows that did not fit it: cut off, or of rows left out.
        target_window: positions of the target, where they and not the recipe set ``max_length``; else None.
    """

    read: int = 0
    dropped: Counter = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    notes: Counter = field(default_factory=Counter)
    rows: int = 0
    fanned_out: int = 0
    tokens: int = 0
    supervised: int = 0
    truncated: int = 0
    max_length: int | None = None
    tokens_cut: int = 0
    target_window: int | None = None

    def drop(self, reason: str, message: str) -> None:
        """Count a row as left out."""
        self.dropped[reason] += 1
        self.examples.setdefault(reason, message)

    def reasons(self) -> str:
        """What is said of the first dropped row of each reason, in one line."""
        return "; ".join(self.examples[reason] for reason in self.dropped)

    def note(self, name: str, message: str | None = None, count: int = 1) -> None:
        """Count something that was changed without dropping a row; ``message`` tells of the first one."""
        self.notes[name] += count
        if message is not None:
            self.examples.setdefault(name, message)

    @property
    def supervised_share(self) -> float:
        """Supervised tokens over all tokens, 0 when there are none."""
        return self.supervised / max(self.tokens, 1)

    def check_used(self, least: float) -> None:
        """Stop where too little of the data is used.

        Args:
            least: share of the rows, and of the tokens, that must be.

        Raises:
            DataError: less is; the reasons are named.
        """
        made = self.read + self.fanned_out
        for what, used, all_of_them in (
            ("rows", self.rows, made),
            ("tokens", self.tokens, self.tokens + self.tokens_cut),
        ):
            if all_of_them and used / all_of_them < least:
                reasons = "; ".join(f"{count} {reason}" for reason, count in self.dropped.most_common())
                raise DataError(
                    f"only {used} of {all_of_them} {what} are used ({used / all_of_them:.1%}, data.min_used_share: "
                    f"{least}): {reasons or 'cut'}; first: {self.reasons() or f'cut at {self.max_length} tokens'}. "
                    "Mend the data or the recipe, or lower data.min_used_share"
                )

    def check_complete(self) -> None:
        """Raise :class:`DataError` unless rows kept = conversations read + rows fanned out - rows dropped."""
        expected = self.read + self.fanned_out - sum(self.dropped.values())
        if self.rows != expected:
            raise DataError(
                f"rows went missing: {expected} expected from the counts, {self.rows} made; please report this"
            )

    def header(self) -> str:
        """The line at the head of every run, and below it one line a reason for dropped rows."""
        share = f"{self.supervised_share:.1%} supervised" if self.tokens else "none supervised"
        late = self.dropped["out_of_time"]  # nothing is wrong with those
        dropped = f"{sum(self.dropped.values()) - late} dropped" + (f", {late} left out for want of time" * bool(late))
        lines = [f"data: {self.read} conversations read, {dropped}, {self.rows} rows, {self.tokens} tokens, {share}"]
        if self.max_length is not None:
            share = f"{self.truncated / self.rows:.1%}" if self.rows else "none"
            lines[0] += f", {share} truncated at {self.max_length} tokens"
            lines[0] += " (the target's own window)" if self.target_window is not None else ""
        if self.tokens and self.supervised == self.tokens:
            lines.append("  warning: every token is supervised; in chat data the user's turns must not be")
        if self.fanned_out:
            lines.append(
                f"  {self.fanned_out} more rows: the template rewrites history, each answer has a row of its own"
            )
        for name, count in sorted(self.notes.items()):
            first = f", first: {self.examples[name]}" if name in self.examples else ""
            lines.append(f"  {name.replace('_', ' ')}: {count}{first}")
        lines += [
            f"  {'left out' if reason == 'out_of_time' else 'dropped'} {count} ({reason}: {REASONS.get(reason, '')}), "
            f"first: {self.examples[reason]}"
            for reason, count in sorted(self.dropped.items())
        ]
        return "\n".join(lines)

    def to_dict(self) -> dict:
        """Plain values for a JSON report."""
        return {
            "read": self.read,
            "dropped": dict(self.dropped),
            "notes": dict(self.notes),
            "rows": self.rows,
            "fanned_out": self.fanned_out,
            "tokens": self.tokens,
            "supervised": self.supervised,
            "truncated": self.truncated,
            "max_length": self.max_length,
            "tokens_cut": self.tokens_cut,
            "target_window": self.target_window,
        }
