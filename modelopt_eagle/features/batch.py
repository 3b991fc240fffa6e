"""What a feature batch is: the target's hidden states for some rows, and the contract that says how they were made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from modelopt_eagle.draft.documents import Documents
from modelopt_eagle.draft.predictions import HostTokens
from modelopt_eagle.errors import FeatureError
from modelopt_eagle.target.identity import same_revision
from modelopt_eagle.target.like import RunningTarget

FORMAT_VERSION = 2
"""Version of the row schema that the writer, the readers and the stream share."""

READABLE_VERSIONS = (1, 2)
"""Versions whose rows are the same to whoever trains; 2 lets rows of a shard share the states of a common prefix."""

_REMEDY = "make the features again with this recipe, or point the recipe at what made them"


def _is_text(value) -> bool:
    return isinstance(value, str)


def _is_text_or_none(value) -> bool:
    return value is None or isinstance(value, str)


def _is_size(value) -> bool:
    return type(value) is int and 0 < value < 2**31


_FIELD_KINDS = {
    "model": _is_text,
    "revision": _is_text_or_none,
    "aux_layer_ids": lambda value: (
        isinstance(value, (list, tuple))
        and all(type(i) is int and 0 <= i < 2**31 for i in value)
        and len(set(value)) == len(value) > 0
    ),
    "final_is_normed": lambda value: isinstance(value, bool),
    "dtype": lambda value: value in ("float32", "bfloat16", "float16", "float8_e4m3", "int8"),
    "tokenizer_hash": _is_text_or_none,
    "template_hash": _is_text_or_none,
    "hidden_size": _is_size,
    "vocab_size": _is_size,
    "end_token_ids": lambda value: (
        value is None or (isinstance(value, (list, tuple)) and all(type(i) is int and 0 <= i < 2**31 for i in value))
    ),
}
"""What a contract's fields may hold that somebody else has written."""


@dataclass(frozen=True)
class FeatureContract:
    """How features were made; whoever makes them states it, whoever reads them checks it.

    Attributes:
        model: name or folder name of the target.
        revision: commit or content hash of the target's weights, or None when its source has none.
        aux_layer_ids: canonical ids (output of layer k, 0-based), in the order in which ``aux_hidden`` joins them.
        final_is_normed: whether ``final_hidden`` is the state after the target's final norm.
        dtype: how states are held: ``float32``, ``bfloat16``, ``float8_e4m3`` or ``int8`` (``float16`` in memory only).
        tokenizer_hash: hash of the tokenizer that made the ids.
        template_hash: hash of the chat template that rendered the conversations.
        hidden_size: Ht, width of one state of the target.
        vocab_size: V, size of the target's vocabulary.
        format_version: version of the row schema; older ones that are still read do not count as a difference.
        end_token_ids: what ended an answer when the rows were masked (``target/stops.py``); ``None`` if nobody wrote it
            down, as in stores of before it was kept, and then no difference to anything.
    """

    model: str
    revision: str | None
    aux_layer_ids: tuple[int, ...]
    final_is_normed: bool
    dtype: str
    tokenizer_hash: str | None
    template_hash: str | None
    hidden_size: int
    vocab_size: int
    format_version: int = FORMAT_VERSION
    end_token_ids: tuple[int, ...] | None = None

    def __post_init__(self):
        object.__setattr__(self, "aux_layer_ids", tuple(int(i) for i in self.aux_layer_ids))
        if self.end_token_ids is not None:
            object.__setattr__(self, "end_token_ids", tuple(int(i) for i in self.end_token_ids))

    @classmethod
    def from_identity(cls, identity: Mapping[str, Any], aux_layer_ids, dtype: str = "float32") -> FeatureContract:
        """The contract of post-norm features of the target with this ``identity()`` (of ``Target``, ``TargetTables``).

        Args:
            identity: model, revision, tokenizer_hash, template_hash, hidden_size, vocab_size.
            aux_layer_ids: canonical ids; they are sorted, as the target's capture does.
            dtype: see the class.
        """
        return cls(
            model=identity["model"],
            revision=identity["revision"],
            aux_layer_ids=tuple(sorted(aux_layer_ids)),
            final_is_normed=True,
            dtype=dtype,
            tokenizer_hash=identity["tokenizer_hash"],
            template_hash=identity["template_hash"],
            hidden_size=identity["hidden_size"],
            vocab_size=identity["vocab_size"],
        )

    @classmethod
    def from_target(cls, target: RunningTarget, aux_layer_ids=None, dtype: str = "float32") -> FeatureContract:
        """The contract of features that ``target`` makes; the default three layers if no ids are given."""
        ids = target.default_aux_layer_ids() if aux_layer_ids is None else aux_layer_ids
        return replace(cls.from_identity(target.identity(), ids, dtype), end_token_ids=target.end_token_ids)

    @classmethod
    def from_dict(cls, values: dict) -> FeatureContract:
        """Read a contract that :meth:`to_dict` wrote.

        Returns:
            the contract.

        Raises:
            FeatureError: an unknown or missing field, or a newer format version.
        """
        if not isinstance(values, dict):
            raise FeatureError(f"a contract with named fields expected, {type(values).__name__} found")
        version = values.get("format_version")
        if version not in READABLE_VERSIONS:
            known = " and ".join(map(str, READABLE_VERSIONS))
            raise FeatureError(
                f"features of format version {version!r} found, this reader knows versions {known}: "
                "dump them again, or use the modelopt_eagle version that wrote them"
            )
        names = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - names):
            raise FeatureError(
                f"unknown contract fields {unknown}; a version {FORMAT_VERSION} contract has {sorted(names)}"
            )
        if missing := sorted(names - set(values) - {"end_token_ids"}):
            raise FeatureError(
                f"contract fields {missing} are missing; a version {FORMAT_VERSION} contract has {sorted(names)}"
            )
        for name, fits in _FIELD_KINDS.items():
            if not fits(values.get(name)):
                raise FeatureError(f"contract field {name} holds {values[name]!r}, which is not of its kind")
        return cls(**values)

    def to_dict(self) -> dict:
        """Plain data, which :meth:`from_dict` reads."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        ends = None if self.end_token_ids is None else list(self.end_token_ids)
        return values | {"aux_layer_ids": list(self.aux_layer_ids), "end_token_ids": ends}

    def differences(self, expected: FeatureContract, ignore: tuple[str, ...] = ("dtype",)) -> list[str]:
        """One line for each field in which these features differ from what a recipe asks for."""
        lines = []
        for field in fields(self):
            found, wanted = getattr(self, field.name), getattr(expected, field.name)
            if field.name == "end_token_ids" and None in (found, wanted):
                continue
            if field.name == "revision" and same_revision(found, wanted):
                continue
            if field.name not in (*ignore, "format_version") and found != wanted:
                lines.append(f"{field.name}: the features were made with {found!r}, this run has {wanted!r}")
        return lines

    def require(self, expected: FeatureContract, where: str, ignore: tuple[str, ...] = ("dtype",)) -> None:
        """Refuse features whose contract is not the expected one.

        Args:
            expected: what the recipe asks for.
            where: the folder or server that holds the features, for the message.
            ignore: fields that may differ (the storage dtype by default).

        Raises:
            FeatureError: names every differing field with both values.
        """
        if lines := self.differences(expected, ignore):
            raise FeatureError(f"{where} does not fit this run:\n  " + "\n  ".join(lines) + f"\n{_REMEDY}")


@dataclass
class FeatureRow:
    """The features of one conversation of s tokens.

    Attributes:
        row_id: conversation id.
        category: category of the conversation, may be empty.
        input_ids: [s] int64.
        supervised: [s] bool, tokens that the draft is trained to predict.
        aux_hidden: [s, A·Ht] floating, outputs of the auxiliary layers side by side.
        final_hidden: [s, Ht] floating; zero outside :func:`needed_final_positions` when the row was stored compactly.
        target_top1: [s] int64, argmax of the target's full-vocabulary logits at predicting positions, -1 elsewhere.
        target_logsumexp: [s] float32, log-sum-exp of those logits at predicting positions, 0 elsewhere.
    """

    row_id: str
    category: str
    input_ids: Tensor
    supervised: Tensor
    aux_hidden: Tensor
    final_hidden: Tensor
    target_top1: Tensor | None = None
    target_logsumexp: Tensor | None = None

    def __len__(self) -> int:
        return int(self.input_ids.shape[0])

    def validate(self, contract: FeatureContract) -> None:
        """Check every shape against the contract.

        Raises:
            FeatureError: a tensor whose shape is not the one that ids and contract call for (a back end that dropped,
                split or reordered tokens is found here).
        """
        s, width = len(self), contract.hidden_size
        wanted = {
            "supervised": (s,),
            "aux_hidden": (s, width * len(contract.aux_layer_ids)),
            "final_hidden": (s, width),
            "target_top1": (s,),
            "target_logsumexp": (s,),
        }
        for name, shape in wanted.items():
            tensor = getattr(self, name)
            if tensor is not None and tuple(tensor.shape) != shape:
                raise FeatureError(
                    f"row {self.row_id!r}: {name} has shape {tuple(tensor.shape)}, expected {shape} for {s} tokens, "
                    f"{len(contract.aux_layer_ids)} auxiliary layers and hidden size {width}"
                )

    def check_finite(self, where: str, remedy: str) -> None:
        """Look for NaN and infinity in the states.

        Args:
            where: what holds the row, for the message.
            remedy: what mends it.

        Raises:
            FeatureError: names the row and counts the positions.
        """
        for name in ("aux_hidden", "final_hidden"):
            bad = ~torch.isfinite(getattr(self, name)).all(-1)  # [s]
            if bad.any():
                raise FeatureError(
                    f"{where}: row {self.row_id!r}: {name} holds NaN or infinity at {int(bad.sum())} of {len(self)} "
                    f"positions, first at {int(bad.nonzero()[0])}; {remedy}"
                )


def predicting_positions(supervised: Tensor) -> Tensor:
    """Positions whose next token is supervised: there the target's prediction is a label.

    Args:
        supervised: [..., S] bool.

    Returns:
        [..., S] bool; position j is True when ``supervised[j+1]`` is; the last one is False.
    """
    predicting = torch.zeros_like(supervised)
    predicting[..., :-1] = supervised[..., 1:]
    return predicting


def needed_final_positions(supervised: Tensor) -> Tensor:
    """Positions whose final state some loss convention reads: supervised ones and their two neighbours.

    ``served`` reads position j for ``supervised[j+1]``, ``modelopt`` and ``speculators`` for ``supervised[j]``,
    ``eagle`` for ``supervised[j-1]``; keeping all three costs two positions an answer.

    Args:
        supervised: [S] bool of one document.

    Returns:
        [S] bool.
    """
    needed = supervised | predicting_positions(supervised)
    needed[1:] |= supervised[:-1]
    return needed


@dataclass
class FeatureBatch:
    """Rows packed one after the other, without padding (B = 1, N tokens in all).

    Attributes:
        input_ids: [1, N] int64.
        supervised: [1, N] bool.
        document_ids: [1, N] int64, 0 for the first row, 1 for the second ...; attention and shifts stay inside one.
        aux_hidden: [1, N, A·Ht].
        final_hidden: [1, N, Ht], post-norm if ``contract.final_is_normed``.
        target_top1: [1, N] int64 or None.
        target_logsumexp: [1, N] float32 or None.
        row_ids: conversation ids in packing order.
        contract: how the features were made.
        host: ids, flags and documents on the CPU as well, for a batch that lies on a device, so that planning a step
            does not wait for it; ``None`` on the CPU, or where they have to be fetched.
    """

    input_ids: Tensor
    supervised: Tensor
    document_ids: Tensor
    aux_hidden: Tensor
    final_hidden: Tensor
    target_top1: Tensor | None
    target_logsumexp: Tensor | None
    row_ids: list[str]
    contract: FeatureContract
    host: HostTokens | None = None

    def on_host(self) -> HostTokens:
        """Ids, flags and documents on the CPU; fetched from the device where nobody kept them."""
        if self.host is not None:
            return self.host
        top1 = None
        if self.target_top1 is not None and self.target_top1.device.type == "cpu":
            top1 = self.target_top1[0]
        documents = Documents.make(1, self.num_tokens, self.document_ids.cpu(), "cpu")
        return HostTokens(self.input_ids[0].cpu(), self.supervised[0].cpu(), documents, top1)

    def to(self, device=None, dtype: torch.dtype | None = None) -> FeatureBatch:
        """Move all tensors to ``device`` and cast the two states to ``dtype``, in a new batch, which is returned."""

        def move(tensor, cast=None):
            return None if tensor is None else tensor.to(device=device, dtype=cast, non_blocking=True)

        host = self.host
        if host is None and self.input_ids.device.type == "cpu" and torch.device(device or "cpu").type != "cpu":
            host = self.on_host()
        return replace(
            self,
            host=host,
            input_ids=move(self.input_ids),
            supervised=move(self.supervised),
            document_ids=move(self.document_ids),
            aux_hidden=move(self.aux_hidden, dtype),
            final_hidden=move(self.final_hidden, dtype),
            target_top1=move(self.target_top1),
            target_logsumexp=move(self.target_logsumexp),
        )

    @property
    def num_tokens(self) -> int:
        """N, tokens of all rows."""
        return int(self.input_ids.shape[1])


def tokens_of(rows: Sequence[Any]) -> HostTokens:
    """What is known of a batch before its features are made: its rows packed, on the CPU.

    Args:
        rows: tokenised rows with ``input_ids`` and ``supervised``.
    """
    ids = torch.cat([torch.as_tensor(row.input_ids, dtype=torch.int64) for row in rows])  # [N]
    supervised = torch.cat([torch.as_tensor(row.supervised, dtype=torch.bool) for row in rows])  # [N]
    lengths = torch.tensor([len(row.input_ids) for row in rows])
    number = torch.repeat_interleave(torch.arange(len(rows)), lengths)  # [N]
    return HostTokens(ids, supervised, Documents.make(1, len(ids), number[None], "cpu"))


def collate(
    rows: list[FeatureRow],
    contract: FeatureContract,
    aux_hidden: Tensor | None = None,
    final_hidden: Tensor | None = None,
) -> FeatureBatch:
    """Pack rows one after the other into one line of N tokens.

    Args:
        rows: at least one row; all made under ``contract``.
        contract: checked against every row's shapes.
        aux_hidden, final_hidden: [N, A·Ht] and [N, Ht] if the rows' states lie packed already (the rows hold views).

    Returns:
        the batch ``[1, N]``, a document for each row.

    Raises:
        FeatureError: no rows, or a row whose shapes break the contract.
    """
    if not rows:
        raise FeatureError("no rows to pack: a batch needs at least one")
    for row in rows:
        row.validate(contract)

    def pack(name, packed=None):
        if packed is not None:
            return packed.unsqueeze(0)
        tensors = [getattr(row, name) for row in rows]
        return None if any(t is None for t in tensors) else torch.cat(tensors).unsqueeze(0)

    lengths = torch.tensor([len(row) for row in rows])
    document_ids = torch.repeat_interleave(torch.arange(len(rows)), lengths)
    return FeatureBatch(
        input_ids=pack("input_ids"),  # [1,N]
        supervised=pack("supervised"),  # [1,N]
        document_ids=document_ids.unsqueeze(0).to(rows[0].input_ids.device),  # [1,N]
        aux_hidden=pack("aux_hidden", aux_hidden),  # [1,N,A·Ht]
        final_hidden=pack("final_hidden", final_hidden),  # [1,N,Ht]
        target_top1=pack("target_top1"),
        target_logsumexp=pack("target_logsumexp"),
        row_ids=[row.row_id for row in rows],
        contract=contract,
    )
