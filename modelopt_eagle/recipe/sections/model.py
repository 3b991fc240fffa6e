"""Recipe section ``model``: the frozen target, and where the head starts from."""

from __future__ import annotations

import os
from typing import Any, Literal

from pydantic import Field, field_validator

from modelopt_eagle.common.machine import check_device_name
from modelopt_eagle.recipe.sections.base import Positive, Section


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
        "sdpa", description="The target's attention in transformers; a family that has no `sdpa` there runs `eager`."
    )
    parallel: Literal["auto", "none", "fsdp", "tensor"] = Field(
        "auto",
        description="How several processes hold the target: a copy in each (`none`), its layers in slices that are "
        "gathered to run (`fsdp`), or in slices that each compute a part of every pass (`tensor`, where transformers "
        "has a plan for its family); `auto`: `none` where a copy fits each device, else `fsdp`.",
    )
    shards: Positive | None = Field(
        None,
        description="Processes that hold one copy of a split target together; null: all. The number of processes must "
        "be a multiple of it.",
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

    @field_validator("device")
    @classmethod
    def _names_a_device(cls, value: str) -> str:
        return check_device_name(value)

    def load_arguments(self) -> dict[str, Any]:
        """Arguments for ``load_target``: ``load_target(**recipe.model.load_arguments())``.

        ``dtype: auto`` becomes float32 where the target runs on a CPU, whose bfloat16 is many times slower, and
        ``device: auto`` becomes the process's own accelerator where a launcher started several processes.
        """
        import torch

        device = self.device
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if device == "auto" and accelerator is None:
            device = "cpu"
        elif device == "auto" and accelerator is not None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            device = f"{accelerator.type}:{os.environ.get('LOCAL_RANK', '0')}"
        return {
            "name": self.base_model,
            "dtype": "float32" if self.dtype == "auto" and device == "cpu" else self.dtype,
            "device": device,
            "revision": self.revision,
            "attn_implementation": self.attn_implementation,
            "trust_remote_code": self.trust_remote_code,
            "chat_template": self.chat_template,
        }

    def table_arguments(self, device: object) -> dict[str, Any]:
        """Arguments for ``load_target_tables``, which go to ``device``."""
        arguments = {**self.load_arguments(), "device": str(device)}
        del arguments["attn_implementation"]
        return arguments

    def decoding_arguments(self) -> dict[str, Any]:
        """The same for decoding, where drafts need an attention that takes a mask: sdpa in place of flash attention."""
        arguments = self.load_arguments()
        if arguments["attn_implementation"] not in ("sdpa", "eager"):
            arguments["attn_implementation"] = "sdpa"
        return arguments
