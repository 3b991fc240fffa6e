"""An accepted path moved together in the caches of transformers equals a cache that never saw the tree."""

import pytest
import torch
from test_architectures import build
from transformers import DynamicCache, StaticCache

from modelopt_eagle.decoding.masks import attention_kinds, kind_masks
from modelopt_eagle.decoding.relocate import relocate_cache
from modelopt_eagle.decoding.target_runner import cache_argument
from modelopt_eagle.errors import DecodingError
from modelopt_eagle.kernels import Accepted

PREFIX = [5, 9, 33, 70, 8, 1, 2, 3, 4, 5]
NODES = [11, 12, 13, 14, 15, 16]
PARENTS, DEPTHS = [-1, 0, 0, 1, 2, 4], [0, 1, 1, 2, 2, 3]
PATH = [0, 2, 4, 5]


def read(target, cache, tokens, **more):
    """The target's forward with a cache of transformers."""
    return target.model(torch.tensor([tokens]), use_cache=True, **{cache_argument(target): cache}, **more)


def static_slots(masks, extra):
    """Masks over a static cache also cover its empty slots."""
    lowest = torch.finfo(torch.float32).min
    return torch.nn.functional.pad(masks, (0, extra), value=lowest)


def tree_mask():
    sees = torch.eye(6, dtype=torch.bool)
    for node, parent in enumerate(PARENTS):
        if parent >= 0:
            sees[node] |= sees[parent]
    return sees[None]


def accepted():
    return Accepted(
        num_accepted=torch.tensor([3], dtype=torch.int32),
        nodes=torch.tensor([PATH], dtype=torch.int32),
        tokens=torch.tensor([[13, 15, 16, 1]], dtype=torch.int32),
    )


@pytest.mark.parametrize("name", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ["llama, grouped", "deepseek, latents"])
@torch.inference_mode()
def test_full_attention_caches(kind, name):
    target = build(kind)
    cache = DynamicCache(config=target.config)
    if name == "static":
        cache = StaticCache(config=target.config, max_cache_len=32)
    read(target, cache, PREFIX)
    masks = kind_masks(attention_kinds(target.config), [10], tree_mask(), torch.tensor([DEPTHS]), torch.float32)
    if name == "static":
        masks = static_slots(masks, 32 - 16)
    read(target, cache, NODES, attention_mask=masks, position_ids=torch.tensor([DEPTHS]) + 10)
    relocate_cache(cache, accepted(), torch.tensor([10]), 6)
    fresh = DynamicCache(config=target.config)
    read(target, fresh, PREFIX + [NODES[n] for n in PATH])
    for mine, theirs in zip(cache.layers, fresh.layers, strict=True):
        torch.testing.assert_close(mine.keys[:, :, :14], theirs.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(mine.values[:, :, :14], theirs.values, atol=1e-4, rtol=1e-4)
    if name == "dynamic":
        cache.crop(-2)
        after = read(target, cache, [17]).logits[0, -1]
        torch.testing.assert_close(after, read(target, fresh, [17]).logits[0, -1], atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_sliding_dynamic_cache_that_has_dropped_its_beginning():
    """The window is 7, the prefix 10: keys are counted from the oldest that is still held."""
    target = build("mistral, window")
    cache = DynamicCache(config=target.config)
    cache.activate_past_recording()
    read(target, cache, PREFIX)
    cache.crop(0)
    layer = cache.layers[0]
    held = layer.keys.shape[-2]
    assert layer.is_sliding and held < 10
    full = kind_masks({"sliding_attention": 7}, [10], tree_mask(), torch.tensor([DEPTHS]), torch.float32)
    read(target, cache, NODES, attention_mask=full[..., 10 - held :], position_ids=torch.tensor([DEPTHS]) + 10)
    relocate_cache(cache, accepted(), torch.tensor([10]), 6)
    cache.crop(-2)
    fresh = DynamicCache(config=target.config)
    read(target, fresh, PREFIX + [NODES[n] for n in PATH])
    for mine, theirs in zip(cache.layers, fresh.layers, strict=True):
        torch.testing.assert_close(mine.keys[:, :, -4:], theirs.keys[:, :, -4:], atol=1e-4, rtol=1e-4)
    after, expected = read(target, cache, [17]).logits, read(target, fresh, [17]).logits
    torch.testing.assert_close(after, expected, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_caches_that_lost_tokens_to_the_tree_are_refused():
    target = build("mistral, window")
    forgetful = DynamicCache(config=target.config)
    read(target, forgetful, PREFIX + NODES)
    with pytest.raises(DecodingError, match="activate_past_recording"):
        relocate_cache(forgetful, accepted(), torch.tensor([10]), 6)
    wrapped = StaticCache(config=target.config, max_cache_len=32)
    read(target, wrapped, PREFIX + NODES)
    with pytest.raises(DecodingError, match="pushed out"):
        relocate_cache(wrapped, accepted(), torch.tensor([10]), 6)
    llama = build("llama, grouped")
    short = DynamicCache(config=llama.config)
    with pytest.raises(DecodingError, match="no keys|holds"):
        relocate_cache(StaticCache(config=llama.config, max_cache_len=8), accepted(), torch.tensor([10]), 6)
    read(llama, short, PREFIX[:3])
    with pytest.raises(DecodingError, match="holds 3 tokens"):
        relocate_cache(short, accepted(), torch.tensor([0]), 6)
