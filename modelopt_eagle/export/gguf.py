"""A head as the GGUF file that llama.cpp serves, written with the ``gguf`` package and read back.

Keys and tensors as llama.cpp's ``src/models/eagle3.cpp`` and ``dflash.cpp`` read them; which heads these graphs compute
as they were trained stands in :mod:`modelopt_eagle.export.engines.llama_cpp` and in the layout of DFlash heads. Three
things differ from a draft folder: ``d2t`` holds target ids and not offsets, and of EAGLE-3 heads the rows of queries
and keys are ordered by rotated pair, and a scaled rotary table is written as divisors of the plain frequencies.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelopt_eagle.common.dtypes import dtype_name
from modelopt_eagle.common.package import require_extra
from modelopt_eagle.draft import DraftConfig
from modelopt_eagle.draft.algorithm import algorithm_of
from modelopt_eagle.draft.base import DraftModule
from modelopt_eagle.draft.dflash.config import DFlashConfig
from modelopt_eagle.draft.rotary import inverse_frequencies
from modelopt_eagle.errors import ExportError
from modelopt_eagle.export.card import model_card
from modelopt_eagle.export.engines import ENGINES, llama_cpp
from modelopt_eagle.export.engines.check import config_reasons
from modelopt_eagle.export.engines.versions import drafter_reasons
from modelopt_eagle.export.folders import GGUF_FILE, whole_folder
from modelopt_eagle.export.universal import universal_config
from modelopt_eagle.export.write import ExportReport
from modelopt_eagle.target.lora import FOLDER as ADAPTER
from modelopt_eagle.target.to_gguf import by_pair, token_numbers, write_out

NAMES = {
    "fc.weight": "fc.weight",
    "input_norm.weight": "enc.output_norm.weight",
    "embed_tokens.weight": "token_embd.weight",
    "layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
    "layers.0.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    "layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight",
    "layers.0.self_attn.k_proj.weight": "blk.0.attn_k.weight",
    "layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
    "layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    "layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    "layers.0.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
    "layers.0.mlp.up_proj.weight": "blk.0.ffn_up.weight",
    "layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
"""The module's name of a tensor to llama.cpp's."""
BLOCK_NAMES = {
    **{name: NAMES[name] for name in ("fc.weight", "embed_tokens.weight", "norm.weight", "lm_head.weight")},
    "hidden_norm.weight": "enc.output_norm.weight",
}
"""The same of a DFlash head, without its layers."""
BLOCK_LAYER_NAMES = {
    **{own[9:]: told[6:] for own, told in NAMES.items() if own.startswith("layers.0.") and ".hidden_norm" not in own},
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
}
"""Of each layer, behind ``layers.N.`` and ``blk.N.``."""
MASK_KEY = "tokenizer.ggml.mask_token_id"
MEASURING = (
    "llama.cpp alone reads this folder: measure the one that it was converted from, or hold the two against each other "
    "(`python scripts/check_serving.py --engine llama.cpp --export_path . --checkpoint FOLDER --base_model TARGET`)."
)
FILE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 32}
"""llama.cpp's numbers for "mostly of this dtype"."""


def gguf_reasons(config: DraftConfig, target_layers: int | None = None) -> list[str]:
    """Why llama.cpp would not compute a head as it was trained; empty if it does.

    Args:
        target_layers: of the target, if it is known.
    """
    engine = llama_cpp.ENGINE
    if (refused := drafter_reasons(engine, config)) is not None:
        if (
            config.algorithm in llama_cpp.SPEC_TYPES
            and target_layers
            and max(config.aux_layer_ids) == target_layers - 1
        ):
            refused.append(f"does not capture the output of the target's last layer ({target_layers - 1})")
        return refused
    return config_reasons(universal_config(config, torch.float32), config, engine.loads, target_layers)


def gguf_names(config: DraftConfig) -> dict[str, str]:
    """A head's own names of tensors to llama.cpp's."""
    if not isinstance(config, DFlashConfig):
        return NAMES
    layers = range(config.num_hidden_layers)
    return BLOCK_NAMES | {
        f"layers.{n}.{own}": f"blk.{n}.{told}" for n in layers for own, told in BLOCK_LAYER_NAMES.items()
    }


def gguf_tensors(module: DraftModule, dtype: torch.dtype) -> dict[str, Tensor]:
    """The head's tensors by llama.cpp's names: matrices in ``dtype``, what has one dimension in float32.

    Args:
        module: a head without :func:`gguf_reasons`.
    """
    config = module.config
    blocks = isinstance(config, DFlashConfig)  # whose graph rotates in halves, as we do
    heads = {} if blocks else {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    left_out = {"d2t", "t2d", *(["lm_head.weight"] if blocks and config.shares_head else [])}
    names, tensors = gguf_names(config), {}
    for own, tensor in module.state_dict().items():
        if own in left_out:
            continue
        name, tensor = names[own], tensor.detach().cpu()
        part = name.split(".")[-2]
        tensor = by_pair(tensor, heads[part]) if part in heads else tensor
        tensors[name] = tensor.to(dtype if tensor.dim() > 1 else torch.float32).contiguous().clone()
    plain = config.rope_theta ** -(torch.arange(0, config.rotary_dim, 2, dtype=torch.int64).float() / config.rotary_dim)
    frequencies = inverse_frequencies(config)[0]  # [d/2]
    if config.rope_scaling is not None:
        tensors["rope_freqs.weight"] = (plain / frequencies).float()
    if not module.vocab.is_identity:
        tensors["d2t"] = module.vocab.target_ids.cpu().to(torch.int64).clone()  # [Vd]
    return tensors


def gguf_fields(config: DraftConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The keys that llama.cpp reads, without the tokenizer's but for the mask token of a head that has one.

    Captured layers are counted by their inputs there.
    """
    architecture, factor = config.algorithm, inverse_frequencies(config)[1]
    fields: dict[str, Any] = {
        "general.type": "model",
        "general.name": f"{algorithm_of(config).title} head for {config.target_name or 'a target'}",
        "general.file_type": FILE_TYPES[dtype],
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": config.rotary_dim,
        "rope.freq_base": float(config.rope_theta),
        "rope.scaling.type": "none",
        "target_layers": [layer + 1 for layer in config.aux_layer_ids],
        "target_hidden_size": config.target_hidden_size,
    }
    if isinstance(config, DFlashConfig):
        fields |= {"block_size": config.block_size, "attention.causal": config.causal}
    else:
        fields |= {
            "norm_before_residual": config.norm_before_residual,
            "norm_before_fc": config.norm_before_fc,
        }
    if factor != 1.0:
        fields["rope.scaling.attn_factor"] = factor
    fields = {key if key.startswith("general.") else f"{architecture}.{key}": value for key, value in fields.items()}
    if isinstance(config, DFlashConfig):
        fields[MASK_KEY] = config.mask()
    return fields


def tokenizer_fields(file: Path | None, config: DraftConfig) -> dict[str, tuple[Any, Any, Any]]:
    """What a head's file says of the tokens: ``{key: (value, type, type of its entries or None)}``.

    Args:
        file: the target as a GGUF file, whose keys are repeated; ``None``: tokens are named by their numbers, as the
            server reads of a head how many there are, and their words for its log alone.

    Raises:
        ExportError: the target's file has another vocabulary.
    """
    from gguf import GGUFReader

    if file is None:
        ends = config.eos_token_id
        end = ends if isinstance(ends, int) else next(iter(ends or ()), 0)
        return token_numbers(config.vocab_size, end)
    found = {}
    for key, field in GGUFReader(file).fields.items():
        if key.startswith("tokenizer.ggml."):
            found[key] = (field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
    size = len(found.get("tokenizer.ggml.tokens", ((),))[0])
    if size != config.vocab_size:
        raise ExportError(
            f"{file} has {size} tokens, the head is one for {config.vocab_size}: name the file of its target"
        )
    return found


def write_gguf(
    module: DraftModule, path: Path, *, dtype: torch.dtype, target_file: Path | None = None
) -> dict[str, Tensor]:
    """Write a head that llama.cpp computes as trained, and read it back.

    Args:
        module: the head.
        path: the file to make.
        dtype: of its matrices.
        target_file: the target as a GGUF file, for its tokenizer.

    Returns:
        the tensors that were written.

    Raises:
        ExportError: another vocabulary, or a key or tensor that reads back differently.
        MissingExtraError: gguf is not installed.
    """
    require_extra("gguf", "gguf")
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter

    kinds = {
        bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING,
    }  # fmt: skip
    fields, tensors = gguf_fields(module.config, dtype), gguf_tensors(module, dtype)
    writer = GGUFWriter(path, module.config.algorithm)
    for key, value in fields.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_key_value(key, value, kinds[type(value)])
    for key, (value, kind, entries) in tokenizer_fields(target_file, module.config).items():
        if key in fields:  # the head's mask token, where the target's file names one of its own
            continue
        writer.add_key_value(key, value, kind, entries)
    for name, tensor in tensors.items():
        if tensor.dtype == torch.bfloat16:
            writer.add_tensor(
                name, tensor.view(torch.int16).numpy().view(np.uint8), raw_dtype=GGMLQuantizationType.BF16
            )
        else:
            writer.add_tensor(name, tensor.numpy())
    write_out(writer)
    check_written(path, fields, tensors)
    return tensors


def read_gguf_head(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """``(keys, tensors)`` of a GGUF file, as they stand in it; tensors are copies."""
    from gguf import GGMLQuantizationType, GGUFReader

    reader = GGUFReader(path)
    tensors = {}
    for entry in reader.tensors:
        tensor = torch.from_numpy(entry.data.copy())
        if entry.tensor_type == GGMLQuantizationType.BF16:
            tensor = tensor.view(torch.bfloat16)
        tensors[entry.name] = tensor.reshape([int(n) for n in reversed(entry.shape)])
    return {key: field.contents() for key, field in reader.fields.items()}, tensors


def check_written(path: Path, fields: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Read a file back and compare.

    Raises:
        ExportError: a key or a tensor that differs, bit by bit (floating keys: as float32).
    """
    found, read = read_gguf_head(path)
    for key, value in fields.items():
        told = found.get(key)
        equal = abs(told - value) <= 1e-6 * abs(value) if isinstance(value, float) and told else told == value
        if not equal:
            raise ExportError(f"{key} was written as {value!r} and reads back as {told!r}: the file was not kept")
    if read.keys() != tensors.keys():
        raise ExportError(f"the file holds other tensors than were written: {sorted(read.keys() ^ tensors.keys())}")
    for name, tensor in tensors.items():
        if read[name].dtype != tensor.dtype or not torch.equal(read[name], tensor):
            raise ExportError(f"the tensor {name} reads back differently: the file was not kept")


def export_gguf(
    module: DraftModule,
    path: str | Path,
    *,
    dtype: torch.dtype,
    target_layers: int | None = None,
    target_file: Path | None = None,
    overwrite: bool = False,
    adapter: Path | None = None,
) -> ExportReport:
    """Make a folder with the head as ``draft.gguf`` and its card.

    Args:
        module: the head.
        path: the folder to make; it appears whole or not at all.
        dtype: of its matrices.
        target_layers: of the target, if it is known.
        target_file: the target as a GGUF file, for its tokenizer.
        adapter: PEFT folder of the target's adapter that the head was trained with; copied.

    Returns:
        what was written.

    Raises:
        ExportError: llama.cpp would compute another head, see :func:`gguf_reasons`; the folder exists.
        MissingExtraError: gguf is not installed.
    """
    engine, config = llama_cpp.ENGINE, module.config
    if reasons := gguf_reasons(config, target_layers):
        raise ExportError(
            f"llama.cpp {engine.version} would not serve this head as trained: it " + "; it ".join(reasons)
        )
    with whole_folder(path, overwrite) as folder:
        tensors = write_gguf(module, folder / GGUF_FILE, dtype=dtype, target_file=target_file)
        size = (folder / GGUF_FILE).stat().st_size
        card = model_card(config, {}, report={}, notes=[], serve=serve_lines(config), measuring=MEASURING)
        (folder / "README.md").write_text(card, encoding="utf-8")
        if adapter is not None:
            shutil.copytree(adapter, folder / ADAPTER)
    return ExportReport(Path(path), dtype_name(dtype), len(tensors), size, 0.0)


def serve_lines(config: DraftConfig) -> list[str]:
    """How the card says to serve such a folder."""
    version = ENGINES["llama_cpp"].tested
    lines = [f"llama.cpp, tested with {version}; TARGET.gguf is the target as a GGUF file:", "", "```bash"]
    if "target_adapter" in config.extra:
        lines[0] = (
            f"llama.cpp, tested with {version}; TARGET.gguf is the target **with the adapter in `{ADAPTER}/` merged**, "
            "as a GGUF file:"
        )
    return [*lines, llama_cpp.server_line(config, "THIS_FOLDER"), "```"]
