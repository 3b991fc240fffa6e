"""Answers by the target itself: a draft head learns best from the text that the target would write.

Decoded by :class:`~modelopt_eagle.decoding.PlainGenerator`. Greedy decoding takes the plain argmax (no repetition
penalty or other processor of the model's generation config), which is what greedy verification accepts.
"""

import json
import zlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from modelopt_eagle.data.prompts import Prompt
from modelopt_eagle.data.roles import Message
from modelopt_eagle.data.template import render_text
from modelopt_eagle.decoding import PlainGenerator
from modelopt_eagle.errors import DataError
from modelopt_eagle.target.model import Target
from modelopt_eagle.validation.dialogues import window


@dataclass(frozen=True)
class SynthesisSettings:
    """What decides the answers; kept beside the output so that a resumed run cannot mix two settings."""

    model: str
    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0


@dataclass
class _Dialogue:
    prompt: Prompt
    messages: list[dict] = field(default_factory=list)
    finish_reason: str = "stop"


def decode_batch(
    generator: PlainGenerator,
    prompts: list[list[int]],
    end_ids: Collection[int],
    max_new_tokens: int,
    temperature: float = 0.0,
    seeds: list[int] | None = None,
) -> list[tuple[list[int], str]]:
    """Continue each prompt until an end token or ``max_new_tokens``.

    Args:
        generator: of the target.
        prompts: token ids; rows may differ in length, none may be empty.
        end_ids: what ends an answer.
        max_new_tokens: limit on new tokens of a row.
        temperature: 0 takes the argmax; above it samples from ``softmax(logits / temperature)``.
        seeds: one a row for sampling, so that a row's answer does not depend on the rest of its batch.

    Returns:
        for each row the new ids without the end token, and ``"stop"`` or ``"length"``.

    Raises:
        DecodingError: a prompt that leaves no room for ``max_new_tokens`` in the target's window.
    """
    output = generator.generate(prompts, max_new_tokens, temperature, eos_token_id=sorted(end_ids), seed=seeds)
    return [
        (tokens[:-1], "stop") if reason == "eos" else (tokens, "length")
        for tokens, reason in zip(output.tokens, output.finish_reasons, strict=True)
    ]


def answer_prompts(generator: PlainGenerator, prompts: list[Prompt], settings: SynthesisSettings) -> list[dict]:
    """Answer every user turn of one batch of prompts, each turn after the answers to those before it.

    Returns:
        rows ``{id, category, messages, finish_reason}``; ``finish_reason`` is that of the last answer, and an assistant
        message that was cut carries its own ``"finish_reason": "length"``.

    Raises:
        DataError: a target that names no end token, or a turn that does not fit its window.
    """
    target, tokenizer = generator.target, generator.target.tokenizer
    if not target.end_token_ids:
        raise DataError(f"neither tokenizer nor configs of {target.name} name an end token; answers could never end")
    dialogues = [
        _Dialogue(prompt, [{"role": "system", "content": prompt.system}] if prompt.system else []) for prompt in prompts
    ]
    for turn in range(max(len(prompt.turns) for prompt in prompts)):
        asking = [dialogue for dialogue in dialogues if turn < len(dialogue.prompt.turns)]
        for dialogue in asking:
            dialogue.messages.append({"role": "user", "content": dialogue.prompt.turns[turn]})
        inputs = [_prompt_ids(tokenizer, dialogue.messages) for dialogue in asking]
        for dialogue, ids in zip(asking, inputs, strict=True):
            if len(ids) + settings.max_new_tokens > window(target):
                raise DataError(
                    f"prompt {dialogue.prompt.id!r}, turn {turn + 1}: {len(ids)} tokens and {settings.max_new_tokens} "
                    f"new ones do not fit the {window(target)} positions of {target.name}: lower --max_new_tokens, or "
                    "shorten the prompt; what is answered already is kept"
                )
        seeds = [zlib.crc32(f"{settings.seed}/{dialogue.prompt.id}/{turn}".encode()) for dialogue in asking]
        answers = decode_batch(
            generator, inputs, target.end_token_ids, settings.max_new_tokens, settings.temperature, seeds
        )
        for dialogue, (ids, reason) in zip(asking, answers, strict=True):
            message = {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}
            if reason == "length":
                # a character of several tokens may have been cut in two
                message = message | {"content": message["content"].rstrip("\ufffd"), "finish_reason": "length"}
            dialogue.messages.append(message)
            dialogue.finish_reason = reason
    return [
        {"id": d.prompt.id, "category": d.prompt.category, "messages": d.messages, "finish_reason": d.finish_reason}
        for d in dialogues
    ]


def _prompt_ids(tokenizer, messages: list[dict]) -> list[int]:
    plain = [Message(message["role"], message["content"]) for message in messages]
    text = render_text(tokenizer, plain, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def synthesize(
    target: Target,
    prompts: list[Prompt],
    output: Path,
    settings: SynthesisSettings,
    batch_size: int = 16,
    on_batch: Callable[[list[dict]], None] = lambda rows: None,
) -> int:
    """Answer the prompts whose ids are not yet in ``output``, appending a batch at a time; returns how many were added.

    Stopping it at any moment loses at most the batch at work: the next call with the same settings goes on.
    """
    done = prepare_output(output, settings)
    todo = [prompt for prompt in prompts if prompt.id not in done]
    # the largest first: what does not fit in memory shows early
    todo.sort(key=lambda prompt: (len(prompt.turns), sum(map(len, prompt.turns))), reverse=True)
    generator = PlainGenerator(target)
    with open(output, "a", encoding="utf-8") as handle:
        for start in range(0, len(todo), batch_size):
            rows = answer_prompts(generator, todo[start : start + batch_size], settings)
            handle.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            handle.flush()
            on_batch(rows)
    return len(todo)


def prepare_output(output: Path, settings: SynthesisSettings) -> set[str]:
    """Make ``output`` ready to be appended to, and return the ids it already holds.

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
        found = json.loads(record.read_text(encoding="utf-8"))
        for key, wanted in vars(settings).items():
            if found.get(key) != wanted:
                raise DataError(
                    f"{output} was made with {key}={found.get(key)!r}, this run has {key}={wanted!r}; "
                    "repeat the old value or choose another --output"
                )
        _cut_partial_line(output)
    else:
        record.write_text(json.dumps(vars(settings), indent=1) + "\n", encoding="utf-8")
        output.touch()
    return set(_ids_of(output))


def _cut_partial_line(output: Path) -> None:
    raw = output.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    if len(whole) < len(raw):
        with open(output, "r+b") as handle:
            handle.truncate(len(whole))


def _ids_of(output: Path) -> Iterable[str]:
    for number, line in enumerate(output.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            yield json.loads(line)["id"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise DataError(
                f"{output}:{number}: not a row of this command ({error}); remove the line, it will be made again"
            ) from error
