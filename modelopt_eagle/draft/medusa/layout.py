"""The folder of Medusa heads that vLLM's ``MedusaModel`` reads.

``blocks.K.layers.N.weight``; ``lm_head.weight`` with ``original_lm_head: true`` for a shared output, else
``lm_heads.K.weight``; ``token_map [Vd]`` target ids of a reduced vocabulary. vLLM 0.32 reads ``token_map`` and then
counts it among the weights that no file brought, so it starts with heads over the whole vocabulary only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modelopt_eagle.common.text import argument
from modelopt_eagle.draft.medusa.config import MedusaConfig
from modelopt_eagle.draft.medusa.module import MedusaModule
from modelopt_eagle.errors import CheckpointError

ARCHITECTURE = "MedusaModel"
REDUCED_FAULT = (
    "does not start with a Medusa head over a reduced vocabulary (0.32 takes `token_map` for a missing weight): train "
    "with `eagle.draft_vocab_size: null` to serve it there"
)


class MedusaLayout:
    """See :class:`~modelopt_eagle.draft.algorithm.Layout`."""

    engines: tuple[str, ...] = ("vllm",)

    def write(self, module: MedusaModule, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors of ``model.safetensors`` in ``dtype``, and the content of ``config.json``.

        Raises:
            CheckpointError: the vocabulary map is unset.
        """
        config, vocab = module.config, module.vocab
        tensors = {
            name: tensor.detach().to("cpu", dtype).contiguous().clone()
            for name, tensor in module.state_dict().items()
            if name not in ("d2t", "t2d")
        }
        if not vocab.is_identity:
            tensors["token_map"] = vocab.target_ids.cpu().clone()
        record = {key: value for key, value in config.to_dict().items() if value not in (None, {})}
        return tensors, {
            "architectures": [ARCHITECTURE],
            "model_type": "medusa",
            "torch_dtype": str(dtype).removeprefix("torch."),
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "truncated_vocab_size": config.draft_vocab_size,
            "num_heads": config.heads,
            "num_hidden_layers": config.blocks,
            "original_lm_head": config.shared_output,
            "medusa_fc_bias": False,
            "modelopt_eagle": record,
        }

    def recognises(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> bool:
        """Whether a folder holds Medusa heads."""
        return config.get("architectures") == [ARCHITECTURE] or config.get("model_type") == "medusa"

    def read(
        self, config: dict[str, Any], tensors: dict[str, Tensor], where: str
    ) -> tuple[MedusaConfig, dict[str, Tensor]]:
        """The configuration, and the tensors under the module's names.

        Raises:
            CheckpointError: a folder of another tool, sizes that its own record contradicts, biases.
        """
        record = config.get("modelopt_eagle")
        if not isinstance(record, dict):
            raise CheckpointError(
                f"{where} holds Medusa heads of another tool, and does not say which target they read; those that this "
                "toolkit wrote are read alone"
            )
        made = MedusaConfig.from_dict(record)
        sizes = {
            "hidden_size": made.hidden_size,
            "vocab_size": made.vocab_size,
            "truncated_vocab_size": made.draft_vocab_size,
            "num_heads": made.heads,
            "num_hidden_layers": made.blocks,
            "original_lm_head": made.shared_output,
            "medusa_fc_bias": False,
        }
        if other := [f"{key} {config.get(key)}" for key, value in sizes.items() if config.get(key) != value]:
            raise CheckpointError(f"{where}: {', '.join(other)} is not what the heads were trained with: {sizes}")
        tensors = dict(tensors)
        if (token_map := tensors.pop("token_map", None)) is not None:
            tensors["d2t"] = token_map - torch.arange(len(token_map))
            tensors["t2d"] = torch.zeros(made.vocab_size, dtype=torch.bool).scatter_(0, token_map, True)
        return made, tensors

    def faults(self, config: MedusaConfig) -> dict[str, list[str]]:
        """What vLLM does with heads over a reduced vocabulary."""
        return {} if config.draft_vocab_size == config.vocab_size else {"vllm": [REDUCED_FAULT]}

    def serve_lines(self, config: MedusaConfig, data: dict[str, Any]) -> list[str]:
        """How vLLM serves it."""
        target = argument(config.target_name or "TARGET")
        if self.faults(config):
            return [f"vLLM {REDUCED_FAULT}."]
        return [
            "vLLM (tested with 0.32.0 on a CPU):",
            "",
            "```bash",
            f"vllm serve {target} --speculative-config "
            f'\'{{"method": "medusa", "model": "THIS_FOLDER", "num_speculative_tokens": {config.heads}}}\'',
            "```",
            "",
            f"At most {config.heads} tokens: a head that was not trained would draft noise.",
        ]
