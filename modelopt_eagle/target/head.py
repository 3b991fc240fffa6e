"""The target's output head: post-norm hidden state to logits, with the bias, scale and cap of the model family."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TargetHead:
    """``logits = cap · tanh((hidden · weightᵀ + bias) · scale / cap)``, each part only if the model has it.

    ``scale`` is 1 for most models, ``logit_scale`` for Cohere, ``1 / logits_scaling`` for Granite,
    ``lm_head_multiplier`` for Falcon-H1; ``cap`` is Gemma's ``final_logit_softcapping``.

    Args:
        weight: [V, Ht] the output head, tied to the embedding or not.
        bias: [V] or None.
        scale: factor on the logits.
        cap: bound of the logits, or None.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def from_config(cls, config, weight: Tensor, bias: Tensor | None = None) -> TargetHead:
        """Build the head of a model from its text config and its tables (``weight`` [V, Ht], ``bias`` [V] or None).

        Returns:
            the head.
        """
        scale = 1.0
        if getattr(config, "logit_scale", None) is not None:
            scale *= float(config.logit_scale)
        if getattr(config, "logits_scaling", None) is not None:
            scale /= float(config.logits_scaling)
        if getattr(config, "lm_head_multiplier", None) is not None:
            scale *= float(config.lm_head_multiplier)
        cap = getattr(config, "final_logit_softcapping", None)
        return cls(weight, bias, scale, None if not cap else float(cap))

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of post-norm hidden states [..., Ht], in the dtype of ``weight``."""
        logits = torch.nn.functional.linear(hidden.to(self.weight), self.weight, self.bias)  # [..., V]
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.cap is not None:
            logits = self.cap * torch.tanh(logits / self.cap)
        return logits

    def rows(self, ids: Tensor) -> Tensor:
        """The rows [n, Ht] of the weight for target token ids [n] (a copy, in the dtype of the table)."""
        return self.weight[ids.to(self.weight.device)]

    def to(self, device=None, dtype=None) -> TargetHead:
        """The same head on another device or in another dtype."""
        bias = None if self.bias is None else self.bias.to(device=device, dtype=dtype)
        return TargetHead(self.weight.to(device=device, dtype=dtype), bias, self.scale, self.cap)
