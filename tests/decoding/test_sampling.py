"""Sampling through drafts leaves the target's distribution alone: χ² over joint sequences, with controls that fail."""

import itertools
import math

import pytest
import torch
from heads import make_head
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from modelopt_eagle.decoding import PseudoSpeculativeGenerator, SamplingOptions, walk
from modelopt_eagle.decoding.requests import Request
from modelopt_eagle.decoding.sampling import shape_probabilities
from modelopt_eagle.target.model import Target

VOCAB, LENGTH, DRAWS = 5, 3, 3000
PROMPT = [1, 3, 0, 2]
OPTIONS = {
    "plain": dict(temperature=1.0),
    "hot": dict(temperature=1.7, top_k=3),
    "nucleus": dict(temperature=0.8, top_p=0.9),
    "min-p": dict(temperature=1.2, min_p=0.15),
}
MODES = {"chain": dict(num_steps=3), "tree": dict(mode="tree", topk=2, depth=3, num_nodes=8)}


@pytest.fixture(scope="module")
def small():
    """A target of five tokens, and a head for it whose drafts are often right."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).float()
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                torch.nn.init.normal_(weight, 0, 0.22 if "lm_head" in name else 0.3)
    model.generation_config.eos_token_id = None
    target = Target(model, None, name="five tokens")
    return target, make_head(target)


@pytest.fixture(scope="module")
def logits(small):
    """The target's logits after every sequence of up to three tokens."""
    target, _ = small
    table = {}
    for length in range(LENGTH):
        for prefix in itertools.product(range(VOCAB), repeat=length):
            ids = torch.tensor([PROMPT + list(prefix)])
            table[prefix] = target.model(ids, use_cache=False).logits[0, -1].detach()
    return table


def joint(logits, options):
    """Exact probabilities [V^LENGTH] of all sequences."""
    shaped = {prefix: shape_probabilities(row[None, None], [options])[0, 0] for prefix, row in logits.items()}
    cells = []
    for sequence in itertools.product(range(VOCAB), repeat=LENGTH):
        cells.append(math.prod(float(shaped[sequence[:k]][sequence[k]]) for k in range(LENGTH)))
    return torch.tensor(cells, dtype=torch.float64)


def draw(small, mode, options, seed=0):
    """Counts [V^LENGTH] of sampled sequences, and the acceptance length."""
    target, head = small
    generator = PseudoSpeculativeGenerator(target, head, **MODES[mode])
    counts = torch.zeros(VOCAB**LENGTH, dtype=torch.float64)
    output = generator.generate([PROMPT] * DRAWS, LENGTH, seed=seed, **options)
    for tokens in output.tokens:
        place = 0
        for token in tokens:
            place = place * VOCAB + token
        counts[place] += 1
    return counts, output.acceptance_length


def deviation(counts, expected):
    """χ² of counts against probabilities as a standard normal number (Wilson and Hilferty); rare cells are pooled."""
    total = counts.sum()
    want = expected * total
    assert not bool(((want == 0) & (counts > 0)).any()), "something impossible was sampled"
    common = want >= 5
    seen = torch.cat((counts[common], counts[~common].sum()[None]))
    want = torch.cat((want[common], want[~common].sum()[None]))
    seen, want = seen[want > 0], want[want > 0]
    chi, freedom = float(((seen - want) ** 2 / want).sum()), len(want) - 1
    return ((chi / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPTIONS)
def test_joint_distribution_is_the_targets(small, logits, mode, name):
    """B145."""
    counts, length = draw(small, mode, OPTIONS[name])
    assert length > 1.15  # drafts are accepted, so the test is about them
    assert deviation(counts, joint(logits, SamplingOptions(**OPTIONS[name]))) < 3.7


@pytest.mark.parametrize("mode", MODES)
def test_control_a_reused_coin_fails(small, logits, mode, monkeypatch):
    fresh = Request.uniforms
    monkeypatch.setattr(Request, "uniforms", lambda self, count: fresh(self, 1).expand(count))
    counts, _ = draw(small, mode, OPTIONS["plain"])
    assert deviation(counts, joint(logits, SamplingOptions(**OPTIONS["plain"]))) > 6


@pytest.mark.parametrize("mode", MODES)
def test_control_accepting_the_likely_fails(small, logits, mode, monkeypatch):
    """A greedy walk in place of a draw."""
    monkeypatch.setattr(walk, "draw_reference", lambda law, uniforms: law.argmax(-1))
    counts, _ = draw(small, mode, OPTIONS["plain"])
    assert deviation(counts, joint(logits, SamplingOptions(**OPTIONS["plain"]))) > 6


@pytest.mark.parametrize("mode", MODES)
def test_control_drawing_after_the_wrong_node_fails(small, logits, mode, monkeypatch):
    """Every node's token drawn from the distribution after the root."""
    monkeypatch.setattr(walk, "visited", lambda logits, rows, node: logits[rows, 0])
    counts, _ = draw(small, mode, OPTIONS["plain"])
    assert deviation(counts, joint(logits, SamplingOptions(**OPTIONS["plain"]))) > 6


def test_a_request_samples_the_same_in_any_company(small):
    target, head = small
    generator = PseudoSpeculativeGenerator(target, head, mode="tree", topk=2, depth=3)
    prompts = [PROMPT, [2], [0, 1, 4]]
    options = dict(temperature=[0.9, 0.0, 1.3], top_p=[1.0, 1.0, 0.8], seed=5)
    together = generator.generate(prompts, 12, **options)
    assert together.tokens == generator.generate(prompts, 12, **options).tokens
    alone = generator.generate(prompts[:1], 12, temperature=0.9, seed=5)
    assert alone.tokens[0] == together.tokens[0] and alone.accepted_lengths[0] == together.accepted_lengths[0]
    greedy = generator.generate(prompts[1:2], 12)
    assert greedy.tokens[0] == together.tokens[1]  # temperature 0 beside sampling rows
    assert generator.generate(prompts, 12, temperature=1.0, seed=6).tokens != together.tokens


def test_shaping_equals_the_warpers_of_transformers():
    torch.manual_seed(0)
    logits = torch.randn(4, 3, 50) * 3
    options = [
        SamplingOptions(0.7, 5, 0.9, 0.0),
        SamplingOptions(1.3, 0, 0.6, 0.05),
        SamplingOptions(1.0, 60, 1.0, 0.2),
        SamplingOptions(0.0, 7, 0.5, 0.5),
    ]
    shaped = shape_probabilities(logits, options)
    torch.testing.assert_close(shaped.sum(-1), torch.ones(4, 3))
    for row, option in enumerate(options[:3]):
        scores = TemperatureLogitsWarper(option.temperature)(None, logits[row])
        if option.top_k:
            scores = TopKLogitsWarper(option.top_k)(None, scores)
        if option.top_p < 1:
            scores = TopPLogitsWarper(option.top_p)(None, scores)
        if option.min_p:
            scores = MinPLogitsWarper(option.min_p)(None, scores)
        torch.testing.assert_close(shaped[row], scores.softmax(-1))
    assert torch.equal(shaped[3].argmax(-1), logits[3].argmax(-1)) and bool((shaped[3].max(-1).values == 1).all())
