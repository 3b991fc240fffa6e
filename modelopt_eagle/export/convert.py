"""``convert_checkpoint``: any known head as the universal folder, speculators', SafeAILab's or llama.cpp's file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelopt_eagle.common.dtypes import dtype_name, parse_dtype
from modelopt_eagle.common.layers import default_layer_ids
from modelopt_eagle.draft import DraftConfig, EagleModule
from modelopt_eagle.draft.algorithm import algorithm_of
from modelopt_eagle.draft.decoders import DECODERS
from modelopt_eagle.draft.dflash.layout import speculators_files as speculators_blocks
from modelopt_eagle.draft.dflash.module import DFlashModule
from modelopt_eagle.errors import ExportError
from modelopt_eagle.export.card import model_card
from modelopt_eagle.export.compare import compare, rebuilt
from modelopt_eagle.export.fitting import table_of, target_identity, with_own_embedding, with_target, without_copy
from modelopt_eagle.export.folders import whole_folder
from modelopt_eagle.export.foreign import ReadOptions
from modelopt_eagle.export.gguf import export_gguf
from modelopt_eagle.export.load import load_draft, read_head
from modelopt_eagle.export.universal import (
    FLAGS,
    MASK,
    NESTED_NORMS,
    RECORD,
    file_tensors,
    own_record,
    universal_config,
)
from modelopt_eagle.export.write import ExportReport, export_checkpoint, write_folder

FORMATS = ("universal", "speculators", "eagle", "gguf")
SPECULATORS_VERSION = "0.9.0"
SPECULATORS_CLASSES = {"eagle3": "Eagle3Speculator", "peagle": "PEagleSpeculator"}
"""Drafter to the architecture that a speculators folder names."""
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def layer_config(config: DraftConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The keys of a plain Llama layer, out of the universal config."""
    data = universal_config(config, dtype)
    for key in ("eagle_config", "eagle_aux_hidden_state_layer_ids", "modelopt_eagle", "target_hidden_size",
                "draft_vocab_size", "architectures", *FLAGS):  # fmt: skip
        data.pop(key, None)
    return data


def check_speculators(config: DraftConfig) -> None:
    """Raise :class:`ExportError` for a head that speculators' model classes cannot hold."""
    if config.algorithm not in SPECULATORS_CLASSES:
        raise ExportError(f"speculators folders are written of {', '.join(SPECULATORS_CLASSES)} and dflash heads")
    if not DECODERS[config.decoder_type].tool_formats:
        raise ExportError(f"speculators has no {config.decoder_type} decoder: convert to universal")
    if config.hidden_size != config.target_hidden_size:
        raise ExportError(
            f"speculators builds fc for the head's own width, this head ({config.hidden_size}) has another than its "
            f"target ({config.target_hidden_size}): convert to universal"
        )
    bare = [key for key, name in NESTED_NORMS.items() if not getattr(config, name)]
    if bare:
        raise ExportError(f"speculators' heads have the norms that {', '.join(bare)} leaves out: convert to universal")
    if config.norm_before_fc and config.fc_norm:
        raise ExportError("speculators allows norm_before_fc or fc_norm, not both: convert to universal")


def speculators_files(module: EagleModule, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and ``config.json`` as speculators 0.9 writes an ``eagle3`` or ``peagle`` head.

    Args:
        module: holds an embedding.
    """
    config = module.config
    kind = config.algorithm
    tensors = file_tensors(module, dtype, "layers")
    tensors = {n: t for n, t in tensors.items() if not ("hidden_norm" in n and not n.startswith("layers.0."))}
    if config.attention_bias:  # its layers give o_proj a bias with the others, Qwen3's too
        biases = [f"layers.{index}.self_attn.o_proj.bias" for index in range(config.num_hidden_layers)]
        tensors.update({name: torch.zeros(config.hidden_size, dtype=dtype) for name in biases})
    data = {
        "architectures": [SPECULATORS_CLASSES[kind]],
        "speculators_model_type": kind,
        "speculators_version": SPECULATORS_VERSION,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in config.aux_layer_ids],
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype_name(dtype),
        **{flag: getattr(config, flag) for flag in FLAGS},  # all of them: its defaults have changed between versions
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": config.target_name, "architectures": []},
        },
        "transformer_layer_config": layer_config(config, dtype),
    }
    for key in algorithm_of(config).file_keys:
        data[key] = data["transformer_layer_config"].pop(key)
    if MASK in tensors:
        tensors[MASK] = tensors[MASK][None, None]  # [1,1,A·Ht]
    return tensors, data


def eagle_files(
    module: EagleModule, dtype: torch.dtype, target_layers: int | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and ``config.json`` as SafeAILab's code reads them.

    Raises:
        ExportError: anything that its code fixes otherwise.
    """
    config = module.config
    on = [flag for flag in FLAGS if getattr(config, flag)]
    wrong = [f"the flag {flag}" for flag in on]
    wrong += [f"{key} false" for key, name in NESTED_NORMS.items() if not getattr(config, name)]
    wrong += ["norms of queries and keys"] if config.qk_norm else []
    wrong += ["a sliding window"] if config.sliding_window else []
    wrong += ["attention biases"] if config.attention_bias or config.mlp_bias else []
    wrong += [f"{config.num_hidden_layers} layers"] if config.num_hidden_layers != 1 else []
    wrong += [f"a {algorithm_of(config).title} head"] if config.algorithm != "eagle3" else []
    wrong += [f"a {config.decoder_type} decoder"] if not DECODERS[config.decoder_type].tool_formats else []
    if wrong:
        raise ExportError(f"SafeAILab's code has no place for {', '.join(wrong)}: convert to universal")
    if target_layers is None:
        raise ExportError(
            "SafeAILab's code captures layers that follow from the target's depth: how many layers has the target? "
            "answer with --base-model or --target-layers"
        )
    usual = default_layer_ids(target_layers)
    if config.aux_layer_ids != usual:
        raise ExportError(
            f"SafeAILab's code captures the outputs of layers {list(usual)} of a target of {target_layers}, the head "
            f"reads {list(config.aux_layer_ids)}: convert to universal"
        )
    tensors = file_tensors(module, dtype, "midlayer")
    vocab = module.vocab
    tensors.update({"d2t": vocab.d2t.cpu().clone(), "t2d": vocab.t2d.cpu().clone()})  # its module always has them
    data = layer_config(config, dtype)
    data.update({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": config.draft_vocab_size})
    if config.hidden_size != config.target_hidden_size:
        data["target_hidden_size"] = config.target_hidden_size
    return tensors, data


def with_embedding_for_speculators(module: EagleModule, target) -> EagleModule:
    """The head with the embedding that a speculators folder always holds: its own, or a copy of the target's.

    speculators 0.9.0 leaves the table of a folder without one uninitialised (under transformers 5.19 and 5.24) and
    says nothing: it looks for numbers that are not finite, and new memory may hold any.

    Raises:
        ExportError: a head that speculators cannot hold, or one without a table whose target is not given.
    """
    check_speculators(module.config)
    if module.config.own_embedding:
        return module
    table = table_of(target)
    if table is None:
        raise ExportError(
            "a speculators folder holds the target's embedding (speculators would compute with whatever lies in memory "
            "instead): which target? answer with --base-model"
        )
    return with_own_embedding(module, table)


def without_record(config: DraftConfig) -> DraftConfig:
    """The config without what other formats have no place for and no number depends on."""
    blank = DraftConfig.__dataclass_fields__
    empty = {name: blank[name].default for name in (*RECORD, *TOKEN_IDS) if name != "extra"}
    if algorithm_of(config).layout is None:  # of a drafter with folders of its own every field shapes the numbers
        empty |= dict.fromkeys(own_record(type(config)))
    return dataclasses.replace(config, **empty, extra={})


def write_checked(
    module: EagleModule,
    path: str | Path,
    files: Callable[[], tuple[dict[str, Tensor], dict[str, Any]]],
    *,
    dtype: torch.dtype,
    overwrite: bool,
    options: ReadOptions,
    adapter: Path | None,
) -> ExportReport:
    """Write a foreign layout, read it back by our reader and compare, as an export does.

    Returns:
        what was written and compared.
    """
    tensors, data = files()
    data_of_card = {} if algorithm_of(module.config).layout else universal_config(module.config, dtype)
    card = model_card(module.config, data_of_card, report={}, notes=[])
    with whole_folder(path, overwrite) as folder:
        write_folder(folder, tensors, {"config.json": data, "README.md": card}, adapter)
        written = load_draft(folder, options=options)
        difference = compare(
            rebuilt(written, without_record(written.config)), rebuilt(module, without_record(module.config)), dtype
        )
        size = (folder / "model.safetensors").stat().st_size
    return ExportReport(Path(path), dtype_name(dtype), len(tensors), size, difference)


def convert_checkpoint(
    source: str | Path,
    path: str | Path,
    to: str = "universal",
    *,
    options: ReadOptions | None = None,
    target=None,
    dtype: str | torch.dtype | None = None,
    strict: bool = True,
    overwrite: bool = False,
    target_file: Path | None = None,
) -> ExportReport:
    """Write any known head in another layout, numbers and vocabulary map unchanged.

    Args:
        source: a head of any layout that :mod:`~modelopt_eagle.export.foreign` knows.
        path: the folder to make.
        to: one of :data:`FORMATS`.
        options: answers to what the source leaves open.
        target: a ``Target``, its tables or their ``identity()``: completes and checks the config, and says how many
            layers there are.
        dtype: of the result; also accepts a source that mixes dtypes.
        strict: as in :func:`~modelopt_eagle.export.load.read_head`.
        target_file: the target as a GGUF file, whose tokenizer a ``gguf`` head repeats.

    Returns:
        what was written, and how it compared with its source.

    Raises:
        CheckpointError: the source cannot be read without guessing.
        ExportError: the layout has no place for this head, or reads back differently.
    """
    if to not in FORMATS:
        raise ExportError(f"format {to!r} is unknown; known are {', '.join(FORMATS)}")
    options = options or ReadOptions()
    if options.target_layers is None:
        options = dataclasses.replace(options, target_layers=target_identity(target).get("num_layers"))
    head = read_head(source, dtype=dtype, strict=strict, options=options)
    dtype = parse_dtype(dtype) or head.module.dtype
    if to == "universal":
        return export_checkpoint(
            head.module, head.config, path, target=target, dtype=dtype, overwrite=overwrite, adapter=head.adapter
        )
    module = without_copy(rebuilt(head.module, with_target(head.config, target)), table_of(target))
    if to == "gguf":
        return export_gguf(
            module, path, dtype=dtype, target_layers=options.target_layers, target_file=target_file,
            overwrite=overwrite, adapter=head.adapter,
        )  # fmt: skip
    if to == "speculators" and isinstance(module, DFlashModule):
        return write_checked(
            module, path, lambda: speculators_blocks(module, dtype), dtype=dtype, overwrite=overwrite,
            options=ReadOptions(), adapter=head.adapter,
        )  # fmt: skip
    if to == "speculators":
        module = with_embedding_for_speculators(module, target)
        return write_checked(
            module, path, lambda: speculators_files(module, dtype), dtype=dtype, overwrite=overwrite,
            options=ReadOptions(layout="speculators"), adapter=head.adapter,
        )  # fmt: skip
    return write_checked(
        module, path, lambda: eagle_files(module, dtype, options.target_layers), dtype=dtype, overwrite=overwrite,
        options=ReadOptions(layout="eagle", target_layers=options.target_layers), adapter=head.adapter,
    )  # fmt: skip
