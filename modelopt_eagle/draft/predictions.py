"""The common currency between drafters and everything that trains and measures them: a flat list of predictions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from modelopt_eagle.draft.documents import Documents, WholeAxis, upload


class TokenAxis(Protocol):
    """Which tokens of a batch this process computes, see :class:`~modelopt_eagle.draft.documents.WholeAxis`."""

    tokens: Tensor
    host_tokens: Tensor

    def local(self, rows: Tensor) -> Tensor:
        """Where flat rows lie among ``tokens``; -1 for those of other processes."""
        ...

    def gather(self, values: Tensor) -> Tensor:
        """``[m, ...]`` of ``tokens`` to ``[N, ...]`` of all, with a gradient."""
        ...


@dataclass(frozen=True)
class HostTokens:
    """What plans are made of, on the CPU: what is learned is known there, so that no device has to be asked for it.

    Attributes:
        input_ids: ``[N]`` int64.
        supervised: ``[N]`` bool.
        documents: where documents begin and end.
        target_top1: ``[N]`` int64 the target's choices, where they are known on the CPU.
    """

    input_ids: Tensor
    supervised: Tensor
    documents: Documents
    target_top1: Tensor | None = None


@dataclass(frozen=True)
class BatchView:
    """What a drafter sees of a training batch; N tokens on one flat axis.

    Attributes:
        input_ids: ``[N]`` int64.
        supervised: ``[N]`` bool, tokens to be learned.
        documents: where documents begin and end.
        aux_hidden: ``[m, A·Ht]`` captured states of the target, of the tokens of ``axis``.
        final_hidden: ``[m, Ht]`` the target's final states after its norm, of the tokens of ``axis``; ``None`` where
            the batch does not hold them for these tokens.
        embed: flat places ``[...]`` to token embeddings ``[..., H]``.
        embed_ids: token ids ``[...]`` to embeddings ``[..., H]``, for drafters that read tokens of their own, such as a
            mask; ``None`` where embeddings were given by place.
        host: the tokens on the CPU; ``None`` where they are there, or have to be fetched.
        length: a bound above every position within a document.
        axis: the tokens that this process computes.
    """

    input_ids: Tensor
    supervised: Tensor
    documents: Documents
    aux_hidden: Tensor
    final_hidden: Tensor | None
    embed: Callable[[Tensor], Tensor]
    length: int
    axis: TokenAxis
    embed_ids: Callable[[Tensor], Tensor] | None = None
    host: HostTokens | None = None

    def on_host(self) -> HostTokens:
        """The tokens on the CPU; fetched from the device where nobody brought them."""
        if self.host is not None:
            return self.host
        return HostTokens(self.input_ids.cpu(), self.supervised.cpu(), self.documents.to("cpu"))

    def planning(self) -> BatchView:
        """The view for a plan: ids, masks and documents on the CPU, every token on the axis."""
        host = self.on_host()
        return replace(
            self,
            input_ids=host.input_ids,
            supervised=host.supervised,
            documents=host.documents,
            axis=WholeAxis(len(host.input_ids), "cpu"),
            host=host,
        )


@dataclass(frozen=True)
class Predictions:
    """n predictions of a drafter in one batch, and the distribution that each has to meet.

    Attributes:
        anchor: ``[n]`` int64 flat token from which a draft starts: the last one whose features it reads.
        depth: ``[n]`` int64, which of the drafted tokens it is, 0 to K-1.
        teacher: ``[n]`` int64 flat token after which the target's distribution is to be met.
        depths: K.
        weight: ``[n]`` float32 factor on its loss term, beside the decay by depth; ``None``: 1 for all.
        host: the same list on the CPU (without a ``weight`` that was made on a device), from which counts and lists
            of indices are made; ``None`` for a list that lies there, or that was chosen on a device.
    """

    anchor: Tensor
    depth: Tensor
    teacher: Tensor
    depths: int
    weight: Tensor | None = None
    host: Predictions | None = None

    def __len__(self) -> int:
        """n."""
        return len(self.anchor)

    def on_host(self) -> Predictions:
        """The list on the CPU; fetched where it was chosen on a device."""
        if self.host is not None or self.anchor.device.type == "cpu":
            return self.host or self
        weight = None if self.weight is None else self.weight.cpu()
        return Predictions(self.anchor.cpu(), self.depth.cpu(), self.teacher.cpu(), self.depths, weight)

    def to(self, device) -> Predictions:
        """The list on a device, by one transfer, with what lies on the CPU beside it."""
        if self.anchor.device == torch.device(device):
            return self
        host = self.on_host()
        if torch.device(device).type == "cpu":
            return host
        lists = upload(torch.stack((host.anchor, host.depth, host.teacher)), device)  # [3,n]
        weight = None if host.weight is None else upload(host.weight, device)
        return Predictions(lists[0], lists[1], lists[2], host.depths, weight, host)

    def counts(self) -> Tensor:
        """``[K]`` int64 predictions of each depth, where the list lies."""
        return upload(torch.bincount(self.on_host().depth, minlength=self.depths), self.anchor.device)

    def select(self, chosen: Tensor) -> Predictions:
        """Those at ``chosen`` (``[n]`` bool, or ``[m]`` int64), in order; on the CPU where the list has a host."""
        if self.host is not None and chosen.device.type == "cpu":
            places = chosen.nonzero().squeeze(1) if chosen.dtype == torch.bool else chosen
            picked = self.host.select(places).to(self.anchor.device)
            if self.weight is None:
                return picked
            return replace(picked, weight=self.weight[upload(places, self.anchor.device)])
        weight = None if self.weight is None else self.weight[chosen]
        return Predictions(self.anchor[chosen], self.depth[chosen], self.teacher[chosen], self.depths, weight)

    def first(self, depths: int) -> Predictions:
        """Those of the first ``depths`` drafted tokens."""
        if depths >= self.depths:
            return self
        kept = self.select(self.on_host().depth < depths)
        host = None if kept.host is None else replace(kept.host, depths=depths)
        return replace(kept, depths=depths, host=host)
