"""``PseudoSpeculativeGenerator``: draft, verify, accept, on one machine and with any transformers target.

It decodes as a serving engine does (KV caches on both sides, one verification pass a round), so its acceptance is
what an engine will see; its output is the target's own: token for token when greedy, in distribution when sampling.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from modelopt_eagle.common.acceptance import prefix_counts
from modelopt_eagle.decoding.checks import check_lengths, check_pair
from modelopt_eagle.decoding.cpu_linear import SWITCH, FastLinears
from modelopt_eagle.decoding.output import GenerationOutput, Timings
from modelopt_eagle.decoding.requests import (
    LogitsProcessor,
    Request,
    StopRule,
    StreamCallback,
    end_token_ids,
    make_requests,
)
from modelopt_eagle.decoding.rounds import DraftedRounds, PlainRounds, Rounds
from modelopt_eagle.decoding.supported import needs_numbers
from modelopt_eagle.decoding.target_runner import cache_argument
from modelopt_eagle.decoding.whole_rounds import WholeRounds
from modelopt_eagle.draft.algorithm import Drafter, algorithm_of
from modelopt_eagle.draft.base import DraftModule
from modelopt_eagle.draft.plan import DraftPlan
from modelopt_eagle.errors import DecodingError
from modelopt_eagle.kernels.recorder import choose_recorder
from modelopt_eagle.target.model import Target


class PseudoSpeculativeGenerator:
    """Generates with a target and a draft head of any kind.

    Args:
        target: the frozen target.
        draft: the head; ``None`` is plain decoding through the same code (see :class:`PlainGenerator`).
        mode: ``"chain"`` or ``"tree"``.
        num_steps: K drafted tokens of a chain; 0 is plain decoding.
        topk, depth, num_nodes: T, D and N (root included) of a tree; N defaults to ``1 + T·D``.
        max_batch: most requests of one call; ``None``: any number.
        cache_length: slots of the KV cache a request; ``None``: as many as the call needs.
        cuda_graph: whether rounds are replayed from a CUDA graph, whole where target and requests allow it, else their
            drafts: ``"auto"`` (on CUDA), ``True`` (an error elsewhere, or where not even drafts can be captured) or
            ``False``. Its memory is kept for the next call.
        fast_linear: float32 linear layers on the CPU run by oneDNN while decoding (``cpu_linear.py``): ``"auto"`` (with
            copies of the weights laid out for it, if they take at most half of the free memory), ``True`` (with copies)
            or ``False``. Copies are shared by all generators of a model and live as long as one of them.
        sample_drafts: draw the drafts of sampling requests from the head (at the request's temperature and filters) and
            accept them by exact rejection; ``False``: draft the likeliest tokens. A tree is then T chains below the
            root, with ``num_nodes`` at its default. Both leave the target's distribution as it is.

    Attributes:
        notes: what a user should know of this plan with this head, such as drafts longer than it was trained for.

    Raises:
        DecodingError: options that do not fit together, a draft of another target, a target without a KV cache.
    """

    def __init__(
        self,
        target: Target,
        draft: DraftModule | None,
        mode: str = "chain",
        num_steps: int = 3,
        *,
        topk: int | None = None,
        depth: int | None = None,
        num_nodes: int | None = None,
        max_batch: int | None = None,
        cache_length: int | None = None,
        cuda_graph: str | bool = "auto",
        fast_linear: str | bool = "auto",
        sample_drafts: bool = False,
    ):
        if not isinstance(target, Target):
            raise DecodingError(
                f"expected a Target, found {type(target).__name__}: load_target(NAME) makes one, or "
                "Target(model, tokenizer, name=...)"
            )
        self.target, self.draft = target, draft
        self.plan = DraftPlan.from_options(mode, num_steps, topk, depth, num_nodes)
        if max_batch is not None and max_batch < 1:
            raise DecodingError(f"max_batch must be at least 1, found {max_batch}")
        cache_argument(target)
        self.notes: list[str] = []
        if draft is None:
            if self.plan.depth:
                raise DecodingError("drafting needs a draft head; for plain decoding pass num_steps=0")
        else:
            self.notes = check_pair(target, draft, self.plan, bool(sample_drafts))
            draft.meet_target(target.head.rows)
        self.sample_drafts = bool(sample_drafts)
        if self.sample_drafts and self.plan.is_tree and self.plan.num_nodes != 1 + self.plan.topk * self.plan.depth:
            raise DecodingError(
                f"sample_drafts draws T chains below the root: num_nodes must be 1 + topk * depth, "
                f"{1 + self.plan.topk * self.plan.depth}, found {self.plan.num_nodes}"
            )
        self.max_batch, self.cache_length = max_batch, cache_length
        self._recorder = choose_recorder(cuda_graph, target.device)
        self._drafter: Drafter | None = None
        self._whole: WholeRounds | None = None
        if fast_linear not in SWITCH:
            raise DecodingError(f'fast_linear must be "auto", True or False, found {fast_linear!r}')
        self.fast_linear = fast_linear
        self._fast: list[FastLinears] = []

    @torch.inference_mode()
    def generate(
        self,
        input_ids: Tensor | Sequence,
        max_new_tokens: int | Sequence[int] = 128,
        temperature: float | Sequence[float] = 0.0,
        *,
        attention_mask: Tensor | None = None,
        top_k: int | Sequence[int] = 0,
        top_p: float | Sequence[float] = 1.0,
        min_p: float | Sequence[float] = 0.0,
        eos_token_id: int | Sequence[int] | None = None,
        stop_strings: Sequence[str] = (),
        seed: int | Sequence[int] | None = None,
        on_tokens: StreamCallback | None = None,
        images: dict[str, Tensor] | None = None,
        logits_processor: LogitsProcessor | Sequence[LogitsProcessor | None] | None = None,
    ) -> GenerationOutput:
        """Answer a batch of prompts, which may differ in length and stop at different times.

        Args:
            input_ids: a list of prompts (lists or 1-D tensors of ids), ``[B, S]`` with ``attention_mask`` if rows are
                padded, or a single prompt ``[S]``.
            max_new_tokens: limit on new tokens, one for all or one a request.
            temperature: 0 is greedy; the sampling options take one value for all, or one a request.
            attention_mask: ``[B, S]``, 0 at padding on either side.
            top_k, top_p, min_p: filters, applied in this order (0, 1 and 0: off).
            eos_token_id: end tokens; ``None``: the target's own (``target/stops.py``); ``[]``: none.
            stop_strings: an answer ends with the token that completes one of these.
            seed: makes sampling repeatable, one for all or one a request; a request's stream comes from its seed and
                its prompt, whatever batch it stands in.
            on_tokens: called as ``on_tokens(request, new_tokens, finish_reason)`` after every step.
            images: what ``Target.vision.inputs`` made of the images of the prompt, which is then the only one and holds
                the expanded placeholders.
            logits_processor: ``processor(input_ids [1, S], scores [1, V]) -> [1, V]``, as those of transformers
                (repetition penalty, the mask of a grammar), one for all or one a request. It sees the text up to each
                node that is visited, before temperature and filters, so the text is the one of plain decoding with it.

        Returns:
            :class:`GenerationOutput`.

        Raises:
            DecodingError: bad prompts or options, a batch above ``max_batch``, a cache too short. Nothing is changed.
        """
        started = time.perf_counter()
        requests = make_requests(
            self.target, input_ids, attention_mask, max_new_tokens, temperature, top_k, top_p, min_p, seed,
            logits_processor,
        )  # fmt: skip
        if self.max_batch is not None and len(requests) > self.max_batch:
            raise DecodingError(f"{len(requests)} requests, but there are {self.max_batch} slots: raise max_batch")
        if images is not None and len(requests) > 1:
            raise DecodingError(f"a prompt with images is answered alone, found {len(requests)} prompts: one a call")
        rule = StopRule(end_token_ids(self.target, eos_token_id), stop_strings, self.target.tokenizer)
        capacity = check_lengths(self.target, requests, self.plan, self.cache_length)
        timings = Timings()
        drafter, whole = self._take_drafter(), self._take_whole()
        with ExitStack() as stack:
            for fast in self._fast_linears():
                stack.enter_context(fast.use())
            rounds = stack.enter_context(self._rounds(len(requests), capacity, timings, drafter, whole))
            run = _Run(requests, rule, on_tokens)
            run.emit(requests, *rounds.prefill(requests, images))
            rounds.keep(run.drop_finished())
            while run.active:
                run.emit(run.active, *rounds.step(run.active))
                rounds.keep(run.drop_finished())
        self._drafter, self._whole = drafter, whole
        timings.other = time.perf_counter() - started - timings.prefill - timings.draft - timings.verify
        accepted = [request.accepted for request in requests]
        return GenerationOutput(
            tokens=[request.tokens for request in requests],
            accepted_lengths=accepted,
            accepted_per_position=prefix_counts(accepted, self.plan.depth),
            finish_reasons=[request.finish_reason for request in requests],
            timings=timings,
        )

    def _fast_linears(self) -> list[FastLinears]:
        """Those of target and head, held from the first call on."""
        if not self._fast:
            models = [self.target.model] if self.draft is None else [self.target.model, self.draft]
            found = [FastLinears.shared(model, self.fast_linear) for model in models]
            self._fast = [fast for fast in found if fast is not None]
        return self._fast

    def _take_drafter(self) -> Drafter | None:
        """The memory and recordings of the call before, or new ones if it failed or still runs in another thread."""
        drafter, self._drafter = self._drafter, None
        if drafter is None and self.draft is not None and self.plan.depth:
            make = algorithm_of(self.draft.config).drafter
            drafter = make(self.draft, self.target.embedding, self.plan, self._recorder)
        return drafter

    def _take_whole(self) -> WholeRounds | None:
        """The same for whole rounds, if they are recorded."""
        whole, self._whole = self._whole, None
        if whole is None and self.draft is not None and self.plan.depth and self._recorder is not None:
            if needs_numbers(self.target, 0) is None:
                reads_final = algorithm_of(self.draft.config).final_state
                whole = WholeRounds(self.target, self.plan, self._recorder, reads_final)
        return whole

    def _rounds(
        self, batch: int, capacity: int, timings: Timings, drafter: Drafter | None, whole: WholeRounds | None
    ) -> Rounds:
        if self.draft is None or drafter is None:
            return PlainRounds(self.target, capacity, timings)
        return DraftedRounds(
            self.target, self.draft, drafter, self.plan, batch, capacity, timings, self.sample_drafts, whole
        )


class PlainGenerator(PseudoSpeculativeGenerator):
    """Plain decoding with a KV cache in the same harness: the fair baseline of a speed-up."""

    def __init__(
        self,
        target: Target,
        *,
        max_batch: int | None = None,
        cache_length: int | None = None,
        fast_linear: str | bool = "auto",
    ):
        super().__init__(
            target, None, "chain", 0, max_batch=max_batch, cache_length=cache_length, fast_linear=fast_linear
        )


class _Run:
    """Which requests are still being answered."""

    def __init__(self, requests: list[Request], rule: StopRule, on_tokens: StreamCallback | None):
        self.active = list(requests)
        self.rule, self.on_tokens = rule, on_tokens

    def emit(self, requests: list[Request], tokens: list[list[int]], accepted: list[int | None]) -> None:
        """Hand each request its step's tokens."""
        for request, new, count in zip(requests, tokens, accepted, strict=True):
            kept = self.rule.accept(request, new, count)
            if self.on_tokens is not None:
                self.on_tokens(request.index, kept, request.finish_reason)

    def drop_finished(self) -> list[int] | None:
        """Rows that go on, or ``None`` if all do."""
        rows = [row for row, request in enumerate(self.active) if request.finish_reason is None]
        if len(rows) == len(self.active):
            return None
        self.active = [self.active[row] for row in rows]
        return rows
