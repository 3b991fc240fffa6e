"""Targets that count places in their cache, or change with the longest row: refused by name, or right."""

import pytest
import torch
import transformers
from heads import LLAMA_SIZES, make_head
from oracle import install

from modelopt_eagle.decoding import PlainGenerator, PseudoSpeculativeGenerator, SamplingOptions
from modelopt_eagle.decoding.masks import attention_kinds
from modelopt_eagle.decoding.requests import Request, StopRule
from modelopt_eagle.errors import DecodingError
from modelopt_eagle.target.model import Target
from modelopt_eagle.validation.dialogues import window

VOCAB = 128
SIZES = dict(LLAMA_SIZES, vocab_size=VOCAB, max_position_embeddings=256)
NEO = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    num_layers=6,
    num_heads=4,
    intermediate_size=48,
    max_position_embeddings=64,
    attention_types=[[["global", "local"], 3]],
    bos_token_id=1,
    eos_token_id=None,
)
LLAMA4 = dict(
    SIZES,
    intermediate_size_mlp=48,
    head_dim=8,
    num_local_experts=2,
    num_experts_per_tok=1,
    no_rope_layer_interval=2,
    attn_scale=0.5,
    attention_chunk_size=64,
)
GPT2 = dict(vocab_size=VOCAB, n_embd=32, n_layer=6, n_head=4, n_positions=26, bos_token_id=1, eos_token_id=None)
OPT = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    ffn_dim=48,
    num_hidden_layers=6,
    num_attention_heads=4,
    word_embed_proj_dim=32,
    max_position_embeddings=26,
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=0,
)
LONGROPE = dict(
    rope_type="longrope",
    rope_theta=10000.0,
    short_factor=[1.0] * 4,
    long_factor=[4.0] * 4,
    original_max_position_embeddings=32,
    factor=8.0,
)
NO_END = dict(bos_token_id=1, eos_token_id=None)
KINDS = {
    "bloom": ("Bloom", dict(vocab_size=VOCAB, hidden_size=32, n_layer=6, n_head=4, **NO_END), "ALiBi"),
    "mpt": (
        "Mpt",
        dict(vocab_size=VOCAB, d_model=32, n_layers=6, n_heads=4, max_seq_len=128, **NO_END),
        "ALiBi",
    ),
    "falcon, alibi": (
        "Falcon",
        dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=6, num_attention_heads=4, alibi=True, **NO_END),
        "ALiBi",
    ),
    "gpt-neo, local": ("GPTNeo", dict(NEO, window_size=7), "window of 7 slots"),
    "llama4, tuned": ("Llama4Text", dict(LLAMA4, floor_scale=8), "scale queries"),
}
WIDE = {"gpt-neo": ("GPTNeo", dict(NEO, window_size=60)), "llama4": ("Llama4Text", dict(LLAMA4, floor_scale=60))}
PROMPTS = [[5, 9, 33, 70], [100, 3, 50, 60, 70, 80, 90, 11, 12, 13, 14], [7]]
CHAIN, TREE = dict(num_steps=3), dict(mode="tree", topk=3, depth=3, num_nodes=12)
CLASSES = {"Llama4Text": "Llama4ForCausalLM", "GPT2": "GPT2LMHeadModel"}


def build(name, options):
    config = getattr(transformers, name + "Config")(**options)
    model_class = getattr(transformers, CLASSES.get(name, name + "ForCausalLM"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = model_class._from_config(config, dtype=torch.float32)
        for parameter_name, weight in model.named_parameters():
            if weight.dim() >= 2:
                table = any(word in parameter_name for word in ("embed", "wte", "wpe"))
                torch.nn.init.normal_(weight, 0, 1.0 if table else 2.0 * weight.shape[-1] ** -0.5)
    model.generation_config.eos_token_id = None
    return Target(model, None, name=name)


def own_text(target, prompts, length):
    """The model's own text, every token from the whole text anew."""
    answers = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = list(prompt)
            for _ in range(length):
                ids.append(int(target.model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
            answers.append(ids[len(prompt) :])
    return answers


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_that_count_slots(kind, monkeypatch):
    """One prompt at a time is right, with accepted drafts; trees and rows of different lengths are refused."""
    name, options, word = KINDS[kind]
    target = build(name, options)
    answers = own_text(target, PROMPTS, 22)
    head = make_head(target)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert PlainGenerator(target).generate([prompt], 22).tokens == [answer]
    assert PlainGenerator(target).generate([PROMPTS[0], PROMPTS[0]], 22).tokens == [answers[0]] * 2
    with pytest.raises(DecodingError, match=f"different lengths together.*{word}.*3 prompts one a call"):
        PlainGenerator(target).generate(PROMPTS, 22)
    with pytest.raises(DecodingError, match="different lengths together"):
        PseudoSpeculativeGenerator(target, head, **CHAIN).generate([PROMPTS[0], PROMPTS[0]], 22)
    with pytest.raises(DecodingError, match=f"trees with siblings.*{word}"):
        PseudoSpeculativeGenerator(target, head, **TREE).generate(PROMPTS[:1], 22)
    seen = set()
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        with monkeypatch.context() as patch:
            install(patch, [prompt], [answer], VOCAB)
            output = PseudoSpeculativeGenerator(target, head, **CHAIN).generate([prompt], 22)
        assert output.tokens == [answer]
        seen.update(output.accepted_lengths[0])
    assert len(seen) > 2  # the drafts were put to the test


@pytest.mark.parametrize("kind", WIDE)
def test_short_texts_are_not_refused(kind, monkeypatch):
    """Where the window or the tuning does not begin, ragged batches and trees are as good as elsewhere."""
    target = build(*WIDE[kind])
    answers = own_text(target, PROMPTS, 22)
    assert PlainGenerator(target).generate(PROMPTS, 22).tokens == answers
    install(monkeypatch, PROMPTS, answers, VOCAB)
    for options in (CHAIN, TREE):
        assert PseudoSpeculativeGenerator(target, make_head(target), **options).generate(PROMPTS, 22).tokens == answers


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
@pytest.mark.parametrize("options", [CHAIN, dict(num_steps=7), TREE], ids=["chain", "long chain", "tree"])
def test_learned_positions_end_with_their_table(kind, options, monkeypatch):
    """The last answers fill the table of 26 places, where drafts reach beyond it."""
    target = build("GPT2", GPT2) if kind == "gpt2" else build("OPT", OPT)
    limits = [26 - len(prompt) for prompt in PROMPTS]
    answers = [own_text(target, [prompt], limit)[0] for prompt, limit in zip(PROMPTS, limits, strict=True)]
    install(monkeypatch, PROMPTS, [answer + [0] * 9 for answer in answers], VOCAB)
    generator = PseudoSpeculativeGenerator(target, make_head(target), **options)
    output = generator.generate(PROMPTS, limits)
    assert output.tokens == answers
    for prompt, accepted in zip(PROMPTS, output.accepted_lengths, strict=True):
        root = len(prompt) + sum(1 + count for count in accepted[:-1])  # place of the last round's root
        assert root + accepted[-1] <= 26  # nothing is counted that has no place
    with pytest.raises(DecodingError, match="made for 26"):
        generator.generate(PROMPTS, 26)


def test_drafts_count_as_far_as_the_target_could_judge_them():
    """Root at position 5 of 8: the drafts at 6, 7 and 8 are judged at 5, 6 and 7, the fourth nowhere."""
    request = Request(0, [1] * 5, 3, SamplingOptions(), None, tokens=[2], position_limit=8)
    assert StopRule([], (), None).accept(request, [3, 4, 5, 6, 7], 4) == [3, 4]
    assert request.accepted == [3] and request.finish_reason == "length"


def test_longrope_stays_on_one_side_of_its_original_length(monkeypatch):
    options = dict(SIZES, rope_parameters=LONGROPE, original_max_position_embeddings=32)
    target = build("Phi3", options)
    head = make_head(target)
    long = [[(7 * place + row) % VOCAB for place in range(33 + row)] for row in range(2)]
    for prompts, length in ((PROMPTS, 21), (long, 20)):
        answers = own_text(target, prompts, length)
        assert PlainGenerator(target).generate(prompts, length).tokens == answers
        for plan in (CHAIN, TREE):
            with monkeypatch.context() as patch:
                install(patch, prompts, [answer + [0] * 4 for answer in answers], VOCAB)
                output = PseudoSpeculativeGenerator(target, head, **plan).generate(prompts, length)
            assert output.tokens == answers
            assert output.accepted > 0
    assert window(target) == 32  # validation leaves longer dialogues out, and counts them
    for generator in (PlainGenerator(target), PseudoSpeculativeGenerator(target, head, **CHAIN)):
        with pytest.raises(DecodingError, match="beyond 32 tokens"):
            generator.generate(PROMPTS[:1], 40)
        with pytest.raises(DecodingError, match="calls of their own"):
            generator.generate([PROMPTS[0], long[0]], 10)


def broken_after(target, place):
    """The target with an embedding of NaN for the answer's token at ``place``, and that answer."""
    answer = PlainGenerator(target).generate(PROMPTS[:1], 12).tokens[0]
    assert answer.index(answer[place]) == place
    with torch.no_grad():
        target.parts.embedding.weight[answer[place]] = float("nan")
    return answer


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
@pytest.mark.parametrize("plan", [None, CHAIN, TREE], ids=["plain", "chain", "tree"])
def test_logits_that_are_no_numbers_are_named(plan, temperature):
    """Also where NaN comes in the middle of an answer; the token before is still handed out."""
    target = build("Llama", SIZES)
    head = make_head(target)
    answer = broken_after(target, 4)
    said = []
    generator = PlainGenerator(target) if plan is None else PseudoSpeculativeGenerator(target, head, **plan)
    with pytest.raises(DecodingError, match="request 0: after 5 new tokens the target's logits are not numbers"):
        generator.generate(PROMPTS[:1], 12, temperature, on_tokens=lambda row, tokens, reason: said.extend(tokens))
    assert said == answer[:5]


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-45, 5e-324])
@pytest.mark.parametrize("plan", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_temperature_near_zero_is_greedy(target, good_head, prompts, greedy, plan, temperature):
    output = PseudoSpeculativeGenerator(target, good_head, **plan).generate(prompts, 30, temperature, seed=1)
    assert output.tokens == [answer[:30] for answer in greedy]


@pytest.mark.parametrize("plan", [CHAIN, dict(mode="tree", topk=2, depth=3)], ids=["chain", "tree"])
def test_a_seed_gives_a_prompt_its_text_at_any_place(target, good_head, prompts, plan):
    generator = PseudoSpeculativeGenerator(target, good_head, **plan)
    forward = generator.generate(prompts, 16, 1.0, seed=3).tokens
    assert generator.generate(prompts[::-1], 16, 1.0, seed=3).tokens == forward[::-1]
    assert generator.generate(prompts[2:3], 16, 1.0, seed=3).tokens == forward[2:3]
    twice = generator.generate([prompts[2], prompts[0], prompts[2]], 16, 1.0, seed=3).tokens
    assert twice[:2] == [forward[2], forward[0]] and twice[2] != twice[0]
    assert generator.generate(prompts[2:3], 16, 1.0, seed=4).tokens != forward[2:3]
    assert generator.generate(prompts[2:3], 16, 1.0, seed=2**64 - 1).tokens != forward[2:3]


def test_each_part_gets_its_own_mode_back(target, good_head, prompts):
    """A head whose norms are frozen in evaluation mode while the rest trains, and likewise a target."""
    parts = [*target.model.modules(), *good_head.modules()]
    for index, part in enumerate(parts):
        part.training = index % 3 == 0
    before = [part.training for part in parts]
    try:
        for plan in (CHAIN, TREE):
            PseudoSpeculativeGenerator(target, good_head, **plan).generate(prompts[:2], 8)
            assert [part.training for part in parts] == before
    finally:
        target.model.eval()
        good_head.eval()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seed": -1}, "seed must be None or an integer from 0"),
        ({"seed": 2**64}, "seed must be"),
        ({"seed": 1.5}, "seed must be"),
        ({"seed": "7"}, "seed must be"),
        ({"temperature": "hot"}, "temperature must be a number, found 'hot'"),
        ({"temperature": None}, "temperature must be a number"),
        ({"temperature": True}, "temperature must be a number"),
        ({"temperature": ["0.7"]}, "temperature must be a number"),
        ({"temperature": 1.0, "top_k": "5"}, "top_k must be a number"),
        ({"temperature": 1.0, "top_k": float("inf")}, "top_k must be an integer"),
        ({"temperature": 1.0, "top_p": b"1"}, "top_p must be a number"),
        ({"temperature": 1.0, "min_p": float("nan")}, "min_p must lie"),
        ({"stop_strings": b"word"}, "list of texts"),
        ({"stop_strings": [b"word"]}, r"list of texts \(str\), found b'word'"),
        ({"stop_strings": [3]}, r"list of texts \(str\)"),
        ({"eos_token_id": 256}, "eos_token_id 256 is no token of tiny: ids are integers from 0 to 255"),
        ({"eos_token_id": [3, -1]}, "eos_token_id -1 is no token"),
        ({"eos_token_id": "</s>"}, "must be a token id or a list"),
        ({"eos_token_id": [1.0]}, "eos_token_id 1.0 is no token"),
        ({"eos_token_id": True}, "eos_token_id True is no token"),
    ],
)
def test_what_is_passed_wrongly_is_named(target, good_head, prompts, options, words):
    for generator in (PlainGenerator(target), PseudoSpeculativeGenerator(target, good_head, **TREE)):
        with pytest.raises(DecodingError, match=words):
            generator.generate(prompts[:1], 4, **options)


def test_options_may_be_tensors(target, good_head, prompts):
    generator = PseudoSpeculativeGenerator(target, good_head)
    plain = generator.generate(prompts[:2], 8, [0.5, 1.0], top_k=[3, 0], seed=1)
    tensors = generator.generate(prompts[:2], 8, torch.tensor([0.5, 1.0]), top_k=torch.tensor([3, 0]), seed=1)
    assert tensors.tokens == plain.tokens
    ends = generator.generate(prompts[:2], 8, eos_token_id=torch.tensor([5, 9]))
    assert ends.tokens == generator.generate(prompts[:2], 8, eos_token_id=[5, 9]).tokens


def test_layers_that_transformers_names_and_nothing_here_reads_are_named_with_the_reason():
    """DeepSeek-V3.2: keys and values of each token, and an index that chooses among them."""
    config = transformers.DeepseekV32Config(num_hidden_layers=6)
    with pytest.raises(DecodingError, match=r"type indexed_attention \(sparse attention, .* exported unmeasured"):
        attention_kinds(config)


def test_layers_that_add_to_the_mask_themselves_run_their_own_attention():
    """Doge; the attention that is lent takes another shape of mask."""
    config = transformers.DogeConfig(**{**SIZES, "keep_window_size": 64})
    torch.manual_seed(3)
    target = Target(transformers.DogeForCausalLM(config).float().eval(), None, name="doge")
    target.model.generation_config.eos_token_id = None
    prompts = [[5, 9, 40, 41], [7, 100, 12]]
    drafted = PseudoSpeculativeGenerator(target, make_head(target), "tree", topk=2, depth=2).generate(prompts, 12)
    assert drafted.tokens == PlainGenerator(target).generate(prompts, 12).tokens


def test_code_that_fails_on_masks_of_ours_is_a_line(monkeypatch):
    target = Target(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).float().eval(), None, name="odd")

    def fails(*given, **named):
        raise KeyError("mamba")

    monkeypatch.setattr(target.layers[2], "forward", fails)
    with pytest.raises(DecodingError, match="odd: LlamaForCausalLM cannot read tokens .*KeyError: 'mamba'.*mode: none"):
        PlainGenerator(target).generate([[5, 9, 40]], 4)
