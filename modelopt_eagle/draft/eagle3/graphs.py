"""A draft loop recorded once and replayed every round (CUDA graphs; see ``recorder.py``).

The first step of a round reads what was accepted in the round before, at most D+1 tokens a row, padded to D+1; with the
chain, or the expansion of the tree and the choice of its nodes behind it, the whole draft has shapes that never change.
It reads four tensors (tokens, their features, how many were there before and came now, the root tokens) and the draft
cache, whose memory stays in place for all rounds and calls. Behind a prompt longer than D+1 tokens the first round of a
call is drafted without a recording.

Rows leave a batch as they finish. The remaining ones are moved to the front of the cache, and the recording for the
next power of two rows is replayed: rows behind the batch are dummies, whose result nobody reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor, nn

from modelopt_eagle.draft.cache import DraftCache
from modelopt_eagle.draft.eagle3.draft_loop import DraftLoop, RoundLoop, Where
from modelopt_eagle.draft.eagle3.drawn import Shape
from modelopt_eagle.draft.module import EagleModule
from modelopt_eagle.draft.plan import DraftPlan
from modelopt_eagle.draft.trees import RoundTree, SampledDraft, build_round_tree
from modelopt_eagle.kernels import DraftTree
from modelopt_eagle.kernels.dispatch import power_of_two
from modelopt_eagle.kernels.recorder import Recorder, Replay

FIELDS = tuple(field.name for field in fields(DraftTree) if field.name != "max_depth")
LEAST_CAPACITY = 256


class DraftGraphs:
    """Static memory and recordings, for one call of the generator at a time.

    Args:
        module: the head, in evaluation mode.
        embedding: the target's embedding.
        plan: chain or tree.
        recorder: what records.
    """

    def __init__(self, module: EagleModule, embedding: nn.Module, plan: DraftPlan, recorder: Recorder):
        self.module, self.embedding, self.plan, self.recorder = module, embedding, plan, recorder
        self.rows = self.capacity = 0
        self._recordings: dict[int, Replay] = {}
        self._weights: list[Tensor] = []  # what the recordings read; held, so that its memory is not given away
        self._tables: list[tuple[Tensor, Tensor]] = []  # rotary tables that they read: a longer one takes their place

    def loop(self, batch: int, capacity: int) -> RecordedLoop:
        """A loop for a batch of ``batch`` rows of at most ``capacity`` anchors.

        Memory and recordings of earlier calls are used again if they are large enough and the weights still lie
        where they were; new sizes are powers of two, so that few calls make new ones.
        """
        weights = self._read_tensors()
        moved = [w.data_ptr() for w in weights] != [w.data_ptr() for w in self._weights]
        if moved or batch > self.rows or capacity > self.capacity:
            self.rows = max(self.rows, power_of_two(batch))
            self.capacity = max(self.capacity, LEAST_CAPACITY, power_of_two(capacity))
            self._allocate()
            self._weights = weights
        else:
            self.cache.clear()
        return RecordedLoop(self, batch)

    def _read_tensors(self) -> list[Tensor]:
        """The weights that a recording reads."""
        return [w.detach() for part in (self.module, self.embedding) for w in (*part.parameters(), *part.buffers())]

    def _allocate(self) -> None:
        self._recordings.clear()
        self._tables.clear()
        self.base = DraftLoop(self.module, self.embedding, self.plan, self.rows, self.capacity, fixed_shapes=True)
        self.cache = self.base.cache
        weight, device, most = self.module.fc.weight, self.module.fc.weight.device, self.plan.depth + 1
        self.tokens = torch.zeros(self.rows, most, dtype=torch.int64, device=device)  # [R,D+1]
        self.features = weight.new_zeros(self.rows, most, self.module.config.fc_input_size)  # [R,D+1,A·Ht]
        self.places = torch.zeros(self.rows, 2, dtype=torch.int64, device=device)  # [R,2] anchors before, and new
        self.places[:, 1] = 1
        self.roots = torch.zeros(self.rows, dtype=torch.int64, device=device)  # [R]

    def replay(
        self, tokens: Tensor, aux_hidden: Tensor, starts: list[int], counts: list[int], roots: Tensor
    ) -> tuple[Tensor, ...]:
        """The region for the first B rows: arguments as for :meth:`DraftLoop.advance`, with at most D+1 new anchors a
        row, and ``roots [B]``.

        Returns:
            what :meth:`region` returns, of B rows; overwritten by the next replay.
        """
        batch, most = len(starts), max(counts)
        self.tokens[:batch, :most] = tokens[:, :most]
        self.features[:batch, :most] = aux_hidden[:, :most]
        self.places[:batch] = torch.tensor((starts, counts)).T
        self.roots[:batch] = roots
        bucket = power_of_two(batch)
        if bucket not in self._recordings:
            inputs = (self.tokens, self.features, self.places, self.roots, *self.cache.tensors())
            self._recordings[bucket] = self.recorder.record(self.region, [tensor[:bucket] for tensor in inputs])
            self._tables.append(self.module.rotary.tables)
        return tuple(tensor[:batch] for tensor in self._recordings[bucket]())

    def region(
        self, tokens: Tensor, aux_hidden: Tensor, places: Tensor, roots: Tensor, *cache: Tensor
    ) -> tuple[Tensor, ...]:
        """What is recorded: a draft from its first step to its last.

        Args:
            tokens: ``[B, D+1]`` int64, the token after each new anchor.
            aux_hidden: ``[B, D+1, A·Ht]`` the anchors' features.
            places: ``[B, 2]`` int64, anchors committed before, and new ones (1 to D+1).
            roots: ``[B]`` int64 last emitted tokens.
            cache: keys and values; those of the new anchors are committed, the nodes' are written behind them.

        Returns:
            ``(drafted [B, K],)`` of a chain; the fields of a :class:`DraftTree` and ``sees [B, N, N]`` of a tree.
        """
        drafted = self.draft(tokens, aux_hidden, places, roots, cache)
        if isinstance(drafted, Tensor):
            return (drafted,)
        return (*(getattr(drafted.tree, name) for name in FIELDS), drafted.sees)

    def draft(
        self, tokens: Tensor, aux_hidden: Tensor, places: Tensor, roots: Tensor, cache: Sequence[Tensor]
    ) -> Tensor | RoundTree:
        """The draft as a function of tensors, arguments as for :meth:`region`: ``[B, K]``, or a tree."""
        loop = self.base.over(DraftCache.over(cache))
        starts, counts = places.unbind(1)  # [B] each
        output = loop.advance_fixed(tokens, aux_hidden, starts, counts)  # [B,H]
        where = Where(None, (starts + counts)[:, None], 0)
        if not self.plan.is_tree:
            return loop.chain_from(output, where)
        return build_round_tree(loop.expand(output, where), self.plan, roots)


class RecordedLoop(RoundLoop):
    """A :class:`DraftLoop` for one batch whose rounds are replayed. Made by :meth:`DraftGraphs.loop`."""

    def __init__(self, graphs: DraftGraphs, batch: int):
        self.graphs, self.plan = graphs, graphs.plan
        self._given: tuple[Tensor, Tensor, list[int], list[int]] | None = None  # committed with the next draft
        self._use(batch)

    def _use(self, batch: int) -> None:
        self._loop = self.graphs.base.over(self.graphs.cache.first_rows(batch))

    @property
    def eager(self) -> DraftLoop:
        """The loop over the same memory, for prompts and drafts that are drawn."""
        return self._loop

    def keep(self, rows: Tensor) -> None:
        """Keep the rows ``[b]`` int64."""
        self.graphs.cache.compact(rows)
        self._use(len(rows))

    def commit(self, tokens: Tensor, aux_hidden: Tensor, starts: list[int], counts: list[int]) -> None:
        """The first step of a prompt; that of a round waits for :meth:`draft`, with which it is replayed."""
        self._given, self._output = (tokens, aux_hidden, starts, counts), None
        if max(counts) > self.plan.depth + 1:
            self._commit_given()

    def draft_fixed(
        self, tokens: Tensor, aux_hidden: Tensor, places: Tensor, roots: Tensor, memory: Sequence[Tensor]
    ) -> Tensor | RoundTree:
        """See :class:`~modelopt_eagle.draft.algorithm.FixedLoop`."""
        return self.graphs.draft(tokens, aux_hidden, places, roots, memory)

    def memory(self, rows: int, width: int) -> list[Tensor]:
        """See :class:`~modelopt_eagle.draft.algorithm.FixedLoop`: each ``[rows, kv_heads, width + room, d]``."""
        graphs = self.graphs
        slots = width + graphs.base.room - graphs.base.capacity
        return [tensor[:rows, :, :slots] for tensor in graphs.cache.tensors()]

    def reads(self) -> list[Tensor]:
        """See :class:`~modelopt_eagle.draft.algorithm.FixedLoop`."""
        return [*self.graphs._read_tensors(), *self.graphs.cache.tensors()]

    def tables(self) -> Sequence[Tensor]:
        """The rotary tables."""
        return self.graphs.module.rotary.tables

    def _commit_given(self) -> None:
        if self._given is not None:
            super().commit(*self._given)
            self._given = None

    def draft(self, lengths: list[int], roots: Tensor) -> Tensor | RoundTree:
        """The draft behind the last :meth:`commit`; it holds until the next round.

        Raises:
            DecodingError: nothing was committed.
        """
        if self._given is None:
            return super().draft(lengths, roots)
        columns = self.graphs.replay(*self._given, roots)
        self._given = None
        if not self.plan.is_tree:
            return columns[0]
        *fields_of, sees = columns
        tree = DraftTree(**dict(zip(FIELDS, fields_of, strict=True)), max_depth=self.plan.depth)
        return RoundTree(tree, sees)

    def sample(self, lengths: list[int], roots: Tensor, shape: Shape, uniforms: Tensor) -> SampledDraft:
        """Drafts that are drawn, see :meth:`RoundLoop.sample`; nothing of them is replayed."""
        self._commit_given()
        return super().sample(lengths, roots, shape, uniforms)

    def advance(self, tokens: Tensor, aux_hidden: Tensor, starts: list[int], counts: list[int]) -> Tensor:
        """The first step without a recording, as :meth:`DraftLoop.advance`."""
        return self._loop.advance(tokens, aux_hidden, starts, counts)

    def chain(self, output: Tensor, lengths: list[int]) -> Tensor:
        """The chain behind it, without a recording."""
        return self._loop.chain(output, lengths)

    def round_tree(self, output: Tensor, lengths: list[int], roots: Tensor) -> RoundTree:
        """The tree behind it, without a recording."""
        return self._loop.round_tree(output, lengths, roots)
