"""Heads through the speculators library itself: loaded, computed with, saved by it and read back.

Collected where speculators is installed (scripts/setup_env.sh installs it): see conftest.py.
"""

import pytest
import torch
from safetensors.torch import load_file
from speculators import SpeculatorModel
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from transformers import PreTrainedModel

from modelopt_eagle.export import convert_checkpoint, export_checkpoint, read_head
from modelopt_eagle.target import load_target_tables
from modelopt_eagle.training import rollout
from tests.export.conftest import build_head

SIZES = dict(
    hidden_size=64, target_hidden_size=64, intermediate_size=96, head_dim=16, vocab_size=256, draft_vocab_size=32,
    target_name=None, tokenizer_hash=None,
)  # fmt: skip
STEPS, LENGTH = 3, 12
HEADS = {
    "plain": {},
    "full_vocabulary": {"draft_vocab_size": 256},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "two_layers_with_biases": {"num_hidden_layers": 2, "attention_bias": True, "mlp_bias": True},
    "qk_norm": {"qk_norm": True},
    "qk_norm_two_layers": {"qk_norm": True, "num_hidden_layers": 2, "attention_bias": True},
    "window": {"sliding_window": 64},
    "own_embedding": {"own_embedding": True},
    "wide_heads": {"head_dim": 32},
    "four_captures": {"aux_layer_ids": (0, 2, 4, 7)},
    "llama3_rope": {"rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    }},
}  # fmt: skip


def load_as_speculators(folder, target, monkeypatch):
    """The model that speculators makes of a folder beside its target, and what transformers said about its keys."""
    said, plain = {}, PreTrainedModel.from_pretrained.__func__

    def listening(cls, *arguments, **options):
        model, info = plain(cls, *arguments, output_loading_info=True, **options)
        said.update(info)
        return model

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(listening))
    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    config.speculators_config.verifier.name_or_path = str(target)  # our folder has the name of a hub's model
    model = SpeculatorModel.from_pretrained(folder, config=config)
    monkeypatch.undo()
    return model.float().eval(), said


@pytest.mark.parametrize("kind", HEADS)
def test_loads_without_missing_or_unexpected_keys_and_computes_the_same(tmp_path, tiny_target_dir, monkeypatch, kind):
    head = build_head(**{**SIZES, **HEADS[kind]})
    export_checkpoint(head, None, tmp_path / "universal")
    target = load_target_tables(tiny_target_dir)
    convert_checkpoint(tmp_path / "universal", tmp_path / "out", "speculators", target=target)
    model, said = load_as_speculators(tmp_path / "out", tiny_target_dir, monkeypatch)
    assert not said["missing_keys"] and not said["unexpected_keys"] and not said["mismatched_keys"], said
    assert not any(bool(p.isnan().any()) for p in model.parameters())

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(256, (1, LENGTH), generator=generator)  # [1,S]
    aux = torch.randn(1, LENGTH, head.config.fc_input_size, generator=generator)  # [1,S,A·Ht]
    table = head.embed_tokens.weight if head.config.own_embedding else target.embedding_weight.float()
    with torch.no_grad():
        ours = rollout(head, torch.nn.functional.embedding(ids, table), aux, steps=STEPS)
        theirs = []
        model.lm_head.register_forward_hook(lambda module, given, logits: theirs.append(logits))
        # it reads the hidden state of a token beside the embedding of the next one, which its loader moves there
        moved = torch.cat((ids[:, 1:], torch.zeros_like(ids[:, :1])), dim=1)
        documents = torch.zeros(1, LENGTH, dtype=torch.long)
        model(hidden_states=aux, input_ids=moved, document_ids=documents, ttt_steps=STEPS)
    for step in range(STEPS):
        rows = LENGTH - 1 - step  # the others have no next token
        torch.testing.assert_close(theirs[step][:, :rows], ours.logits(step)[:, :rows], rtol=1e-4, atol=1e-4)


def test_what_speculators_saves_reads_back_as_it_was(tmp_path, tiny_target_dir, monkeypatch):
    """It writes the target's embedding into its folders; the head has none of its own."""
    head = build_head(**SIZES, norm_before_residual=True)
    export_checkpoint(head, None, tmp_path / "universal")
    target = load_target_tables(tiny_target_dir)
    convert_checkpoint(tmp_path / "universal", tmp_path / "out", "speculators", target=target)
    model, _ = load_as_speculators(tmp_path / "out", tiny_target_dir, monkeypatch)
    model.save_pretrained(tmp_path / "theirs")
    assert "embed_tokens.weight" in load_file(tmp_path / "theirs/model.safetensors")
    found = read_head(tmp_path / "theirs")
    assert found.layout == "speculators" and found.config.aux_layer_ids == (1, 3, 4)
    assert found.config.norm_before_residual and found.config.rope_theta == head.config.rope_theta
    for name, tensor in head.state_dict().items():
        assert torch.equal(found.module.state_dict()[name], tensor), name
    convert_checkpoint(tmp_path / "theirs", tmp_path / "back", target=target)
    assert not read_head(tmp_path / "back").config.own_embedding
