"""Answering prompts for real: turns rendered by the target's template, later turns behind the answers given so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from modelopt_eagle.data import Message, Prompt, render_text
from modelopt_eagle.data.images import read_pictures
from modelopt_eagle.data.written import written_message
from modelopt_eagle.decoding import GenerationOutput, PseudoSpeculativeGenerator, SamplingOptions
from modelopt_eagle.decoding.supported import run_limit
from modelopt_eagle.errors import DataError
from modelopt_eagle.target.model import Target


@dataclass(frozen=True)
class Answer:
    """One answer, step by step.

    Attributes:
        question: the user's turn.
        context: tokens before the answer.
        pieces: what each verification step wrote: the text of the accepted drafted tokens, and that of the target's own
            token behind them. The first piece is the token of the prompt's pass, which nothing drafted.
        accepted: accepted drafted tokens of each step, one entry fewer than ``pieces``; also those that were cut off
            behind ``max_new_tokens``.
    """

    question: str
    context: int
    pieces: list[tuple[str, str]]
    accepted: list[int]


@dataclass
class Dialogue:
    """A prompt being answered, with what its drafts were worth.

    Attributes:
        prompt: id, category and the user's turns.
        messages: what was said so far.
        accepted: accepted drafted tokens of every verification step, over all turns.
        contexts: tokens of the text that each of these steps stood behind.
        tokens: new tokens, over all turns.
        too_long: turns left out because they do not fit the target's window.
        answers: each turn's answer, step by step.
    """

    prompt: Prompt
    messages: list[Message] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    contexts: list[int] = field(default_factory=list)
    tokens: int = 0
    too_long: int = 0
    answers: list[Answer] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Verification steps."""
        return len(self.accepted)


def answer_dialogues(
    generator: PseudoSpeculativeGenerator,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    batch_size: int,
    max_turns: int = 2,
    on_batch: Callable[[int], None] | None = None,
    sampling: SamplingOptions | None = None,
    seed: int | None = None,
    more: Callable[[int, int], bool] | None = None,
) -> list[Dialogue]:
    """Answer every prompt, turn after turn.

    Args:
        generator: decodes and accepts.
        prompts: what is asked.
        max_new_tokens: limit of each answer.
        batch_size: prompts decoded together. Those of like length are put together; results do not depend on it.
        max_turns: turns of a prompt that are asked.
        on_batch: called with the number of dialogues that a batch finished.
        sampling: how answers are drawn; ``None``: greedily.
        seed: of what is drawn.
        more: asked before each batch but the first, with the prompts that are answered and those of the batch; false
            leaves out what is left, whose dialogues stay empty. Each batch is then drawn from all over the prompts.

    Returns:
        A dialogue a prompt, in the order of the prompts.

    Raises:
        DataError: no chat template, or no prompt that fits the target's window.
        DecodingError: from the generator.
    """
    dialogues = [Dialogue(prompt) for prompt in prompts]
    if more is None:
        by_size = sorted(dialogues, key=lambda d: (len(d.prompt.turns[:max_turns]), sum(map(len, d.prompt.turns))))
        batches = [by_size[start : start + batch_size] for start in range(0, len(by_size), batch_size)]
    else:
        count = -(-len(dialogues) // batch_size)
        batches = [dialogues[start::count] for start in range(count)]
    done = 0
    for batch in batches:
        if more is not None and done and not more(done, len(batch)):
            break
        done += len(batch)
        for turn in range(max_turns):
            _answer_turn(generator, batch, turn, max_turns, max_new_tokens, sampling_arguments(sampling, seed))
        if on_batch is not None:
            on_batch(len(batch))
    if not any(dialogue.tokens for dialogue in dialogues):
        raise DataError(
            f"no prompt leaves room for {max_new_tokens} new tokens in the window of {generator.target.name}: "
            "lower max_new_tokens"
        )
    return dialogues


def sampling_arguments(sampling: SamplingOptions | None, seed: int | None) -> dict[str, Any]:
    """Arguments of ``generate`` for these options; empty for greedy decoding."""
    if sampling is None or sampling.greedy:
        return {}
    return {**asdict(sampling), "seed": seed}


def _answer_turn(
    generator: PseudoSpeculativeGenerator,
    batch: list[Dialogue],
    turn: int,
    max_turns: int,
    max_new_tokens: int,
    sampling: dict[str, Any],
) -> None:
    target = generator.target
    asking, inputs, pictured = [], [], []
    for dialogue in batch:
        if turn >= len(dialogue.prompt.turns) or dialogue.too_long:
            continue
        asked = [*dialogue.messages, dialogue.prompt.message(turn)]
        if turn == 0:
            asked = dialogue.prompt.beginning + asked
        ids, images = prompt_inputs(target, asked, dialogue.prompt.tools, dialogue.prompt.template_arguments)
        if len(ids) + max_new_tokens > window(target):
            dialogue.too_long = min(len(dialogue.prompt.turns), max_turns) - turn
            continue
        dialogue.messages = asked
        if images is None:
            asking.append(dialogue)
            inputs.append(ids)
        else:
            pictured.append((dialogue, ids, images))
    if asking:
        _take(target, asking, inputs, generator.generate(inputs, max_new_tokens, **sampling))
    for dialogue, ids, images in pictured:  # one by one
        _take(target, [dialogue], [ids], generator.generate([ids], max_new_tokens, images=images, **sampling))


def _take(target: Target, dialogues: list[Dialogue], inputs: list[list[int]], output: GenerationOutput) -> None:
    """Add what was said to the dialogues."""
    rows = zip(dialogues, inputs, output.tokens, output.accepted_lengths, strict=True)
    for dialogue, ids, tokens, accepted in rows:
        dialogue.accepted += accepted
        place = len(ids) + 1  # with the token that the prompt's own pass gave
        for count in accepted:
            dialogue.contexts.append(place)
            place += 1 + count
        dialogue.tokens += len(tokens)
        question = dialogue.messages[-1].content
        dialogue.answers.append(Answer(question, len(ids), pieces(target.tokenizer, tokens, accepted), list(accepted)))
        dialogue.messages.append(_said(target, dialogue, tokens))


def _said(target: Target, dialogue: Dialogue, tokens: list[int]) -> Message:
    """The answer as a message that a later turn is rendered behind."""
    if target.vision is not None:  # a placeholder in it would ask for one more image
        return Message("assistant", target.tokenizer.decode(tokens, skip_special_tokens=True))
    prompt, ends = dialogue.prompt, target.end_token_ids
    return written_message(
        target.tokenizer, dialogue.messages, tokens, cut=not tokens or tokens[-1] not in ends, end_token_ids=ends,
        tools=prompt.tools, arguments=prompt.template_arguments,
    )  # fmt: skip


def pieces(tokenizer: Any, tokens: Sequence[int], accepted: Sequence[int]) -> list[tuple[str, str]]:
    """The text of an answer as its steps wrote it; put together it is the whole, special tokens included.

    A character whose bytes two tokens share belongs to the one that ends it.

    Args:
        tokenizer: the target's.
        tokens: of the answer, the first one from the prompt's pass.
        accepted: accepted drafted tokens of each step.

    Returns:
        ``(accepted text, own text)`` of the first token and of each step.
    """
    ends = [0, min(1, len(tokens))]  # where the accepted and the own tokens of each piece end
    for count in accepted:
        ends += [min(ends[-1] + count, len(tokens)), min(ends[-1] + count + 1, len(tokens))]
    written, parts = "", []
    for end in ends:
        text = tokenizer.decode(tokens[:end], clean_up_tokenization_spaces=False)
        if end < len(tokens):
            text = text.rstrip("\ufffd")  # the beginning of a character
        parts.append(text[len(written) :])
        written = text
    return list(zip(parts[::2], parts[1::2], strict=True))


def prompt_inputs(
    target: Target, messages: Sequence[Message], tools: Sequence[dict] = (), arguments: Mapping[str, Any] | None = None
) -> tuple[list[int], dict | None]:
    """Token ids of messages and the generation prompt, and what the target's forward takes for their images.

    Args:
        tools, arguments: of the prompt, for the chat template.

    Raises:
        DataError: images that the target cannot read, or that its template leaves out.
    """
    paths = tuple(image.path for message in messages for image in message.images)
    if not paths:
        return prompt_ids(target, messages, tools, arguments), None
    if target.vision is None:
        raise DataError(f"a prompt has the image {paths[0]}, and {target.name} reads text only: give prompts of text")
    text, (pictures, _) = render_text(target.tokenizer, messages, True, tools, arguments), read_pictures(paths)
    written = text.count(target.vision.image_token)
    if written != len(paths):
        raise DataError(
            f"the chat template wrote {written} placeholders {target.vision.image_token!r} for the {len(paths)} images "
            f"of a prompt ({', '.join(paths)})"
        )
    return target.vision.inputs(text, pictures)


def prompt_ids(
    target: Target, messages: Sequence[Message], tools: Sequence[dict] = (), arguments: Mapping[str, Any] | None = None
) -> list[int]:
    """Token ids of messages and the generation prompt, as a server renders them."""
    text = render_text(target.tokenizer, messages, True, tools, arguments)
    return list(target.tokenizer(text, add_special_tokens=False)["input_ids"])


def first_turn(target: Target, prompt: Prompt) -> list[int]:
    """Token ids of a prompt's first turn, with its images' placeholders."""
    messages = [*prompt.beginning, prompt.message(0)]
    return prompt_inputs(target, messages, prompt.tools, prompt.template_arguments)[0]


def window(target: Target) -> int:
    """Positions a dialogue may take: those the target was made for; with longrope, those below its original length."""
    return run_limit(target, 0) or 1 << 30
