"""Heads that are built in a moment: width 32 for a target of width 32 and 64 tokens."""

from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from modelopt_eagle.draft import DraftVocab, EagleModule
from modelopt_eagle.draft.algorithm import find_algorithm

collect_ignore = [] if find_spec("speculators") else ["test_speculators.py"]

SIZES = dict(
    hidden_size=32, target_hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, rope_theta=5e4, max_position_embeddings=2048, vocab_size=64, draft_vocab_size=16,
    aux_layer_ids=(1, 3, 4),
    bos_token_id=1, eos_token_id=[2, 5], pad_token_id=0, target_name="someone/target", target_model_type="llama",
    tokenizer_hash="0123456789abcdef", training_length=96,
)  # fmt: skip
LATENT = dict(
    decoder_type="kimik2", num_key_value_heads=4, q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=6,
    qk_rope_head_dim=4, v_head_dim=5,
)  # fmt: skip


def build_head(seed=0, **overrides) -> EagleModule:
    """A random head of EAGLE-3, or of the ``algorithm`` given.

    Every number differs from every other, and the draft vocabulary skips tokens.
    """
    drafter = find_algorithm(overrides.get("algorithm", "eagle3"))
    config = drafter.config(**{**SIZES, **overrides})
    torch.manual_seed(seed)
    size = config.draft_vocab_size
    vocab = None
    if size < config.vocab_size:
        vocab = DraftVocab.from_target_ids(
            torch.arange(size) * 2 + 1 - (torch.arange(size) > 5).long(), config.vocab_size
        )
    module = drafter.module(config, vocab)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if parameter.dim() == 1 else 0.0))
    return module


def stand_in_tables(config, seed=1, num_layers=8):
    """The part of a target's tables that conversion and export read."""
    table = torch.randn(config.vocab_size, config.target_hidden_size, generator=torch.Generator().manual_seed(seed))
    identity = {"model": "someone/target", "num_layers": num_layers, "vocab_size": config.vocab_size}
    return SimpleNamespace(embedding_weight=table, identity=lambda: identity)


@pytest.fixture
def head():
    return build_head()
