"""Answers by the target itself: a draft head learns best from the text that the target would write.

Batched decoding with a KV cache, left padding, rows sorted by length; a row leaves the batch when it ends. Greedy
decoding takes the plain argmax (no repetition penalty or other processor of the model's generation config), which is
what greedy verification accepts.
"""

import inspect
import json
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import DynamicCache

from modelopt_eagle.data.prompts import Prompt
from modelopt_eagle.data.roles import Message
from modelopt_eagle.data.template import render_text
from modelopt_eagle.errors import DataError


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


def stop_token_ids(model, tokenizer) -> set[int]:
    """The ids that end an answer: the tokenizer's end token and those of the model's generation config."""
    ids: set[int] = set()
    for value in (tokenizer.eos_token_id, getattr(getattr(model, "generation_config", None), "eos_token_id", None)):
        ids.update(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
    if not ids:
        raise DataError("neither tokenizer nor model names an end token; answers could never end")
    return ids


@torch.inference_mode()
def decode_batch(
    model,
    prompts: list[list[int]],
    stop_ids: set[int],
    max_new_tokens: int,
    temperature: float = 0.0,
    seeds: list[int] | None = None,
) -> list[tuple[list[int], str]]:
    """Continue each prompt until a stop id or ``max_new_tokens``.

    Args:
        model: a causal language model of transformers.
        prompts: token ids; rows may differ in length, none may be empty.
        temperature: 0 takes the argmax; above it samples from ``softmax(logits / temperature)``.
        seeds: one a row for sampling, so that a row's answer does not depend on the rest of its batch.

    Returns:
        for each row the new ids without the stop id, and ``"stop"`` or ``"length"``.
    """
    device = model.get_input_embeddings().weight.device
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in prompts], device=device)  # [B,S]
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts], device=device)  # [B,S]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)  # [B,S]
    generators = [torch.Generator().manual_seed(seed) for seed in seeds or []]
    answers: list[list[int]] = [[] for _ in prompts]
    reasons = ["length"] * len(prompts)
    alive = list(range(len(prompts)))
    cache = DynamicCache(config=model.config)
    renamed = "cache" in inspect.signature(model.forward).parameters  # within transformers 5.x
    for _ in range(max_new_tokens):
        output = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{"cache" if renamed else "past_key_values": cache},
        )
        logits = output.logits[:, -1].float()  # [b,V]
        if temperature > 0:
            shares = (logits / temperature).softmax(-1).cpu()  # [b,V]
            chosen = [
                int(torch.multinomial(share, 1, generator=generators[row]))
                for row, share in zip(alive, shares, strict=True)
            ]
        else:
            chosen = logits.argmax(-1).tolist()
        keep = []
        for slot, (row, token) in enumerate(zip(alive, chosen, strict=True)):
            if token in stop_ids:
                reasons[row] = "stop"
            else:
                answers[row].append(token)
                keep.append(slot)
        if not keep:
            break
        if len(keep) < len(alive):
            index = torch.tensor(keep, device=device)
            cache.batch_select_indices(index)
            mask, positions = mask[index], positions[index]
            alive, chosen = [alive[slot] for slot in keep], [chosen[slot] for slot in keep]
        ids = torch.tensor(chosen, device=device)[:, None]  # [b,1]
        mask = torch.cat([mask, mask.new_ones(len(alive), 1)], dim=1)  # [b,S+t]
        positions = positions[:, -1:] + 1  # [b,1]
    return list(zip(answers, reasons, strict=True))


def answer_prompts(model, tokenizer, prompts: list[Prompt], settings: SynthesisSettings) -> list[dict]:
    """Answer every user turn of one batch of prompts, each turn after the answers to those before it.

    Returns:
        rows ``{id, category, messages, finish_reason}``; ``finish_reason`` is that of the last answer, and an assistant
        message that was cut carries its own ``"finish_reason": "length"``.
    """
    stops = stop_token_ids(model, tokenizer)
    dialogues = [
        _Dialogue(prompt, [{"role": "system", "content": prompt.system}] if prompt.system else []) for prompt in prompts
    ]
    for turn in range(max(len(prompt.turns) for prompt in prompts)):
        asking = [dialogue for dialogue in dialogues if turn < len(dialogue.prompt.turns)]
        for dialogue in asking:
            dialogue.messages.append({"role": "user", "content": dialogue.prompt.turns[turn]})
        inputs = [_prompt_ids(tokenizer, dialogue.messages) for dialogue in asking]
        seeds = [zlib.crc32(f"{settings.seed}/{dialogue.prompt.id}/{turn}".encode()) for dialogue in asking]
        answers = decode_batch(model, inputs, stops, settings.max_new_tokens, settings.temperature, seeds)
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
    model,
    tokenizer,
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
    with open(output, "a", encoding="utf-8") as handle:
        for start in range(0, len(todo), batch_size):
            rows = answer_prompts(model, tokenizer, todo[start : start + batch_size], settings)
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
