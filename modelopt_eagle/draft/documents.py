"""Where documents lie on the flat token axis of a packed batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def upload(tensor: Tensor, device) -> Tensor:
    """A CPU tensor on a device, by way of pinned memory, so that nobody waits for what the device still has to do."""
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


@dataclass(frozen=True)
class Documents:
    """Where documents begin and end on the flat token axis.

    Attributes:
        starts, ends: ``[N]`` int64, first token of the token's document and one past its last.
        real: ``[N]`` bool, false on padding.
    """

    starts: Tensor
    ends: Tensor
    real: Tensor

    @classmethod
    def make(cls, batch: int, length: int, document_ids: Tensor | None, device) -> Documents:
        """From ``[B, S]`` ids (a run of equal ids in a row is a document, negative is padding), or one a row."""
        index = torch.arange(batch * length, device=device)  # [N]
        if document_ids is None:
            starts = index // length * length
            return cls(starts, starts + length, torch.ones_like(index, dtype=torch.bool))
        flat = document_ids.reshape(-1).to(device)  # [N]
        first = torch.ones_like(flat, dtype=torch.bool)
        first[1:] = (flat[1:] != flat[:-1]) | (index[1:] % length == 0)
        run = first.cumsum(0) - 1  # [N]
        begins = first.nonzero().squeeze(1)  # [documents]
        stops = torch.cat((begins[1:], begins.new_tensor([batch * length])))
        return cls(begins[run], stops[run], flat >= 0)

    def to(self, device) -> Documents:
        """The same on a device; itself where it is there."""
        if self.starts.device == torch.device(device):
            return self
        if torch.device(device).type == "cpu":
            return Documents(self.starts.cpu(), self.ends.cpu(), self.real.cpu())
        return Documents(*(upload(part, device) for part in (self.starts, self.ends, self.real)))

    @property
    def positions(self) -> Tensor:
        """``[N]`` int64 position within the document."""
        return torch.arange(len(self.starts), device=self.starts.device) - self.starts

    def exists(self, rows: Tensor, offset: int) -> Tensor:
        """Whether token ``row + offset`` lies in the document of ``row``, any shape."""
        return (rows + offset < self.ends[rows]) & self.real[rows]


class WholeAxis:
    """Every token of a batch is computed in this process; the other way is to share them, see ``training.context``.

    Attributes:
        tokens: ``[m]`` int64 the flat tokens whose rows are computed here, ascending: all N.
        host_tokens: the same on the CPU.
    """

    def __init__(self, length: int, device):
        self.tokens = torch.arange(length, device=device)
        self.host_tokens = self.tokens if self.tokens.device.type == "cpu" else torch.arange(length)

    def local(self, rows: Tensor) -> Tensor:
        """Where flat rows lie among ``tokens``; -1 for those of other processes."""
        return rows

    def gather(self, values: Tensor) -> Tensor:
        """``[m, ...]`` of ``tokens`` to ``[N, ...]`` of all."""
        return values
