"""The typed recipe: every option of a run, with its default, its bounds and what it means.

``docs/recipes.md`` is generated from these classes, the loader types files and overrides with them, and unknown keys
are refused. An option stands here only because something reads it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, field_validator, model_validator

from modelopt_eagle.recipe.bounds import need
from modelopt_eagle.recipe.outcome import ExportSection, ValidationSection
from modelopt_eagle.recipe.section import LayerId, Positive, PositiveFloat, Section, Share
from modelopt_eagle.recipe.shared_context import check_shared
from modelopt_eagle.recipe.target_lora import TargetLoraSection, check_fits


class ModelSection(Section):
    """The frozen target model, and where the head starts from."""

    base_model: str = Field(
        "quickstart",
        min_length=1,
        description="The frozen target: a hub id, a local folder, a GGUF file, or `quickstart` (bundled SmolLM2-135M).",
    )
    revision: str | None = Field(None, description="Hub revision (branch, tag or commit) of the target.")
    dtype: Literal["float32", "bfloat16", "auto"] = Field(
        "auto", description="Numbers of the target: `auto` is what its checkpoint declares, and float32 on a CPU."
    )
    device: str = Field("auto", min_length=1, description="Where the target runs: `auto`, `cpu`, `cuda`, `cuda:1`, ...")
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3"] = Field(
        "sdpa", description="The target's attention in transformers."
    )
    trust_remote_code: bool = Field(False, description="Run Python code that the target's repository ships.")
    draft_init: str | None = Field(
        None, description="Folder of a trained head to continue from (any format that `load_draft` reads)."
    )
    draft_init_vocab: Literal["keep", "rebuild"] = Field(
        "keep",
        description="The vocabulary map of `draft_init`: kept as it is, or chosen anew by `eagle.draft_vocab_*` as for "
        "a new head, each row of the head moved with its token.",
    )
    chat_template: str | None = Field(
        None, description="Jinja chat template, or a file with one, used in place of the target's own."
    )

    def load_arguments(self) -> dict[str, Any]:
        """Arguments for ``load_target``: ``load_target(**recipe.model.load_arguments())``.

        ``dtype: auto`` becomes float32 where the target runs on a CPU, whose bfloat16 is many times slower, and
        ``device: auto`` becomes the process's own accelerator where a launcher started several processes.
        """
        import torch

        device = self.device
        if device == "auto" and not torch.accelerator.is_available():
            device = "cpu"
        elif device == "auto" and int(os.environ.get("WORLD_SIZE", 1)) > 1:
            device = f"{torch.accelerator.current_accelerator().type}:{os.environ.get('LOCAL_RANK', 0)}"
        return {
            "name": self.base_model,
            "dtype": "float32" if self.dtype == "auto" and device == "cpu" else self.dtype,
            "device": device,
            "revision": self.revision,
            "attn_implementation": self.attn_implementation,
            "trust_remote_code": self.trust_remote_code,
            "chat_template": self.chat_template,
        }

    def decoding_arguments(self) -> dict[str, Any]:
        """The same for decoding, where drafts need an attention that takes a mask: sdpa in place of flash attention."""
        arguments = self.load_arguments()
        if arguments["attn_implementation"] not in ("sdpa", "eager"):
            arguments["attn_implementation"] = "sdpa"
        return arguments


class DataSection(Section):
    """The conversations, and where the target's features of them come from."""

    train_path: str | list[str] = Field(
        "quickstart",
        description="JSONL file(s) of `messages` or `conversations` rows, or `quickstart` (the conversations shipped). "
        "With `offline_data_path` the rows come from the store instead.",
    )
    eval_path: str | list[str] | None = Field(
        None,
        description="JSONL file(s) of held-out conversations for the acceptance walk while training; several get a "
        "number each, besides the pooled one.",
    )
    max_length: Annotated[int, Field(ge=16)] = Field(
        2048,
        description="Training window in tokens; longer conversations are handled by `overlong` and counted. It is not "
        "the limit declared to engines: the exported `max_position_embeddings` stays the target's.",
    )
    overlong: Literal["truncate", "drop"] = Field(
        "truncate", description="What happens to a conversation longer than `max_length`: cut at its end, or left out."
    )
    unknown_role: Literal["fail", "drop"] = Field(
        "fail", description="A role that is neither known nor in `role_aliases`: stop, or leave the row out, counted."
    )
    role_aliases: dict[str, Literal["system", "user", "assistant"]] = Field(
        default_factory=dict, description="Further role names: `{my_model_v2: assistant}`."
    )
    max_rows: Positive | None = Field(None, description="Use only the first rows of the data; null: all.")
    offline_data_path: str | None = Field(
        None,
        description="Folder of dumped features: train from it, without running the target. A feature store, or a dump "
        "of Model-Optimizer, SpecForge or speculators as it is.",
    )
    offline_final_states: Literal["normed", "pre-norm"] | None = Field(
        None,
        description="Whether the final states of another tool's dump are after or before the final norm, where its "
        "files do not say it.",
    )
    offline_all_supervised: bool = Field(
        False, description="Train on every token of another tool's dump that holds no loss mask."
    )
    cache_features: Literal["none", "memory", "disk"] = Field(
        "none",
        description="Run the target over the data once, keep its features in memory or in a store under `output_dir`, "
        "and train all epochs from them.",
    )
    streaming_server_url: str | None = Field(
        None, description="Feature server(s) to train from, comma-separated: `http://host:8000,http://other:8000`."
    )
    streaming_transport: Literal["auto", "shm", "tcp", "nixl"] = Field(
        "auto",
        description="How states come from the server: shared memory (same host), TCP, NIXL (needs `nixl-cu12` or "
        "`nixl-cu13` on both sides); auto: shared memory on loopback, else TCP.",
    )
    on_missing: Literal["fail", "generate", "skip"] = Field(
        "fail",
        description="A row of `train_path` that the store at `offline_data_path` lacks: stop, compute it (by the "
        "server, or by the target here) and store it, or skip it, counted.",
    )
    shuffle: bool = Field(True, description="New order of the conversations in every epoch, drawn from the seed.")

    @field_validator("train_path", "eval_path")
    @classmethod
    def _paths_are_named(cls, value: str | list[str] | None) -> str | list[str] | None:
        need(value is None or (bool(value) and all(value)), "expected a path or a list of paths, found an empty one")
        return value

    @field_validator("streaming_server_url")
    @classmethod
    def _urls_are_http(cls, value: str | None) -> str | None:
        for url in value.split(",") if value is not None else []:
            need(
                re.match(r"https?://[^/\s]+", url.strip()),
                f"expected http://HOST:PORT (several: comma-separated), found {url.strip()!r}",
            )
        return value

    @model_validator(mode="after")
    def _one_feature_source(self) -> DataSection:
        stored, streamed = self.offline_data_path is not None, self.streaming_server_url is not None
        need(
            not (stored and streamed) or self.on_missing == "generate",
            "offline_data_path and streaming_server_url are two feature sources: set one of them to null, or "
            "on_missing: generate to let the server fill the store",
        )
        for name, given in (
            ("offline_final_states", self.offline_final_states is not None),
            ("offline_all_supervised", self.offline_all_supervised),
        ):
            need(
                not given or (stored and self.on_missing == "fail"),
                f"{name} speaks of another tool's dump: set offline_data_path to it and leave on_missing at fail, or "
                "leave it out",
            )
        need(
            stored or self.on_missing == "fail",
            f"on_missing: {self.on_missing} speaks of rows missing from a store: set offline_data_path, or leave it at "
            "fail",
        )
        need(
            streamed or self.streaming_transport == "auto",
            "streaming_transport speaks of a feature server: set streaming_server_url, or leave it at auto",
        )
        need(
            not (stored or streamed) or self.cache_features == "none",
            f"cache_features: {self.cache_features} keeps what the target computes in this run: set it to none with "
            "offline_data_path or streaming_server_url",
        )
        return self


class TrainingSection(Section):
    """The optimisation: length, schedule, saving and logging."""

    output_dir: str | None = Field(
        None, description="Folder of checkpoints, report, export and `recipe.yaml`; null: `ckpts/<base_model>-eagle3`."
    )
    epochs: Positive = Field(1, description="Passes over the data; `max_steps` or the time budget may end them sooner.")
    max_steps: Positive | None = Field(None, description="Stop after so many optimiser steps.")
    time_budget_minutes: PositiveFloat | None = Field(
        None,
        description="Stop training after so many minutes. The learning rate then follows whichever is further on, the "
        "share of the steps or the share of the time, so that it always comes to its end.",
    )
    batch_size: Positive = Field(
        4, description="Conversations in a micro-batch (of each process), packed one after the other without padding."
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
    resume: Literal["auto", "never"] = Field(
        "auto", description="`auto` goes on from the newest complete checkpoint in `output_dir`, if there is one."
    )
    report_to: Literal["tensorboard", "wandb", "none"] = Field("tensorboard", description="Where metrics are logged.")
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
    def _rates_have_their_optimizer(self) -> TrainingSection:
        need(
            self.optimizer == "muon" or self.muon_learning_rate is None,
            "muon_learning_rate is read only when optimizer is muon: set optimizer: muon, or leave it at null",
        )
        return self


class EagleSection(Section):
    """The draft head and its loss."""

    ttt_steps: Annotated[int, Field(ge=1, le=32)] = Field(3, description="Rollout steps K trained at every position.")
    ttt_warmup: Share = Field(
        0.0,
        description="Share of the run, at its beginning, in which only the first rollout step is trained; it costs a "
        "third and the later steps catch up fast. For short runs.",
    )
    loss_decay: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="Weight of step k is decay^k; null: the convention's (served and modelopt 0.9, eagle 0.8, "
        "speculators 1.0).",
    )
    loss: Literal["kl", "lk"] = Field(
        "kl", description="`kl`: soft-label distillation; `lk`: KL blended with total variation by the acceptance rate."
    )
    lk_eta: Annotated[float, Field(ge=0)] = Field(
        3.0, description="Rate of the LK blend: KL is weighted exp(-lk_eta * mean acceptance). Read when loss is lk."
    )
    convention: Literal["served", "modelopt", "eagle", "speculators"] = Field(
        "served",
        description="Which positions count and how the loss is normalised; all but `served` are there to "
        "reproduce published runs.",
    )
    in_vocab_only: bool = Field(False, description="Drop positions whose target token is outside the draft vocabulary.")
    self_logit_distillation: bool = Field(
        True, description="Learn the target's distribution; false: its text as hard labels."
    )
    mix_hidden_states: Share = Field(
        0.0, description="Share of positions that, after the first step, take the target's true feature as their state."
    )
    draft_vocab_size: Positive | None = Field(
        None, description="Tokens the head can draft, the most frequent ones of the data; null: the full vocabulary."
    )
    draft_vocab_counts: Literal["teacher", "text"] = Field(
        "teacher",
        description="What a reduced vocabulary is chosen by: the supervised tokens and the target's own probabilities "
        "at a sample of their positions, or the supervised tokens alone.",
    )
    draft_vocab_path: str | None = Field(
        None, description="Vocabulary map written by `scripts/calibrate_draft_vocab.py`; null: counted from the data."
    )
    aux_layer_ids: list[LayerId] | None = Field(
        None, description="Target layers whose outputs feed the head, counted from 0; null: 1, n//2-1 and n-4."
    )
    decoder_type: Literal["llama", "kimik2"] = Field(
        "llama", description="The head's decoder layer: llama, or MLA as in DeepSeek-V3 and Kimi-K2."
    )
    num_layers: Annotated[int, Field(ge=1, le=16)] = Field(1, description="Decoder layers of the head.")
    hidden_size: Positive | None = Field(None, description="Width of the head; null: the target's.")
    intermediate_size: Positive | None = Field(None, description="Width of the head's MLP; null: the target's.")
    num_attention_heads: Positive | None = Field(None, description="Attention heads; null: the target's.")
    num_key_value_heads: Positive | None = Field(None, description="Key and value heads; null: the target's.")
    attention_bias: bool = Field(False, description="Biases in the q, k and v projections.")
    norm_before_residual: bool = Field(False, description="The residual takes the normed state.")
    norm_before_fc: bool = Field(False, description="One norm over the concatenated features before `fc`.")
    fc_norm: bool = Field(False, description="A norm of its own for each auxiliary feature before `fc`.")
    norm_output: bool = Field(False, description="The state carried to the next step is the normed output.")
    init: Literal["random", "target"] = Field(
        "random", description="Start of the weights: random, or the target's own last layer, norm and head rows."
    )

    @field_validator("aux_layer_ids", mode="before")
    @classmethod
    def _ids_may_be_written_with_commas(cls, value: Any) -> Any:
        return [part.strip() for part in value.split(",")] if isinstance(value, str) else value

    @field_validator("aux_layer_ids")
    @classmethod
    def _ids_are_distinct(cls, value: list[int] | None) -> list[int] | None:
        if value is None:
            return None
        need(value, "expected at least one layer id, or null for the default three, found an empty list")
        need(len(set(value)) == len(value), f"expected distinct layer ids, found {value}")
        return sorted(value)

    @model_validator(mode="after")
    def _options_fit_together(self) -> EagleSection:
        need(self.loss == "lk" or self.lk_eta == 3.0, "lk_eta is read only when loss is lk: set loss: lk, or leave it")
        need(
            self.loss == "kl" or self.self_logit_distillation,
            "loss: lk compares distributions: set self_logit_distillation: true, or loss: kl",
        )
        need(
            self.loss == "kl" or self.convention == "served",
            f"convention: {self.convention} reproduces a published loss, and none is lk: set convention: served",
        )
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        need(
            heads is None or kv_heads is None or heads % kv_heads == 0,
            f"num_attention_heads must be a multiple of num_key_value_heads, found {heads} and {kv_heads}",
        )
        sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
        own_sizes = [name for name in sizes if getattr(self, name) is not None]
        need(
            self.init == "random" or not own_sizes,
            f"init: target copies weights of the target's sizes: remove {', '.join(own_sizes)}, or set init: random",
        )
        return self

    @property
    def counts_by_target_choice(self) -> bool:
        """Whether the loss drops positions by the token that the target would choose (``eagle`` always does)."""
        return self.in_vocab_only or self.convention == "eagle"


def default_output_dir(base_model: str) -> str:
    """The output folder of a run that names none."""
    name = re.sub(r"[^\w.-]+", "-", Path(base_model).name) or "target"
    return f"ckpts/{name}-eagle3"


class Recipe(Section):
    """A whole run. ``origin`` says of each ``section.key`` where its value comes from."""

    model: ModelSection = Field(default_factory=ModelSection)
    data: DataSection = Field(default_factory=DataSection)
    training: TrainingSection = Field(default_factory=TrainingSection)
    eagle: EagleSection = Field(default_factory=EagleSection)
    target_lora: TargetLoraSection = Field(default_factory=TargetLoraSection)
    validation: ValidationSection = Field(default_factory=ValidationSection)
    export: ExportSection = Field(default_factory=ExportSection)

    _origin: dict[str, str] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _sections_fit_together(self) -> Recipe:
        need(
            self.model.draft_init is None or self.eagle.init == "random",
            "model.draft_init and eagle.init: target are two starting points: set one of them (init: random)",
        )
        need(
            self.model.draft_init is not None or self.model.draft_init_vocab == "keep",
            "model.draft_init_vocab: rebuild is for a head that is continued: give its folder as model.draft_init",
        )
        check_fits(self.target_lora, self.data, self.eagle)
        if self.training.context_parallel > 1:
            check_shared(self.training.context_parallel, self.eagle, self.target_lora)
        vocab, topk = self.eagle.draft_vocab_size, self.validation.topk
        need(
            vocab is None or topk is None or topk <= vocab,
            f"validation.topk {topk} is larger than the draft vocabulary: choose at most {vocab}",
        )
        if self.training.output_dir is None:
            self.training.output_dir = default_output_dir(self.model.base_model)
        return self

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
        return Path(self.export.path) if self.export.path is not None else Path(self.training.output_dir) / "export"

    @classmethod
    def keys(cls) -> list[tuple[str, str]]:
        """All ``(section, key)`` pairs, in the order of the schema."""
        return [(name, key) for name, section in cls.sections().items() for key in section.model_fields]

    @classmethod
    def sections(cls) -> dict[str, type[Section]]:
        """Section name → its class."""
        return {name: field.annotation for name, field in cls.model_fields.items()}
