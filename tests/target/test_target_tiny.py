"""The tiny target is lossless in text, varied in its answers, and always the same."""

import pytest
import torch

from modelopt_eagle.errors import TargetError
from modelopt_eagle.target.tiny import make_byte_tokenizer, make_tiny_target


def test_tokenizer_is_lossless_and_small():
    tokenizer = make_byte_tokenizer()
    assert len(tokenizer) == 247
    for text in ("Hello,  world\n\n", "Ünïcödé 世界 😀 \x00\x7f", " leading", "a\tb\r\n"):
        ids = tokenizer(text).input_ids
        assert len(ids) == len(text.encode()) and tokenizer.decode(ids) == text
    assert tokenizer("<|im_start|>a<|im_end|>").input_ids[::2] == [1, 2]


def test_chat_template_is_chatml(tiny_target):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    text = tiny_target.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("tie", [False, True])
def test_greedy_text_is_varied_and_depends_on_the_prompt(tie):
    target = make_tiny_target(tie=tie)
    x = torch.randint(4, 247, (4, 12))
    out = target.model.generate(
        x, attention_mask=torch.ones_like(x), max_new_tokens=60, do_sample=False, eos_token_id=[]
    )
    answers = [row.tolist() for row in out[:, 12:]]
    assert min(len(set(answer)) for answer in answers) > 15
    assert len({tuple(answer[:8]) for answer in answers}) == 4


def test_weights_depend_on_the_seed_only():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = make_tiny_target().lm_head_weight
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(make_tiny_target().lm_head_weight, first)
    assert not torch.equal(make_tiny_target(seed=1).lm_head_weight, first)


def test_sizes():
    target = make_tiny_target(layers=6, hidden=32, vocab=300, heads=2, kv_heads=1, tie=True)
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (6, 32, 300)
    assert target.lm_head_weight.data_ptr() == target.embedding.weight.data_ptr()
    with pytest.raises(TargetError, match="vocab >= 247"):
        make_tiny_target(vocab=200)
