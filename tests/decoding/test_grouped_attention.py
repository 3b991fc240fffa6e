"""The attention lent to targets: sdpa's numbers, no copies of keys and values, given back afterwards."""

import threading

import pytest
import torch
from test_architectures import build
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from modelopt_eagle.decoding import PlainGenerator, PseudoSpeculativeGenerator
from modelopt_eagle.decoding.grouped_attention import NAME, grouped_attention, lent, query_groups
from modelopt_eagle.decoding.masks import beside, causal
from modelopt_eagle.decoding.target_runner import TargetRunner


class Module(torch.nn.Module):
    is_causal = True

    def __init__(self, groups):
        super().__init__()
        self.num_key_value_groups = groups


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 1), (4, 4)])
@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("masked", ["folded", "other groups", "plain", "none"])
def test_equals_sdpa(batch, heads, kv_heads, count, masked):
    groups, width = heads // kv_heads, 11
    pool = torch.randn(batch, 3 * kv_heads, 17, 8)  # strided, as in the cache
    key, value = pool[:, kv_heads : 2 * kv_heads, :width], pool[:, 2 * kv_heads :, :width]
    query = torch.randn(batch, count, heads, 8).transpose(1, 2)
    mask = torch.zeros(batch, 1, count, width)
    mask[..., width - count :] = torch.full((count, count), torch.finfo(torch.float32).min).triu(1)
    module = Module(groups)
    given = {"folded": beside(mask, groups), "other groups": beside(mask, groups + 1), "plain": mask, "none": None}
    expected, _ = sdpa_attention_forward(
        module, query, key, value, None if masked == "none" else mask, scaling=0.3, is_causal=None
    )
    found, weights = grouped_attention(module, query, key, value, given[masked], scaling=0.3, dropout=0.0)
    assert weights is None
    torch.testing.assert_close(found, expected)


class Copies(TorchDispatchMode):
    """The largest tensor made anew, beside the lm_head's logits."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, tensor.numel())
        return result


@pytest.mark.parametrize("kind", ["llama, grouped", "mistral, window", "gemma3, mixed windows"])
def test_verification_copies_no_keys(kind):
    """At 400 tokens of context nothing of the size of a layer's keys is made, and sliding layers read a window."""
    target = build(kind)
    prompt = torch.arange(400)[None] % 128
    sees, depths = causal(4, torch.device("cpu"))
    with torch.inference_mode(), TargetRunner(target, (1, 2), 410, 4) as runner:
        runner.prefill(prompt, [400])
        with Copies() as copies:
            runner.verify(torch.tensor([[1, 2, 3, 4]]), [400], sees, depths)
    config = target.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys = config.num_key_value_heads * 400 * head
    assert copies.largest < keys / 1.5, (copies.largest, keys)


def test_sliding_layers_hand_out_their_window_only():
    target = build("gemma3, mixed windows")
    prompt = torch.arange(60)[None] % 128
    sees, depths = causal(4, torch.device("cpu"))
    widths = []
    with torch.inference_mode(), TargetRunner(target, (), 70, 4) as runner:
        runner.prefill(prompt, [60])
        for layer in runner.cache.layers:
            update = layer.update
            layer.update = lambda *a, update=update, **k: widths.append(update(*a, **k)[0].shape[2]) or update(*a, **k)
        runner.verify(torch.tensor([[1, 2, 3, 4]]), [60], sees, depths)
    assert widths == [10, 64] * 3  # a window of 7 before the root, the root among them, and three more nodes


def test_it_is_lent_for_the_call_only(target, good_head, prompts, greedy):
    config = target.config
    assert config._attn_implementation == "sdpa" and query_groups(target) == 2
    seen = []
    generator = PseudoSpeculativeGenerator(target, good_head)
    output = generator.generate(prompts, 20, on_tokens=lambda *a: seen.append(config._attn_implementation))
    assert output.tokens == [answer[:20] for answer in greedy]
    assert set(seen) == {NAME} and config._attn_implementation == "sdpa"

    def stop(*arguments):
        raise RuntimeError("stop here")

    with pytest.raises(RuntimeError, match="stop here"):
        generator.generate(prompts, 20, on_tokens=stop)
    assert config._attn_implementation == "sdpa"


def test_a_call_inside_a_call_and_threads_share_the_loan(target, prompts, greedy):
    config = target.config

    def inner(*arguments):
        assert PlainGenerator(target).generate(prompts[:1], 5).tokens == [greedy[0][:5]]
        assert config._attn_implementation == NAME  # the outer call still runs

    PlainGenerator(target).generate(prompts[:1], 3, on_tokens=inner)
    assert config._attn_implementation == "sdpa"
    first, second = threading.Event(), threading.Event()

    def hold():
        with lent(target):
            first.set()
            second.wait()

    thread = threading.Thread(target=hold)
    with lent(target):
        thread.start()
        first.wait()
    assert config._attn_implementation == NAME
    second.set()
    thread.join()
    assert config._attn_implementation == "sdpa"


def test_eager_and_other_attention_is_left_alone():
    target = build("llama, eager")
    assert query_groups(target) == 1
    with lent(target):
        assert target.config._attn_implementation == "eager"
