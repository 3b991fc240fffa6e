"""Greedy parity on targets of many kinds: grouped heads, windows, mixed layers, MLA, experts, eager attention."""

import pytest
import torch
import transformers
from heads import LLAMA_SIZES, make_head
from oracle import install

from modelopt_eagle.decoding import PlainGenerator, PseudoSpeculativeGenerator
from modelopt_eagle.decoding.target_runner import TargetRunner
from modelopt_eagle.errors import DecodingError
from modelopt_eagle.target.model import Target

BASE = dict(LLAMA_SIZES, vocab_size=128, max_position_embeddings=512)
MIXED = ["sliding_attention", "full_attention"] * 3
KINDS = {
    "llama, grouped": ("Llama", {}),
    "llama, eager": ("Llama", {"attn_implementation": "eager"}),
    "llama, many heads": ("Llama", {"num_key_value_heads": 4}),
    "mistral, window": ("Mistral", {"sliding_window": 7}),
    "qwen2, mixed windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 7, "layer_types": MIXED}),
    "gemma3, mixed windows": (
        "Gemma3Text",
        {"sliding_window": 7, "layer_types": MIXED, "head_dim": 16, "tie_word_embeddings": False},
    ),
    "deepseek, latents": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 3,
        },
    ),
    "llama4, chunks": (
        "Llama4Text",
        {
            "intermediate_size_mlp": 48,
            "head_dim": 8,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "no_rope_layer_interval": 2,
            "attention_chunk_size": 5,
        },
    ),
    "mixtral, experts": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
CLASSES = {"Gemma3Text": "Gemma3ForCausalLM", "Llama4Text": "Llama4ForCausalLM"}
PROMPTS = [[5, 9, 33, 70], [100, 3, 50, 60, 70, 80, 90, 11, 12, 13, 14], [7]]
LENGTH = 22
MODES = [dict(num_steps=3), dict(mode="tree", topk=3, depth=3, num_nodes=12)]


def build(kind):
    name, options = KINDS[kind]
    config = getattr(transformers, name + "Config")(**{**BASE, **options})
    model_class = getattr(transformers, CLASSES.get(name, name + "ForCausalLM"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = model_class._from_config(config, dtype=torch.float32)
        for parameter_name, weight in model.named_parameters():
            if weight.dim() >= 2:
                scale = 1.0 if "embed" in parameter_name else 2.0 * weight.shape[-1] ** -0.5
                torch.nn.init.normal_(weight, 0, scale)
    model.generation_config.eos_token_id = None
    return Target(model, None, name=kind)


def greedy_answers(target):
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = target.model.generate(
            ids, max_new_tokens=LENGTH, do_sample=False, attention_mask=torch.ones_like(ids), pad_token_id=0
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_parity(kind, monkeypatch):
    """B147, B160: token for token, with drafts of which some are accepted and some are not, in ragged batches."""
    target = build(kind)
    answers = greedy_answers(target)
    assert len(set(answers[0])) > 4  # no constant text
    assert PlainGenerator(target).generate(PROMPTS, LENGTH).tokens == answers
    install(monkeypatch, PROMPTS, answers, 128)
    for options in MODES:
        output = PseudoSpeculativeGenerator(target, make_head(target), **options).generate(PROMPTS, LENGTH)
        assert output.tokens == answers, options
        seen = {accepted for row in output.accepted_lengths for accepted in row}
        assert seen == {0, 1, 2, 3}, options  # the drafts were put to the test


@pytest.mark.parametrize(
    "kind", ["llama, grouped", "mistral, window", "gemma3, mixed windows", "llama4, chunks", "deepseek, latents"]
)
def test_tree_verification_equals_every_path_on_its_own(kind):
    """Logits of each node: as if its path alone had been read (fp32)."""
    target = build(kind)
    prefix = [[5, 9, 33, 70, 8, 1, 2, 3, 4, 5, 6], [100, 3, 50]]
    parents, depths = [-1, 0, 0, 1, 1, 3], [0, 1, 1, 2, 2, 3]
    tokens = torch.tensor([[11, 12, 13, 14, 15, 16], [21, 22, 23, 24, 25, 26]])
    sees = torch.eye(6, dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            sees[node] |= sees[parent]
    with torch.inference_mode(), TargetRunner(target, (1, 2), 32) as runner:
        padded = torch.tensor([row + [0] * (11 - len(row)) for row in prefix])
        runner.prefill(padded, [11, 3])
        logits, aux = runner.verify(tokens, [11, 3], sees[None], torch.tensor([depths]))
        for row in range(2):
            for node in range(6):
                path = [tokens[row, other].item() for other in range(6) if sees[node, other]]
                alone = torch.tensor([prefix[row] + path])
                with target.capture((1, 2)) as captured:
                    expected = target.model(alone, use_cache=False).logits[0, -1]
                torch.testing.assert_close(logits[row, node], expected, atol=2e-4, rtol=1e-4)
                torch.testing.assert_close(aux[row, node], captured.aux_hidden[0, -1], atol=2e-4, rtol=1e-4)


def test_recurrent_targets_are_refused():
    config = transformers.MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=6, state_size=4)
    target = build("llama, grouped")
    target.model = transformers.MambaForCausalLM(config)
    with pytest.raises(DecodingError, match="KV cache"):
        PseudoSpeculativeGenerator(target, None, num_steps=0)
    target = build("qwen2, mixed windows")
    target.config.layer_types = ["linear_attention"] * 6
    with pytest.raises(DecodingError, match="linear_attention"):
        PlainGenerator(target)
    target = build("llama, grouped")
    target.config._attn_implementation = "flash_attention_2"
    with pytest.raises(DecodingError, match="attn_implementation"):
        PlainGenerator(target)
