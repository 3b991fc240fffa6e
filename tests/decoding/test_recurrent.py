"""Targets with recurrent layers: chains are verified without loss, trees and ragged rows are refused by name."""

import pytest
import torch
import transformers
from heads import LLAMA_SIZES, make_head
from oracle import install

from modelopt_eagle.decoding import PlainGenerator, PseudoSpeculativeGenerator
from modelopt_eagle.decoding.recurrent import continues
from modelopt_eagle.decoding.rounds import DraftedRounds
from modelopt_eagle.errors import DecodingError
from modelopt_eagle.target.model import Target

VOCAB = 96
BASE = dict(LLAMA_SIZES, vocab_size=VOCAB, max_position_embeddings=256)
KINDS = {
    "lfm2": ("Lfm2", dict(layer_types=["conv", "conv", "full_attention"] * 2, conv_L_cache=3, block_multiple_of=8)),
    "lfm3, windows": (
        "Lfm3",
        dict(
            layer_types=["conv", "sliding_attention", "full_attention"] * 2,
            conv_L_cache=3,
            head_dim=8,
            sliding_window=8,
        ),
    ),
    "qwen3-next": (
        "Qwen3Next",
        dict(
            layer_types=["linear_attention", "linear_attention", "full_attention"] * 2,
            head_dim=8,
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        ),
    ),
    "falcon-h1": (
        "FalconH1",
        dict(head_dim=8, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_chunk_size=8),
    ),
    "jamba": (
        "Jamba",
        dict(
            attn_layer_period=3,
            attn_layer_offset=2,
            expert_layer_period=2,
            expert_layer_offset=1,
            num_experts=2,
            num_experts_per_tok=1,
            mamba_d_state=4,
            mamba_dt_rank=4,
            use_mamba_kernels=False,
        ),
    ),
    "mamba2, no attention": ("Mamba2", dict(state_size=8, num_heads=8, head_dim=8, n_groups=1, chunk_size=8)),
}
PROMPTS = [[5, 9, 33, 70], [90, 3, 50, 60, 70, 80, 91, 11, 12, 13, 14], [7]]
LENGTH = 20


def build(kind):
    name, options = KINDS[kind]
    config = getattr(transformers, name + "Config")(**{**BASE, **options})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = getattr(transformers, name + "ForCausalLM")._from_config(config, dtype=torch.float32)
        for parameter_name, weight in model.named_parameters():
            if weight.dim() == 2 and "A_log" not in parameter_name:
                scale = 1.0 if "embed" in parameter_name else 1.5 * weight.shape[-1] ** -0.5
                torch.nn.init.normal_(weight, 0, scale)
    model.generation_config.eos_token_id = None
    return Target(model, None, name=kind)


@pytest.fixture(scope="module", params=KINDS)
def pair(request):
    """A target and what ``generate`` answers."""
    target = build(request.param)
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = target.model.generate(
            ids, max_new_tokens=LENGTH, do_sample=False, attention_mask=torch.ones_like(ids), pad_token_id=0
        )
        answers.append(out[0, len(prompt) :].tolist())
    assert max(len(set(answer)) for answer in answers) > 3  # no constant text
    return target, answers


def test_chains_are_verified_without_loss(pair, monkeypatch):
    target, answers = pair
    head, seen = make_head(target), set()
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert PlainGenerator(target).generate([prompt], LENGTH).tokens == [answer]
        for options in (dict(num_steps=3), dict(mode="tree", topk=1, depth=3)):
            with monkeypatch.context() as patch:
                install(patch, [prompt], [answer + [0] * 4], VOCAB)
                output = PseudoSpeculativeGenerator(target, head, **options).generate([prompt], LENGTH)
            assert output.tokens == [answer], options
            seen.update(output.accepted_lengths[0])
    assert seen >= {0, 3}  # drafts were taken whole and not at all
    same = PlainGenerator(target).generate([PROMPTS[0], PROMPTS[0]], [LENGTH, 5]).tokens
    assert same == [answers[0], answers[0][:5]]  # a row that leaves takes its state along


def test_the_head_reads_the_features_of_what_was_accepted(pair, monkeypatch):
    """Also where a chain is read token by token, each pass into the same buffer."""
    target, answers = pair
    head, own, counts = make_head(target), DraftedRounds._draft, set()

    def draft(self, requests):
        text = torch.tensor([requests[0].prompt + requests[0].tokens])
        read = target.features(text[:, : self.lengths[0]], None, head.config.aux_layer_ids).aux_hidden[0]  # [S,A·Ht]
        found = self.features[0, : self.counts[0]]
        torch.testing.assert_close(found, read[-self.counts[0] :], atol=1e-3, rtol=1e-3)
        counts.add(self.counts[0])
        return own(self, requests)

    install(monkeypatch, PROMPTS[:1], [answers[0] + [0] * 4], VOCAB)
    monkeypatch.setattr(DraftedRounds, "_draft", draft)
    output = PseudoSpeculativeGenerator(target, head, num_steps=3).generate(PROMPTS[:1], LENGTH)
    assert output.tokens == [answers[0]] and counts == {1, 2, 4}  # the head reads after rejections, too


def test_drawn_chains_too(pair):
    target, _ = pair
    generator = PseudoSpeculativeGenerator(target, make_head(target), sample_drafts=True)
    output = generator.generate(PROMPTS[:1], LENGTH, 1e-4, seed=1)
    assert output.tokens == PlainGenerator(target).generate(PROMPTS[:1], LENGTH).tokens


def test_trees_and_ragged_rows_are_refused(pair):
    target, _ = pair
    head = make_head(target)
    with pytest.raises(DecodingError, match="trees with siblings: its recurrent layers"):
        PseudoSpeculativeGenerator(target, head, "tree", topk=2, depth=2)
    with pytest.raises(DecodingError, match="different lengths together: its recurrent layers"):
        PlainGenerator(target).generate(PROMPTS, 4)
    with pytest.raises(DecodingError, match="2 prompts one a call"):
        PseudoSpeculativeGenerator(target, head).generate([PROMPTS[0], PROMPTS[0]], 4)


def test_which_go_on_from_their_state():
    assert continues(build("lfm2"), "past_key_values") and continues(build("falcon-h1"), "past_key_values")
