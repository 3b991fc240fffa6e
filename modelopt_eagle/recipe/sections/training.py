"""Recipe section ``training``: length, schedule, saving and logging."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from modelopt_eagle.recipe.bounds import need
from modelopt_eagle.recipe.sections.base import Positive, PositiveFloat, Section, Share


class TrainingSection(Section):
    """The optimisation: length, schedule, saving and logging."""

    output_dir: str | None = Field(
        None,
        description="Folder of checkpoints, report, export and `recipe.yaml`; null: `ckpts/<base_model>-<algorithm>`.",
    )
    epochs: Positive = Field(1, description="Passes over the data; `max_steps` or the time budget may end them sooner.")
    max_steps: Positive | None = Field(None, description="Stop after so many optimiser steps.")
    time_budget_minutes: PositiveFloat | None = Field(
        None,
        description="Stop training after so many minutes. The learning rate then follows whichever is further on, the "
        "share of the steps or the share of the time, so that it always comes to its end.",
    )
    run_budget_minutes: PositiveFloat | None = Field(
        None,
        description="Minutes of the whole run from the loaded target on: features that are kept (`cache_features`) are "
        "made of as many rows as 40 % of it allow (the others are counted and named), training ends at 75 %, and the "
        "rest is for measuring. null: all rows, however long they take.",
    )
    time_budget_clock: Literal["wall", "processor"] = Field(
        "wall",
        description="What the minutes of `time_budget_minutes` are: `wall`, or `processor`, minutes that this process "
        "had its processors for, over its threads. The second does not depend on what else runs on the machine.",
    )
    batch_size: Positive = Field(
        4, description="Conversations in a micro-batch (of each process), packed one after the other without padding."
    )
    max_tokens_per_batch: Positive | None = Field(
        None,
        description="Tokens in a micro-batch (of each process), in place of `batch_size`, which then does not count: "
        "filled with rows until no more fit, and levelled over the processes in each step. At least `data.max_length`; "
        "null: `batch_size` rows.",
    )
    gradient_accumulation_steps: Positive = Field(1, description="Micro-batches in an optimiser step.")
    learning_rate: Annotated[float, Field(gt=0, le=1)] = Field(1e-4, description="Peak learning rate.")
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw", description="`muon` is used for the weight matrices of the decoder layers, AdamW for the rest."
    )
    muon_learning_rate: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="Peak learning rate of the matrices that Muon takes; null: `learning_rate`."
    )
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="AdamW's decay of the first moment.")
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = Field(0.95, description="AdamW's decay of the second moment.")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="Decoupled weight decay of the matrices.")
    warmup_ratio: Share = Field(0.03, description="Share of the run in which the learning rate rises linearly.")
    lr_scheduler: Literal["linear", "cosine", "constant"] = Field(
        "cosine", description="Course of the learning rate after the warm-up."
    )
    min_lr_ratio: Share = Field(0.0, description="Learning rate at the end, as a share of the peak.")
    max_grad_norm: PositiveFloat | None = Field(1.0, description="Clip the gradient to this norm; null: no clipping.")
    precision: Literal["float32", "bf16"] = Field(
        "float32", description="Arithmetic of the head's matrix products; its weights stay float32."
    )
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(42, description="Seed of weights, data order and mixing.")
    log_steps: Positive = Field(10, description="Optimiser steps between two log lines.")
    save_steps: Positive | None = Field(500, description="Optimiser steps between checkpoints; null: only at the end.")
    eval_steps: Positive | None = Field(
        500, description="Optimiser steps between evaluations by the acceptance walk; null: only at the end."
    )
    save_total_limit: Positive | None = Field(
        3, description="Checkpoints kept, the best one always among them; null: all."
    )
    nonfinite: Literal["stop", "skip"] = Field(
        "stop",
        description="A step whose loss or gradient is not finite: stop and name its rows, or leave the step out, "
        "counted (ten in a row stop the run all the same).",
    )
    ignore_memory: bool = Field(False, description="Start although the estimate says that the memory does not suffice.")
    early_stopping: Positive | None = Field(
        None,
        description="End training after so many evaluations without a longer acceptance length; null: never. Needs "
        "`eval_steps`.",
    )
    resume: Literal["auto", "never"] = Field(
        "auto", description="`auto` goes on from the newest complete checkpoint in `output_dir`, if there is one."
    )
    report_to: Literal["tensorboard", "wandb", "mlflow", "trackio", "none"] = Field(
        "tensorboard",
        description="Where metrics are logged: `tensorboard` writes into `logs/` of the output folder, the others need "
        "their package.",
    )
    torch_compile: bool = Field(False, description="Compile the head's forward with torch.compile.")
    context_parallel: Positive = Field(
        1,
        description="Processes that share each batch by positions, for sequences too long for one (docs/training.md); "
        "the number of processes must be a multiple of it.",
    )
    dry_run: bool = Field(
        False, description="Do everything up to the first step, and export the untrained head; train nothing."
    )

    @model_validator(mode="after")
    def _early_stopping_evaluates(self) -> TrainingSection:
        need(
            self.early_stopping is None or self.eval_steps is not None,
            "early_stopping counts evaluations, and eval_steps: null makes one, at the end: set eval_steps",
        )
        return self

    @model_validator(mode="after")
    def _the_clock_has_a_budget(self) -> TrainingSection:
        need(
            self.time_budget_minutes is not None or self.time_budget_clock == self.default("time_budget_clock"),
            "time_budget_clock says what the minutes of time_budget_minutes are, and there is no budget: set one",
        )
        need(
            self.run_budget_minutes is None or self.time_budget_clock == self.default("time_budget_clock"),
            "run_budget_minutes are those of a watch: leave time_budget_clock out, or set time_budget_minutes alone",
        )
        return self

    @model_validator(mode="after")
    def _rates_have_their_optimizer(self) -> TrainingSection:
        need(
            self.optimizer == "muon" or self.muon_learning_rate is None,
            "muon_learning_rate is read only when optimizer is muon: set optimizer: muon, or leave it at null",
        )
        need(
            self.lr_scheduler != "constant" or self.min_lr_ratio == self.default("min_lr_ratio"),
            "min_lr_ratio is where a learning rate falls to, and lr_scheduler: constant does not fall: set linear or "
            "cosine, or leave it out",
        )
        return self
