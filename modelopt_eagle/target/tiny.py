"""A tiny Llama target with a byte tokenizer, built in about a second: for unit tests, documentation and benchmarks."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from modelopt_eagle.target.model import Target

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>")  # ids 0..3

CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_byte_tokenizer():
    """Build a byte tokenizer of 247 ids that encodes every text without loss.

    Ids 0..3 are ``<|endoftext|>`` (padding), ``<|im_start|>`` (bos), ``<|im_end|>`` (eos) and ``<unk>``; the 243
    byte values that UTF-8 uses follow in ascending order. Its chat template is ChatML without generation tags.

    Returns:
        A ``PreTrainedTokenizerFast``.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    utf8_bytes = [b for b in range(256) if b not in (0xC0, 0xC1) and b < 0xF5]  # the others never occur in UTF-8
    vocabulary = {token: i for i, token in enumerate(SPECIAL_TOKENS)}
    for byte in utf8_bytes:
        vocabulary[_byte_character(byte)] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|endoftext|>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        chat_template=CHATML_TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def _byte_character(byte: int) -> str:
    """The printable character that GPT-2's byte-level tokenizers use for a byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printable:
        return chr(byte)
    return chr(256 + [b for b in range(256) if b not in printable].index(byte))


def make_tiny_target(
    path: str | Path | None = None,
    *,
    layers: int = 8,
    hidden: int = 64,
    vocab: int = 256,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 128,
    max_positions: int = 2048,
    seed: int = 0,
    tie: bool = False,
) -> Target:
    """Build a random Llama target whose greedy text is varied, and save it when ``path`` is given.

    The global random state is left as it was. The weights depend on ``seed`` and the sizes only.

    Args:
        path: folder for ``config.json``, ``model.safetensors`` and the tokenizer; None keeps it in memory.
        layers, hidden, heads, kv_heads, intermediate, max_positions: sizes of the Llama model.
        vocab: rows of the embedding, at least 247 (the byte tokenizer's ids); ids beyond those are never encoded.
        seed: of the weights.
        tie: share the embedding with the output head.

    Returns:
        A frozen float32 ``Target`` on the CPU, named "tiny" (or after the folder).

    Raises:
        TargetError: ``vocab`` is smaller than the tokenizer.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    from modelopt_eagle.errors import TargetError

    tokenizer = make_byte_tokenizer()
    if vocab < len(tokenizer):
        raise TargetError(f"a tiny target needs vocab >= {len(tokenizer)}, the size of its tokenizer; found {vocab}")
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tie,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    config.architectures = ["LlamaForCausalLM"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).float()
        _scale_weights(model, tie)
    if path is not None:
        path = Path(path)
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
        # AutoTokenizer reads the class from here; written out so that every transformers 5.x picks the same one
        settings = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    return Target(model, tokenizer, name="tiny" if path is None else str(path), source=path)


@torch.no_grad()
def _scale_weights(model, tie: bool) -> None:
    """Redraw the matrices so that the greedy text wanders: strong layers, logits with a spread of about 3."""
    for name, weight in model.named_parameters():
        if weight.dim() < 2:
            continue
        unit = weight.shape[1] ** -0.5
        if "embed_tokens" in name:
            weight.normal_(0, 0.4 if tie else 1.0)
        elif "lm_head" in name:
            weight.normal_(0, 3 * unit)
        else:
            weight.normal_(0, unit if "self_attn" in name else 2 * unit)
