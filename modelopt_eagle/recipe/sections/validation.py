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
    mode: Literal["chain", "tree", "none"] = Field(
        "chain",
        description="Draft a chain, or a dynamic tree; none: decode nothing. The head is then exported unmeasured, and "
        "a run from stored or streamed features never loads the target.",
    )
    topk: int | None = Field(
        None, description="Branching factor T of the tree; required with mode tree, an error without."
    )
    depth: Positive | None = Field(None, description="Depth D of the tree; null: `num_steps`.")
    num_nodes: int | None = Field(
        None, description="Nodes N of the tree with its root, from D+1 to 1+T+T²(D-1); null: T·D+1, at most that."
    )
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        0.0, description="Temperature of the answers; 0: the likeliest tokens."
    )
    top_k: Annotated[int, Field(ge=0)] = Field(0, description="Draw from the k likeliest tokens; 0: from all.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="Draw from the smallest set of tokens whose mass reaches p; 1: from all."
    )
    min_p: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="Never draw a token less likely than min_p times the likeliest; 0: draw any."
    )
    sample_drafts: bool = Field(
        False,
        description="Draw the drafts from the head, too, and accept them by exact rejection; needs a temperature.",
    )
    speedup_prompts: Annotated[int, Field(ge=0)] = Field(
        8, description="Prompts on which the wall-clock speed-up over plain decoding is measured; 0: not measured."
    )
    cuda_graph: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Replay rounds from a CUDA graph: auto (on CUDA), on (an error elsewhere), or off.",
    )
    ar_lower_bound: Annotated[float, Field(ge=1)] | None = Field(
        None, description="Exit with an error if the acceptance length is lower."
    )
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(
        0, description="Seed of the confidence interval's bootstrap, and of answers that are drawn."
    )

    @model_validator(mode="after")
    def _prompts_and_tree(self) -> ValidationSection:
        need(
            self.dataset is None or self.prompts == "shipped",
            "prompts and dataset both name the prompts: set one of them (prompts: shipped, or dataset: null)",
        )
        need(
            self.mode != "none" or self.ar_lower_bound is None,
            f"ar_lower_bound: {self.ar_lower_bound} bounds what mode: none does not measure: remove it, or set mode: "
            "chain",
        )
        check_tree_shape(self.mode, self.topk, self.tree_depth if self.mode == "tree" else self.depth, self.num_nodes)
        filters = {"top_k": self.top_k != 0, "top_p": self.top_p != 1, "min_p": self.min_p != 0}
        filters["sample_drafts"] = self.sample_drafts
        given = [name for name, is_given in filters.items() if is_given]
        need(
            self.temperature > 0 or not given,
            f"{', '.join(given)} without a temperature: answers are greedy then; set temperature above 0",
        )
        nodes = None if self.topk is None else 1 + self.topk * self.tree_depth
        need(
            not self.sample_drafts or self.mode == "chain" or self.num_nodes in (None, nodes),
            f"sample_drafts draws T chains below the root: num_nodes must be 1 + topk * depth, {nodes}, found "
            f"{self.num_nodes}",
        )
        return self

    @property
    def tree_depth(self) -> int:
        """Depth D of the tree drafted in mode tree."""
        return self.num_steps if self.depth is None else self.depth

    @property
    def tree_nodes(self) -> int | None:
        """Nodes N of the tree with its root; None in other modes."""
        if self.mode != "tree" or self.topk is None:
            return None
        return default_tree_nodes(self.topk, self.tree_depth) if self.num_nodes is None else self.num_nodes
