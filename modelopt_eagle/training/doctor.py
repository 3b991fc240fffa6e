"""What makes heads fail later, looked for before training: each finding with what it means and what mends it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from modelopt_eagle.common.machine import free_memory
from modelopt_eagle.data import TokenizedDataset
from modelopt_eagle.data.encode import TokenizedRow
from modelopt_eagle.data.vocab import count_supervised, coverage_of, load_draft_vocab, required_ids
from modelopt_eagle.draft import DraftVocab
from modelopt_eagle.errors import EagleError
from modelopt_eagle.features.batch import FeatureRow
from modelopt_eagle.features.compute import compute_features
from modelopt_eagle.recipe import Recipe
from modelopt_eagle.target import RunningTarget
from modelopt_eagle.training.own_share import LITTLE

SAMPLE_ROWS, SAMPLE_TOKENS = 8, 256
GOOD, WARNING, FAULT = "good", "warning", "fault"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        level: ``good``, ``warning`` (training works, the head may be worse than it could be) or ``fault``.
        title: what was looked at.
        found: what was found.
        mend: what mends it; empty where nothing has to be.
    """

    level: str
    title: str
    found: str
    mend: str = ""

    def line(self) -> str:
        """As text."""
        mark = {GOOD: "ok  ", WARNING: "warn", FAULT: "FAIL"}[self.level]
        return f"{mark} {self.title}: {self.found}" + (f"\n       mend: {self.mend}" if self.mend else "")


def data_findings(recipe: Recipe, data: TokenizedDataset, tokenizer, own_template: str | None, window: int | None):
    """What the conversations alone tell.

    Args:
        data: of ``data.train_path``.
        tokenizer: with the template in effect.
        own_template: the template that the target brings.
        window: positions of the target.

    Yields:
        findings.
    """
    report = data.report
    used = report.rows / max(report.read + report.fanned_out, 1)
    dropped = ", ".join(f"{count} {reason}" for reason, count in report.dropped.most_common()) or "none dropped"
    yield Finding(
        GOOD if used > 0.9 else WARNING if used >= recipe.data.min_used_share else FAULT,
        "rows used", f"{report.rows} of {report.read + report.fanned_out} ({dropped})",
        "" if used > 0.9 else f"first: {report.reasons() or 'see modelopt-eagle preview'}",
    )  # fmt: skip
    share = report.supervised_share
    fine = 0.02 < share < 0.98
    yield Finding(
        GOOD if fine else WARNING, "supervised share", f"{share:.1%} of {report.tokens} tokens are learned",
        "" if fine else "look at rows with modelopt-eagle preview: is the chat template the target's own?",
    )  # fmt: skip
    lengths = sorted(data.lengths)
    longest, typical = lengths[-1], lengths[len(lengths) // 2]
    long = window is not None and recipe.data.max_length > window
    cut = report.truncated / max(report.rows, 1)
    yield Finding(
        WARNING if long or cut > 0.2 else GOOD, "lengths",
        f"half of the rows have at most {typical} tokens, the longest {longest}; {cut:.1%} are cut at "
        f"{report.max_length}; the target has {window or 'unknown'} positions",
        "set data.max_length to what the target has" if long else "raise data.max_length" if cut > 0.2 else "",
    )  # fmt: skip
    given = tokenizer.get_chat_template() if getattr(tokenizer, "chat_template", None) else None
    same = given == own_template
    yield Finding(
        GOOD if same else WARNING, "template of the data and of serving",
        "the target's own" if same else "model.chat_template replaces the target's own",
        "" if same else "serve with the same one (vLLM and SGLang: --chat-template FILE)",
    )  # fmt: skip
    for note in ("ends_that_the_target_does_not_stop_at", "ends_of_turn_that_are_no_single_token",
                 "empty_reasoning_as_context"):  # fmt: skip
        if report.notes[note]:
            yield Finding(
                WARNING, "end of turn" if note.startswith("ends") else "reasoning",
                f"{report.notes[note]} × {note.replace('_', ' ')} {report.examples.get(note, '')}".strip(),
                "use the target's own template and tokenizer" if note.startswith("ends") else
                "data.template_arguments: {enable_thinking: false}, if the template has it, or let the target answer",
            )  # fmt: skip


def duplicate_findings(train: list[TokenizedRow], held: list[TokenizedRow]) -> Iterator[Finding]:
    """Rows that stand twice, within the training data and in the evaluation."""
    seen = {tuple(row.input_ids) for row in train}
    twice = len(train) - len(seen)
    yield Finding(
        WARNING if twice > len(train) // 20 else GOOD, "duplicates", f"{twice} of {len(train)} rows stand there before",
        "remove them: they are learned more often than others" if twice > len(train) // 20 else "",
    )  # fmt: skip
    if held:
        both = sum(tuple(row.input_ids) in seen for row in held)
        yield Finding(
            WARNING if both else GOOD, "evaluation", f"{both} of {len(held)} rows are trained on, too",
            "take them out of one of the two: the numbers would be better than the head" if both else "",
        )  # fmt: skip


def sample_features(target: RunningTarget, data: TokenizedDataset, layers) -> list[FeatureRow]:
    """Features of a few rows spread over the data, each cut at some length."""
    count = len(data.rows)
    numbers = sorted({i * count // SAMPLE_ROWS for i in range(min(SAMPLE_ROWS, count))})
    rows = []
    for number in numbers:
        row = data.rows[number]
        if row.images is None:
            size = min(len(row.input_ids), max(SAMPLE_TOKENS, row.prompt_length + 32))
            rows.append(
                TokenizedRow(row.id, row.category, row.input_ids[:size], row.supervised[:size], row.prompt_length)
            )
    return [feature for row in rows for feature in compute_features(target, [row], layers)]


def target_findings(recipe: Recipe, target: RunningTarget, data: TokenizedDataset, layers) -> Iterator[Finding]:
    """What a few forwards of the target tell: teacher, captured layers, whose text it is, what the vocabulary holds."""
    sample = torch.tensor([data.rows[0].input_ids[:64]])  # [1,s]
    yield _tried(
        "teacher parity", "logits are rebuilt from the final state",
        "families that change their logits behind the head are not supported", lambda: target.check_parity(sample),
    )  # fmt: skip
    features = sample_features(target, data, layers)
    if not features:
        yield Finding(WARNING, "captured layers", "every row of the sample has images, of which no forward is tried",
                      "look at a part of the data that is text: data.train_path=FILE")  # fmt: skip
        return
    width = target.hidden_size
    prints = []
    for place, layer in enumerate(layers):
        states = torch.cat([row.aux_hidden[:, place * width : (place + 1) * width].float() for row in features])
        prints.append((layer, float(states.mean()), float(states.std()), float(states.abs().max())))
    shown = "; ".join(
        f"layer {layer}: mean {mean:.3g}, spread {std:.3g}, largest {top:.3g}" for layer, mean, std, top in prints
    )
    alike = any(a[1:] == b[1:] for n, a in enumerate(prints) for b in prints[n + 1 :])
    flat = [layer for layer, _, std, _ in prints if std == 0 or std != std]
    yield Finding(
        FAULT if alike or flat else GOOD, "captured layers", shown,
        "two layers give the same states: name others in eagle.aux_layer_ids" if alike else
        f"layers {flat} give no states" if flat else "",
    )  # fmt: skip
    choices = torch.cat(
        [row.target_top1[:-1][row.target_top1[:-1] >= 0] for row in features if row.target_top1 is not None]
    )
    texts = torch.cat([row.input_ids[1:][row.target_top1[:-1] >= 0] for row in features if row.target_top1 is not None])
    own = float((choices == texts).float().mean()) if len(choices) else 0.0
    yield Finding(
        GOOD if own >= 0.5 else WARNING, "whose text it is",
        f"{own:.0%} of the supervised tokens are the target's likeliest (a sample)",
        "" if own >= 0.5 else "let the target answer the prompts: scripts/synthesize_answers.py" if own >= LITTLE else
        "these are no texts of this target: is the template or the tokenizer another one?",
    )  # fmt: skip
    if (vocab := vocabulary_of(recipe, target, data)) is not None:
        inside = float(vocab.t2d[choices.cpu()].float().mean()) if len(choices) else 0.0
        counted = coverage_of(count_supervised(data.rows, target.vocab_size), vocab)
        fine = min(inside, counted) >= 0.9
        yield Finding(
            GOOD if fine else WARNING if counted >= recipe.eagle.min_vocab_coverage else FAULT, "draft vocabulary",
            f"{vocab.size} of {target.vocab_size} tokens hold {counted:.1%} of the text and {inside:.1%} of the "
            "target's likeliest tokens",
            "" if fine else "a larger eagle.draft_vocab_size, or a map counted on this data",
        )  # fmt: skip


def vocabulary_of(recipe: Recipe, target: RunningTarget, data: TokenizedDataset) -> DraftVocab | None:
    """The reduced vocabulary that training would use, counted from the text alone; ``None`` for the full one."""
    if recipe.eagle.draft_vocab_path is not None:
        return load_draft_vocab(recipe.eagle.draft_vocab_path, target.identity().tokenizer_hash, target.vocab_size)
    if recipe.eagle.draft_vocab_size is None:
        return None
    counts = count_supervised(data.rows, target.vocab_size)
    needed = required_ids(target.tokenizer, target.vocab_size, target.end_token_ids, counts)
    return DraftVocab.from_counts(counts, recipe.eagle.draft_vocab_size, needed)


def _tried(title: str, good: str, mend: str, action: Callable[[], object]) -> Finding:
    """A check that raises where it fails."""
    try:
        action()
    except EagleError as error:
        return Finding(FAULT, title, str(error), mend)
    return Finding(GOOD, title, good)


def room_findings(recipe: Recipe, needed_disk: int, needed_memory: int) -> Iterator[Finding]:
    """Whether disk and memory hold what a run needs, in bytes."""
    folder = Path(recipe.training.output_dir).resolve()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    yield Finding(
        GOOD if free > needed_disk else FAULT, "disk",
        f"{_size(needed_disk)} are needed at {folder}, {_size(free)} are free",
        "" if free > needed_disk else "another training.output_dir, a smaller training.save_total_limit, or "
        "data.cache_features: none",
    )  # fmt: skip
    memory = free_memory()
    if memory is not None:
        yield Finding(
            GOOD if memory > needed_memory else WARNING, "memory",
            f"{_size(needed_memory)} for target and head, {_size(memory)} are free",
            "" if memory > needed_memory else "a smaller target or training.batch_size, or features from a store",
        )  # fmt: skip


def _size(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
