"""Recipe section ``eagle``: the draft head and its loss."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from modelopt_eagle.common.lists import split_list
from modelopt_eagle.recipe.bounds import need
from modelopt_eagle.recipe.sections.base import LayerId, Positive, PositiveFloat, Section, Share

LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""Keys that only layers with latent attention read."""


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
    min_vocab_coverage: Share = Field(
        0.25,
        description="Stop if the draft vocabulary holds less than this share of the supervised tokens: the head could "
        "never draft the rest.",
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
    head_dim: Annotated[int, Field(ge=2, multiple_of=2)] | None = Field(
        None, description="Width of an attention head of `llama` layers; null: the target's."
    )
    rope_theta: PositiveFloat | None = Field(None, description="Rotary base of the head; null: the target's.")
    rope_scaling: dict[str, Any] | None = Field(
        None,
        description="Rotary scaling of the head in training and decoding, as transformers names it, such as "
        "`{rope_type: yarn, factor: 4.0}`; `{rope_type: default}`: none; null: the target's.",
    )
    hidden_act: Literal["silu", "gelu", "gelu_pytorch_tanh", "relu"] | None = Field(
        None, description="Activation of the feed-forward part; null: silu. Engines serve silu alone or mostly."
    )
    rms_norm_eps: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="Epsilon of the head's norms; null: the target's."
    )
    q_lora_rank: Positive | None = Field(
        None, description="Of `kimik2` layers: rank of the queries; null: the target's, or whole queries."
    )
    kv_lora_rank: Positive | None = Field(
        None,
        description="Of `kimik2` layers: rank of keys and values; null: the target's. With the three widths below, a "
        "target without latent attention gets such a head.",
    )
    qk_nope_head_dim: Positive | None = Field(
        None, description="Of `kimik2` layers: part of a head that is not rotated; null: the target's."
    )
    qk_rope_head_dim: Annotated[int, Field(ge=2, multiple_of=2)] | None = Field(
        None, description="Of `kimik2` layers: part of a head that is rotated; null: the target's."
    )
    v_head_dim: Positive | None = Field(None, description="Of `kimik2` layers: width of a value; null: the target's.")
    attention_bias: bool = Field(False, description="Biases in the q, k and v projections.")
    norm_before_residual: bool = Field(False, description="The residual takes the normed state.")
    norm_before_fc: bool = Field(False, description="One norm over the concatenated features before `fc`.")
    fc_norm: bool = Field(False, description="A norm of its own for each auxiliary feature before `fc`.")
    norm_output: bool = Field(False, description="The state carried to the next step is the normed output.")
    qk_norm: bool = Field(
        False, description="Queries and keys are normed head by head, as in Qwen3; vLLM 0.24.0 or newer serves it."
    )
    sliding_window: Annotated[int, Field(ge=64)] | None = Field(
        None,
        description="The head sees that many positions back, its own among them, in training and when it drafts: for "
        "long contexts, where full attention over the head's own short training drafts badly; null: everything. vLLM "
        "reads it from the export, SGLang from its command line (on the card), TensorRT-LLM not.",
    )
    init: Literal["random", "target"] = Field(
        "random", description="Start of the weights: random, or the target's own last layer, norm and head rows."
    )

    @field_validator("aux_layer_ids", mode="before")
    @classmethod
    def _ids_may_be_written_with_commas(cls, value: Any) -> Any:
        return split_list(value) if isinstance(value, str) else value

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
        later = ("mix_hidden_states", "ttt_warmup", "loss_decay")
        given = [key for key in later if self.ttt_steps == 1 and key in self.changed()]
        need(
            not given,
            f"{', '.join(given)} speaks of the rollout's later steps, and ttt_steps: 1 has none: leave it out, or set "
            "ttt_steps: 2",
        )
        need(
            self.draft_vocab_counts == self.default("draft_vocab_counts")
            or (self.draft_vocab_size is not None and self.draft_vocab_path is None),
            f"draft_vocab_counts: {self.draft_vocab_counts} says how a vocabulary is chosen from the data, and "
            "none is: set draft_vocab_size and leave draft_vocab_path at null, or leave it out",
        )
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        need(
            heads is None or kv_heads is None or heads % kv_heads == 0,
            f"num_attention_heads must be a multiple of num_key_value_heads, found {heads} and {kv_heads}",
        )
        latent = [name for name in LATENT if getattr(self, name) is not None]
        need(
            self.decoder_type == "kimik2" or not latent,
            f"{', '.join(latent)} is read by layers of decoder_type kimik2: set decoder_type, or leave it out",
        )
        need(
            self.decoder_type == "llama" or self.head_dim is None,
            "head_dim is read by layers of decoder_type llama; a latent head is qk_nope_head_dim and qk_rope_head_dim "
            "wide: leave it out",
        )
        need(
            self.decoder_type == "llama" or kv_heads is None,
            "num_key_value_heads is read by layers of decoder_type llama; a latent head has keys and values of its own "
            "for each head: leave it out",
        )
        need(
            self.rope_scaling is None or "rope_type" in self.rope_scaling,
            "expected the key rope_type in rope_scaling (such as yarn, or default for none)",
        )
        sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
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
