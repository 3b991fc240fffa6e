"""The target's KV cache while decoding: fixed buffers in which every row has its own length.

Row ``b`` keeps token ``j`` in slot ``j``, so rows that accept different numbers of tokens never need padding in
front, and rejected drafts are simply overwritten by the next round.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from modelopt_eagle.errors import DecodingError


class RowLayer(CacheLayerMixin):
    """One layer's buffers ``[B, heads, capacity, d]``, made at the first update. Sliding layers keep all keys, too."""

    is_sliding = False

    def __init__(self, place: Placement):
        super().__init__()
        self.place = place

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Allocate for the shapes of the first keys and values; zeros, as a masked NaN would still spread."""
        values = key_states if value_states is None else value_states
        self.dtype, self.device = key_states.dtype, key_states.device
        self.regions = self.place.allocate("keys", key_states), self.place.allocate("values", values)
        self.bind()
        self.is_initialized = True

    def bind(self) -> None:
        """Look at the buffers where they are now."""
        self.keys, self.values = (self.place.view(region) for region in self.regions)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write ``[B, heads, n, d]`` at each row's place; return views over all slots in use."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        place, count = self.place, key_states.shape[2]
        if place.start is not None:
            self.keys[:, :, place.start : place.start + count] = key_states
            self.values[:, :, place.start : place.start + count] = value_states
        else:
            self.keys[place.rows, :, place.slots] = key_states.transpose(1, 2)
            self.values[place.rows, :, place.slots] = value_states.transpose(1, 2)
        return self.keys[:, :, : place.width], self.values[:, :, : place.width]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that the model's own mask must cover (it is only made when all rows have one length)."""
        return self.place.width, 0

    def get_seq_length(self) -> int:
        """Tokens before this forward pass (of the longest row)."""
        return self.place.longest

    def get_max_length(self) -> int:
        """Slots a row."""
        return self.place.capacity

    get_max_cache_shape = get_max_length


class Placement:
    """The buffers of all layers, and where the next forward pass writes in them.

    Layers of equal shape share one tensor ``[B, heads of all layers, capacity, d]`` for keys and one for values, of
    which each sees its heads, so that moving an accepted path is one operation for the whole model.

    Attributes:
        start: the slot of the first new token when all rows agree, else ``None``.
        rows, slots: ``[B, 1]`` and ``[B, n]`` int64 when they do not.
        width, longest: slots read, ``max(length) + n``, and ``max(length)``.
        pools: the tensors.
    """

    def __init__(self, capacity: int, shared: int):
        self.capacity, self.shared = capacity, shared
        self.start: int | None = 0
        self.rows = self.slots = None
        self.width = self.longest = 0
        self.pools: list[Tensor] = []
        self._open: dict[tuple, tuple[int, int]] = {}  # kind of state -> its pool and the layers already in it

    def allocate(self, role: str, like: Tensor) -> tuple[int, int, int]:
        """Room for a layer's states ``[B, heads, n, d]``: pool, first head, heads."""
        batch, heads, _, dim = like.shape
        kind = role, heads, dim, like.dtype, like.device
        pool, used = self._open.get(kind, (len(self.pools), 0))
        if used == 0 or used >= self.shared:
            first_of_role = not any(known[0] == role for known in self._open)
            layers = self.shared if first_of_role else 1  # a kind that comes later has too few layers to plan for
            pool, used = len(self.pools), 0 if first_of_role else self.shared
            self.pools.append(like.new_zeros(batch, layers * heads, self.capacity, dim))
        self._open[kind] = pool, used + 1
        return pool, (used * heads if used < self.shared else 0), heads

    def view(self, region: tuple[int, int, int]) -> Tensor:
        """``[B, heads, capacity, d]`` of a region."""
        pool, first, heads = region
        return self.pools[pool][:, first : first + heads]


class RowCache(Cache):
    """A transformers cache with per-row lengths, which the caller owns.

    Args:
        num_layers: layers of the target.
        capacity: slots a row.
        alike: whether all layers are of one kind, so that one tensor can hold them.
    """

    def __init__(self, num_layers: int, capacity: int, alike: bool = True):
        self.place = Placement(capacity, num_layers if alike else 1)
        super().__init__(layers=[RowLayer(self.place) for _ in range(num_layers)])

    @contextmanager
    def writing(self, lengths: list[int], count: int, device: torch.device):
        """Say where the forward pass inside writes: ``count`` tokens behind ``lengths`` [B].

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
        before = place.start, place.rows, place.slots, place.width, place.longest
        place.width, place.longest = width, max(lengths)
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
            place.start, place.rows, place.slots, place.width, place.longest = before

    def keep(self, rows: Tensor) -> None:
        """Keep the rows ``[b]`` int64 and forget the others."""
        self.place.pools = [pool[rows] for pool in self.place.pools]
        for layer in self.layers:
            if layer.is_initialized:
                layer.bind()

    def tensors(self) -> list[Tensor]:
        """The buffers ``[B, heads, capacity, d]`` of all layers."""
        return self.place.pools
