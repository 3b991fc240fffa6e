"""A round as one function of tensors of fixed shapes: the first draft step, the later ones, verification by the target,
acceptance and the move of the accepted path. On CUDA it is recorded once and replayed (``recorder.py``).

What changes from round to round stands in tensors: ``state [R, D+3]`` (how many tokens of a row the target holds, how
many the last round emitted, these tokens) and their features. A round reads both and gives the next ones, so between
two rounds the host copies two tensors, replays one recording and reads the new state back.

Shapes follow the rows and the longest row in powers of two: a recording reads the first W slots of the caches, whose
memory has room for more and stays in place for all rounds and calls.

Greedy rounds only, and targets that take positions and masks for rows of different lengths. Prompts, rounds that sample
or have a logits processor, prompts with images and other drafters run call by call (``rounds.py``).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from modelopt_eagle.decoding.accept import Choice
from modelopt_eagle.decoding.masks import causal
from modelopt_eagle.decoding.requests import Request
from modelopt_eagle.decoding.row_cache import RowCache
from modelopt_eagle.decoding.supported import needs_numbers
from modelopt_eagle.decoding.target_runner import TargetRunner, row_cache
from modelopt_eagle.decoding.walk import likeliest
from modelopt_eagle.draft.algorithm import FixedLoop
from modelopt_eagle.draft.plan import DraftPlan
from modelopt_eagle.errors import DecodingError
from modelopt_eagle.kernels import relocate_kv, repack_accepted, verify_greedy
from modelopt_eagle.kernels.dispatch import power_of_two
from modelopt_eagle.kernels.recorder import Recorder, Replay, strict
from modelopt_eagle.target.model import Target

LEAST_WIDTH = 256
"""Slots that the shortest recording reads; the memory is a multiple of as many."""


class WholeRounds:
    """Memory and recordings of whole rounds, for one call of a generator at a time.

    Args:
        target: the frozen target.
        plan: chain or tree.
        recorder: what records.
        reads_final: whether the head reads the target's final state, behind its norm.
    """

    def __init__(self, target: Target, plan: DraftPlan, recorder: Recorder, reads_final: bool):
        self.target, self.plan, self.recorder, self.reads_final = target, plan, strict(recorder), reads_final
        self.rows = self.capacity = 0
        self.cache: RowCache | None = None
        self.refused: str | None = None  # why nothing is recorded any more
        self._recordings: dict[tuple[int, int, int | None], Replay] = {}
        self._reads: list[Tensor] = []  # held, so that its memory is not given away
        self._held: list[Tensor] = []  # as are the head's rotary tables, of which longer ones take the place
        self._state: Tensor | None = None
        self._features: Tensor | None = None
        self._after: tuple[Tensor, ...] | None = None  # of the round before, if the next one goes on from it

    def prepare(self, batch: int, capacity: int) -> RowCache:
        """The target's cache for a call of ``batch`` rows of ``capacity`` slots, of the call before if it is enough."""
        if self.cache is None or batch > self.rows or capacity > self.capacity:
            self.rows = max(self.rows, batch)
            self.capacity = max(self.capacity, -(-capacity // LEAST_WIDTH) * LEAST_WIDTH)
            self.cache = row_cache(self.target, self.capacity, self.rows)
            self._state = None
        else:
            self.cache.begin(batch)
        return self.cache

    def join(self, runner: TargetRunner, loop: FixedLoop) -> None:
        """Go on with what a call made over the cache of :meth:`prepare`; recordings of other memory are dropped."""
        self.runner, self.loop, self._after = runner, loop, None
        reads = [w.detach() for w in (*self.target.model.parameters(), *self.target.model.buffers())] + loop.reads()
        if [w.data_ptr() for w in reads] != [w.data_ptr() for w in self._reads]:
            self._recordings.clear()
            self._held.clear()
            self._reads = reads

    def takes(self, requests: list[Request]) -> bool:
        """Whether the next round of these requests can be one recording."""
        return (
            self.refused is None
            and self.runner.shift == 0
            and all(request.sampling.greedy and request.processor is None for request in requests)
        )

    def forget(self) -> None:
        """The next round does not go on from the last one of here: rows left, or it was run call by call."""
        self._after = None

    def round(self, lengths: list[int], counts: list[int], tokens: Tensor, features: Tensor) -> Choice | None:
        """Draft, verify, accept and move, for B rows.

        Args:
            lengths: B tokens that the target holds of each row.
            counts: B tokens emitted by the last round, at most D+1.
            tokens: ``[B, m]`` int64 these tokens, padded on the right.
            features: ``[B, m, A·Ht]`` of the nodes that they follow.

        Returns:
            the round's acceptance, which holds until the next round; ``None`` if it cannot be recorded.

        Raises:
            DecodingError: the nodes do not fit into the cache.
        """
        batch = len(lengths)
        need = max(lengths) + self.plan.num_nodes
        if need > self.capacity:
            raise DecodingError(f"the KV cache holds {self.capacity} tokens a request, {need} are needed")
        state, read = self._inputs(batch, lengths, counts, tokens, features)
        bucket = min(power_of_two(batch), self.rows)
        width = min(max(power_of_two(need), LEAST_WIDTH), self.capacity)
        kind = bucket, width, self.runner.position_limit
        if kind not in self._recordings and not self._record(state, read, *kind):
            return None
        self._after = tuple(tensor[:batch] for tensor in self._recordings[kind]())
        new, packed, known, last = self._after
        rows = new.tolist()  # the one copy that a round waits for
        emitted = [row[2 : 2 + row[1]] for row in rows]
        return Choice(emitted, [row[1] - 1 for row in rows], known, packed, last)

    def _inputs(
        self, batch: int, lengths: list[int], counts: list[int], tokens: Tensor, features: Tensor
    ) -> tuple[Tensor, Tensor]:
        """State and features of a round in their places, of which the first B rows are real."""
        state, held = self._state, self._features
        if state is None or held is None or held.shape[-1] != features.shape[-1] or held.dtype != features.dtype:
            most = self.plan.depth + 1
            state = torch.zeros(self.rows, most + 2, dtype=torch.int64, device=tokens.device)  # [R,D+3]
            state[:, :2] = 1  # a legal row: its first token is emitted and known to the target
            held = features.new_zeros(self.rows, most, features.shape[-1])  # [R,D+1,A·Ht]
            self._state, self._features = state, held
            self._recordings.clear()
        if self._after is not None:
            state[:batch], held[:batch] = self._after[0], self._after[1]
        else:
            most = max(counts)
            state[batch:, :2] = 1  # a row that left may be longer than the slots that are read now
            state[:batch, :2] = torch.tensor((lengths, counts), device=tokens.device).T
            state[:batch, 2 : 2 + most] = tokens[:, :most]
            held[:batch, :most] = features[:, :most]
        return state, held

    def _record(self, state: Tensor, features: Tensor, bucket: int, width: int, limit: int | None) -> bool:
        """Record a round; False, with a warning, if it cannot be."""
        memory = self.loop.memory(bucket, width)
        pools = [tensor[:bucket] for tensor in self._cache().held()]

        def region(state: Tensor, features: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
            return self.region(state, features, tensors[: len(memory)], tensors[len(memory) :], width)

        self.refused = needs_numbers(self.target, width)
        if self.refused is None:
            try:
                replay = self.recorder.record(region, [state[:bucket], features[:bucket], *memory, *pools])
                self._recordings[bucket, width, limit] = replay
                self._held += self.loop.tables()
                return True
            except DecodingError as error:
                self.refused = str(error)
        warnings.warn(f"of the rounds of {self.target.name} the draft alone is recorded: {self.refused}", stacklevel=2)
        return False

    def _cache(self) -> RowCache:
        if self.cache is None:
            raise DecodingError("a round needs the memory of prepare(...)")
        return self.cache

    def region(
        self, state: Tensor, features: Tensor, memory: Sequence[Tensor], pools: Sequence[Tensor], width: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A whole round as a function of tensors.

        It may be run again on what it has run on: all that it writes lies behind what it reads.

        Args:
            state: ``[B, D+3]`` int64: tokens that the target holds, n + 1 tokens of the last round, and these.
            features: ``[B, D+1, A·Ht]``, of the nodes that they follow; padding holds anything.
            memory: the head's keys and values, of ``width`` positions and a draft.
            pools: the target's, of which ``width`` slots are read.
            width: at least the longest row and N.

        Returns:
            the next state and features; the state's tokens with 0 for -1 (padding, and where the target's logits are
            not numbers); and the last token ``[B]`` int64 of each row.
        """
        lengths, counts = state[:, 0], state[:, 1]  # [B] each
        tokens = state[:, 2:].clamp(min=0)  # [B,D+1]
        roots = tokens.gather(1, counts[:, None] - 1)[:, 0]  # [B]
        places = torch.stack((lengths - counts, counts), 1)  # [B,2]
        read = self.target.final_norm(features) if self.reads_final else features
        drafted = self.loop.draft_fixed(tokens, read, places, roots, memory)
        if isinstance(drafted, Tensor):
            nodes = torch.cat((roots[:, None], drafted), 1)  # [B,K+1]
            sees, depths = causal(self.plan.num_nodes, nodes.device)
            logits, packed = self.runner.verify_fixed(nodes, lengths, sees, depths, list(pools), width)
            emitted = likeliest(logits)  # [B,K+1]
            accepted = (emitted[:, :-1] == nodes[:, 1:]).cumprod(1).sum(1)  # [B]
        else:
            tree = drafted.tree
            logits, captured = self.runner.verify_fixed(
                tree.tokens.long(), lengths, drafted.sees, tree.depths.long(), list(pools), width
            )
            path = verify_greedy(tree, likeliest(logits))
            packed = repack_accepted(captured, path.nodes, path.num_accepted)  # [B,D+1,A·Ht]
            for pool in pools:
                relocate_kv(pool, path.nodes, path.num_accepted, lengths)
            emitted, accepted = path.tokens.long(), path.num_accepted.long()
        new = accepted[:, None] + 1  # [B,1]
        last = emitted.gather(1, accepted[:, None])[:, 0]  # [B]
        return torch.cat((lengths[:, None] + new, new, emitted), 1), packed, emitted.clamp(min=0), last
