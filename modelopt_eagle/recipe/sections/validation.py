"""Recipe section ``validation``: how the acceptance length is measured after training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from modelopt_eagle.common.trees import default_tree_nodes
from modelopt_eagle.recipe.bounds import check_tree_shape, need
from modelopt_eagle.recipe.sections.base import Positive, Section


class ValidationSection(Section):
    """How the acceptance length is measured after training."""

    prompts: str = Field(
        "shipped",
        min_length=1,
        description="Prompts to decode: `shipped` (80 in the 8 MT-Bench categories) or a JSONL file of ours or of "
        "MT-Bench (`question.jsonl`).",
    )
    dataset: str | None = Field(None, description="`mt_bench` or another hub data set of prompts, in place of a file.")
    num_samples: Positive | None = Field(
        None, description="Prompts used, spread over the categories; null: all of them."
    )
    num_steps: Annotated[int, Field(ge=1, le=64)] = Field(3, description="Drafted tokens of a chain.")
    max_new_tokens: Positive = Field(256, description="Tokens generated for each prompt.")
    batch_size: Positive = Field(8, description="Prompts decoded together.")
    mode: Literal["chain", "tree"] = Field("chain", description="Draft a chain, or a dynamic tree.")
    topk: int | None = Field(
        None, description="Branching factor T of the tree; required with mode tree, an error without."
    )
    depth: Positive | None = Field(None, description="Depth D of the tree; null: `num_steps`.")
    num_nodes: int | None = Field(
        None, description="Nodes N of the tree with its root, from D+1 to 1+T+T²(D-1); null: T·D+1, at most that."
    )
    speedup_prompts: Annotated[int, Field(ge=0)] = Field(
        8, description="Prompts on which the wall-clock speed-up over plain decoding is measured; 0: not measured."
    )
    cuda_graph: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Replay the draft loop from a CUDA graph: auto (on CUDA), on (an error elsewhere), or off.",
    )
    ar_lower_bound: Annotated[float, Field(ge=1)] | None = Field(
        None, description="Exit with an error if the acceptance length is lower."
    )
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(0, description="Seed of the confidence interval's bootstrap.")

    @model_validator(mode="after")
    def _prompts_and_tree(self) -> ValidationSection:
        need(
            self.dataset is None or self.prompts == "shipped",
            "prompts and dataset both name the prompts: set one of them (prompts: shipped, or dataset: null)",
        )
        check_tree_shape(self.mode, self.topk, self.tree_depth if self.mode == "tree" else self.depth, self.num_nodes)
        return self

    @property
    def tree_depth(self) -> int:
        """Depth D of the tree drafted in mode tree."""
        return self.num_steps if self.depth is None else self.depth

    @property
    def tree_nodes(self) -> int | None:
        """Nodes N of the tree with its root; None in mode chain."""
        if self.mode == "chain" or self.topk is None:
            return None
        return default_tree_nodes(self.topk, self.tree_depth) if self.num_nodes is None else self.num_nodes
