"""The target's KV cache while decoding: fixed buffers in which every row has its own length.

Row ``b`` keeps token ``j`` in slot ``j``, so rows that accept different numbers of tokens never need padding in
front, and rejected drafts are simply overwritten by the next round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin

from modelopt_eagle.errors import DecodingError


class RowLayer(CacheLayerMixin):
    """One layer's buffers ``[B, heads, capacity, d]``, made at the first update.

    Sliding layers keep all keys, too, but hand out those that a window can reach.
    """

    is_sliding = False

    def __init__(self, place: Placement, kind: str):
        super().__init__()
        self.place, self.kind = place, kind

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Allocate for the shapes of the first keys and values; zeros, as a masked NaN would still spread."""
        values = key_states if value_states is None else value_states
        self.dtype, self.device = key_states.dtype, key_states.device
        heads = key_states.shape[1]
        if key_states.shape == values.shape:  # side by side, so that both are moved at once
            pool, first = self.place.allocate("both", key_states, 2 * heads)
            self.regions = (pool, first, heads), (pool, first + heads, heads)
        else:
            keys, own = self.place.allocate("keys", key_states, heads), values.shape[1]
            self.regions = (*keys, heads), (*self.place.allocate("values", values, own), own)
        self.bind()
        self.is_initialized = True

    def bind(self) -> None:
        """Look at the buffers where they are now."""
        self.keys, self.values = (self.place.view(region) for region in self.regions)
        (pool, first, heads), values = self.regions
        beside = values == (pool, first + heads, heads)
        self.both = self.place.view((pool, first, 2 * heads)) if beside else None

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write ``[B, heads, n, d]`` at each row's place; return views over the slots that can be seen."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        place, count = self.place, key_states.shape[2]
        if place.start is not None:
            self.keys[:, :, place.start : place.start + count] = key_states
            self.values[:, :, place.start : place.start + count] = value_states
        else:
            self.keys[place.rows, :, place.slots] = key_states.transpose(1, 2)
            self.values[place.rows, :, place.slots] = value_states.transpose(1, 2)
        seen = slice(place.first.get(self.kind, 0), place.width)
        return self.keys[:, :, seen], self.values[:, :, seen]

    def update_both(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`update` with ``[B, 2·heads, n, d]``, the keys' heads before the values', in one copy where it can."""
        heads, place = states.shape[1] // 2, self.place
        if not self.is_initialized or self.both is None or place.start is None:
            return self.update(states[:, :heads], states[:, heads:])
        self.both[:, :, place.start : place.start + states.shape[2]] = states
        keys, values = self.both[:, :, place.first.get(self.kind, 0) : place.width].split(heads, 1)
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that the model's own mask must cover (it is only made when all rows have one length)."""
        first = self.place.first.get(self.kind, 0)
        return self.place.width - first, first

    def get_seq_length(self) -> int:
        """Tokens before this forward pass (of the longest row)."""
        return self.place.longest

    def get_max_length(self) -> int:
        """Slots a row."""
        return self.place.capacity

    get_max_cache_shape = get_max_length


class Placement:
    """The buffers of all layers, and where the next forward pass writes in them.

    Layers of equal shape share one tensor ``[B, heads of all layers, capacity, d]``, of which each sees its heads, so
    that moving an accepted path is one operation for the whole model. Keys and values lie in one if their widths agree
    (not so with latents), else in one each.

    Attributes:
        start: the slot of the first new token when all rows agree, else ``None``.
        rows, slots: ``[B, 1]`` and ``[B, n]`` int64 when they do not.
        width, longest: slots in use, ``max(length) + n``, and ``max(length)``.
        first: the first slot that can be seen, by kind of layer; 0 if not said.
        pools: the tensors, of the rows in use.
        held: the tensors whole, of which ``pools`` are the first rows.
    """

    def __init__(self, capacity: int, shared: int, held_rows: int | None = None):
        self.capacity, self.shared, self.held_rows = capacity, shared, held_rows
        self.held: list[Tensor] = []
        self.start: int | None = 0
        self.rows = self.slots = None
        self.width = self.longest = 0
        self.first: dict[str, int] = {}
        self.pools: list[Tensor] = []
        self._open: dict[tuple, tuple[int, int]] = {}  # kind of state -> its pool and the layers already in it

    def allocate(self, role: str, like: Tensor, heads: int) -> tuple[int, int]:
        """Room for ``heads`` heads of a layer's states ``[B, heads, n, d]``: pool and first head."""
        batch, _, _, dim = like.shape
        kind = role, heads, dim, like.dtype, like.device
        pool, used = self._open.get(kind, (len(self.pools), 0))
        if used == 0 or used >= self.shared:
            first_of_role = not any(known[0] == role for known in self._open)
            layers = self.shared if first_of_role else 1  # a kind that comes later has too few layers to plan for
            pool, used = len(self.pools), 0 if first_of_role else self.shared
            self.held.append(like.new_zeros(self.held_rows or batch, layers * heads, self.capacity, dim))
            self.pools.append(self.held[-1][:batch])
        self._open[kind] = pool, used + 1
        return pool, used * heads if used < self.shared else 0

    def view(self, region: tuple[int, int, int]) -> Tensor:
        """``[B, heads, capacity, d]`` of a region."""
        pool, first, heads = region
        return self.pools[pool][:, first : first + heads]

    def keep(self, rows: list[int], used: int) -> None:
        """Move the rows (ascending) to the front, of ``used`` slots each; what is behind them is forgotten."""
        for pool in self.pools:
            for place, row in enumerate(rows):
                if place != row:
                    pool[place, :, :used] = pool[row, :, :used]
        self.pools = [pool[: len(rows)] for pool in self.pools]


class RowCache(Cache):
    """A transformers cache with per-row lengths, which the caller owns.

    Args:
        num_layers: layers of the target.
        capacity: slots a row.
        alike: whether all layers have keys of one shape, so that one tensor can hold them.
        kinds: kind of each layer's attention (``masks.layer_kinds``); ``None``: full.
        make: ``(placement, kinds)`` to the layers, for targets that have others beside attention.
        held_rows: rows to allocate; ``None``: as many as the first pass has.
    """

    def __init__(
        self,
        num_layers: int,
        capacity: int,
        alike: bool = True,
        kinds: Sequence[str] | None = None,
        make: Callable[[Placement, Sequence[str]], list] | None = None,
        held_rows: int | None = None,
    ):
        self.place = Placement(capacity, num_layers if alike else 1, held_rows)
        kinds = ["full_attention"] * num_layers if kinds is None else kinds
        rows = [RowLayer(self.place, kind) for kind in kinds] if make is None else make(self.place, kinds)
        super().__init__(layers=rows)

    @contextmanager
    def writing(self, lengths: list[int], count: int, device: torch.device, first: dict[str, int] | None = None):
        """Say where the forward pass inside writes: ``count`` tokens behind ``lengths`` [B]; and from which slot on it
        reads, by kind of layer.

        The placement of before is put back on leaving, also after an exception.

        Raises:
            DecodingError: the tokens do not fit.
        """
        place = self.place
        width = max(lengths) + count
        if width > place.capacity:
            raise DecodingError(
                f"the KV cache holds {place.capacity} tokens a request, {width} are needed for {count} nodes behind "
                f"{max(lengths)} tokens: ask for fewer new tokens or nodes, or a larger cache_length"
            )
        before = place.start, place.rows, place.slots, place.width, place.longest, place.first
        place.width, place.longest, place.first = width, max(lengths), first or {}
        if len(set(lengths)) == 1:
            place.start, place.rows, place.slots = lengths[0], None, None
        else:
            first = torch.tensor(lengths, device=device)[:, None]  # [B,1]
            place.start = None
            place.rows = torch.arange(len(lengths), device=device)[:, None]  # [B,1]
            place.slots = first + torch.arange(count, device=device)  # [B,n]
        try:
            yield
        finally:
            place.start, place.rows, place.slots, place.width, place.longest, place.first = before

    @contextmanager
    def writing_fixed(self, pools: Sequence[Tensor], lengths: Tensor, count: int, width: int):
        """:meth:`writing` with places as tensors, so that nothing of it is a Python number that changes.

        Args:
            pools: as :meth:`tensors`, the first B rows of each; read and written in the place of those in use.
            lengths: ``[B]`` int64 tokens of each row; ``lengths + count`` is at most ``width``.
            count: tokens of a row that the pass writes.
            width: slots that it reads.
        """
        place = self.place
        before = place.start, place.rows, place.slots, place.width, place.longest, place.first, place.pools
        place.start, place.width, place.longest, place.first = None, width, width - count, {}
        place.rows = torch.arange(len(lengths), device=lengths.device)[:, None]  # [B,1]
        place.slots = lengths[:, None] + torch.arange(count, device=lengths.device)  # [B,n]
        self._look_at(list(pools))
        try:
            yield
        finally:
            place.start, place.rows, place.slots, place.width, place.longest, place.first, own = before
            self._look_at(own)

    def begin(self, batch: int) -> None:
        """Use the memory again for ``batch`` rows: zeros, as a masked NaN would still spread."""
        for tensor in self.place.held:
            tensor.zero_()
        self._look_at([tensor[:batch] for tensor in self.place.held])

    def _look_at(self, pools: list[Tensor]) -> None:
        self.place.pools = pools
        for layer in self.layers:
            if isinstance(layer, RowLayer) and layer.is_initialized:
                layer.bind()

    def keep(self, rows: list[int], used: int | None = None) -> None:
        """Keep the rows and forget the others; nothing but rows that move is copied.

        Args:
            rows: ascending places of those that stay.
            used: slots of the longest of them; ``None``: all.
        """
        self.place.keep(rows, self.place.capacity if used is None else used)
        self._look_at(self.place.pools)
        for layer in self.layers:
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                LinearAttentionCacheLayerMixin.reorder_cache(layer, torch.tensor(rows))

    def tensors(self) -> list[Tensor]:
        """The buffers ``[B, heads, capacity, d]`` of all layers."""
        return self.place.pools

    def held(self) -> list[Tensor]:
        """The same buffers with all their rows; they stay where they are when rows leave."""
        return self.place.held
