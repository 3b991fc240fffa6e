"""The folder of a DFlash head: what vLLM's ``DFlashDraftModel`` and the tools of z-lab read, and that of speculators.

The captured layers are named once, as outputs of layer k (``dflash_config.target_layer_ids``); an ``eagle_config``
beside them would win in vLLM, even an empty one. The number of drafted tokens is the engine's own setting.

speculators' folders say the same in other words: sizes under ``transformer_layer_config``, layers by their inputs
(``aux_hidden_state_layer_ids``). Their blocks are bidirectional, and a head over the whole vocabulary takes the
target's output layer, whatever the file holds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modelopt_eagle.common.text import argument
from modelopt_eagle.draft.dflash.config import DFlashConfig
from modelopt_eagle.draft.dflash.module import DFlashModule
from modelopt_eagle.errors import CheckpointError, ExportError

ARCHITECTURE = "DFlashDraftModel"
SAME_NAME = (
    "hidden_size", "target_hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "num_hidden_layers", "rms_norm_eps", "max_position_embeddings", "vocab_size", "draft_vocab_size", "hidden_act",
    "attention_bias", "bos_token_id", "eos_token_id", "pad_token_id", "block_size",
)  # fmt: skip
RECORD = ("target_name", "target_model_type", "tokenizer_hash", "training_length", "extra")
NORM_FAULT = (
    "norms the context keys of every draft layer with the weights of the first one (0.32 on a CPU), which lowers the "
    "acceptance of heads of several layers; the text stays the target's"
)


SPECULATORS = "dflash"
"""``speculators_model_type`` of their folders."""
COPIES = ("verifier_norm.", "verifier_lm_head.", "rotary_emb.")
"""Names of the target's tensors, and of computed ones, that older folders of theirs hold."""


def from_speculators(config: dict[str, Any], where: str) -> dict[str, Any]:
    """Their ``config.json`` in the words of z-lab's.

    Raises:
        CheckpointError: a key missing, or heads that draft from the known token's slot too.
    """
    if config.get("sample_from_anchor"):
        raise CheckpointError(f"{where}: sample_from_anchor is true; DFlash heads here draft from the masks alone")
    layer = config.get("transformer_layer_config")
    missing = [name for name in ("aux_hidden_state_layer_ids", "mask_token_id") if config.get(name) is None]
    if not isinstance(layer, dict) or missing:
        raise CheckpointError(f"{where}: its config does not say {', '.join(missing) or 'transformer_layer_config'}")
    block = {
        "mask_token_id": config["mask_token_id"],
        "target_layer_ids": [layer_id - 1 for layer_id in config["aux_hidden_state_layer_ids"]],
        "causal": False,
    }
    verifier = ((config.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
    named = {"target_name": verifier} if verifier else {}
    kept = {name: config[name] for name in ("block_size", "draft_vocab_size") if config.get(name) is not None}
    return {**layer, **kept, "dflash_config": block, "modelopt_eagle": named}


def speculators_files(module: DFlashModule, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and ``config.json`` as speculators 0.9 writes a ``dflash`` head.

    Raises:
        ExportError: a head that its model class computes otherwise.
    """
    config, whole = module.config, module.config.draft_vocab_size == module.config.vocab_size
    lacks = {
        "blocks are bidirectional": config.causal,
        "heads are as wide as their target": config.hidden_size != config.target_hidden_size,
        "layers have no bias in the feed-forward part": config.mlp_bias,
        "heads over the whole vocabulary take the target's output layer": whole and not config.shares_head,
        "heads over a reduced vocabulary have an output layer of their own": not whole and config.shares_head,
        "heads take the target's embedding": config.own_embedding,
    }
    if found := [words for words, applies in lacks.items() if applies]:
        raise ExportError(f"speculators' {'; its '.join(found)}: convert to universal")
    tensors, data = DFlashLayout().write(module, dtype)
    block = data.pop("dflash_config")
    for name in ("architectures", "modelopt_eagle", "has_own_lm_head", "target_hidden_size", "draft_vocab_size",
                 "block_size", "tie_word_embeddings"):  # fmt: skip
        data.pop(name, None)
    proposal = {"proposal_type": "greedy", "speculative_tokens": config.block_size - 1}
    return tensors, {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": SPECULATORS,
        "speculators_version": "0.9.0",
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in block["target_layer_ids"]],
        "mask_token_id": block["mask_token_id"],
        "sliding_window_non_causal": True,  # vLLM reads it of every layer: its word for bidirectional
        "sample_from_anchor": False,
        "tie_word_embeddings": False,
        "torch_dtype": data["torch_dtype"],
        "speculators_config": {
            "algorithm": SPECULATORS,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": config.target_name, "architectures": []},
        },
        "transformer_layer_config": data,
    }


class DFlashLayout:
    """Writes and reads such folders, see :class:`~modelopt_eagle.draft.algorithm.Layout`."""

    engines: tuple[str, ...] = ("vllm", "llama_cpp")

    def write(self, module: DFlashModule, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and ``config.json``; a shared output layer and an identity map are left out."""
        config, vocab = module.config, module.vocab
        left_out = {"d2t", "t2d", *(["lm_head.weight"] if config.shares_head else [])}
        tensors = {
            name: tensor.detach().to("cpu", dtype).contiguous().clone()
            for name, tensor in module.state_dict().items()
            if name not in left_out
        }
        if not vocab.is_identity:
            tensors |= {"d2t": vocab.d2t.cpu().clone(), "t2d": vocab.t2d.cpu().clone()}
        theta, scaling = float(config.rope_theta), config.rope_scaling
        named = str(dtype).removeprefix("torch.")
        data: dict[str, Any] = {
            "architectures": [ARCHITECTURE],
            "model_type": "qwen3",
            "torch_dtype": named,
            "dtype": named,
            "tie_word_embeddings": False,
            **{name: getattr(config, name) for name in SAME_NAME},
            "rope_theta": theta,
            "rope_scaling": dict(scaling) if scaling else None,
            "rope_parameters": {"rope_theta": theta, **(scaling or {"rope_type": "default"})},
            "dflash_config": {
                "mask_token_id": config.mask(),
                "target_layer_ids": list(config.aux_layer_ids),
                "causal": config.causal,
            },
        }
        if not config.shares_head:
            data["has_own_lm_head"] = True
        record = {name: getattr(config, name) for name in RECORD if getattr(config, name)}
        data["modelopt_eagle"] = {"format": 1, **record}
        return tensors, data

    def recognises(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> bool:
        """Told by the architecture, or by what speculators calls them."""
        named = config.get("speculators_model_type")
        return named == SPECULATORS or (named is None and ARCHITECTURE in (config.get("architectures") or ()))

    def read(
        self, config: dict[str, Any], tensors: dict[str, Tensor], where: str
    ) -> tuple[DFlashConfig, dict[str, Tensor]]:
        """The configuration, and tensors under the module's names.

        Raises:
            CheckpointError: no layers, mask token or block size named, a window, or another architecture of the layers.
        """
        if config.get("speculators_model_type") == SPECULATORS:
            config = from_speculators(config, where)
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(COPIES)}
        block = config.get("dflash_config") or {}
        missing = [name for name in ("mask_token_id", "target_layer_ids") if block.get(name) is None]
        size = config.get("block_size") or block.get("block_size")  # z-lab's newer folders: nested
        missing += [] if size else ["block_size"]
        if missing:
            raise CheckpointError(f"{where}: dflash_config does not say {', '.join(missing)}")
        beside = config.get("eagle_aux_hidden_state_layer_ids")  # of layers by their inputs, which vLLM lets win
        if beside is not None and [layer_id - 1 for layer_id in beside] != list(block["target_layer_ids"]):
            raise CheckpointError(
                f"{where}: eagle_aux_hidden_state_layer_ids {list(beside)} (inputs of layers) and "
                f"dflash_config.target_layer_ids {list(block['target_layer_ids'])} (outputs) name other layers: which "
                "ones was it trained on? correct the one that is wrong"
            )
        if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()):
            raise CheckpointError(f"{where}: its layers see a window of the context; DFlash heads here see all of it")
        record = config.get("modelopt_eagle") or {}
        vocabulary = int(config["vocab_size"])
        shares = "lm_head.weight" not in tensors
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        theta = float(rope.pop("rope_theta", None) or config.get("rope_theta") or 1e6)
        kind = rope.pop("type", None) or rope.get("rope_type", "default")
        values = {name: config[name] for name in SAME_NAME if config.get(name) is not None}
        values["block_size"] = size
        values.setdefault("target_hidden_size", config["hidden_size"])
        values.setdefault("draft_vocab_size", len(tensors["d2t"]) if "d2t" in tensors else vocabulary)
        values.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
        read = DFlashConfig(
            **values,
            aux_layer_ids=tuple(block["target_layer_ids"]),
            causal=bool(block.get("causal", False)),
            mask_token_id=int(block["mask_token_id"]),
            rope_theta=theta,
            rope_scaling=None if kind == "default" else {**rope, "rope_type": kind},
            own_embedding="embed_tokens.weight" in tensors,
            shares_head=shares,
            **{name: record[name] for name in RECORD if name in record},
        )
        if shares:  # filled with the target's rows when the two meet
            width = tensors["fc.weight"]
            tensors["lm_head.weight"] = width.new_zeros(read.draft_vocab_size, read.hidden_size)
        return read, tensors

    def faults(self, config: DFlashConfig) -> dict[str, list[str]]:
        """What vLLM does with heads of several layers, and what llama.cpp's graph (``src/models/dflash.cpp``) lacks."""
        lacks = {
            "has no attention bias": config.attention_bias,
            "has no bias in the feed-forward part": config.mlp_bias,
            "takes features as wide as the head": config.hidden_size != config.target_hidden_size,
            f"computes silu, the head was trained with {config.hidden_act}": config.hidden_act != "silu",
            "reads no table of rotary frequencies for such heads, and this one's are scaled": (
                config.rope_scaling is not None
            ),
            "takes the target's whole output layer, this head its rows for a reduced vocabulary": (
                config.shares_head and config.draft_vocab_size < config.vocab_size
            ),
        }
        found = {"llama_cpp": [reason for reason, applies in lacks.items() if applies]}
        if config.num_hidden_layers > 1:
            found["vllm"] = [NORM_FAULT]
        return {engine: reasons for engine, reasons in found.items() if reasons}

    def serve_lines(self, config: DFlashConfig, data: dict[str, Any]) -> list[str]:
        """How vLLM serves such a folder, for the card."""
        drafted = config.block_size - 1
        lines = [
            "```bash",
            f"vllm serve {argument(config.target_name or 'TARGET')} --speculative-config \\",
            f'  \'{{"method": "dflash", "model": "THIS_FOLDER", "num_speculative_tokens": {drafted}}}\'',
            "```",
        ]
        if not config.causal:
            lines += [
                "",
                f"The block is bidirectional and was trained with {drafted} drafted tokens: another "
                "`num_speculative_tokens` is nothing it has seen.",
            ]
        if config.num_hidden_layers > 1:
            lines += ["", f"vLLM {NORM_FAULT}."]
        return lines
