"""A draft that always says what the target says; heads beyond their declared length; mixed numbers."""

import torch
from heads import make_head

from modelopt_eagle.common.acceptance import acceptance_length, prefix_shares
from modelopt_eagle.decoding import PlainGenerator, PseudoSpeculativeGenerator
from modelopt_eagle.decoding.divergence import first_divergence
from modelopt_eagle.draft.eagle3.draft_loop import DraftLoop
from modelopt_eagle.target.tiny import make_tiny_target


def test_a_draft_that_is_the_target_is_always_accepted(target, head, prompts, monkeypatch):
    """B132: acceptance of a perfect draft is K at every step, as counted and as reported."""
    steps, limit = 3, 24
    answers = PlainGenerator(target).generate(prompts, 40, eos_token_id=[]).tokens
    texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]

    def perfect(self, output, lengths):
        return torch.tensor([text[n + 1 : n + 1 + steps] for text, n in zip(texts, lengths, strict=True)])

    monkeypatch.setattr(DraftLoop, "chain", perfect)
    output = PseudoSpeculativeGenerator(target, head, num_steps=steps).generate(prompts, limit, eos_token_id=[])
    assert output.tokens == [answer[:limit] for answer in answers]
    assert all(set(accepted) == {steps} for accepted in output.accepted_lengths)
    assert acceptance_length(output.accepted_lengths) == steps + 1
    assert prefix_shares(output.accepted_lengths, steps) == [1.0] * steps


def test_a_head_runs_past_its_declared_length(target, prompts, greedy):
    """B85, B87: 32 positions declared, each row goes past 40, and both together past the slots of one."""
    head = make_head(target, max_position_embeddings=32)
    generator = PseudoSpeculativeGenerator(target, head, num_steps=3, cache_length=64)
    output = generator.generate(prompts[:2], 48, eos_token_id=[])
    assert output.tokens == PlainGenerator(target).generate(prompts[:2], 48, eos_token_id=[]).tokens
    cos, sin = head.rotary(torch.tensor([0, 31, 32, 5000]))
    longer_cos, longer_sin = make_head(target, max_position_embeddings=8192).rotary(torch.tensor([0, 31, 32, 5000]))
    assert torch.equal(cos, longer_cos) and torch.equal(sin, longer_sin)


def test_target_and_head_need_not_share_their_numbers(prompts):
    """B70: a target rounded to 8 bits with a float32 head says what it says alone; so does one that runs in bf16."""
    rounded = make_tiny_target()
    with torch.no_grad():
        for parameter in rounded.model.parameters():
            parameter.copy_(parameter.to(torch.float8_e4m3fn).float())
    head = make_head(rounded)
    alone = PlainGenerator(rounded).generate(prompts, 32, eos_token_id=[]).tokens
    assert PseudoSpeculativeGenerator(rounded, head).generate(prompts, 32, eos_token_id=[]).tokens == alone
    half = make_tiny_target()
    half.model.to(torch.bfloat16)
    half.embedding.to(torch.bfloat16)
    assert half.dtype == torch.bfloat16 and head.fc.weight.dtype == torch.float32
    alone = PlainGenerator(half).generate(prompts, 16, eos_token_id=[]).tokens
    drafted = PseudoSpeculativeGenerator(half, head).generate(prompts, 16, eos_token_id=[]).tokens
    for prompt, one, other in zip(prompts, alone, drafted, strict=True):
        parted = first_divergence(half, prompt, one, other)
        assert parted is None or parted.gap <= 0.25  # two steps of bf16 at these logits
