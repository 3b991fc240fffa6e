"""Rotary position embeddings with every scaling type that transformers knows, as one table of cosines and sines."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from modelopt_eagle.draft.config import DraftConfig
from modelopt_eagle.errors import CheckpointError

KEYS = {
    "linear": ({"factor"}, set()),
    "dynamic": ({"factor"}, set()),
    "yarn": ({"factor"}, {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}),
    "longrope": ({"short_factor", "long_factor"}, {"factor", "attention_factor"}),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor"}, set()),
    "proportional": (set(), {"factor", "partial_rotary_factor"}),
}
"""Of each type, the keys that it needs and those that it may have, as transformers reads them."""


def check_scaling(scaling: dict) -> None:
    """Check a scaling that a user wrote: a type that is known, with its keys and numbers.

    Raises:
        CheckpointError: another type, a key missing, a key that nothing reads, or a value that is no number.
    """
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind not in KEYS:
        raise CheckpointError(f"rope type {kind!r} is unknown; transformers knows {', '.join(sorted(KEYS))}")
    needed, more = KEYS[kind]
    given = {key: value for key, value in scaling.items() if key not in ("rope_type", "type")}
    if missing := sorted(needed - given.keys()):
        raise CheckpointError(f"rope type {kind!r} needs {', '.join(missing)} in rope_scaling")
    if unread := sorted(given.keys() - needed - more - {"original_max_position_embeddings"}):
        known = ", ".join(sorted(needed | more | {"original_max_position_embeddings"}))
        raise CheckpointError(
            f"rope_scaling: {', '.join(unread)} is nothing that type {kind!r} reads; it reads {known}"
        )
    for key, value in given.items():
        numbers = value if isinstance(value, list) and key in ("short_factor", "long_factor") else [value]
        flag = key == "truncate" and isinstance(value, bool)
        if not flag and not all(isinstance(n, (int, float)) and not isinstance(n, bool) and n > 0 for n in numbers):
            raise CheckpointError(f"rope_scaling: {key} must be a number above 0, found {value!r}")


def inverse_frequencies(config: DraftConfig) -> tuple[Tensor, float]:
    """``([d/2] float32, factor)``: frequencies and the factor on cosines and sines.

    The types whose frequencies follow the length (``dynamic``, ``longrope``) are fixed at the declared
    ``max_position_embeddings``, as vLLM does, so that one table serves every request.

    Raises:
        CheckpointError: a type that transformers does not know, or one of its parameters missing.
    """
    dim = config.rotary_dim
    if config.rope_scaling is None:
        exponent = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        return 1.0 / (config.rope_theta**exponent), 1.0
    parameters = dict(config.rope_scaling)
    kind = parameters.pop("type", None) or parameters.get("rope_type")
    if kind not in ROPE_INIT_FUNCTIONS:
        known = ", ".join(sorted(ROPE_INIT_FUNCTIONS))
        raise CheckpointError(f"rope type {kind!r} is unknown; transformers knows {known}")
    parameters["rope_type"] = kind
    stand_in = PretrainedConfig()  # the table functions read a configuration
    stand_in.hidden_size, stand_in.num_attention_heads = dim, 1
    stand_in.head_dim = dim
    stand_in.max_position_embeddings = config.max_position_embeddings
    stand_in.rope_parameters = {**parameters, "rope_theta": config.rope_theta}
    if kind in ("llama3", "yarn", "longrope"):
        stand_in.rope_parameters.setdefault("original_max_position_embeddings", config.max_position_embeddings)
    try:
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](
            stand_in, torch.device("cpu"), seq_len=config.max_position_embeddings
        )
    except KeyError as error:
        raise CheckpointError(f"rope type {kind!r} needs {error} in rope_scaling") from error
    return frequencies.float(), float(factor)


class Rotary(nn.Module):
    """Cosines and sines by position; the table grows by doubling and is never saved."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        with torch.device("cpu"):  # a head on the meta device, of which shapes alone are asked for, has them too
            self.frequencies, self.factor = inverse_frequencies(config)
        self._cos = self._sin = torch.empty(0, config.rotary_dim // 2)

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """The tables in use, ``[L, d/2]`` each; a longer bound makes new ones."""
        return self._cos, self._sin

    def forward(self, position_ids: Tensor, length: int | None = None) -> tuple[Tensor, Tensor]:
        """Look positions up.

        Args:
            position_ids: ``[...]`` int64.
            length: a bound above every position, if the caller knows one (saves reading the maximum back).

        Returns:
            ``cos, sin`` ``[..., d/2]`` float32.
        """
        if length is None:
            length = int(position_ids.max()) + 1 if position_ids.numel() else 1
        if len(self._cos) < length or self._cos.device != position_ids.device:
            size = max(1024, 1 << (length - 1).bit_length())
            angle = torch.arange(size, dtype=torch.float32)[:, None] * self.frequencies[None]  # [L,d/2]
            self._sin = (angle.sin() * self.factor).to(position_ids.device)
            self._cos = (angle.cos() * self.factor).to(position_ids.device)  # the one that is looked at: other threads
        return self._cos[position_ids], self._sin[position_ids]
