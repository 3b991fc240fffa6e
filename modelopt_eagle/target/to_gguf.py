"""A target as a float32 GGUF file, for checks in llama.cpp: its own file with the numbers unpacked, or a Llama written.

A file that is written here holds no words, only token numbers: prompts go to the server as ids, answers come as ids.
For use rather than checks, llama.cpp's own converter writes the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from modelopt_eagle.common.package import require_extra
from modelopt_eagle.errors import TargetError
from modelopt_eagle.target.gguf import gguf_file_of
from modelopt_eagle.target.model import Target

CLASSES = ("LlamaForCausalLM",)
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def float32_gguf(target: Target, name: str | Path, path: Path) -> None:
    """Write a target in float32.

    Args:
        target: loaded in float32.
        name: what it was loaded by.
        path: the file to make.

    Raises:
        TargetError: a target that is neither a GGUF file nor a plain Llama.
        MissingExtraError: gguf is not installed.
    """
    require_extra("gguf", "gguf")
    file = gguf_file_of(name)
    if file is not None:
        unpacked_copy(file, path)
    else:
        write_llama(target, path)


def unpacked_copy(file: Path, path: Path) -> None:
    """A GGUF file again, every key as it is and every tensor in float32."""
    from gguf import GGUFReader, GGUFWriter
    from gguf.quants import dequantize

    reader = GGUFReader(file)
    writer = GGUFWriter(path, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key not in ("general.architecture", "general.file_type"):
            entries = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], entries)
    writer.add_file_type(0)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, dequantize(tensor.data, tensor.tensor_type))
    write_out(writer)


def write_llama(target: Target, path: Path) -> None:
    """A plain Llama by its own numbers, with token numbers in the place of words."""
    from gguf import GGUFWriter

    config, stops = target.config, target.end_token_ids
    state = target.model.state_dict()
    odd = sorted(
        name for name in state if name not in NAMES and gguf_name(name) is None and not name.endswith("inv_freq")
    )
    rope: dict[str, Any] = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    plain = rope.get("rope_type", rope.get("type", "default")) == "default"
    kind = type(target.model).__name__
    if kind not in CLASSES or odd or not plain or config.hidden_act != "silu" or not stops:
        why = odd[0] if odd else "a scaled rotary table" if not plain else kind
        raise TargetError(
            f"a GGUF file of this target is not written here ({why}): convert it with llama.cpp's "
            "convert_hf_to_gguf.py --outtype f32, and name the file with --target_gguf"
        )
    heads, keys = config.num_attention_heads, config.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer = GGUFWriter(path, "llama")
    writer.add_file_type(0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(keys)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(float(rope.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0))
    for key, value in token_numbers(config.vocab_size, stops[0]).items():
        writer.add_key_value(key, *value)
    for name, tensor in state.items():
        told = gguf_name(name)
        if told is None or (told == "output.weight" and config.tie_word_embeddings):
            continue
        part, tensor = told.split(".")[-2], tensor.detach().cpu().float()
        if part in ("attn_q", "attn_k"):
            tensor = by_pair(tensor, heads if part == "attn_q" else keys)
        writer.add_tensor(told, tensor.contiguous().numpy())
    write_out(writer)


def token_numbers(size: int, end: int) -> dict[str, tuple[Any, Any, Any]]:
    """A tokenizer's keys with the tokens' numbers in the place of words: ``{key: (value, type, type of entries)}``.

    Args:
        size: of the vocabulary.
        end: the token that ends an answer.
    """
    from gguf import GGUFValueType as Kind

    return {
        "tokenizer.ggml.model": ("gpt2", Kind.STRING, None),
        "tokenizer.ggml.pre": ("default", Kind.STRING, None),
        "tokenizer.ggml.tokens": ([f"t{number}" for number in range(size)], Kind.ARRAY, Kind.STRING),
        "tokenizer.ggml.token_type": ([1] * size, Kind.ARRAY, Kind.INT32),
        "tokenizer.ggml.merges": (["t 0"], Kind.ARRAY, Kind.STRING),
        "tokenizer.ggml.bos_token_id": (end, Kind.UINT32, None),
        "tokenizer.ggml.eos_token_id": (end, Kind.UINT32, None),
    }


def by_pair(weight: Tensor, heads: int) -> Tensor:
    """``[heads·d, n]`` with the two numbers that are rotated together in neighbouring rows; here they are d/2 apart."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)  # [heads,2,d/2,n] -> [heads,d/2,2,n]


def gguf_name(name: str) -> str | None:
    """llama.cpp's name of a Llama's tensor; ``None`` if it has none."""
    if name in NAMES:
        return NAMES[name]
    parts = name.split(".")
    if parts[:2] != ["model", "layers"] or parts[-1] != "weight":
        return None
    own = LAYER_NAMES.get(".".join(parts[3:-1]))
    return f"blk.{parts[2]}.{own}.weight" if own else None


def write_out(writer: Any) -> None:
    """Write what was added, and close."""
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
