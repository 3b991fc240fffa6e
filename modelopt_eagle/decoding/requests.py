"""Requests while they are being answered: prompts, what each has emitted, and when it stops."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from modelopt_eagle.decoding.options import SamplingOptions, per_request
from modelopt_eagle.errors import DecodingError
from modelopt_eagle.target.model import Target

StreamCallback = Callable[[int, list[int], "str | None"], None]
"""``callback(request, new_tokens, finish_reason)``, once a step and request; the reason is ``None`` until the end."""


LogitsProcessor = Callable[[Tensor, Tensor], Tensor]
"""``processor(input_ids [1, S], scores [1, V]) -> [1, V]``, as transformers' logits processors; ``input_ids`` holds
prompt and answer up to the token that is chosen next."""


@dataclass
class Request:
    """One prompt on its way."""

    index: int
    prompt: list[int]
    max_new_tokens: int
    sampling: SamplingOptions
    generator: torch.Generator | None
    processor: LogitsProcessor | None = None
    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    position_limit: int | None = None
    """Positions that the target has; drafts behind the last are not counted."""

    @property
    def length(self) -> int:
        """Tokens that the target has read: all but the last emitted one."""
        return len(self.prompt) + len(self.tokens) - 1

    def uniforms(self, count: int) -> Tensor:
        """``[count]`` float64 numbers in [0, 1) of this request's own stream; 0 if greedy."""
        if self.generator is None:
            return torch.zeros(count, dtype=torch.float64)
        return torch.rand(count, generator=self.generator, dtype=torch.float64)


class StopRule:
    """When an answer ends, and which of a run of tokens still belong to it.

    Args:
        end_ids: end tokens.
        stop_strings: texts that end an answer when they appear in it.
        tokenizer: needed for stop strings.

    Raises:
        DecodingError: stop strings without a tokenizer, an empty one, or what is no list of texts.
    """

    def __init__(self, end_ids: Sequence[int], stop_strings: Sequence[str], tokenizer):
        self.end_ids = frozenset(end_ids)
        if isinstance(stop_strings, (str, bytes)):
            raise DecodingError(f"stop_strings is a list of texts: pass [{stop_strings!r}]")
        self.stop_strings = tuple(stop_strings)
        wrong = [text for text in self.stop_strings if not isinstance(text, str)]
        if wrong:
            raise DecodingError(f"stop_strings is a list of texts (str), found {wrong[0]!r} in it")
        self.tokenizer = tokenizer
        if any(not text for text in self.stop_strings):
            raise DecodingError("an empty stop string would stop at once: remove it")
        if self.stop_strings and tokenizer is None:
            raise DecodingError("stop_strings need the target's tokenizer, and this target has none")
        longest = max((len(text.encode()) for text in self.stop_strings), default=0)
        self._window = longest + 1  # a token is at least a byte

    def accept(self, request: Request, new_tokens: list[int], accepted: int | None) -> list[int]:
        """Add a step's tokens to a request, up to where it stops.

        Args:
            new_tokens: what the step emits.
            accepted: drafted tokens among them; ``None`` for the prefill, which is no step.

        Returns:
            The tokens kept; ``request.finish_reason`` is set if it ended.

        Raises:
            DecodingError: the target's logits were not numbers (a token of -1).
        """
        room = request.max_new_tokens - len(request.tokens)
        kept, counted = [], accepted
        if accepted is not None and request.position_limit is not None:
            counted = min(accepted, request.position_limit - request.length)
        for place, token in enumerate(new_tokens):
            if token < 0:
                raise DecodingError(
                    f"request {request.index}: after {len(request.tokens)} new tokens the target's logits are not "
                    "numbers (NaN or infinite), so there is no next token: load it in bfloat16 or float32 if it runs "
                    "in float16, and check its weights"
                )
            kept.append(token)
            request.tokens.append(token)
            if token in self.end_ids:
                request.finish_reason = "eos"
            elif self.stop_strings and self._stops(request.tokens):
                request.finish_reason = "stop"
            elif place + 1 == room:
                request.finish_reason = "length"
            if request.finish_reason is not None:
                break
        if counted is not None:
            request.accepted.append(counted if request.finish_reason == "length" else min(counted, len(kept)))
        return kept

    def _stops(self, tokens: list[int]) -> bool:
        tail = self.tokenizer.decode(tokens[-self._window :])
        return any(text in tail for text in self.stop_strings)


def make_requests(
    target: Target,
    input_ids,
    attention_mask,
    max_new_tokens,
    temperature,
    top_k,
    top_p,
    min_p,
    seed: int | Sequence[int] | None,
    processor: LogitsProcessor | Sequence[LogitsProcessor | None] | None = None,
) -> list[Request]:
    """Check the arguments of ``generate`` and make a request of each prompt.

    Returns:
        a request for each prompt, in order.

    Raises:
        DecodingError: no or empty prompts, ids outside the vocabulary, or a bad option.
    """
    prompts = read_prompts(input_ids, attention_mask, target.vocab_size)
    count = len(prompts)
    limits = per_request("max_new_tokens", max_new_tokens, count)
    for limit in limits:
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise DecodingError(f"max_new_tokens must be an integer of at least 1, found {limit!r}")
    columns = [
        per_request(name, value, count)
        for name, value in (("temperature", temperature), ("top_k", top_k), ("top_p", top_p), ("min_p", min_p))
    ]
    seeds = per_request("seed", seed, count)
    for one in seeds:
        check_seed(one)
    processors = [processor] * count if callable(processor) else per_request("logits_processor", processor, count)
    for one in processors:
        if one is not None and not callable(one):
            raise DecodingError(
                "logits_processor must be callable as processor(input_ids, scores), or a list of one a request, "
                f"found {one!r}"
            )
    requests, copies = [], Counter()
    for index, (prompt, limit, *sampling) in enumerate(zip(prompts, limits, *columns, strict=True)):
        options = SamplingOptions(*sampling)
        generator = None
        if not options.greedy:
            generator = torch.Generator()
            if seeds[index] is None:
                generator.seed()
            else:
                generator.manual_seed(stream_seed(seeds[index], prompt, copies[seeds[index], tuple(prompt)]))
        copies[seeds[index], tuple(prompt)] += 1
        requests.append(Request(index, prompt, limit, options, generator, processors[index]))
    return requests


def check_seed(seed) -> None:
    """Raise DecodingError unless a seed is ``None`` or an integer of 0 to 2^64 - 1."""
    if seed is None:
        return
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 64:
        raise DecodingError(f"seed must be None or an integer from 0 to 2^64 - 1, found {seed!r}")


def stream_seed(seed: int, prompt: Sequence[int], copy: int) -> int:
    """What a request's stream of random numbers starts from: the seed, the prompt, and which copy of it this is.

    So a prompt samples the same text wherever it stands in a batch, and two equal prompts two texts.
    """
    text = f"{seed} {copy} " + " ".join(map(str, prompt))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def read_prompts(input_ids, attention_mask, vocab_size: int) -> list[list[int]]:
    """Prompts as lists of ids: of a list of lists or 1-D tensors, of ``[B, S]`` ids with a padding mask, or of one
    prompt alone, ``[S]``.

    Raises:
        DecodingError: see :func:`make_requests`.
    """
    if isinstance(input_ids, Tensor) and (input_ids.is_floating_point() or input_ids.dim() not in (1, 2)):
        raise DecodingError(
            f"input_ids must be integers of shape [B, S] or [S], found {input_ids.dtype} {list(input_ids.shape)}"
        )
    if isinstance(input_ids, Tensor):
        if input_ids.dim() == 1:
            input_ids = input_ids[None]  # [1,S]
            attention_mask = attention_mask[None] if attention_mask is not None else None
        if attention_mask is None:
            prompts = input_ids.tolist()
        else:
            if attention_mask.shape != input_ids.shape:
                raise DecodingError(
                    f"attention_mask must have the shape of input_ids, {tuple(input_ids.shape)}, "
                    f"found {tuple(attention_mask.shape)}"
                )
            prompts = [row[mask.bool()].tolist() for row, mask in zip(input_ids, attention_mask, strict=True)]
    elif isinstance(input_ids, (list, tuple)):
        if attention_mask is not None:
            raise DecodingError("attention_mask goes with input_ids as a [B, S] tensor; a list of prompts needs none")
        prompts = [p.tolist() if isinstance(p, Tensor) else p for p in input_ids]
        if prompts and all(isinstance(p, int) for p in prompts):
            prompts = [prompts]
        if not all(isinstance(p, (list, tuple)) and all(isinstance(token, int) for token in p) for p in prompts):
            raise DecodingError(
                "input_ids must hold token ids: pass a list of prompts, [[1, 2, 3], [4, 5]], or tensors"
            )
        prompts = [list(p) for p in prompts]
    else:
        raise DecodingError(f"input_ids must be [B, S], or a list of prompts, found {type(input_ids).__name__}")
    if not prompts or not all(prompts):
        raise DecodingError("every request needs at least one prompt token" if prompts else "no prompts given")
    for index, prompt in enumerate(prompts):
        wrong = [token for token in prompt if not 0 <= token < vocab_size]
        if wrong:
            raise DecodingError(f"prompt {index}: token id {wrong[0]} lies outside the vocabulary of {vocab_size}")
    return prompts


def end_token_ids(target: Target, eos_token_id) -> list[int]:
    """The ids that end an answer: the given ones (an empty list: none), else the target's own.

    Raises:
        DecodingError: given ids that are no tokens of the target.
    """
    if eos_token_id is None:
        return list(target.end_token_ids)
    if isinstance(eos_token_id, Tensor):
        eos_token_id = eos_token_id.tolist()
    ids = [eos_token_id] if isinstance(eos_token_id, int) else eos_token_id
    if isinstance(ids, (str, bytes)) or not isinstance(ids, (Sequence, set, frozenset)):
        raise DecodingError(f"eos_token_id must be a token id or a list of them, found {eos_token_id!r}")
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < target.vocab_size:
            raise DecodingError(
                f"eos_token_id {token!r} is no token of {target.name}: ids are integers from 0 to "
                f"{target.vocab_size - 1}; [] ends at no token"
            )
    return list(ids)
