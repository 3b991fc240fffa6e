"""The seam for drafters: everything that the toolkit asks of a kind of draft head, as one record.

A drafter is a folder ``draft/<name>/`` whose ``algorithm.py`` holds an :class:`Algorithm` called ``ALGORITHM``, and an
entry in :data:`SHIPPED`; code outside of the package registers its own with :func:`register`. Training, the acceptance
walk, the generator, validation, export and the estimate ask the record and know of no kind by name.

* Training: :attr:`Algorithm.plan` says what is predicted where (a flat list of
  :class:`~modelopt_eagle.draft.predictions.Predictions`), :attr:`Algorithm.states` computes the states that the loss
  turns into logits. The loss, its counts and hits by depth, and the report know nothing of how states were made.
* Decoding: :attr:`Algorithm.drafter` gives an object for one generator, which gives a :class:`DraftLoop` for a batch.
  The loop is handed what was accepted with its true features, and drafts the next tokens; its caches are its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from modelopt_eagle.common.layers import default_layer_ids
from modelopt_eagle.draft.base import DraftModule
from modelopt_eagle.draft.config import DraftConfig
from modelopt_eagle.draft.plan import DraftPlan
from modelopt_eagle.draft.predictions import BatchView, Predictions
from modelopt_eagle.draft.trees import RoundTree, SampledDraft
from modelopt_eagle.draft.vocab import DraftVocab
from modelopt_eagle.errors import RecipeError
from modelopt_eagle.kernels.recorder import Recorder

SHIPPED = ("eagle3", "peagle", "medusa", "dflash")
"""Drafters of this package; ``draft/<name>/algorithm.py`` is read when one is asked for."""


class DraftLoop(Protocol):
    """Drafts for the rows of one batch, round after round."""

    def commit(self, tokens: Tensor, aux_hidden: Tensor, starts: list[int], counts: list[int]) -> None:
        """Take over what the target accepted since the last round (at first: the prompts).

        Args:
            tokens: ``[B, m]`` int64, the token AFTER each newly accepted position, padded on the right.
            aux_hidden: ``[B, m, A·Ht]`` the target's true features at these positions.
            starts: B positions committed before.
            counts: B new positions, at least 1.
        """
        ...

    def draft(self, lengths: list[int], roots: Tensor) -> Tensor | RoundTree:
        """Draft behind what was committed.

        Args:
            lengths: B committed positions.
            roots: ``[B]`` int64 the last emitted tokens, which no model has read yet.

        Returns:
            ``[B, K]`` int64 target ids of a chain, or a tree; both hold until the next round.
        """
        ...

    def keep(self, rows: Tensor) -> None:
        """Go on with the rows ``[b]`` int64 only."""
        ...


@runtime_checkable
class DrawingLoop(DraftLoop, Protocol):
    """A loop that can also draw its drafts, for sampling with exact rejection."""

    def sample(
        self, lengths: list[int], roots: Tensor, shape: Callable[[Tensor], Tensor], uniforms: Tensor
    ) -> SampledDraft:
        """Draw a draft behind what was committed.

        Args:
            lengths, roots: as for :meth:`DraftLoop.draft`.
            shape: draft logits ``[B, n, Vd]`` to the distributions ``[B, n, Vd]`` that the requests draw from.
            uniforms: ``[B, D, T]`` in [0, 1), T = 1 for a chain.

        Returns:
            the tokens, and the distributions that they were drawn from.
        """
        ...


@runtime_checkable
class FixedLoop(DraftLoop, Protocol):
    """A loop whose draft is also a function of tensors of fixed shapes, so that it can stand in a recorded round."""

    def draft_fixed(
        self, tokens: Tensor, aux_hidden: Tensor, places: Tensor, roots: Tensor, memory: Sequence[Tensor]
    ) -> Tensor | RoundTree:
        """Commit and draft, nothing of it a Python number that changes or a value read back.

        Args:
            tokens: ``[B, D+1]`` int64, the token after each new position; padding holds any id.
            aux_hidden: ``[B, D+1, A·Ht]``; padding holds anything.
            places: ``[B, 2]`` int64, positions committed before, and new ones (1 to D+1).
            roots: ``[B]`` int64 last emitted tokens.
            memory: of :meth:`memory`, for B rows.

        Returns:
            as :meth:`DraftLoop.draft`.
        """
        ...

    def memory(self, rows: int, width: int) -> list[Tensor]:
        """The head's keys and values: ``rows`` rows with room for ``width`` positions and a draft, where they lie."""
        ...

    def reads(self) -> list[Tensor]:
        """What a recording reads wherever it lies (weights, memory): one is good for as long as all lie there."""
        ...

    def tables(self) -> Sequence[Tensor]:
        """What it reads and others may take the place of, in which case a recording goes on with these."""
        ...


class Drafter(Protocol):
    """What a generator keeps of a head between its calls: memory, recordings."""

    def loop(self, batch: int, capacity: int) -> DraftLoop:
        """A loop for ``batch`` rows of at most ``capacity`` committed positions."""
        ...


class Layout(Protocol):
    """How heads of a kind lie in a folder that engines load."""

    engines: tuple[str, ...]
    """Engines that read it, by their keys."""

    def write(self, module: Any, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors of ``model.safetensors`` in ``dtype``, and the content of ``config.json``."""
        ...

    def recognises(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> bool:
        """Whether a folder holds a head of this kind in this layout."""
        ...

    def read(
        self, config: dict[str, Any], tensors: dict[str, Tensor], where: str
    ) -> tuple[DraftConfig, dict[str, Tensor]]:
        """The head's configuration, and the tensors under the module's names; ``where`` names the folder in errors.

        Raises:
            CheckpointError: keys that are missing or unknown, or that contradict each other.
        """
        ...

    def faults(self, config: Any) -> Mapping[str, list[str]]:
        """Engine to what the release that was read does otherwise than the head was trained; none: an empty mapping.

        Returns:
            ends of the sentence "ENGINE ...", such as ``does not start with ...``, of engines in :attr:`engines`.
        """
        ...

    def serve_lines(self, config: Any, data: dict[str, Any]) -> list[str]:
        """Markdown for the card: how each of the engines serves such a folder."""
        ...


@dataclass(frozen=True)
class Cost:
    """What training a head costs, in weights that are multiplied with.

    Attributes:
        every_token: weights that each token of a row meets once.
        every_prediction: weights below the output layer that each prediction meets once more.
        output: weights of the output layer, met at each prediction.
        parameters: weights in all; ``None``: those of a token and of the output.
    """

    every_token: int
    every_prediction: int
    output: int
    parameters: int | None = None


def cost_of_every_weight(module: type[DraftModule], config: DraftConfig) -> Cost:
    """Cost of a head that runs as a whole over every token, and once more for each prediction of a later depth."""
    with torch.device("meta"):  # one output row: its size is known, and no vocabulary map is needed
        bare = module(type(config).from_dict({**config.to_dict(), "draft_vocab_size": 1}))
    inner = sum(p.numel() for name, p in bare.named_parameters() if name != "lm_head.weight")
    return Cost(inner, inner, config.draft_vocab_size * config.hidden_size)


def refuse_keys(recipe: Any, keys: Sequence[str], reason: str) -> None:
    """Refuse keys of ``eagle`` that were set and that nothing of an algorithm reads.

    Raises:
        RecipeError: such keys, followed by ``reason``.
    """
    given = [f"eagle.{key}" for key in keys if getattr(recipe.eagle, key) != recipe.eagle.default(key)]
    if given:
        raise RecipeError(f"{', '.join(given)} {reason}")


def _of_the_recipe(*given: Any) -> None:
    """Nothing of its own: what the recipe says."""


def _accept(*given: Any) -> None:
    """Nothing to refuse, nothing to fill in."""


def _no_notes(config: Any, plan: DraftPlan) -> list[str]:
    """Every plan will do."""
    return []


@dataclass(frozen=True)
class Algorithm:
    """One kind of draft head.

    Attributes:
        name: in recipes (``algorithm: eagle3``) and in the head's configuration.
        title: for people.
        config: the configuration's class: :class:`~modelopt_eagle.draft.config.DraftConfig` or a subclass, with the
            drafter's name as the default of its field ``algorithm``.
        module: the head's class, built as ``module(config, vocab)``.
        head_config: ``(recipe, target config, draft vocabulary size or None, aux layer ids or None, **fields)`` to the
            configuration of a new head; ``fields`` are those that say what it was made for.
        settings: recipe to what :attr:`plan` and :attr:`states` read of it; for most the section ``eagle``.
        depths: settings to K, the drafted tokens that are trained.
        plan: ``(view, settings, generator or None)`` to the predictions of a batch that are to be learned. It runs
            before the head does, on every process that shares the batch alike, over ids, masks and documents on the
            CPU, and draws from a generator of the CPU: planning asks no device.
        states: ``(module, view, predictions, settings, generator or None)`` to states ``[n, H]`` after the head's last
            norm, in the order of the predictions. A process that has none of them still takes part in what is gathered.
            Lists of indices whose lengths depend on the data are made on the CPU, of ``predictions.on_host()`` and
            ``view.on_host()``, and sent to the device (:func:`~modelopt_eagle.draft.documents.upload`).
        drafts: ``(module, view, steps)`` to the predictions and states of every draft of ``steps`` tokens that a
            decoder could ask for within the answers: what the acceptance walk reads.
        drafter: ``(module, target embedding, plan, recorder or None)`` to a :class:`Drafter`.
        probe: the head's logits on fixed random features, float32, in which every number of the head takes part; what
            an exported folder is compared by.
        structure: key of the recipe's section ``eagle`` to the field of the configuration that it fixes; a head that
            is continued must agree with those that the recipe gives.
        from_target: ``(module, target)``: start from the target's own weights (``eagle.init: target``), if the head
            can. The target is loaded, or its tables with ``layers`` that are read when asked for.
        default_layers: number of the target's layers to the ids of those that a head reads by default.
        layout: of the exported folder; ``None``: the universal checkpoint of EAGLE-3.
        cost: configuration to the cost of training it.
        recipe: the shipped recipe to begin with.
        check_recipe: refuses, before anything is loaded, what a recipe asks of the head and this drafter cannot do;
            raises :class:`~modelopt_eagle.errors.RecipeError`.
        complete: ``(configuration, recipe, target tables, supervised counts [V])``, called once the data is read: fills
            in what follows from it, and refuses a head that does not suit it. Of a continued head too.
        check_plan: ``(configuration, plan)`` to what a user of the generator should know of a plan; raises
            :class:`~modelopt_eagle.errors.DecodingError` for one that the head cannot draft.
        shares: settings to the share of the positions that each of the K depths trains; ``None``: all.
        file_keys: fields of the configuration that the universal checkpoint carries for this drafter alone.
        decay: settings to the weight base of the depths where ``eagle.loss_decay`` is not given; ``None``: the
            convention's.
        weigh: ``(module, view, predictions, states, settings)`` to factors ``[n]`` on the loss terms that follow from
            the states, made without a gradient; ``None``: those of the plan.
        trained_length: configuration to the drafted tokens that a head was trained for, if it records them; a draft of
            so many is among those that a sweep tries.
        final_state: whether it reads the target's final state (its last layer, after the norm) where others read the
            captured layers; the loop's ``aux_hidden`` is then ``[B, m, Ht]`` of those.
        trees: whether it drafts trees.
        draws: whether its loops can draw their drafts, see :class:`DrawingLoop`.
        shares_context: whether a batch can be shared over processes by positions.
    """

    name: str
    title: str
    config: type[DraftConfig]
    module: type[DraftModule]
    head_config: Callable[..., Any]
    settings: Callable[[Any], Any]
    depths: Callable[[Any], int]
    plan: Callable[[BatchView, Any, torch.Generator | None], Predictions]
    states: Callable[[Any, BatchView, Predictions, Any, torch.Generator | None], Tensor]
    drafts: Callable[[Any, BatchView, int], tuple[Predictions, Tensor]]
    drafter: Callable[[Any, nn.Module, DraftPlan, Recorder | None], Drafter]
    cost: Callable[[Any], Cost]
    recipe: str
    probe: Callable[[Any], Tensor]
    structure: Mapping[str, str] = field(default_factory=dict)
    from_target: Callable[[Any, Any], None] | None = None
    default_layers: Callable[[int], tuple[int, ...]] = default_layer_ids
    layout: Layout | None = None
    check_recipe: Callable[[Any], None] = _accept
    complete: Callable[[Any, Any, Any, Tensor], None] = _accept
    check_plan: Callable[[Any, DraftPlan], list[str]] = _no_notes
    shares: Callable[[Any], Sequence[float]] | None = None
    file_keys: tuple[str, ...] = ()
    decay: Callable[[Any], float | None] = _of_the_recipe
    weigh: Callable[..., Tensor | None] = _of_the_recipe
    trained_length: Callable[[Any], int | None] = _of_the_recipe
    final_state: bool = False
    trees: bool = True
    draws: bool = False
    shares_context: bool = True


_REGISTERED: dict[str, Algorithm] = {}


def register(algorithm: Algorithm) -> Algorithm:
    """Make a drafter known under its name, and return it; a second one of that name takes the first one's place."""
    _REGISTERED[algorithm.name] = algorithm
    return algorithm


def known_algorithms() -> list[str]:
    """Names of the drafters that can be asked for."""
    return sorted({*SHIPPED, *_REGISTERED})


def find_algorithm(name: str) -> Algorithm:
    """The drafter of a name.

    Raises:
        RecipeError: there is none; the message lists those that are known.
    """
    if name not in _REGISTERED and name in SHIPPED:
        register(importlib.import_module(f"modelopt_eagle.draft.{name}.algorithm").ALGORITHM)
    if name not in _REGISTERED:
        raise RecipeError(f"algorithm {name!r} is unknown; known are {', '.join(known_algorithms())}")
    return _REGISTERED[name]


def algorithm_of(config: DraftConfig) -> Algorithm:
    """The drafter that a head's configuration belongs to."""
    return find_algorithm(config.algorithm)


def config_from_dict(data: dict[str, Any]) -> DraftConfig:
    """A head's configuration from plain data, of whatever drafter; without a word on it, EAGLE-3.

    Raises:
        RecipeError: a drafter that is not known here.
        CheckpointError: see :meth:`~modelopt_eagle.draft.config.DraftConfig.from_dict`.
    """
    return find_algorithm(data.get("algorithm", "eagle3")).config.from_dict(data)


def random_module(config: DraftConfig, vocab: DraftVocab, seed: int) -> DraftModule:
    """A head drawn from the seed; the global random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return algorithm_of(config).module(config, vocab)
