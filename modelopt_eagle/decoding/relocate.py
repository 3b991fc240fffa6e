"""Moving an accepted tree path together in the target's cache: ours, and the caches of transformers."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from modelopt_eagle.decoding.row_cache import RowCache
from modelopt_eagle.errors import DecodingError
from modelopt_eagle.kernels import Accepted, relocate_kv


def relocate_rows(cache: RowCache, path: Accepted, lengths: list[int]) -> None:
    """Move each row's accepted path behind its prefix of ``lengths`` tokens; one call for all layers if they agree."""
    start = torch.tensor(lengths, device=path.nodes.device)  # [B]
    for tensor in cache.tensors():
        relocate_kv(tensor, path.nodes, path.num_accepted, start)


def relocate_cache(cache: Cache, path: Accepted, lengths: Tensor, num_nodes: int) -> None:
    """The same in a cache of transformers (dynamic, static, sliding), right after the target read the tree.

    The rejected nodes' rows stay behind the path: drop them with ``cache.crop(-(num_nodes - n - 1))`` when all rows
    accepted ``n``, or mask them. A dynamic sliding layer must have been told ``cache.activate_past_recording()``
    before, else it has already dropped the keys that a rejection needs back.

    Args:
        cache: with the N nodes as its newest tokens.
        path: accepted nodes.
        lengths: ``[B]`` int64, tokens before the root.
        num_nodes: N.

    Raises:
        DecodingError: a static sliding layer that has wrapped around, so that tokens were lost to rejected nodes, or
            a layer that keeps no keys.
    """
    for index, layer in enumerate(cache.layers):
        if getattr(layer, "keys", None) is None:
            raise DecodingError(
                f"layer {index} of the cache ({type(layer).__name__}) holds no keys: it was not read yet, or it is "
                "recurrent and cannot take a tree back"
            )
        held = layer.keys.shape[-2]
        seen = int(layer.get_seq_length())  # tokens read so far, nodes included
        dropped = 0
        if getattr(layer, "is_sliding", False):
            if hasattr(layer, "max_cache_len"):
                if seen > layer.max_cache_len:
                    raise DecodingError(
                        f"layer {index}: {seen} tokens went through a static sliding cache of {layer.max_cache_len}; "
                        "what the tree pushed out is lost. Use a dynamic cache, or a longer max_cache_len"
                    )
            else:
                dropped = seen - held
                if dropped > 0 and not getattr(layer, "record_past", False):
                    raise DecodingError(
                        f"layer {index} dropped the oldest keys while the tree was read: call "
                        "cache.activate_past_recording() before"
                    )
        if held < num_nodes:
            raise DecodingError(f"layer {index} holds {held} tokens, fewer than the tree's {num_nodes} nodes")
        relocate_kv([layer.keys, layer.values], path.nodes, path.num_accepted, lengths - dropped)
