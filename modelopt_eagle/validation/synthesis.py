"""Answers by the target itself: a draft head learns best from the text that the target would write.

Decoded by :class:`~modelopt_eagle.decoding.PlainGenerator`. Greedy decoding takes the plain argmax (no repetition
penalty or other processor of the model's generation config), which is what greedy verification accepts.
"""

import json
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from filelock import Timeout

from modelopt_eagle.common.files import disk_trouble, file_lock, read_json, write_whole
from modelopt_eagle.common.strict_json import parse_json
from modelopt_eagle.data.files import SourceRow
from modelopt_eagle.data.prompts import Prompt, prompt_of
from modelopt_eagle.data.roles import Message
from modelopt_eagle.data.template import render_text
from modelopt_eagle.data.written import written_message
from modelopt_eagle.decoding import PlainGenerator
from modelopt_eagle.errors import DataError
from modelopt_eagle.target.model import Target
from modelopt_eagle.validation.dialogues import window

DIGEST = "prompt_digest"
"""Key of a row of the output: the prompt that it answers."""


@dataclass(frozen=True)
class SynthesisSettings:
    """What decides the answers; kept beside the output so that a resumed run cannot mix two settings.

    Attributes:
        model: name of the target, or what servers call it.
        max_new_tokens: an answer is cut here.
        temperature: 0 is greedy.
        seed: of the sampling.
        chat_template: SHA-256 of the one that replaces the target's template; ``None``: the target's own.
    """

    model: str
    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    chat_template: str | None = None


@dataclass
class Answered:
    """A prompt with the answers so far."""

    prompt: Prompt
    messages: list[Message]
    finish_reason: str = "stop"
    trouble: str | None = None  # why a turn of it cannot be answered

    @classmethod
    def of(cls, prompt: Prompt) -> "Answered":
        """Nothing said yet."""
        return cls(prompt, prompt.beginning)

    def row(self, name: str) -> dict[str, Any]:
        """The conversation as a row of the output, under this id.

        It names the prompt by its digest: one that ended early, at the call of a tool, does not hold all of its turns.
        """
        prompt = self.prompt
        row: dict[str, Any] = {"id": name, "category": prompt.category, "messages": [as_dict(m) for m in self.messages],
                               "finish_reason": self.finish_reason, DIGEST: prompt.digest}  # fmt: skip
        if prompt.tools:
            row["tools"] = list(prompt.tools)
        if prompt.template_arguments:
            row["chat_template_kwargs"] = dict(prompt.template_arguments)
        return row


def as_dict(message: Message) -> dict[str, Any]:
    """A message as it stands in a file of conversations; the ids that were written are kept."""
    made: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        made["reasoning_content"] = message.reasoning
    if message.tool_calls:
        made["tool_calls"] = list(message.tool_calls)
    if message.token_ids is not None:
        made["token_ids"] = list(message.token_ids)
    if message.finish_reason is not None:
        made["finish_reason"] = message.finish_reason
    return made


def decode_batch(
    generator: PlainGenerator,
    prompts: list[list[int]],
    end_ids: Collection[int],
    max_new_tokens: int,
    temperature: float = 0.0,
    seeds: list[int] | None = None,
    keep_end: bool = False,
) -> list[tuple[list[int], str]]:
    """Continue each prompt until an end token or ``max_new_tokens``.

    Args:
        generator: of the target.
        prompts: token ids; rows may differ in length, none may be empty.
        end_ids: what ends an answer.
        max_new_tokens: limit on new tokens of a row.
        temperature: 0 takes the argmax; above it samples from ``softmax(logits / temperature)``.
        seeds: one a row for sampling, so that a row's answer does not depend on the rest of its batch.
        keep_end: leave the end token at the end of the ids.

    Returns:
        for each row the new ids, by default without the end token, and ``"stop"`` or ``"length"``.

    Raises:
        DecodingError: a prompt that leaves no room for ``max_new_tokens`` in the target's window.
    """
    output = generator.generate(prompts, max_new_tokens, temperature, eos_token_id=sorted(end_ids), seed=seeds)
    return [
        (tokens if keep_end else tokens[:-1], "stop") if reason == "eos" else (tokens, "length")
        for tokens, reason in zip(output.tokens, output.finish_reasons, strict=True)
    ]


def answer_prompts(generator: PlainGenerator, prompts: list[Prompt], settings: SynthesisSettings) -> list[Answered]:
    """Answer every user turn of one batch of prompts, each turn after the answers to those before it.

    Returns:
        a dialogue a prompt; its ``finish_reason`` is that of the last answer, and an answer that was cut has its own.
        One with a turn that does not fit the target's window, or that the template refuses, ends there with its
        ``trouble``.

    Raises:
        DataError: a target that names no end token.
    """
    target = generator.target
    if not target.end_token_ids:
        raise DataError(f"neither tokenizer nor configs of {target.name} name an end token; answers could never end")
    dialogues = [Answered.of(prompt) for prompt in prompts]
    for turn in range(max(len(prompt.turns) for prompt in prompts)):
        asking, inputs = [], []
        for dialogue in dialogues:
            if dialogue.trouble is not None or turn >= len(dialogue.prompt.turns):
                continue
            dialogue.messages.append(dialogue.prompt.message(turn))
            try:
                inputs.append(_prompt_ids(target, dialogue, settings.max_new_tokens))
            except DataError as error:
                dialogue.trouble = f"turn {turn + 1}: {error}"
            else:
                asking.append(dialogue)
        if not asking:
            continue
        seeds = [zlib.crc32(f"{settings.seed}/{prompt_name(d.prompt)}/{turn}".encode()) for d in asking]
        answers = decode_batch(
            generator, inputs, target.end_token_ids, settings.max_new_tokens, settings.temperature, seeds, True
        )
        for dialogue, (ids, reason) in zip(asking, answers, strict=True):
            message = written_message(
                target.tokenizer, dialogue.messages, ids, cut=reason == "length", end_token_ids=target.end_token_ids,
                tools=dialogue.prompt.tools, arguments=dialogue.prompt.template_arguments,
            )  # fmt: skip
            if message.cut:  # a character of several tokens may have been cut in two
                message = replace(message, content=message.content.rstrip("\ufffd"))
            dialogue.messages.append(message)
            dialogue.finish_reason = reason
    return dialogues


def _prompt_ids(target: Target, dialogue: Answered, max_new_tokens: int) -> list[int]:
    """Ids of what is said so far, with the generation prompt.

    Raises:
        DataError: the template refuses it, or no room is left for ``max_new_tokens`` in the target's window.
    """
    prompt = dialogue.prompt
    text = render_text(target.tokenizer, dialogue.messages, True, prompt.tools, prompt.template_arguments)
    ids = target.tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) + max_new_tokens > window(target):
        raise DataError(
            f"{len(ids)} tokens and {max_new_tokens} new ones do not fit the {window(target)} positions of "
            f"{target.name}: lower --max_new_tokens, or shorten the prompt"
        )
    return ids


def prompt_name(prompt: Prompt) -> str:
    """A name that does not depend on where in its file a prompt stands."""
    return f"prompt-{prompt.digest}" if prompt.numbered else prompt.id


@dataclass
class Account:
    """What became of the prompts: ``answered + failed + skipped`` is how many there were."""

    answered: int = 0
    failed: int = 0
    skipped: int = 0
    cut: int = 0


class AnswerFile:
    """The output of a synthesis, held by one process at a time: its rows, those that failed, and the account of both.

    Rows are appended as they come. A prompt that cannot be answered goes to ``<output>.errors.jsonl`` with the reason,
    and is tried again by the next call. A context manager; leaving it lets go of the output.

    Args:
        output: the file of rows; see :func:`prepare_output`.
        settings: what decides the answers.
        prompts: all that are asked.

    Raises:
        DataError: see :func:`prepare_output`; or another process writes into the output, or nobody can.
    """

    def __init__(self, output: Path, settings: SynthesisSettings, prompts: list[Prompt]):
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            self._lock = file_lock(output.with_name(output.name + ".lock"), wait=False)
            self._lock.acquire()
        except Timeout as error:
            raise DataError(f"another process writes into {output}: wait for it, or choose another --output") from error
        except OSError as error:
            raise DataError(f"cannot write {output}: {disk_trouble(error)}; choose another --output") from error
        try:
            self.missing = missing_prompts(prompts, prepare_output(output, settings))
            self.account = Account(skipped=len(prompts) - len(self.missing))
            self._errors = output.with_name(output.name + ".errors.jsonl")
            self._errors.unlink(missing_ok=True)
            self._rows = open(output, "a", encoding="utf-8")  # noqa: SIM115  (closed by __exit__)
        except BaseException:
            self._lock.release()
            raise

    def __enter__(self) -> "AnswerFile":
        return self

    def __exit__(self, *_) -> None:
        self._rows.close()
        self._lock.release()

    def add(self, row: dict[str, Any]) -> None:
        """Append a conversation."""
        self._rows.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._rows.flush()
        self.account.answered += 1
        self.account.cut += row["finish_reason"] == "length"

    def fail(self, name: str, reason: str) -> None:
        """Write down why a prompt has no answer."""
        with open(self._errors, "a", encoding="utf-8") as log:
            log.write(json.dumps({"id": name, "error": reason}, ensure_ascii=False) + "\n")
        self.account.failed += 1


def synthesize(
    target: Target,
    answers: AnswerFile,
    settings: SynthesisSettings,
    batch_size: int = 16,
    on_batch: Callable[[Account], None] = lambda account: None,
) -> Account:
    """Answer the prompts that the output does not hold yet, appending a batch at a time.

    Stopping it at any moment loses at most the batch at work: the next call with the same settings goes on.
    """
    # the largest first: what does not fit in memory shows early
    todo = sorted(answers.missing, key=lambda named: (len(named[1].turns), sum(map(len, named[1].turns))), reverse=True)
    generator = PlainGenerator(target)
    for start in range(0, len(todo), batch_size):
        batch = todo[start : start + batch_size]
        dialogues = answer_prompts(generator, [prompt for _, prompt in batch], settings)
        for (name, _), dialogue in zip(batch, dialogues, strict=True):
            if dialogue.trouble is None:
                answers.add(dialogue.row(name))
            else:
                answers.fail(name, dialogue.trouble)
        on_batch(answers.account)
    return answers.account


def missing_prompts(prompts: list[Prompt], answered: "Found") -> list[tuple[str, Prompt]]:
    """``(name, prompt)`` of what is not answered yet, by what is asked and not by where it stands in its file.

    Names are the prompts' ids; one without an id is called by its content, and one whose id is taken by another
    prompt gets that behind it.
    """
    left, taken, missing = Counter(answered.digests), set(answered.names), []
    for prompt in prompts:
        if left[prompt.digest]:
            left[prompt.digest] -= 1
            continue
        name = prompt_name(prompt)
        if name in taken:
            name = f"{name}-{prompt.digest}"
        number = 2
        while name in taken:
            name, number = f"{prompt_name(prompt)}-{number}", number + 1
        taken.add(name)
        missing.append((name, prompt))
    return missing


@dataclass(frozen=True)
class Found:
    """What an output holds already: the digest of each prompt that is answered, and the ids of the rows."""

    digests: list[str]
    names: list[str]

    def __len__(self) -> int:
        return len(self.names)


def prepare_output(output: Path, settings: SynthesisSettings) -> Found:
    """Make ``output`` ready to be appended to, and return what it already holds.

    A last line that was cut while writing is removed. The settings stand beside it in ``<output>.settings.json``.

    Raises:
        DataError: the file was made with other settings or by something else, or a line before the last is broken.
    """
    record = output.with_name(output.name + ".settings.json")
    output.parent.mkdir(parents=True, exist_ok=True)
    present = output.exists() and output.stat().st_size > 0
    if present and not record.exists():
        raise DataError(
            f"{output} exists and {record.name} is not beside it: another command made it; choose another --output"
        )
    if present:
        found = read_json(record, DataError, "choose another --output")
        for key, wanted in vars(settings).items():
            if found.get(key) != wanted:
                raise DataError(
                    f"{output} was made with {key}={found.get(key)!r}, this run has {key}={wanted!r}; "
                    "repeat the old value or choose another --output"
                )
        _cut_partial_line(output)
    else:
        write_whole(record, json.dumps(vars(settings), indent=1) + "\n")
        output.touch()
    rows = list(_rows_of(output))
    return Found([digest for digest, _ in rows], [name for _, name in rows])


def _cut_partial_line(output: Path) -> None:
    raw = output.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    if len(whole) < len(raw):
        with open(output, "r+b") as handle:
            handle.truncate(len(whole))


def _rows_of(output: Path) -> Iterable[tuple[str, str]]:
    """Digest of the prompt, and id, of each row of an output."""
    # lines as files have them: a text may hold other characters at which str.splitlines() divides
    for number, line in enumerate(output.read_bytes().split(b"\n")[:-1], start=1):
        place = f"{output}:{number}"
        try:
            value = parse_json(line, finite=False)
            name = str(value["id"])
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{place}: not a row of this command ({error}); remove the line, it will be made again"
            ) from error
        if isinstance(value.get(DIGEST), str):
            yield value[DIGEST], name
            continue
        try:  # of a version that did not write it
            yield prompt_of(SourceRow(value, place, output.parent), number).digest, name
        except DataError:
            yield "", name  # it asks nothing, so it answers no prompt
