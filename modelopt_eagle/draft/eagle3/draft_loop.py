"""The draft loop: one round of drafting from the tokens and true features of the last acceptance.

Chain and tree share the first step and the later steps. The first step reads all tokens accepted since the round
before (variable length) and writes exactly their keys; each later step reads the new nodes of one layer, which see
the prefix, their own ancestors' keys and themselves (EAGLE-2, arXiv 2406.16858, section 4; ``rollout.md`` at k >= 1).
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from modelopt_eagle.common.trees import history_size
from modelopt_eagle.draft.cache import DraftCache
from modelopt_eagle.draft.eagle3.drawn import Shape, draw_draft
from modelopt_eagle.draft.module import EagleModule
from modelopt_eagle.draft.plan import DraftPlan
from modelopt_eagle.draft.trees import RoundTree, SampledDraft, TreeHistory, build_round_tree
from modelopt_eagle.errors import DecodingError
from modelopt_eagle.kernels.topk import stable_topk


class RoundLoop(ABC):
    """A round as the generator asks for it, made of a first step and what follows it."""

    plan: DraftPlan
    _output: Tensor | None = None

    @property
    @abstractmethod
    def eager(self) -> DraftLoop:
        """The loop itself, for what is not replayed."""

    @abstractmethod
    def advance(self, tokens: Tensor, aux_hidden: Tensor, starts: list[int], counts: list[int]) -> Tensor:
        """The first step, see :meth:`DraftLoop.advance`."""

    @abstractmethod
    def chain(self, output: Tensor, lengths: list[int]) -> Tensor:
        """The chain behind a first step, see :meth:`DraftLoop.chain`."""

    @abstractmethod
    def round_tree(self, output: Tensor, lengths: list[int], roots: Tensor) -> RoundTree:
        """The tree behind a first step, see :meth:`DraftLoop.round_tree`."""

    def commit(self, tokens: Tensor, aux_hidden: Tensor, starts: list[int], counts: list[int]) -> None:
        """Run the first step; arguments as for :class:`~modelopt_eagle.draft.algorithm.DraftLoop`."""
        self._output = self.advance(tokens, aux_hidden, starts, counts)  # [B,H]

    def draft(self, lengths: list[int], roots: Tensor) -> Tensor | RoundTree:
        """The later steps behind the last :meth:`commit`.

        Raises:
            DecodingError: nothing was committed.
        """
        if self._output is None:
            raise DecodingError("nothing was committed yet: a round begins with commit(...)")
        if self.plan.is_tree:
            return self.round_tree(self._output, lengths, roots)
        return self.chain(self._output, lengths)

    def sample(self, lengths: list[int], roots: Tensor, shape: Shape, uniforms: Tensor) -> SampledDraft:
        """Drafts that are drawn behind the last :meth:`commit` (``drawn.py``).

        Raises:
            DecodingError: nothing was committed.
        """
        if self._output is None:
            raise DecodingError("nothing was committed yet: a round begins with commit(...)")
        return draw_draft(self.eager, self._output, lengths, roots, shape, uniforms)


class EagerDrafter:
    """Gives a new loop, with its own cache, for each call of the generator.

    Args:
        module: the head, in evaluation mode.
        embedding: the target's embedding (unused by a head with its own).
        plan: chain or tree.
    """

    def __init__(self, module: EagleModule, embedding: nn.Module, plan: DraftPlan):
        self.module, self.embedding, self.plan = module, embedding, plan

    def loop(self, batch: int, capacity: int) -> DraftLoop:
        """A loop for ``batch`` rows of at most ``capacity`` anchors."""
        return DraftLoop(self.module, self.embedding, self.plan, batch, capacity)


class DraftLoop(RoundLoop):
    """Drafts for a batch of rows.

    Args:
        module: the head, in evaluation mode.
        embedding: the target's embedding (unused by a head with its own).
        plan: chain or tree.
        batch: rows.
        capacity: anchors a row can have.
        fixed_shapes: run the later steps over the whole buffer with positions as tensors, so that their shapes never
            change (what a CUDA graph needs); otherwise over the slots in use.
    """

    def __init__(
        self,
        module: EagleModule,
        embedding: nn.Module,
        plan: DraftPlan,
        batch: int,
        capacity: int,
        fixed_shapes: bool = False,
    ):
        self.module, self.embedding, self.plan = module, embedding, plan
        self.capacity, self.window = capacity, module.config.sliding_window
        if self.window is not None and plan.depth > self.window:
            raise DecodingError(f"drafts of {plan.depth} tokens do not fit into the head's window of {self.window}")
        self.room = capacity + max(plan.depth, max(1, plan.depth - 1) * plan.branching)
        self.cache = DraftCache.allocate(module, batch, self.room)
        self.fixed_shapes = fixed_shapes
        self.target_ids = module.vocab.d2t + torch.arange(len(module.d2t), device=module.d2t.device)  # [Vd]
        self._positions = capacity + plan.depth + 1  # above every rotary position

    @property
    def eager(self) -> DraftLoop:
        """This loop."""
        return self

    def keep(self, rows: Tensor) -> None:
        """Keep the rows ``[b]`` int64."""
        self.cache.keep(rows)

    def over(self, cache: DraftCache) -> DraftLoop:
        """The same loop on another cache, of any number of rows and slots."""
        loop = copy.copy(self)
        loop.cache, loop.room = cache, cache.keys[0].shape[2]
        return loop

    def advance(self, tokens: Tensor, aux_hidden: Tensor, starts: list[int], counts: list[int]) -> Tensor:
        """The first step: commit the newly accepted anchors and return the output of the last of each row.

        Args:
            tokens: ``[B, m]`` int64, the token AFTER each anchor (``x_{i+1}``), padded on the right.
            aux_hidden: ``[B, m, A·Ht]`` target features of the anchors.
            starts: B anchors committed before.
            counts: B new anchors, at least 1.

        Returns:
            ``[B, H]`` output at the last anchor, before the final norm.
        """
        device = tokens.device
        batch, count = tokens.shape
        even = len(set(starts)) == 1
        uniform = even and len(set(counts)) == 1
        grid = torch.arange(count, device=device)  # [m]
        first = starts[0] if even else torch.tensor(starts, device=device)[:, None]
        # anchor = slot = rotary position; the padding of short rows is kept inside the tables and never written
        positions = (first + grid).clamp(max=self.capacity - 1).expand(batch, -1)  # [B,m]
        limit = min(max(starts) + count, self.room)
        ends = torch.tensor([b * count + c - 1 for b, c in enumerate(counts)], device=device)  # [B] last rows
        slot = torch.arange(limit, device=device)  # [W]
        if uniform:
            width, visible = starts[0] + counts[0], None
            asking = torch.full((1, 1, 1), width - 1, device=device)
        else:
            width = limit
            asking = torch.tensor(starts, device=device) + torch.tensor(counts, device=device) - 1  # [B]
            asking = asking[:, None, None]  # [B,1,1]
            visible = slot <= asking  # [B,1,W]
        if self.window is not None:
            near = slot[:width] > asking - self.window  # [B or 1,1,W]
            visible = near if visible is None else visible & near
        last = Sight(width, visible)
        return self._first_step(tokens, aux_hidden, positions, ends, Sight(limit, None), last, (starts, counts))

    def advance_fixed(self, tokens: Tensor, aux_hidden: Tensor, starts: Tensor, counts: Tensor) -> Tensor:
        """:meth:`advance` over the whole buffer, places as tensors: its shapes never change and nothing is read back.

        A row's padding is written behind its anchors, where the later steps write next and nobody looks before.

        Args:
            tokens: ``[B, m]`` int64 with m at most D+1; padding holds any id of the vocabulary.
            aux_hidden: ``[B, m, A·Ht]``; padding holds anything.
            starts: ``[B]`` int64 anchors committed before.
            counts: ``[B]`` int64 new anchors, 1 to m.

        Returns:
            ``[B, H]`` output at the last anchor, before the final norm.
        """
        batch, count = tokens.shape
        grid = torch.arange(count, device=tokens.device)  # [m]
        slots = starts[:, None] + grid  # [B,m]
        padding = grid >= counts[:, None]  # [B,m]
        aux_hidden = aux_hidden.masked_fill(padding[..., None], 0)  # a key that is not a number spreads, masked or not
        ends = torch.arange(batch, device=tokens.device) * count + counts - 1  # [B]
        asking = (starts + counts - 1)[:, None, None]  # [B,1,1]
        slot = torch.arange(self.room, device=tokens.device)  # [W]
        visible = slot <= asking  # [B,1,W]
        if self.window is not None:
            visible = visible & (slot > asking - self.window)
        positions = slots.clamp(max=self.capacity - 1)
        last = Sight(self.room, visible)
        return self._first_step(tokens, aux_hidden, positions, ends, Sight(self.room, None), last, slots)

    def _first_step(
        self,
        tokens: Tensor,
        aux_hidden: Tensor,
        positions: Tensor,
        ends: Tensor,
        below: Sight,
        last: Sight,
        places: Tensor | tuple[list[int], list[int]],
    ) -> Tensor:
        """What both forms of the first step do.

        Args:
            tokens, aux_hidden: the anchors, ``[B, m]`` and ``[B, m, A·Ht]``.
            positions: ``[B, m]`` rotary positions.
            ends: ``[B]`` each row's last anchor among the B·m.
            below: slots that a layer below the last one reads; each anchor sees those up to its own.
            last: what the last layer's one query a row sees.
            places: where keys are written, ``[B, m]``; or starts and counts, then real anchors alone are written.

        Returns:
            ``[B, H]``.
        """
        module = self.module
        batch, count = tokens.shape
        cos, sin = module.rotary(positions, self._positions)  # [B,m,d/2]
        cos, sin = cos.flatten(0, 1), sin.flatten(0, 1)
        weight = module.fc.weight
        state = module.fuse(aux_hidden.to(weight.dtype)).flatten(0, 1)  # [B·m,H]
        embedding = module.embed(tokens, self.embedding).to(weight.dtype).flatten(0, 1)  # [B·m,H]
        for index, layer in enumerate(module.layers):
            final = index == len(module.layers) - 1
            q, k, v, residual = layer.project(
                embedding if index == 0 else None, state, cos, sin, query_rows=ends if final and count > 1 else None
            )
            k, v = k.unflatten(0, (batch, count)), v.unflatten(0, (batch, count))  # [B,m,hkv,d]
            if isinstance(places, Tensor):
                self.cache.write(index, k, v, places)
            else:
                self._commit(index, k, v, *places)
            rows, sight = (1, last) if final else (count, below)
            visible = sight.visible
            if not final:
                slot = torch.arange(sight.width, device=tokens.device)  # [W]
                visible = slot <= positions[..., None]  # [B,m,W]
                if self.window is not None:
                    visible = visible & (slot > positions[..., None] - self.window)
            attention = self.cache.attend(index, q.unflatten(0, (batch, rows)), visible, sight.width, layer.scale)
            state = layer.combine(attention.flatten(0, 1), residual)  # [B,H], or [B·m,H] below the last layer
        return state

    def _commit(self, layer: int, k: Tensor, v: Tensor, starts: list[int], counts: list[int]) -> None:
        """Write each row's real anchors; padding never reaches the buffer."""
        if len(set(starts)) == 1 and len(set(counts)) == 1:
            self.cache.write(layer, k, v, starts[0])
            return
        for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
            self.cache.keys[layer][row, :, start : start + count] = k[row, :count].transpose(0, 1)
            self.cache.values[layer][row, :, start : start + count] = v[row, :count].transpose(0, 1)

    def chain(self, output: Tensor, lengths: list[int]) -> Tensor:
        """Draft K tokens a row.

        Args:
            output: ``[B, H]`` of :meth:`advance`.
            lengths: B committed anchors.

        Returns:
            ``[B, K]`` int64 target ids.
        """
        return self.chain_from(output, self.places(lengths, output.device))

    def chain_from(self, output: Tensor, where: Where) -> Tensor:
        """The chain proper, ``[B, K]``."""
        drafted: list[Tensor] = []
        for step in range(self.plan.depth):
            if step > 0:
                state = self.module.next_state(output)[:, None]  # [B,1,H]
                output = self.later(drafted[-1][:, None], state, where, step, None)[:, 0]  # [B,H]
            drafted.append(self.target_ids[self.logits(output).argmax(-1)])  # [B]
        return torch.stack(drafted, 1)

    def tree(self, output: Tensor, lengths: list[int]) -> TreeHistory:
        """Expand a tree of branching T and depth D; arguments as for :meth:`chain`.

        Returns:
            every candidate that was scored.
        """
        return self.expand(output, self.places(lengths, output.device))

    def round_tree(self, output: Tensor, lengths: list[int], roots: Tensor) -> RoundTree:
        """The tree of a round below the roots ``[B]``, the last emitted tokens."""
        return build_round_tree(self.tree(output, lengths), self.plan, roots)

    def expand(self, output: Tensor, where: Where) -> TreeHistory:
        """The expansion proper: T candidates below the root, then the best T of each layer by T.

        Args:
            output: ``[B, H]``.
            where: places of the prefix.
        """
        topk, depth = self.plan.branching, self.plan.depth
        batch, device = len(output), output.device
        value, token = self._candidates(output[:, None], topk)  # [B,1,T] each
        scores, tokens = [value.flatten(1)], [token.flatten(1)]  # history, [B,T] then [B,T*T] a layer
        parents = [torch.full((batch, 1), -1, device=device)]
        flat = torch.arange(topk, device=device).expand(batch, -1)  # [B,T] flat ids of the survivors
        best, node = scores[0], tokens[0]  # [B,T] their scores and tokens
        state = self.module.next_state(output)[:, None].expand(-1, topk, -1)  # [B,T,H] their parents' output
        sees = torch.eye(topk, dtype=torch.bool, device=device).expand(batch, -1, -1)  # [B,T,layers·T]
        for layer in range(1, depth):
            parents.append(flat)
            output = self.later(node, state, where, layer, sees)  # [B,T,H]
            value, token = self._candidates(output, topk)  # [B,T,T]
            value = (value + best[..., None]).flatten(1)  # [B,T·T]
            token = token.flatten(1)
            scores.append(value)
            tokens.append(token)
            if layer == depth - 1:
                break
            best, order = stable_topk(value, topk)  # [B,T] ties by flat id
            node, origin = token.gather(1, order), order // topk  # [B,T] token, and survivor it grew from
            flat = history_size(topk, layer) + order
            carried = self.module.next_state(output)  # [B,T,H]
            state = carried.gather(1, origin[..., None].expand_as(carried))
            above = sees.gather(1, origin[..., None].expand_as(sees))  # [B,T,layer·T]
            sees = torch.cat((above, torch.eye(topk, dtype=torch.bool, device=device).expand(batch, -1, -1)), -1)
        return TreeHistory(torch.cat(scores, 1), torch.cat(tokens, 1), torch.cat(parents, 1))

    def _candidates(self, output: Tensor, topk: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities and target ids ``[B, n, T]`` of the likeliest draft tokens after outputs ``[B, n, H]``."""
        logits = self.logits(output)  # [B,n,Vd]
        if topk == 1:
            index = logits.argmax(-1, keepdim=True)  # [B,n,1] the chain's own choice
            value = logits.gather(-1, index)
        else:
            value, index = stable_topk(logits, topk)  # [B,n,T]
        value = (value - logits.logsumexp(-1, keepdim=True)).clamp(max=0)  # never above the parent's score
        return value, self.target_ids[index]

    def logits(self, output: Tensor) -> Tensor:
        """Float32 logits ``[..., Vd]`` of outputs ``[..., H]``."""
        return self.module.lm_head(self.module.head_input(output)).float()

    def places(self, lengths: list[int], device: torch.device) -> Where:
        """Where the nodes behind ``lengths`` committed anchors are written."""
        if len(set(lengths)) == 1 and not self.fixed_shapes:
            return Where(lengths[0], None, lengths[0])
        return Where(None, torch.tensor(lengths, device=device)[:, None], max(lengths))

    def later(self, tokens: Tensor, state: Tensor, where: Where, layer: int, sees: Tensor | None) -> Tensor:
        """Step ``layer`` >= 1 for n nodes a row: write their keys behind the layers before, attend, combine.

        Args:
            tokens: ``[B, n]`` the nodes' own tokens.
            state: ``[B, n, H]`` carried from their parents.
            sees: ``[B, n, layer·n]`` bool over all nodes so far; ``None`` for a chain, which sees them all.

        Returns:
            ``[B, n, H]`` before the final norm.
        """
        module, count, device = self.module, tokens.shape[1], tokens.device
        new = layer * count  # nodes drafted so far, with these
        weight = module.fc.weight
        embedding = module.embed(tokens, self.embedding).to(weight.dtype)  # [B,n,H]
        place: int | Tensor
        visible: Tensor | None = None
        anchors = where.anchors
        if isinstance(anchors, int):
            positions = torch.full((1, 1), anchors - 1 + layer, device=device)  # anchor + k
            place, width = anchors + new - count, anchors + new
            if count > 1 or self.window is not None:
                before = torch.ones(1, 1, anchors, dtype=torch.bool, device=device)
                if self.window is not None:
                    before = (torch.arange(anchors, device=device) > positions - self.window)[None]  # [1,1,anchors]
                own = before.new_ones(1, 1, new) if sees is None else sees
                visible = torch.cat((before.expand(len(own), own.shape[1], -1), own), -1)  # [B or 1,n,W]
        else:
            positions = anchors - 1 + layer  # [B,1]
            place = anchors + (new - count) + torch.arange(count, device=device)  # [B,n]
            width = self.room if self.fixed_shapes else where.longest + new
            column = torch.arange(width, device=device)  # [W]
            before = column < anchors  # [B,W]
            if self.window is not None:
                before = before & (column > positions - self.window)
            visible = before[:, None].repeat(1, count, 1)  # [B,n,W]
            drafted = anchors + torch.arange(new, device=device)  # [B,new]
            own = torch.ones_like(drafted, dtype=torch.bool)[:, None].expand(-1, count, -1) if sees is None else sees
            visible.scatter_(2, drafted[:, None].expand(-1, count, -1), own)
        cos, sin = module.rotary(positions, self._positions)  # [B or 1,1,d/2]
        for index, part in enumerate(module.layers):
            q, k, v, residual = part.project(embedding if index == 0 else None, state, cos, sin)
            self.cache.write(index, k, v, place)
            attention = self.cache.attend(index, q, visible, width, part.scale)  # [B,n,h·dv]
            state = part.combine(attention, residual)  # [B,n,H]
        return state


@dataclass(frozen=True)
class Sight:
    """The first ``width`` slots of the cache, and which of them a query sees: ``[B or 1, n, W]`` bool, or all."""

    width: int
    visible: Tensor | None


@dataclass(frozen=True)
class Where:
    """Committed anchors before the drafted nodes: one number for all rows, or ``lengths [B, 1]`` int64."""

    start: int | None
    lengths: Tensor | None
    longest: int

    @property
    def anchors(self) -> int | Tensor:
        """The number of all rows, or ``[B, 1]``."""
        return self.longest if self.lengths is None else self.lengths
