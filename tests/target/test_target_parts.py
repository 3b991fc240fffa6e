"""Parts are found by structure, and a failure lists what came near."""

import pytest
import torch
from target_families import SIZES, make_family
from torch import nn
from transformers import AutoModelForSequenceClassification, LlamaConfig

from modelopt_eagle.errors import TargetError
from modelopt_eagle.target.parts import find_parts


def test_names_and_tying():
    for family, tied in (("llama", False), ("qwen3", True)):
        model = make_family(family)
        parts = find_parts(model, model.config)
        assert parts.names == {
            "backbone": "model",
            "embedding": "model.embed_tokens",
            "layers": "model.layers",
            "final_norm": "model.norm",
            "head": "lm_head",
        }
        assert (parts.head.weight is parts.embedding.weight) == tied


def test_positions_as_long_as_the_vocabulary_are_not_the_token_table():
    model = make_family("gpt2")  # its position table has 128 rows, its token table 96
    parts = find_parts(model, model.config)
    assert parts.names["embedding"] == "transformer.wte" and parts.names["final_norm"] == "transformer.ln_f"


def test_no_fit_lists_near_matches():
    model = make_family("llama")
    model.model.layers = model.model.layers[:4]
    with pytest.raises(TargetError, match=r"6 decoder layers.*found none.\nNear matches:\n  model.layers: 4 modules"):
        find_parts(model, model.config)


def test_a_second_backbone_alike_is_not_taken():
    model = make_family("llama")
    model.talker = make_family("llama").model
    parts = find_parts(model, model.config)
    assert parts.backbone is model.model


def test_no_head():
    config = LlamaConfig(**SIZES)
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    with pytest.raises(TargetError, match="expected an output head of 96 x 32"):
        find_parts(model, config)


def test_an_unnamed_head_is_found_by_its_size():
    model = make_family("llama")
    model.get_output_embeddings = lambda: None
    assert find_parts(model, model.config).head is model.lm_head
    model.other = nn.Linear(32, 96)
    with pytest.raises(TargetError, match="lm_head .*other"):
        find_parts(model, model.config)
