"""Prefill and decoding rounds of a batch, plain or drafted; the generator owns the requests around them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import ExitStack

import torch
from torch import Tensor

from modelopt_eagle.common.modes import evaluating
from modelopt_eagle.decoding.accept import Choice, choose_chain, choose_sampled, choose_tree, first_tokens
from modelopt_eagle.decoding.masks import causal
from modelopt_eagle.decoding.output import Timings
from modelopt_eagle.decoding.relocate import relocate_rows
from modelopt_eagle.decoding.requests import Request
from modelopt_eagle.decoding.row_cache import RowCache
from modelopt_eagle.decoding.sampling import shape_probabilities
from modelopt_eagle.decoding.target_runner import TargetRunner
from modelopt_eagle.decoding.walk import draw_uniforms
from modelopt_eagle.decoding.whole_rounds import WholeRounds
from modelopt_eagle.draft.algorithm import Drafter, DrawingLoop, FixedLoop, algorithm_of
from modelopt_eagle.draft.base import DraftModule
from modelopt_eagle.draft.plan import DraftPlan
from modelopt_eagle.draft.trees import RoundTree, SampledDraft
from modelopt_eagle.errors import DecodingError
from modelopt_eagle.target.model import Target


class Rounds(ABC):
    """What the generator drives: a context manager with ``prefill``, ``step`` and ``keep``.

    Both of the first return ``(tokens, accepted)``: the tokens that each row emits, and how many of them were drafted.
    """

    def __init__(
        self,
        target: Target,
        aux_layer_ids,
        capacity: int,
        timings: Timings,
        num_nodes: int = 1,
        cache: RowCache | None = None,
    ):
        self.target, self.timings = target, timings
        self.runner = TargetRunner(target, aux_layer_ids, capacity, num_nodes, cache=cache)
        self.lengths: list[int] = []  # tokens of each row in the target's cache
        self._stack = ExitStack()

    def __enter__(self):
        self._stack.enter_context(self.runner)
        return self

    def __exit__(self, *exception) -> None:
        self._stack.close()

    def prefill(self, requests: list[Request], images=None) -> tuple[list[list[int]], list[None]]:
        """Read all prompts, one of them if it has ``images``, and give each its first token.

        Returns:
            the first token of each row, and ``None`` for each, as nothing was drafted.
        """
        begun = time.perf_counter()
        self.lengths = [len(request.prompt) for request in requests]
        longest = max(self.lengths)
        padded = [request.prompt + [0] * (longest - len(request.prompt)) for request in requests]
        tokens = torch.tensor(padded, device=self.target.device)  # [B,P]
        logits, aux = self.runner.prefill(tokens, self.lengths, images)  # [B,V], [B,P,A·Ht]
        first = first_tokens(logits, requests)  # [B]
        self.after_prefill(tokens, aux, first)
        self.timings.prefill += time.perf_counter() - begun
        return [[token] for token in first.tolist()], [None] * len(requests)

    @abstractmethod
    def after_prefill(self, tokens: Tensor, aux: Tensor | None, first: Tensor) -> None:
        """Remember what the first round needs."""

    @abstractmethod
    def step(self, requests: list[Request]) -> tuple[list[list[int]], list[int]]:
        """One round for all rows."""

    def keep(self, rows: list[int] | None) -> Tensor | None:
        """Go on with these rows only (``None``: all). Returns them as ``[b]`` int64."""
        if rows is None or not rows:
            return None
        self.lengths = [self.lengths[row] for row in rows]
        index = torch.tensor(rows, device=self.target.device)
        self.runner.cache.keep(rows, max(self.lengths))
        return index


class PlainRounds(Rounds):
    """One token a row and forward pass."""

    def __init__(self, target: Target, capacity: int, timings: Timings):
        super().__init__(target, (), capacity, timings)
        self.sees, self.depths = causal(1, target.device)

    def after_prefill(self, tokens: Tensor, aux: Tensor | None, first: Tensor) -> None:
        """The first round reads the first token."""
        self.last = first[:, None]  # [B,1]

    def step(self, requests: list[Request]) -> tuple[list[list[int]], list[int]]:
        """Read the last token of each row and choose the next.

        Returns:
            the new token of each row, and that none was drafted.
        """
        begun = time.perf_counter()
        logits, _ = self.runner.verify(self.last, self.lengths, self.sees, self.depths)  # [B,1,V]
        self.last = first_tokens(logits[:, 0], requests)[:, None]  # [B,1]
        self.lengths = [length + 1 for length in self.lengths]
        tokens = self.last.tolist()
        self.timings.verify += time.perf_counter() - begun
        return tokens, [0] * len(tokens)

    def keep(self, rows: list[int] | None) -> Tensor | None:
        """Also keep their last tokens."""
        index = super().keep(rows)
        if index is not None:
            self.last = self.last[index]
        return index


class DraftedRounds(Rounds):
    """Draft, verify, accept.

    Between rounds it holds the last emitted token of each row (which no model has read yet) and the anchors that the
    target accepted since the head last ran: their true features and the tokens that follow them.
    """

    def __init__(
        self,
        target: Target,
        draft: DraftModule,
        drafter: Drafter,
        plan: DraftPlan,
        batch: int,
        capacity: int,
        timings: Timings,
        sample_drafts: bool = False,
        whole: WholeRounds | None = None,
    ):
        self.loop = drafter.loop(batch, capacity)
        self.whole = whole if isinstance(self.loop, FixedLoop) else None
        cache = None if self.whole is None else self.whole.prepare(batch, capacity)
        super().__init__(target, draft.config.aux_layer_ids, capacity, timings, plan.num_nodes, cache)
        self.draft, self.plan = draft, plan
        if self.whole is not None:
            self.whole.join(self.runner, self.loop)
        self.sample_drafts = sample_drafts
        if sample_drafts and not isinstance(self.loop, DrawingLoop):
            raise DecodingError(
                f"{type(self.loop).__name__} drafts the likeliest tokens only: leave sample_drafts at False"
            )
        self.reads_final = algorithm_of(draft.config).final_state
        self.sees, self.depths = causal(plan.num_nodes, target.device)  # of a chain

    def __enter__(self):
        self._stack.enter_context(evaluating(self.draft))
        return super().__enter__()

    def after_prefill(self, tokens: Tensor, aux: Tensor | None, first: Tensor) -> None:
        """The first round commits every prompt token as an anchor."""
        self.last = first  # [B]
        self.counts = list(self.lengths)
        ends = torch.tensor(self.lengths, device=tokens.device)[:, None] - 1  # [B,1]
        following = torch.cat((tokens[:, 1:], tokens[:, :1]), 1)  # [B,P] token after each anchor
        self.pending = following.scatter(1, ends, first[:, None])  # [B,P]
        self.features = aux  # [B,P,A·Ht]

    def step(self, requests: list[Request]) -> tuple[list[list[int]], list[int]]:
        """One round: at least one token a row, up to D+1."""
        begun = time.perf_counter()
        choice = self._replayed(requests)
        drafted = begun
        if choice is None:
            choice, drafted = self._called(requests)
        counts = [accepted + 1 for accepted in choice.accepted]
        most = max(counts)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self.counts = counts
        self.pending, self.features, self.last = choice.tokens[:, :most], choice.features[:, :most], choice.last
        ended = time.perf_counter()
        self.timings.draft += drafted - begun
        self.timings.verify += ended - drafted
        return choice.emitted, choice.accepted

    def _replayed(self, requests: list[Request]) -> Choice | None:
        """The round as one recording (``whole_rounds.py``), if it can be; its time counts as verification."""
        if self.whole is None or max(self.counts) > self.plan.depth + 1 or not self.whole.takes(requests):
            return None
        return self.whole.round(self.lengths, self.counts, self.pending, self.features)

    def _called(self, requests: list[Request]) -> tuple[Choice, float]:
        """The round call by call, and when its draft was done."""
        if self.whole is not None:
            self.whole.forget()
        committed = [length - count for length, count in zip(self.lengths, self.counts, strict=True)]
        features = self.target.final_norm(self.features) if self.reads_final else self.features
        self.loop.commit(self.pending, features, committed, self.counts)
        drafts = self._draft(requests)  # [B,K], or a tree
        drafted = time.perf_counter()
        if isinstance(drafts, SampledDraft):
            choice = self._verify_drawn(drafts, requests)
        elif isinstance(drafts, RoundTree):
            choice = self._verify_tree(drafts, requests)
        else:
            choice = self._verify_chain(drafts, requests)
        return choice, drafted

    def _draft(self, requests: list[Request]) -> Tensor | RoundTree | SampledDraft:
        """The likeliest tokens, or drawn ones if a request samples and drafts are to be drawn."""
        options = [request.sampling for request in requests]
        if not self.sample_drafts or not isinstance(self.loop, DrawingLoop) or all(one.greedy for one in options):
            return self.loop.draft(self.lengths, self.last)
        size = self.plan.depth, self.plan.topk or 1
        uniforms = draw_uniforms(requests, size[0] * size[1], self.last.device).view(-1, *size)  # [B,D,T]
        return self.loop.sample(self.lengths, self.last, lambda logits: shape_probabilities(logits, options), uniforms)

    def _verify_drawn(self, drafted: SampledDraft, requests: list[Request]) -> Choice:
        """Acceptance of drafts that were drawn; a chain lies in place already."""
        tree = drafted.tree.tree
        logits, features = self.runner.verify(tree.tokens.long(), self.lengths, drafted.tree.sees, tree.depths.long())
        choice = choose_sampled(drafted, logits, features, requests)
        if drafted.branching > 1:
            relocate_rows(self.runner.cache, choice.path, self.lengths)
        else:
            self.runner.settle(tree.tokens.long(), self.lengths, choice.accepted)
        return choice

    def _verify_chain(self, drafted: Tensor, requests: list[Request]) -> Choice:
        """Acceptance of ``[B, K]`` drafted tokens."""
        nodes = torch.cat((self.last[:, None], drafted), 1)  # [B,K+1]
        logits, features = self.runner.verify(nodes, self.lengths, self.sees, self.depths)
        choice = choose_chain(nodes, logits, features, requests)
        self.runner.settle(nodes, self.lengths, choice.accepted)
        return choice

    def _verify_tree(self, drafted: RoundTree, requests: list[Request]) -> Choice:
        """Acceptance of a tree; the accepted path is moved together in the target's cache."""
        tokens, depths = drafted.tree.tokens.long(), drafted.tree.depths.long()  # [B,N]
        logits, features = self.runner.verify(tokens, self.lengths, drafted.sees, depths)
        choice = choose_tree(drafted, logits, features, requests)
        relocate_rows(self.runner.cache, choice.path, self.lengths)
        self.runner.settle(tokens, self.lengths, choice.accepted)
        return choice

    def keep(self, rows: list[int] | None) -> Tensor | None:
        """Also keep the head's cache and what the next round reads."""
        index = super().keep(rows)
        if index is not None:
            self.loop.keep(index)
            if self.whole is not None:
                self.whole.forget()
            self.pending, self.features, self.last = self.pending[index], self.features[index], self.last[index]
            self.counts = [self.counts[row] for row in rows]
        return index
