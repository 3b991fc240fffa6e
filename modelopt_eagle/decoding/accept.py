"""Which drafted tokens the target takes: the greedy walk, or lossless sampling (``sample_and_match``)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from modelopt_eagle.decoding.requests import Request
from modelopt_eagle.decoding.sampling import shape_probabilities
from modelopt_eagle.draft.trees import RoundTree, chain_tree
from modelopt_eagle.kernels import Accepted, repack_accepted, sample_and_match, verify_greedy


@dataclass(frozen=True)
class Choice:
    """One round's acceptance.

    Attributes:
        emitted: tokens of each row, accepted ones and the bonus.
        accepted: how many of them were drafted.
        tokens: ``[B, D+1]`` int64 of the same; places behind a row's tokens hold any valid id.
        features: ``[B, D+1, A·Ht]`` true features of the accepted path, root first.
        last: ``[B]`` int64 the last emitted token.
        path: the accepted nodes, for the KV cache.
    """

    emitted: list[list[int]]
    accepted: list[int]
    tokens: Tensor
    features: Tensor
    last: Tensor
    path: Accepted | None = None


def first_tokens(logits: Tensor, requests: list[Request]) -> Tensor:
    """``[B]`` int64: each request's next token from logits ``[B, V]``."""
    if all(request.sampling.greedy for request in requests):
        return likeliest(logits)
    probabilities = shape_probabilities(logits[:, None], [request.sampling for request in requests])
    root = chain_tree(torch.zeros(len(requests), 1, dtype=torch.int64, device=logits.device))
    return sample_and_match(root, probabilities, draw_uniforms(requests, 1, logits.device)).tokens[:, 0].long()


def likeliest(logits: Tensor) -> Tensor:
    """The first largest logit's token ``[...]`` int64 of ``[..., V]``; -1 where one is NaN, which is no choice."""
    value, token = logits.max(-1)
    return token.masked_fill_(value.isnan(), -1)


def choose_chain(nodes: Tensor, logits: Tensor, features: Tensor, requests: list[Request]) -> Choice:
    """Acceptance of a chain.

    Args:
        nodes: ``[B, K+1]`` int64, the root first.
        logits: ``[B, K+1, V]`` of the target after each.
        features: ``[B, K+1, A·Ht]``.
    """
    if not all(request.sampling.greedy for request in requests):
        return _choice(_sample(RoundTree(chain_tree(nodes), None), logits, requests), features)
    predict = likeliest(logits)  # [B,K+1]
    agreed = (predict[:, :-1] == nodes[:, 1:]).cumprod(1).sum(1)  # [B]
    accepted = agreed.tolist()
    emitted = [row[: count + 1] for row, count in zip(predict.tolist(), accepted, strict=True)]
    last = predict.gather(1, agreed[:, None])[:, 0]  # [B]
    return Choice(emitted, accepted, predict.clamp(min=0), features, last)


def choose_tree(drafted: RoundTree, logits: Tensor, features: Tensor, requests: list[Request]) -> Choice:
    """Acceptance of a tree; logits ``[B, N, V]`` and features ``[B, N, A·Ht]`` by node."""
    if all(request.sampling.greedy for request in requests):
        return _choice(verify_greedy(drafted.tree, likeliest(logits)), features)
    return _choice(_sample(drafted, logits, requests), features)


def draw_uniforms(requests: list[Request], count: int, device: torch.device) -> Tensor:
    """``[B, count]`` float64 in [0, 1), each row from its request's own stream (0 for greedy rows)."""
    return torch.stack([request.uniforms(count) for request in requests]).to(device)


def _sample(drafted: RoundTree, logits: Tensor, requests: list[Request]) -> Accepted:
    probabilities = shape_probabilities(logits, [request.sampling for request in requests])  # [B,N,V]
    uniforms = draw_uniforms(requests, drafted.tree.depth_limit() + 1, logits.device)
    return sample_and_match(drafted.tree, probabilities, uniforms)


def _choice(path: Accepted, features: Tensor) -> Choice:
    accepted = path.num_accepted.tolist()
    emitted = [row[: count + 1] for row, count in zip(path.tokens.tolist(), accepted, strict=True)]
    last = path.tokens.long().gather(1, path.num_accepted.long()[:, None])[:, 0]  # [B]
    packed = repack_accepted(features, path.nodes, path.num_accepted)  # [B,D+1,A·Ht]
    return Choice(emitted, accepted, path.tokens.long().clamp(min=0), packed, last, path)
