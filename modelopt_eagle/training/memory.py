"""The memory that a run needs at its peak, found by going through its steps without their numbers.

The very code of a step is run over hollow tensors (:class:`~modelopt_eagle.common.allocations.Shapes`): the target's
forward over the heaviest batch, the drafter's states, loss, backward, optimiser, evaluation. So whatever is trained,
with whichever options, is counted as it is, and what a change of the code costs shows here. For a GPU that need not be
here the step takes the way it takes there: the kernels' operations, which say what they give and keep without being
launched, and the dtypes of autocast there.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from modelopt_eagle.common.allocations import Shapes
from modelopt_eagle.common.dtypes import dtype_name
from modelopt_eagle.common.machine import free_memory
from modelopt_eagle.common.text import byte_text, first_line
from modelopt_eagle.data.encode import TokenizedRow
from modelopt_eagle.draft.algorithm import algorithm_of
from modelopt_eagle.draft.attention import largest_chunk_alone
from modelopt_eagle.draft.vocab import DraftVocab
from modelopt_eagle.errors import TrainingError
from modelopt_eagle.features.batch import FeatureBatch, FeatureContract, collate
from modelopt_eagle.features.compute import compute_features
from modelopt_eagle.features.unadapted import AdaptableBatch
from modelopt_eagle.kernels.dispatch import as_on_gpu
from modelopt_eagle.recipe import Recipe
from modelopt_eagle.target.head import TargetHead
from modelopt_eagle.target.load import asked_attention, causal_class, load_config
from modelopt_eagle.target.lora import TargetAdapter
from modelopt_eagle.target.model import Target
from modelopt_eagle.training.acceptance import target_law, walk
from modelopt_eagle.training.course import batch_options
from modelopt_eagle.training.optimizer import build_optimizers
from modelopt_eagle.training.states import AdaptedStates
from modelopt_eagle.training.step import TeacherTables, TrainingStep

PLANNED_EPOCHS = 4
"""Epochs that are planned to find the heaviest batch."""

PHASES = {
    "target": "the target's forward", "forward": "the head's forward", "backward": "the head's backward",
    "optimiser": "the optimiser's step", "evaluation": "an evaluation",
}  # fmt: skip
"""Parts of a step in which the peak can be, in words."""

SMALL = 64 * 2**20
"""Bytes of weights below which a run's header does not go through a step: it takes longer than such a run's first."""

FORWARD = 4096
"""Tokens of a forward that makes features to be kept."""

AHEAD = 4
"""Batches of a store or a server that are in memory on their way: waiting, in the making, and in use."""

Shape = tuple[tuple[int, int], ...]
"""Of each row of a batch its tokens and how many of them are supervised."""


@dataclass(frozen=True)
class Peak:
    """Bytes of tensors on a device at the peak of a run.

    Attributes:
        target: its weights, or the tables that are read of it.
        head: weights, gradients and optimiser.
        features: the states of a step's micro-batches.
        scratch: what else there is at the peak, made and let go in a step.
        kept: features of the whole data and batches prepared ahead, where they share the device's memory.
        phase: in which part of a step the peak is.
        shape: of the heaviest micro-batch.
        unknown: why the target's forward is not counted, or ``None``.
    """

    target: int
    head: int
    features: int
    scratch: int
    phase: str
    shape: Shape
    kept: int = 0
    unknown: str | None = None

    @property
    def total(self) -> int:
        """All of it."""
        return self.target + self.head + self.features + self.scratch + self.kept

    def line(self) -> str:
        """As text."""
        rows, tokens = len(self.shape), sum(length for length, _ in self.shape)
        parts = {"target": self.target, "head with gradients and optimiser": self.head, "features": self.features,
                 "features kept": self.kept, PHASES[self.phase]: self.scratch}  # fmt: skip
        said = ", ".join(f"{name} {byte_text(value)}" for name, value in parts.items() if value)
        batch = f"a batch of {rows} row{'s' * (rows != 1)}, {tokens:,} tokens"
        line = f"{byte_text(self.total)} of tensors at the peak on each device, with {batch} ({said})"
        return line if self.unknown is None else f"{line}; without the target's forward: {self.unknown}"


def heaviest_batch(recipe: Recipe, lengths: Sequence[int], supervised: Sequence[int] | None, world_size: int) -> Shape:
    """Rows of the batch with most tokens in the first epochs of a run.

    Args:
        lengths: tokens of each row.
        supervised: of them supervised; ``None``: all.
        world_size: shares of the data.
    """
    from modelopt_eagle.data import plan_batches

    training = recipe.training
    options: dict[str, Any] = {"seed": training.seed, "shuffle": recipe.data.shuffle}
    options |= batch_options(training, training.gradient_accumulation_steps)
    if training.max_tokens_per_batch is not None:
        options |= {"world_size": world_size, "supervised": supervised}
    counts = lengths if supervised is None else supervised
    best: list[int] = []
    for epoch in range(min(training.epochs, PLANNED_EPOCHS)):
        for batch in plan_batches(lengths, epoch=epoch, **options):
            if sum(lengths[row] for row in batch) > sum(lengths[row] for row in best):
                best = batch
    return tuple((int(lengths[row]), int(counts[row])) for row in best)


def estimate_peak(
    recipe: Recipe,
    config: Any,
    head: Any,
    shape: Shape,
    *,
    processes: int = 1,
    state_dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
) -> Peak:
    """The peak of a run.

    Args:
        recipe: of the run.
        config: the target's, of transformers.
        head: configuration of the head.
        shape: of the heaviest micro-batch, see :func:`heaviest_batch`.
        processes: how many train together; with several, gradients are kept twice.
        state_dtype: of states that come from a store or a server.
        device: kind of device that is meant; ``cuda`` takes the way of the kernels, any other that of a CPU.
    """
    parts = [json.dumps(head.to_dict(), sort_keys=True, default=str), config.to_json_string(use_diff=False)]
    parts += [recipe.model_dump_json(exclude={"validation", "export"}), str((shape, state_dtype, device))]
    key = "\n".join(parts)
    if key not in _FOUND:
        with _as_on(device):
            _FOUND[key] = _Follower(recipe, config, head, state_dtype).peak(shape)
    found = _FOUND[key]
    if processes == 1:
        return found
    return replace(found, head=found.head + found.head // 4)


_FOUND: dict[str, Peak] = {}
"""Peaks that this process has found."""


IN_FLOAT32 = frozenset(
    "layer_norm group_norm exp expm1 log log2 log10 log1p pow rsqrt reciprocal softplus logsumexp kl_div "
    "nll_loss cosine_similarity dist cdist renorm norm".split()
)
"""Functions whose inputs CUDA's autocast makes float32 and a CPU's does not."""

TO_FLOAT32 = frozenset("softmax log_softmax sum prod cumsum cumprod".split())
"""Functions whose result it makes float32."""


class AsOnCuda(TorchFunctionMode):
    """Where autocast of a CPU is on, the dtypes are those of CUDA's, and norms keep what CUDA's own kernel keeps."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if name == "rms_norm":
            return self.norm(*args, **kwargs)
        if name in IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            with torch.autocast("cpu", enabled=False):
                return function(*tree_map(_longer, args), **tree_map(_longer, kwargs))
        if name in TO_FLOAT32 and torch.is_autocast_enabled("cpu") and args and _is_short(args[0]):
            kwargs = {**kwargs, "dtype": kwargs.get("dtype") or torch.float32}
        return function(*args, **kwargs)

    @staticmethod
    def norm(x, normalized_shape, weight=None, eps=None):
        """``torch.rms_norm``."""
        if torch.is_autocast_enabled("cpu"):
            x, weight = _longer(x), _longer(weight)
        with torch.autocast("cpu", enabled=False):
            if weight is None or weight.dtype != x.dtype or len(normalized_shape) != 1:  # not one kernel there, either
                return nn.functional.rms_norm(x, normalized_shape, weight, eps)
            return _FusedNorm.apply(x, weight, torch.finfo(x.dtype).eps if eps is None else eps)


class _FusedNorm(torch.autograd.Function):
    """Keeps the input and a number a row; on a CPU torch keeps what stands between its operations, too."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        inverse = (x.square().mean(-1, keepdim=True) + eps).rsqrt()  # [...,1]
        ctx.save_for_backward(x, weight, inverse)
        return x * inverse * weight

    @staticmethod
    def backward(ctx, upstream):
        x, weight, inverse = ctx.saved_tensors
        unit, pulled = x * inverse, upstream * weight  # [...,H] each
        by_x = inverse * (pulled - unit * (pulled * unit).mean(-1, keepdim=True))
        return by_x, (upstream * unit).flatten(0, -2).sum(0), None


def _is_short(value: Any) -> bool:
    """Whether it is a tensor of 16-bit floats."""
    return isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _longer(value: Any) -> Any:
    """A tensor of 16-bit floats in float32, anything else as it is."""
    return value.float() if _is_short(value) else value


@contextlib.contextmanager
def _as_on(device: str) -> Iterator[None]:
    """Inside, hollow tensors go the way that tensors on ``device`` go."""
    if device != "cuda":
        yield
        return
    with as_on_gpu(), AsOnCuda():
        yield


@dataclass
class _Phases:
    """Bytes over those of the weights: of a batch's states, and at the peak of each part of a step."""

    batch: int
    peaks: dict[str, int]


class _Follower:
    """Goes through the steps of a run."""

    def __init__(self, recipe: Recipe, config: Any, head: Any, state_dtype: torch.dtype):
        self.recipe = recipe.model_copy(deep=True)
        self.recipe.eagle.in_vocab_only = False  # would count by numbers that are not there
        self.config, self.text = config, config.get_text_config()
        self.head = type(head).from_dict(head.to_dict())
        if getattr(self.head, "mask_token_id", 0) is None:
            self.head.mask_token_id = 0
        self.state_dtype = state_dtype
        name = recipe.model.load_arguments()["dtype"]
        self.dtype = getattr(torch, dtype_name(getattr(self.text, "dtype", None) or torch.float32)
                             if name == "auto" else name)  # fmt: skip
        self.unknown: str | None = None
        self.adapter: TargetAdapter | None = None

    def peak(self, shape: Shape) -> Peak:
        """See :func:`estimate_peak`."""
        window = self.recipe.training.gradient_accumulation_steps
        self.mem = mem = Shapes()
        target = self._target() if self.recipe.data.runs_target else None
        step, optimizers = self._step(target)
        weights = sum(p.numel() * p.element_size() for p in step.parameters() if p.requires_grad)
        head, gradients = mem.now - self.of_target, weights
        found = self._gone_through(step, optimizers, shape)
        once = shape
        if self.recipe.data.cache_features != "none":  # the target runs before the first step, over full forwards
            middle = sorted(shape)[len(shape) // 2]
            once = (middle,) * max(1, FORWARD // max(shape)[0])
        features = self._features(target, step, once) if target is not None else None
        peaks = dict(found.peaks)
        if features is not None:
            peaks["target"] = features
        held = (window - 1) * found.batch
        phase = max(peaks, key=lambda name: peaks[name])
        return Peak(
            target=self.of_target,
            head=head + gradients,
            features=held + found.batch,
            scratch=max(0, peaks[phase] - found.batch - gradients),
            phase=phase,
            shape=shape,
            unknown=self.unknown,
        )

    def _target(self) -> Target | None:
        """The hollow target, and ``of_target`` bytes counted."""
        mem, model = self.mem, self.recipe.model
        kind = causal_class(self.config, model.base_model, model.trust_remote_code)
        with torch.device("meta"):
            bare = kind.from_config(self.config, attn_implementation=asked_attention(model.attn_implementation))
        mem.fill(bare, self.dtype)
        with mem:
            return Target(bare, None, name="shapes")

    def _step(self, target: Target | None) -> tuple[TrainingStep, list[torch.optim.Optimizer]]:
        """The step with a hollow head whose optimiser has its moments."""
        mem, recipe, algorithm = self.mem, self.recipe, algorithm_of(self.head)
        total = self.head.vocab_size
        if target is None:
            shape = (total, self.text.hidden_size)
            embedding = mem.empty(*shape, dtype=self.dtype)
            tied = getattr(self.config, "tie_word_embeddings", False)
            table = TargetHead.from_config(self.text, embedding if tied else mem.empty(*shape, dtype=self.dtype))
        else:
            embedding, table = target.embedding_weight, target.head
        with torch.device("meta"):
            module = algorithm.module(self.head, None)
        vocab = DraftVocab.from_counts(torch.zeros(total), self.head.draft_vocab_size)
        module.d2t, module.t2d = vocab.d2t, vocab.t2d
        with mem:
            tables = TeacherTables.make(embedding, table, module.target_ids)
            self.of_target = mem.now
            mem.fill(module, torch.float32)
            states = None if target is None else self._adapted(target)
            step = TrainingStep(module.train(), tables, recipe.eagle, recipe.training.precision, states=states,
                                settings=algorithm.settings(recipe))  # fmt: skip
            optimizers = build_optimizers(
                module, recipe.training, list(step.adapters), recipe.target_lora.learning_rate
            )
            for parameter in step.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
            self._update(optimizers)
        return step, optimizers

    def _adapted(self, target: Target) -> AdaptedStates | None:
        """States by hollow adapters in the target, where the recipe trains them."""
        lora = self.recipe.target_lora
        if not lora.rank:
            return None
        self.adapter = adapter = TargetAdapter(
            target, rank=lora.rank, alpha=lora.alpha, target_modules=lora.target_modules, first_layer=lora.first_layer
        )
        for part in adapter.peft_model.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None and parameter.requires_grad:
                    part._parameters[name] = nn.Parameter(self.mem.empty(*parameter.shape, dtype=parameter.dtype))
        adapter.find_trained()
        return AdaptedStates(adapter, lora)

    @staticmethod
    def _update(optimizers: list[torch.optim.Optimizer]) -> None:
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def _gone_through(self, step: TrainingStep, optimizers: list[torch.optim.Optimizer], shape: Shape) -> _Phases:
        mem, training = self.mem, self.recipe.training
        base, peaks = mem.now, {}

        def note(name: str) -> None:
            peaks[name] = max(peaks.get(name, 0), mem.peak - base)
            mem.forget_peak()

        with mem, largest_chunk_alone():
            batch = step.place(step.share(self._made(shape)), "cpu")
            held = mem.now - base
            mem.forget_peak()
            generator = torch.Generator().manual_seed(0)
            step.count_positions(batch, generator)
            ones = torch.ones(step.depths)
            options = {"adapt": True, "detach": self.recipe.target_lora.detach_teacher >= 1} if self.adapter else {}
            for _ in range(min(2, training.gradient_accumulation_steps)):
                loss = step(batch, ones, generator, **options).loss
                note("forward")
                loss.backward()
                del loss
                note("backward")
            if training.max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(
                    [p for p in step.parameters() if p.requires_grad], training.max_grad_norm
                )
            self._update(optimizers)
            note("optimiser")
            step.eval()
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=step.bf16):
                view, tables = step.view(batch), step.tables
                law = target_law(view.final_hidden, tables.lm_head, step.module.target_ids, tables.transform)
                walk(step.module, view, batch.input_ids[0], self.recipe.validation.num_steps, law)
                del view, law
            note("evaluation")
            step.train()
            del batch
        return _Phases(held, peaks)

    def _contract(self) -> FeatureContract:
        return FeatureContract("shapes", None, self.head.aux_layer_ids, True, "float32", None, None,
                               self.text.hidden_size, self.head.vocab_size)  # fmt: skip

    def _made(self, shape: Shape) -> FeatureBatch:
        """A hollow batch as it comes from a source."""
        runs, mem, contract = self.recipe.data.runs_target, self.mem, self._contract()
        held = self.dtype if runs else self.state_dtype
        lengths = torch.tensor([length for length, _ in shape])
        tokens = int(lengths.sum())
        supervised = torch.cat([torch.arange(length) >= length - learned for length, learned in shape])
        wide = [mem.empty(1, tokens, width * contract.hidden_size, dtype=held)
                for width in (len(contract.aux_layer_ids), 1)]  # fmt: skip
        ids = torch.zeros(1, tokens, dtype=torch.int64)
        documents = torch.repeat_interleave(torch.arange(len(shape)), lengths)[None]
        made = (ids, supervised[None], documents, *wide, ids, None, [], contract)
        return FeatureBatch(*made) if self.adapter is None else AdaptableBatch(*made, rows=tokenised(shape))

    def _features(self, target: Target, step: TrainingStep, shape: Shape) -> int | None:
        """Bytes at the peak of the target's forward over a batch, over those of the weights."""
        mem = self.mem
        base = mem.now
        mem.forget_peak()
        if len(shape) > 1 and len({length for length, _ in shape}) == 1 and shape[-1][0] > 1:
            length, learned = shape[-1]  # rows of exactly one length need no mask, and are rare
            shape = (*shape[:-1], (length - 1, min(learned, length - 1)))
        rows = tokenised(shape)
        try:
            plain = contextlib.nullcontext() if self.adapter is None else self.adapter.disabled()
            with _without_torchs_log(), mem, plain:
                made = collate(compute_features(target, rows, self.head.aux_layer_ids), self._contract())
                step.place(step.share(made), "cpu")
        except Exception as error:  # code of any model may ask for numbers that are not there
            self.unknown = first_line(error) or type(error).__name__
            return None
        return mem.peak - base


@contextlib.contextmanager
def _without_torchs_log() -> Iterator[None]:
    """Keep torch from logging an error of hollow tensors, with its traceback, beside the reason that is told."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def tokenised(shape: Shape) -> list[TokenizedRow]:
    """Rows of these sizes."""
    return [TokenizedRow(str(number), "", [1] * length, [False] * (length - learned) + [True] * learned, 1)
            for number, (length, learned) in enumerate(shape)]  # fmt: skip


def bytes_kept(recipe: Recipe, tokens: int, token_bytes: float, shape: Shape, device: str) -> int:
    """Bytes of features beside those of a step, where they share the device's memory.

    Args:
        tokens: of the data.
        token_bytes: of a token's features.
        shape: of the heaviest micro-batch.
        device: kind of device.
    """
    if device != "cpu":
        return 0
    data = recipe.data
    ahead = 0 if data.runs_target else AHEAD * round(token_bytes * sum(length for length, _ in shape))
    return ahead + (round(token_bytes * tokens) if data.cache_features == "memory" else 0)


def check_weights(recipe: Recipe, place: Path | str, available: int | None) -> None:
    """Refuse a target whose weights alone do not fit, before they are loaded.

    Args:
        place: its folder; the weights of a hub id may not be here yet, and are not looked at.
        available: bytes that there are.

    Raises:
        TrainingError: see :func:`check_memory`.
    """
    if not recipe.data.runs_target or not isinstance(place, Path):
        return
    files = list(place.glob("*.safetensors"))
    stored = getattr(load_config(place, recipe.model.revision, recipe.model.trust_remote_code), "dtype", None)
    asked = recipe.model.load_arguments()["dtype"]
    grows = 1.0 if asked == "auto" or stored is None else getattr(torch, asked).itemsize / stored.itemsize
    needed = round(sum(file.stat().st_size for file in files) * grows)
    check_memory(recipe, needed, f"{place}: the target's weights take", available)


def memory_line(recipe: Recipe, target: Any, head: Any, source: Any, accelerator: Any) -> str | None:
    """What the head of a run says of its peak; ``None`` for one whose weights are small.

    Args:
        target: the loaded target, or its tables.
        head: configuration of the head.
        source: of the training rows: ``lengths`` and ``supervised_counts()``.
        accelerator: of the run.

    Raises:
        TrainingError: it does not fit, see :func:`check_memory`.
    """
    model = getattr(target, "model", None)
    parts = [target.embedding_weight] if model is None else list(model.parameters())
    cost = algorithm_of(head).cost(head)
    weights = 16 * (cost.parameters or cost.every_token + cost.output) + sum(part.nbytes for part in parts)
    if weights < SMALL:
        return None
    share, processes = recipe.training.context_parallel, accelerator.num_processes
    shape = heaviest_batch(recipe, source.lengths, source.supervised_counts(), processes // share)
    config = target.config if model is None else model.config
    device = accelerator.device
    found = estimate_peak(recipe, config, head, shape, processes=processes, device=device.type)
    kept = bytes_kept(recipe, sum(source.lengths), state_bytes(head), shape, device.type)
    found, available = replace(found, kept=kept), free_memory(str(device))
    line = found.line()
    if share > 1:
        return f"memory: {line}, less what {share} processes share of it"
    check_memory(recipe, found.total, f"{line}: this takes", available)
    return f"memory: {line}" + ("" if available is None else f"; {byte_text(available)} are there")


def state_bytes(head: Any, width: int = 4) -> int:
    """Bytes of a token's states, with numbers of ``width`` bytes."""
    return (len(head.aux_layer_ids) + 1) * head.target_hidden_size * width


def check_memory(recipe: Recipe, needed: int, what: str, available: int | None) -> None:
    """Refuse a run that cannot fit.

    Args:
        needed: bytes on the device.
        what: the beginning of the sentence, "... take".
        available: bytes that there are; ``None``: not known.

    Raises:
        TrainingError: it is more than there is, and ``training.ignore_memory`` is not set.
    """
    if available is None or needed <= available or recipe.training.ignore_memory:
        return
    raise TrainingError(
        f"{what} {byte_text(needed)}, and {byte_text(available)} are there: lower training.batch_size, "
        "training.max_tokens_per_batch or data.max_length, choose a smaller target or features from a store, or set "
        "training.ignore_memory=true to try all the same"
    )
