"""The later steps of a draft loop, recorded once and replayed every round (CUDA graphs; see ``recorder.py``).

The first step of a round reads as many tokens as were accepted and stays as it is. All that follows has shapes that
never change: the chain, or the expansion of the tree and the choice of its nodes. It reads three tensors (the first
step's output, the lengths, the root tokens) and the draft cache, whose memory stays in place for all rounds and calls.

Rows leave a batch as they finish. The remaining ones are moved to the front of the cache, and the recording for the
next power of two rows is replayed: rows behind the batch are dummies, whose result nobody reads.
"""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor, nn

from modelopt_eagle.draft.cache import DraftCache
from modelopt_eagle.draft.eagle3.draft_loop import DraftLoop, RoundLoop, Where
from modelopt_eagle.draft.module import EagleModule
from modelopt_eagle.draft.plan import DraftPlan
from modelopt_eagle.draft.trees import RoundTree, build_round_tree
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
        return [w.detach() for part in (self.module, self.embedding) for w in (*part.parameters(), *part.buffers())]

    def _allocate(self) -> None:
        self._recordings.clear()
        self._tables.clear()
        self.base = DraftLoop(self.module, self.embedding, self.plan, self.rows, self.capacity, fixed_shapes=True)
        self.cache = self.base.cache
        weight, device = self.module.fc.weight, self.module.fc.weight.device
        self.output = weight.new_zeros(self.rows, self.module.config.hidden_size)  # [R,H]
        self.lengths = torch.ones(self.rows, 1, dtype=torch.int64, device=device)  # [R,1]
        self.roots = torch.zeros(self.rows, dtype=torch.int64, device=device)  # [R]

    def replay(self, output: Tensor, lengths: list[int], roots: Tensor | None) -> tuple[Tensor, ...]:
        """The region for the first B rows: ``output [B, H]``, B lengths, ``roots [B]`` (trees only).

        Returns:
            what :meth:`region` returns, of B rows; overwritten by the next replay.
        """
        batch = len(lengths)
        self.output[:batch] = output
        self.lengths[:batch, 0] = torch.tensor(lengths)
        if roots is not None:
            self.roots[:batch] = roots
        bucket = power_of_two(batch)
        if bucket not in self._recordings:
            inputs = (self.output, self.lengths, self.roots, *self.cache.tensors())
            self._recordings[bucket] = self.recorder.record(self.region, [tensor[:bucket] for tensor in inputs])
            self._tables.append(self.module.rotary.tables)
        return tuple(tensor[:batch] for tensor in self._recordings[bucket]())

    def region(self, output: Tensor, lengths: Tensor, roots: Tensor, *cache: Tensor) -> tuple[Tensor, ...]:
        """What is recorded.

        Args:
            output: ``[B, H]`` of the first step.
            lengths: ``[B, 1]`` int64 committed anchors.
            roots: ``[B]`` int64 last emitted tokens.
            cache: keys and values, written behind ``lengths``.

        Returns:
            ``(drafted [B, K],)`` of a chain; the fields of a :class:`DraftTree` and ``sees [B, N, N]`` of a tree.
        """
        loop, where = self.base.over(DraftCache.over(cache)), Where(None, lengths, 0)
        if not self.plan.is_tree:
            return (loop.chain_from(output, where),)
        drafted = build_round_tree(loop.expand(output, where), self.plan, roots)
        return (*(getattr(drafted.tree, name) for name in FIELDS), drafted.sees)


class RecordedLoop(RoundLoop):
    """A :class:`DraftLoop` for one batch whose later steps are replayed. Made by :meth:`DraftGraphs.loop`."""

    def __init__(self, graphs: DraftGraphs, batch: int):
        self.graphs, self.plan = graphs, graphs.plan
        self._use(batch)

    def _use(self, batch: int) -> None:
        self._first = self.graphs.base.over(self.graphs.cache.first_rows(batch))

    @property
    def eager(self) -> DraftLoop:
        """The loop over the same memory; drafts that are drawn are not replayed."""
        return self._first

    def keep(self, rows: Tensor) -> None:
        """Keep the rows ``[b]`` int64."""
        self.graphs.cache.compact(rows)
        self._use(len(rows))

    def advance(self, tokens: Tensor, aux_hidden: Tensor, starts: list[int], counts: list[int]) -> Tensor:
        """The first step, as :meth:`DraftLoop.advance`."""
        return self._first.advance(tokens, aux_hidden, starts, counts)

    def chain(self, output: Tensor, lengths: list[int]) -> Tensor:
        """``[B, K]`` drafted tokens; they hold until the next round."""
        return self.graphs.replay(output, lengths, None)[0]

    def round_tree(self, output: Tensor, lengths: list[int], roots: Tensor) -> RoundTree:
        """The tree of a round; it holds until the next."""
        *columns, sees = self.graphs.replay(output, lengths, roots)
        tree = DraftTree(**dict(zip(FIELDS, columns, strict=True)), max_depth=self.graphs.plan.depth)
        return RoundTree(tree, sees)
