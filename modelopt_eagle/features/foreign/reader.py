"""Read hidden states that other tools have dumped, as they lie on the disk (layouts: ``foreign_files``)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from modelopt_eagle.common.dtypes import MODEL_DTYPES, dtype_name
from modelopt_eagle.common.layers import check_layer_ids
from modelopt_eagle.errors import FeatureError
from modelopt_eagle.features.batch import FeatureContract, FeatureRow, predicting_positions
from modelopt_eagle.features.foreign.files import FORMATS, ForeignFile, arrow_masks, find_format, row_name
from modelopt_eagle.features.store.manifest import is_store
from modelopt_eagle.features.store.reader import StoreReader
from modelopt_eagle.target.identity import TargetIdentity


@dataclass(frozen=True)
class Answers:
    """Where a user says what a folder leaves open, for the messages."""

    layers: str
    final_states: str
    all_supervised: str


IMPORT_OPTIONS = Answers("--aux-layers a,b,c", "--final-states normed|pre-norm", "--all-supervised")
RECIPE_KEYS = Answers(
    "eagle.aux_layer_ids: [a, b, c]", "data.offline_final_states: normed|pre-norm", "data.offline_all_supervised: true"
)

WORSE_NATS = 2.0
"""Text that a target reads this much better, a token, after the other reading of the norm says that it was the right
one. (SmolLM2 on its own text: 0.4 nats when right, 10 with the norm twice, 300 with none.)"""


class ForeignTokens:
    """Token ids and masks of a foreign dump; they stay in memory (5 bytes a token).

    Args:
        folder: the dump.
        all_supervised: take every token as supervised where the files hold no loss mask.
        answers: where the user says what the folder leaves open, for the messages.

    Attributes:
        row_ids: name of every row.
        lengths, supervised: tokens and supervised tokens of every row, after :meth:`scan`.

    Raises:
        FeatureError: an unknown layout, or a damaged file.
    """

    def __init__(self, folder: str | Path, *, all_supervised: bool = False, answers: Answers = RECIPE_KEYS):
        self.folder, self._answers = Path(folder), answers
        self.format, self._files = find_format(folder)
        self._read, self._all_supervised = FORMATS[self.format][1], all_supervised
        self._masks = arrow_masks(self.folder) if self.format == "speculators" else None
        self.row_ids = [row_name(path.relative_to(self.folder)) for path in self._files]

    def scan(self) -> None:
        """Open every file once."""
        with ThreadPoolExecutor(8) as pool:
            self._tokens = list(pool.map(self._scan, range(len(self._files))))
        self.lengths = [len(ids) for ids, _ in self._tokens]
        self.supervised = [int(mask.sum()) for _, mask in self._tokens]

    def __len__(self) -> int:
        return len(self._files)

    @property
    def dataset_hash(self) -> str:
        """Of names, token ids and masks of all rows."""
        digest = hashlib.sha256()
        for name, (ids, mask) in zip(self.row_ids, self._tokens, strict=True):
            digest.update(f"{name}\0{len(ids)}\0".encode() + ids.numpy().tobytes() + mask.numpy().tobytes())
        return digest.hexdigest()

    def tokens(self, number: int) -> tuple[Tensor, Tensor]:
        """Token ids [s] int32 and supervised [s] bool of a row, without its states."""
        return self._tokens[number]

    def _raw(self, number: int) -> ForeignFile:
        return self._read(self._files[number], self._masks)

    def _scan(self, number: int) -> tuple[Tensor, Tensor]:
        """Token ids [s] int32 and supervised [s] bool of a file, copied so that it can be let go."""
        raw = self._raw(number)
        ids = raw.input_ids.flatten().int().clone()  # [s]
        if raw.supervised is None and not self._all_supervised:
            raise FeatureError(
                f"{self._files[number]} holds no loss mask: dump it with one, or train on every token of such files by "
                f"{self._answers.all_supervised}"
            )
        mask = torch.ones(len(ids)) if raw.supervised is None else raw.supervised.flatten()
        if len(mask) != len(ids):
            raise FeatureError(f"{self._files[number]}: {len(ids)} token ids, a loss mask of {len(mask)}")
        return ids, mask.bool().clone()


class ForeignReader(ForeignTokens):
    """Rows of a foreign dump; give it to :class:`~modelopt_eagle.features.OfflineSource`.

    Args:
        folder: the dump.
        identity: of the target that made it (``Target.identity()`` or ``TargetTables.identity()``): the folder does
            not say it, so it is taken on trust.
        aux_layer_ids: canonical ids (output of layer k, 0-based) of the states, in their order in the files; rows come
            out in ascending order.
        final_is_normed: whether final states are post-norm; may be None if the files say it.
        all_supervised: take every token as supervised where the files hold no loss mask.
        answers: where the user says what the folder leaves open, for the messages.

    Attributes:
        contract: how the features were made.

    Raises:
        FeatureError: an unknown layout, a damaged file, widths that do not fit the ids, or questions that the folder
            leaves open and the arguments do not answer: all of them, each with what answers it.
        TargetError: ids that are repeated, or of layers that the target does not have.
    """

    def __init__(
        self,
        folder: str | Path,
        identity: TargetIdentity,
        aux_layer_ids: Sequence[int] | None,
        *,
        final_is_normed: bool | None = None,
        all_supervised: bool = False,
        answers: Answers = IMPORT_OPTIONS,
    ):
        super().__init__(folder, all_supervised=all_supervised, answers=answers)
        self._told = final_is_normed is not None
        first = self._raw(0)
        self._ask(first, aux_layer_ids, final_is_normed)
        check_layer_ids(aux_layer_ids, identity.num_layers)
        normed = first.final_is_normed if final_is_normed is None else final_is_normed
        dtype = dtype_name(first.aux_hidden.dtype)
        self.contract = replace(
            FeatureContract.from_identity(identity, aux_layer_ids, dtype), final_is_normed=normed
        )  # its ids ascend
        self._order = sorted(range(len(aux_layer_ids)), key=lambda a: aux_layer_ids[a])
        self._check_widths(first)
        self.scan()
        self._check_ids(identity.vocab_size)

    def _ask(self, first: ForeignFile, aux_layer_ids: Sequence[int] | None, final_is_normed: bool | None) -> None:
        """Refuse a folder that leaves something open, and an answer that the files contradict."""
        answers, questions = self._answers, []
        if aux_layer_ids is None:
            questions.append(
                "which layers its states are of, by the outputs of layers counted from 0 (most dumps hold 1, n//2-1 "
                f"and n-4; take one off the ids of a tool that counts inputs): {answers.layers}"
            )
        if first.final_is_normed is None and final_is_normed is None:
            questions.append(
                "whether final states are before or after the final norm (normed: by transformers, SGLang, "
                f"TensorRT-LLM; pre-norm: by vLLM): {answers.final_states}"
            )
        if first.supervised is None and not self._all_supervised:
            questions.append(
                "which tokens are supervised, as it holds no loss mask: dump it with one, or train on every token by "
                f"{answers.all_supervised}"
            )
        if questions:
            lines = "\n  ".join(questions)
            raise FeatureError(f"{self.folder} is a dump of {self.format}, which does not say\n  {lines}")
        if None not in (first.final_is_normed, final_is_normed) and first.final_is_normed != final_is_normed:
            said = "normed" if first.final_is_normed else "pre-norm"
            raise FeatureError(
                f"{self._files[0]} says that its final states are {said}; leave out {answers.final_states}"
            )

    def _check_widths(self, first: ForeignFile) -> None:
        """Say how many layers the states are of before their ids are read wrongly."""
        width, ids = self.contract.hidden_size, self.contract.aux_layer_ids
        if first.final_hidden.shape[-1] != width:
            raise FeatureError(
                f"{self._files[0]}: final states are {first.final_hidden.shape[-1]} wide, those of "
                f"{self.contract.model} are {width}: the dump is of another target"
            )
        if first.aux_hidden.shape[-1] != width * len(ids):
            held = first.aux_hidden.shape[-1] / width
            raise FeatureError(
                f"{self._files[0]}: auxiliary states of {held:g} layers found, {len(ids)} ids given "
                f"({', '.join(map(str, ids))}): give as many, {self._answers.layers}"
            )

    def _check_ids(self, vocab_size: int) -> None:
        """Find a dump of another tokenizer before its ids are looked up."""
        for path, (ids, _) in zip(self._files, self._tokens, strict=True):
            if not len(ids):
                raise FeatureError(f"{path} holds no token; dump it again or delete it")
            least, most = int(ids.min()), int(ids.max())
            if least < 0 or most >= vocab_size:
                raise FeatureError(
                    f"{path} holds the token id {least if least < 0 else most}, {self.contract.model} has ids 0 to "
                    f"{vocab_size - 1}: the dump is of another target"
                )

    def row(self, number: int) -> FeatureRow:
        """Row ``number``, without the target's predictions.

        Raises:
            FeatureError: names the file.
        """
        raw, path = self._raw(number), self._files[number]
        if raw.final_is_normed is not None and raw.final_is_normed != self.contract.final_is_normed:
            raise FeatureError(
                f"{path} is {'post' if raw.final_is_normed else 'pre'}-norm, unlike the folder's other files"
            )
        if raw.final_is_normed is None and not self._told:
            raise FeatureError(
                f"{path} does not say whether its final states are normed, unlike the folder's first file: give "
                f"{self._answers.final_states}"
            )
        if odd := {raw.aux_hidden.dtype, raw.final_hidden.dtype} - {*MODEL_DTYPES.values()}:
            raise FeatureError(f"{path}: states are {odd.pop()}; float32, bfloat16 or float16 expected")
        ids, mask = self._tokens[number]
        row = FeatureRow(self.row_ids[number], "", ids.long(), mask, raw.aux_hidden, raw.final_hidden)
        try:
            row.validate(self.contract)
        except FeatureError as error:
            raise FeatureError(f"{path}: {error}") from error
        if self._order != sorted(self._order):
            layers = row.aux_hidden.unflatten(-1, (len(self._order), -1))  # [s,A,Ht]
            row = replace(row, aux_hidden=layers[:, self._order].flatten(1))
        row.check_finite(str(path), "dump it again or delete it")
        return row

    @torch.no_grad()
    def check_final_states(self, final_norm, head, sample_rows: int = 4) -> None:
        """Read some text by its final states as they are said to be, and the other way about.

        Args:
            final_norm, head: of the target.
            sample_rows: rows looked at, spread over the dump.

        Raises:
            FeatureError: the target finds its text far likelier the other way: normed and pre-norm are mixed up.
        """
        count = len(self)
        numbers = sorted({i * count // sample_rows for i in range(min(sample_rows, count))})
        rows = [row for row in map(self.row, numbers) if predicting_positions(row.supervised).any()]
        if not rows:
            return
        said, other = (
            sum(_nats(row, final_norm if norm else None, head) for row in rows) / len(rows)
            for norm in (not self.contract.final_is_normed, self.contract.final_is_normed)
        )
        if said > other + WORSE_NATS:
            names = ("normed", "pre-norm") if self.contract.final_is_normed else ("pre-norm", "normed")
            raise FeatureError(
                f"{self.folder}: with final states read as {names[0]} the target finds its text {said - other:.1f} "
                f"nats a token less likely than as {names[1]}: they are {names[1]}; mend {self._answers.final_states}"
            )


def _nats(row: FeatureRow, final_norm, head) -> float:
    """Mean of the negative log-likelihood of a row's supervised tokens by its final states."""
    predicting = predicting_positions(row.supervised)  # [s]
    states = row.final_hidden[predicting][:256].to(head.weight)  # [n,Ht]
    following = row.input_ids[1:][predicting[:-1]][:256].to(states.device)  # [n]
    logits = head(states if final_norm is None else final_norm(states)).float()  # [n,V]
    return float(torch.nn.functional.cross_entropy(logits, following))


def open_tokens(folder: str | Path, all_supervised: bool = False) -> StoreReader | ForeignTokens:
    """Token ids and masks of a feature store or a foreign dump, without a target to read its states for.

    Raises:
        FeatureError: neither, or damaged.
    """
    if is_store(Path(folder)):
        return StoreReader(folder, verify="read")
    found = ForeignTokens(folder, all_supervised=all_supervised)
    found.scan()
    return found


def open_reader(
    path: str | Path,
    tables,
    aux_layer_ids: Sequence[int] | None = None,
    *,
    final_is_normed: bool | None = None,
    all_supervised: bool = False,
    answers: Answers = IMPORT_OPTIONS,
    verify: str = "open",
) -> StoreReader | ForeignReader:
    """A reader of whatever ``data.offline_data_path`` names: our store, or a foreign dump.

    Args:
        path: the folder.
        tables: ``TargetTables`` (or a ``Target``) of the target.
        aux_layer_ids, final_is_normed, all_supervised, answers: for foreign dumps, see :class:`ForeignReader`.
        verify: for stores, see :class:`~modelopt_eagle.features.store.StoreReader`.

    Raises:
        FeatureError: see there; or answers to what a store says itself.
    """
    folder = Path(path)
    if not is_store(folder):
        reader = ForeignReader(
            folder, tables.identity(), aux_layer_ids,
            final_is_normed=final_is_normed, all_supervised=all_supervised, answers=answers,
        )  # fmt: skip
        reader.check_final_states(tables.final_norm, tables.head)
        return reader
    if final_is_normed is not None or all_supervised:
        raise FeatureError(
            f"{folder} is a feature store, which says itself what it holds: leave out {answers.final_states} and "
            f"{answers.all_supervised}"
        )
    return StoreReader(folder, verify)


def open_offline(
    path: str | Path,
    tables,
    aux_layer_ids: Sequence[int] | None = None,
    *,
    final_is_normed: bool | None = None,
    all_supervised: bool = False,
    verify: str = "open",
    **options,
):
    """An ``OfflineSource`` of whatever a path names: our store, or a foreign dump.

    Args:
        path, tables, final_is_normed, all_supervised, verify: see :func:`open_reader`.
        aux_layer_ids: canonical ids that this run asks for; None accepts a store's own.
        options: of :class:`~modelopt_eagle.features.OfflineSource`: dtype, prefetch.

    Returns:
        a source whose contract has been compared with the target and whose teacher has been checked.

    Raises:
        FeatureError: see there.
    """
    from modelopt_eagle.features.offline import OfflineSource

    reader = open_reader(
        path, tables, aux_layer_ids, final_is_normed=final_is_normed, all_supervised=all_supervised, verify=verify
    )
    ids = reader.contract.aux_layer_ids if aux_layer_ids is None else aux_layer_ids
    expected = FeatureContract.from_identity(tables.identity(), ids)
    source = OfflineSource(
        reader, None if isinstance(reader, ForeignReader) else expected,
        final_norm=tables.final_norm, head=tables.head, **options,
    )  # fmt: skip
    source.check_teacher(tables.head, final_norm=tables.final_norm)
    return source
