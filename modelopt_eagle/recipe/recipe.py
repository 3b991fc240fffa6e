"""The typed recipe: every option of a run in sections, and what of them goes together.

``docs/recipes.md`` is generated from the sections, the loader types files and overrides with them, and unknown keys are
refused. An option stands in a section only because something reads it. A new section, such as that of a further
drafter, is a file of ``sections/`` and a field here; loader, documentation and the resolved recipe then know it.
"""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import Field, PrivateAttr, model_validator

from modelopt_eagle.recipe.bounds import need
from modelopt_eagle.recipe.sections import (
    DataSection,
    DFlashSection,
    DrafterSection,
    EagleSection,
    ExportSection,
    MedusaSection,
    ModelSection,
    PEagleSection,
    Section,
    TargetLoraSection,
    TrainingSection,
    ValidationSection,
)

OF_ONE_DRAFTER = ("medusa", "peagle", "dflash")  # sections that only the algorithm of their name reads


def default_output_dir(base_model: str, algorithm: str) -> str:
    """The output folder of a run that names none."""
    name = re.sub(r"[^\w.-]+", "-", Path(base_model).name) or "target"
    return f"ckpts/{name}-{algorithm}"


class Recipe(Section):
    """A whole run. ``origin`` says of each ``section.key`` where its value comes from."""

    drafter: DrafterSection = Field(default_factory=DrafterSection)
    model: ModelSection = Field(default_factory=ModelSection)
    data: DataSection = Field(default_factory=DataSection)
    training: TrainingSection = Field(default_factory=TrainingSection)
    eagle: EagleSection = Field(default_factory=EagleSection)
    medusa: MedusaSection = Field(default_factory=MedusaSection)
    peagle: PEagleSection = Field(default_factory=PEagleSection)
    dflash: DFlashSection = Field(default_factory=DFlashSection)
    target_lora: TargetLoraSection = Field(default_factory=TargetLoraSection)
    validation: ValidationSection = Field(default_factory=ValidationSection)
    export: ExportSection = Field(default_factory=ExportSection)

    _origin: dict[str, str] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _sections_fit_together(self) -> Recipe:
        self._check_drafter()
        self._check_starting_point()
        self._check_adapters()
        self._check_shared_batches()
        self._check_batches_of_tokens()
        self._check_split_target()
        self._check_drafted_tokens()
        if self.training.output_dir is None:
            self.training.output_dir = default_output_dir(self.model.base_model, self.drafter.algorithm)
        return self

    def _check_drafter(self) -> None:
        """A drafter reads no section of another one."""
        algorithm = self.drafter.algorithm
        others = [name for name in OF_ONE_DRAFTER if name != algorithm]
        given = [f"{name}.{key}" for name in others for key in getattr(self, name).changed()]
        need(
            not given,
            f"algorithm is {algorithm}, which does not read {', '.join(given)}: leave these keys out, or set "
            "algorithm to the drafter of that name",
        )

    def _check_starting_point(self) -> None:
        """A continued head brings its weights and its vocabulary."""
        need(
            self.model.draft_init is None or self.eagle.init == "random",
            "model.draft_init and eagle.init: target are two starting points: set one of them (init: random)",
        )
        need(
            self.model.draft_init is not None or self.model.draft_init_vocab == "keep",
            "model.draft_init_vocab: rebuild is for a head that is continued: give its folder as model.draft_init",
        )

    def _check_adapters(self) -> None:
        """Adapters on the target change its features and choices in every step."""
        lora = self.target_lora
        if lora.rank == 0:
            return
        made_before = {
            "data.offline_data_path": self.data.offline_data_path,
            "data.streaming_server_url": self.data.streaming_server_url,
            "data.cache_features": None if self.data.cache_features == "none" else self.data.cache_features,
        }
        given = [f"{name}: {value}" for name, value in made_before.items() if value is not None]
        need(
            not given,
            f"target_lora.rank {lora.rank} changes the target's features in every step, and {', '.join(given)} takes "
            "them from before: leave it out to train online, or set target_lora.rank: 0",
        )
        need(
            not self.eagle.counts_by_target_choice,
            "target_lora: eagle.in_vocab_only and convention: eagle count positions by the target's choice, which the "
            "adapters change within the step: set in_vocab_only: false and another convention, or target_lora.rank: 0",
        )
        need(
            self.eagle.self_logit_distillation or lora.detach_teacher == lora.default("detach_teacher"),
            "target_lora.detach_teacher speaks of the target's distribution, and self_logit_distillation: false learns "
            "the text: leave it out",
        )

    def _check_shared_batches(self) -> None:
        """With a batch shared over processes, none may look at more of it than it holds."""
        size = self.training.context_parallel
        if size == 1:
            return
        where = f"training.context_parallel: {size}"
        need(
            self.eagle.loss == "kl",
            f"{where}: eagle.loss: lk blends by the mean acceptance of a whole micro-batch, which no process holds: "
            "set loss: kl",
        )
        need(
            self.eagle.convention == "served" or not self.eagle.counts_by_target_choice,
            f"{where}: convention: {self.eagle.convention} counts by target choices that features do not come with, "
            "from final states which no process holds whole: set convention: served",
        )

    def _check_batches_of_tokens(self) -> None:
        """The longest row fits into a batch."""
        most, longest = self.training.max_tokens_per_batch, self.data.max_length
        need(
            most is None or most >= longest,
            f"training.max_tokens_per_batch {most} is less than data.max_length {longest}, and a row of that length "
            f"would fit into no batch: set it to {longest} or more, or max_length to {most} or less",
        )

    def _check_split_target(self) -> None:
        """A split target is run by all of its processes together."""
        kind, device = self.model.parallel, self.model.device
        if kind in ("none", "auto"):
            need(
                self.model.shards is None or kind == "auto",
                "model.shards says how many processes hold a split target, and model.parallel is none: leave it out",
            )
            return
        where = f"model.parallel: {kind}"
        need(
            self.data.runs_target,
            f"{where} splits a target that runs here, and this run takes its features from elsewhere: leave it out",
        )
        need(
            not self.data.fills_store,
            f"{where}: with data.on_missing: generate each process makes rows whenever it finds one missing, and a "
            "split target runs in all of them together: fill the store by `modelopt-eagle dump` first",
        )
        need(
            self.target_lora.rank == 0,
            f"{where}: target_lora learns inside the target, and a split one has no gradient: set target_lora.rank: 0",
        )
        need(
            self.training.run_budget_minutes is None or self.data.cache_features != "disk",
            f"{where}: training.run_budget_minutes with data.cache_features: disk lets each process make parts of its "
            "own, and a split target runs in all of them together: set cache_features: memory",
        )
        need(":" not in device, f"{where}: each process takes its own device, and model.device is {device}: set auto")

    def _check_drafted_tokens(self) -> None:
        """A tree cannot branch wider than the draft vocabulary."""
        vocab, topk = self.eagle.draft_vocab_size, self.validation.topk
        need(
            vocab is None or topk is None or topk <= vocab,
            f"validation.topk {topk} is larger than the draft vocabulary: choose at most {vocab}",
        )

    def __eq__(self, other: object) -> bool:
        """The same values, wherever they come from."""
        return isinstance(other, Recipe) and self.model_dump() == other.model_dump()

    @property
    def origin(self) -> dict[str, str]:
        """``section.key`` → ``default``, ``FILE:LINE`` or ``override``."""
        names = (f"{section}.{key}" for section, key in self.keys())
        return {name: self._origin.get(name, "default") for name in names}

    @property
    def export_path(self) -> Path:
        """Where the head is exported to: ``export.path``, or ``export`` in the output folder."""
        if self.export.path is not None:
            return Path(self.export.path)
        folder = self.training.output_dir or default_output_dir(self.model.base_model, self.drafter.algorithm)
        return Path(folder) / "export"

    @classmethod
    def keys(cls) -> list[tuple[str, str]]:
        """All ``(section, key)`` pairs, in the order of the schema."""
        return [(name, key) for name, section in cls.sections().items() for key in section.model_fields]

    @classmethod
    def sections(cls) -> dict[str, type[Section]]:
        """Section name → its class."""
        kinds = {name: field.annotation for name, field in cls.model_fields.items()}
        return {name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Section)}
