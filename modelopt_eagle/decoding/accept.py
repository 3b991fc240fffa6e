"""Which drafted tokens the target takes: the greedy walk, lossless sampling, or rejection of drafts that were drawn."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from modelopt_eagle.decoding.requests import Request
from modelopt_eagle.decoding.walk import choose, draw_uniforms, likeliest, reject_path, sample_path
from modelopt_eagle.draft.trees import RoundTree, SampledDraft, chain_tree
from modelopt_eagle.kernels import Accepted, repack_accepted, verify_greedy


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
    if _plain(requests):
        return likeliest(logits)
    uniforms = draw_uniforms(requests, 1, logits.device)[:, 0]  # [B]
    return choose(logits, requests, uniforms, [[] for _ in requests], list(range(len(requests))))


def choose_chain(nodes: Tensor, logits: Tensor, features: Tensor, requests: list[Request]) -> Choice:
    """Acceptance of a chain.

    Args:
        nodes: ``[B, K+1]`` int64, the root first.
        logits: ``[B, K+1, V]`` of the target after each.
        features: ``[B, K+1, A·Ht]``.
    """
    if not _plain(requests):
        return _choice(sample_path(chain_tree(nodes), logits, requests), features)
    predict = likeliest(logits)  # [B,K+1]
    agreed = (predict[:, :-1] == nodes[:, 1:]).cumprod(1).sum(1)  # [B]
    accepted, emitted = _to_host(agreed, predict)
    last = predict.gather(1, agreed[:, None])[:, 0]  # [B]
    return Choice(emitted, accepted, predict.clamp(min=0), features, last)


def choose_tree(drafted: RoundTree, logits: Tensor, features: Tensor, requests: list[Request]) -> Choice:
    """Acceptance of a tree; logits ``[B, N, V]`` and features ``[B, N, A·Ht]`` by node."""
    if _plain(requests):
        return _choice(verify_greedy(drafted.tree, likeliest(logits)), features)
    return _choice(sample_path(drafted.tree, logits, requests), features)


def choose_sampled(drafted: SampledDraft, logits: Tensor, features: Tensor, requests: list[Request]) -> Choice:
    """Acceptance of drafts that were drawn; logits ``[B, N, V]`` and features ``[B, N, A·Ht]`` by node."""
    return _choice(reject_path(drafted, logits, requests), features)


def _plain(requests: list[Request]) -> bool:
    """Whether all requests take the likeliest token of the target's own logits."""
    return all(request.sampling.greedy and request.processor is None for request in requests)


def _choice(path: Accepted, features: Tensor) -> Choice:
    accepted, emitted = _to_host(path.num_accepted, path.tokens)
    last = path.tokens.long().gather(1, path.num_accepted.long()[:, None])[:, 0]  # [B]
    packed = repack_accepted(features, path.nodes, path.num_accepted)  # [B,D+1,A·Ht]
    return Choice(emitted, accepted, path.tokens.long().clamp(min=0), packed, last, path)


def _to_host(accepted: Tensor, tokens: Tensor) -> tuple[list[int], list[list[int]]]:
    """Accepted drafts ``[B]`` and emitted tokens of ``[B, D+1]`` as lists, in the one copy that a round waits for."""
    rows = torch.cat((accepted[:, None], tokens), 1).tolist()  # [B,D+2]
    return [row[0] for row in rows], [row[1 : row[0] + 2] for row in rows]
