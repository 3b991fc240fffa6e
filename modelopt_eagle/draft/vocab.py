"""The draft vocabulary: which target tokens the head can propose, and the map between the two numberings.

``d2t`` holds **offsets**: the target id of draft id ``i`` is ``i + d2t[i]``. ``t2d`` marks the target ids inside.
Three invariants hold at every construction, load and save::

    0 <= i + d2t[i] < V          strictly increasing in i          nonzero(t2d) == arange(Vd) + d2t
"""

from __future__ import annotations

import torch
from torch import Tensor

from modelopt_eagle.errors import CheckpointError

UNSET = -1
"""Fill value of a map that nobody has set yet; it breaks the first invariant, so it cannot be mistaken for one."""


class DraftVocab:
    """A checked pair of maps.

    Attributes:
        d2t: ``[Vd]`` int64 offsets.
        t2d: ``[V]`` bool.
    """

    def __init__(self, d2t: Tensor, t2d: Tensor):
        self.d2t = d2t.to(torch.int64)
        self.t2d = t2d.to(torch.bool)
        self.validate()
        self._target_to_draft: Tensor | None = None

    @classmethod
    def identity(cls, vocab_size: int) -> DraftVocab:
        """The whole target vocabulary of ``vocab_size`` tokens."""
        return cls(torch.zeros(vocab_size, dtype=torch.int64), torch.ones(vocab_size, dtype=torch.bool))

    @classmethod
    def from_target_ids(cls, ids: Tensor, vocab_size: int) -> DraftVocab:
        """The given target ids, ``[Vd]``, in ascending order.

        Raises:
            CheckpointError: an id repeated or outside ``[0, vocab_size)``.
        """
        ids = torch.as_tensor(ids, dtype=torch.int64).sort().values  # [Vd]
        if ids.numel() and (int(ids[0]) < 0 or int(ids[-1]) >= vocab_size):
            raise CheckpointError(
                f"draft vocabulary ids must lie in [0, {vocab_size}), found {int(ids[0])}..{int(ids[-1])}"
            )
        if bool((ids.diff() == 0).any()):
            raise CheckpointError("the draft vocabulary names a token twice")
        t2d = torch.zeros(vocab_size, dtype=torch.bool, device=ids.device)
        t2d[ids] = True
        return cls(ids - torch.arange(len(ids), device=ids.device), t2d)

    @classmethod
    def from_counts(cls, counts: Tensor, size: int, required_ids=()) -> DraftVocab:
        """The ``size`` most frequent tokens, the required ones always among them.

        Args:
            counts: ``[V]`` how often each token was to be predicted.
            size: Vd. Ties, and tokens never seen, are taken by ascending id, so the result depends on nothing else.
            required_ids: special and end-of-turn tokens.

        Raises:
            CheckpointError: ``size`` larger than V, below one, or below the number of required ids.
        """
        counts = torch.as_tensor(counts)  # [V]
        vocab_size = counts.numel()
        required = sorted({int(i) for i in required_ids})
        if size > vocab_size:
            raise CheckpointError(
                f"a draft vocabulary of {size} tokens was asked for, the target has {vocab_size}: ask for at most that"
            )
        if size < max(1, len(required)):
            raise CheckpointError(
                f"a draft vocabulary of {size} cannot hold the {len(required)} special and end tokens: ask for more"
            )
        if required and (required[0] < 0 or required[-1] >= vocab_size):
            raise CheckpointError(
                f"required ids {required[0]}..{required[-1]} lie outside the vocabulary of {vocab_size}"
            )
        rank = counts.to(torch.float64).clone()
        rank[required] = float("inf")
        order = torch.argsort(rank, descending=True, stable=True)  # [V], ties by ascending id
        return cls.from_target_ids(order[:size], vocab_size)

    @classmethod
    def from_d2t(cls, d2t: Tensor, vocab_size: int) -> DraftVocab:
        """From offsets alone.

        Raises:
            CheckpointError: offsets that break an invariant, a table of absolute target ids among them.
        """
        d2t = torch.as_tensor(d2t).to(torch.int64)
        ids = torch.arange(len(d2t), device=d2t.device) + d2t
        t2d = torch.zeros(vocab_size, dtype=torch.bool, device=d2t.device)
        t2d[ids.clamp(0, vocab_size - 1)] = True
        return cls(d2t, t2d)

    def validate(self) -> None:
        """Raise :class:`CheckpointError` naming the first invariant that does not hold."""
        ids, vocab_size = self.target_ids, self.t2d.numel()
        if ids.numel() == 0:
            raise CheckpointError("the draft vocabulary is empty")
        if bool((self.d2t == UNSET).all()):
            raise CheckpointError(
                "the draft vocabulary map was never set: a reduced vocabulary needs its d2t "
                "(module.set_vocab(...), or scripts/calibrate_draft_vocab.py)"
            )
        bad = (ids < 0) | (ids >= vocab_size)
        if bool(bad.any()):
            i = int(bad.nonzero()[0])
            raise CheckpointError(
                f"d2t holds offsets, target id = draft id + d2t[draft id]; draft id {i} gives {int(ids[i])}, outside "
                f"[0, {vocab_size}). A table of absolute target ids must be converted: d2t - arange(len(d2t))"
            )
        step = ids.diff()
        if bool((step <= 0).any()):
            i = int((step <= 0).nonzero()[0])
            raise CheckpointError(
                f"d2t must give strictly increasing target ids; draft ids {i} and {i + 1} give {int(ids[i])} and "
                f"{int(ids[i + 1])}"
            )
        inside = self.t2d.nonzero().squeeze(1)
        if inside.numel() != ids.numel() or not torch.equal(inside, ids):
            raise CheckpointError(
                f"t2d marks {inside.numel()} target tokens, d2t gives {ids.numel()}, and they are not the same tokens"
            )

    @property
    def size(self) -> int:
        """Vd."""
        return self.d2t.numel()

    @property
    def target_ids(self) -> Tensor:
        """``[Vd]`` int64: the target id of each draft id, ascending."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    @property
    def is_identity(self) -> bool:
        """Whether every target token is inside, told by the table itself."""
        return self.size == self.t2d.numel() and not bool(self.d2t.any())

    def to_target(self, ids: Tensor) -> Tensor:
        """Target ids of draft ids, any shape, int64."""
        ids = torch.as_tensor(ids, device=self.d2t.device)
        return ids + self.d2t[ids]

    def to_draft(self, ids: Tensor) -> Tensor:
        """Draft ids of target ids, any shape, int64; -1 where the token is outside."""
        if self._target_to_draft is None:
            table = torch.full((self.t2d.numel(),), -1, dtype=torch.int64, device=self.d2t.device)
            table[self.target_ids] = torch.arange(self.size, device=self.d2t.device)
            self._target_to_draft = table
        return self._target_to_draft[torch.as_tensor(ids, device=self.d2t.device)]
