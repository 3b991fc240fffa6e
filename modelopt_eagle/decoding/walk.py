"""Walks down a draft that read one row of logits at each visited node: what nobody visits is never shaped.

:func:`sample_path` draws every token from the target and descends while the draft holds what was drawn (the rule of
``sample_and_match``). :func:`reject_path` is for drafts that were drawn themselves: exact rejection against the
distribution that they were drawn from (arXiv 2211.17192; siblings without replacement as in arXiv 2305.09781).
"""

from __future__ import annotations

import torch
from torch import Tensor

from modelopt_eagle.decoding.requests import Request
from modelopt_eagle.decoding.sampling import shape_probabilities
from modelopt_eagle.draft.trees import SampledDraft
from modelopt_eagle.kernels import Accepted, DraftTree
from modelopt_eagle.kernels.inverse_cdf import draw_reference
from modelopt_eagle.kernels.verify_greedy import accepted_fields, find_child_reference, nobody


def sample_path(tree: DraftTree, logits: Tensor, requests: list[Request]) -> Accepted:
    """Choose each token after the nodes of a path, as long as the tree holds what was chosen.

    Args:
        tree: B drafts.
        logits: ``[B, N, V]`` of the target after each node.
        requests: B, with their options, processors and streams.

    Returns:
        the path; the token -1 where logits are not numbers.
    """
    depth, device = tree.depth_limit(), logits.device
    uniforms = draw_uniforms(requests, depth + 1, device)  # [B,D+1]
    node = torch.zeros(len(requests), dtype=torch.int64, device=device)  # [B]
    walking = torch.ones_like(node, dtype=torch.bool)
    said: list[list[int]] = [[] for _ in requests]
    chosen = node
    path: list[Tensor] = []
    out: list[Tensor] = []
    for step in range(depth + 1):
        if step:
            child, exists = find_child_reference(tree.tokens, tree.parents, node, chosen)
            walking = walking & exists
            if nobody(walking):
                break
            node = torch.where(walking, child, node)
        active = visiting(walking)
        row = choose(visited(logits, active, node), [requests[i] for i in active], uniforms[active, step], said, active)
        chosen = torch.full_like(node, -1).index_put((torch.tensor(active, device=device),), row)  # [B]
        path.append(torch.where(walking, node, -1))
        out.append(torch.where(walking, chosen, -1))
    return Accepted(*accepted_fields(path, out, depth))


def reject_path(draft: SampledDraft, logits: Tensor, requests: list[Request]) -> Accepted:
    """Accept drawn tokens with the probability that leaves the target's distribution as it is.

    A child drawn from ``q`` is taken with probability ``min(1, p/q)``; if it is not, ``p`` becomes what is left of it,
    ``max(p - q, 0)``, and its next sibling is asked. After the last one the token is drawn from what is left.

    Args:
        draft: B drafts with the distributions of their nodes.
        logits: ``[B, N, V]``.
        requests: B.
    """
    tree, device, vocab = draft.tree.tree, logits.device, logits.shape[-1]
    batch, depth = len(requests), tree.depth_limit()
    most = draft.branching
    uniforms = draw_uniforms(requests, depth * most + depth + 1, device)
    coins, last = uniforms[:, : depth * most].view(batch, depth, most), uniforms[:, depth * most :]
    rows = torch.arange(batch, device=device)
    node = torch.zeros(batch, dtype=torch.int64, device=device)  # [B]
    walking = torch.ones_like(node, dtype=torch.bool)
    said: list[list[int]] = [[] for _ in requests]
    path: list[Tensor] = []
    out: list[Tensor] = []
    for step in range(depth + 1):
        path.append(torch.where(walking, node, -1))
        p = target_law(logits[rows, node], requests, said, walking)  # [B,V]
        taken, token = torch.zeros_like(walking), torch.full_like(node, -1)
        if step < depth:
            q = p.new_zeros(batch, vocab)
            law = draft.probabilities[rows, node.clamp(max=draft.probabilities.shape[1] - 1)]  # [B,Vd]
            q.scatter_(1, draft.target_ids.expand(batch, -1), law.to(q.dtype))
            child = tree.first_child[rows, node].long()  # [B]
            for sibling in range(most if step == 0 else 1):
                offered = tree.tokens[rows, child.clamp(min=0)].long()[:, None]  # [B,1]
                drawn_from = q.gather(1, offered)[:, 0]  # [B] 0: nothing was left to draw, the child stands for none
                open_ = walking & ~taken & (child >= 0) & (drawn_from > 0)
                hit = open_ & (coins[:, step, sibling] * drawn_from < p.gather(1, offered)[:, 0])
                node, token = torch.where(hit, child, node), torch.where(hit, offered[:, 0], token)
                taken = taken | hit
                p = torch.where((open_ & ~hit)[:, None], left_over(p, q), p)
                q = q.scatter(1, offered, 0.0)
                q = q / q.sum(-1, keepdim=True).clamp_(min=torch.finfo(q.dtype).tiny)
                child = torch.where(open_ & ~hit, tree.next_sibling[rows, child.clamp(min=0)].long(), child)
        drawn = draw_reference(p, last[:, step])  # [B]
        token = torch.where(taken, token, drawn)
        out.append(torch.where(walking, token, -1))
        if any(request.processor is not None for request in requests):
            for row, (walks, value) in enumerate(zip(walking.tolist(), token.tolist(), strict=True)):
                if walks:
                    said[row].append(value)
        walking = walking & taken
        if nobody(walking):
            break
    return Accepted(*accepted_fields(path, out, depth))


def left_over(p: Tensor, q: Tensor) -> Tensor:
    """``[B, V]`` what a rejection leaves of ``p``: ``max(p - q, 0)``, normalised; ``p`` if rounding leaves nothing."""
    rest = (p - q).clamp_(min=0)
    mass = rest.sum(-1, keepdim=True)
    return torch.where(mass > 0, rest / mass, p)


def visiting(walking: Tensor) -> list[int]:
    """Rows whose next token is wanted: those that walk, or all of them where asking would wait for a GPU."""
    if walking.device.type != "cpu":
        return list(range(len(walking)))
    return walking.nonzero()[:, 0].tolist()


def visited(logits: Tensor, rows: list[int], node: Tensor) -> Tensor:
    """The logits ``[b, V]`` of some rows at their nodes ``[B]``."""
    index = torch.tensor(rows, device=logits.device)
    return logits[index, node[index]]


def choose(logits: Tensor, requests: list[Request], uniforms: Tensor, said: list[list[int]], rows: list[int]) -> Tensor:
    """The next token ``[b]`` int64 of some requests: the likeliest, or drawn with ``uniforms [b]``; -1: no numbers.

    Args:
        logits: ``[b, V]``.
        said: tokens of this round so far, of every row of the batch; those chosen here are added.
        rows: places of the b requests in the batch.
    """
    logits = processed(logits, requests, [said[row] for row in rows])
    token = likeliest(logits)  # [b]
    if not all(request.sampling.greedy for request in requests):
        law = shape_probabilities(logits[:, None], [request.sampling for request in requests])[:, 0]  # [b,V]
        greedy = torch.tensor([request.sampling.greedy for request in requests], device=logits.device)
        token = torch.where(greedy, token, draw_reference(law, uniforms))
    if any(request.processor is not None for request in requests):
        for row, value in zip(rows, token.tolist(), strict=True):
            said[row].append(value)
    return token


def target_law(logits: Tensor, requests: list[Request], said: list[list[int]], walking: Tensor) -> Tensor:
    """The distribution ``[B, V]`` float64 that each request draws from, NaN where logits are not numbers."""
    if any(request.processor is not None for request in requests):
        rows = visiting(walking)
        given = processed(logits[rows], [requests[row] for row in rows], [said[row] for row in rows])
        logits = logits.float().index_copy(0, torch.tensor(rows, device=logits.device), given.float())
    law = shape_probabilities(logits[:, None], [request.sampling for request in requests])[:, 0].double()
    return law.masked_fill_(likeliest(logits)[:, None] < 0, float("nan"))


def processed(logits: Tensor, requests: list[Request], said: list[list[int]]) -> Tensor:
    """Logits ``[b, V]`` after each request's own processor, which is shown prompt, answer and the path so far."""
    if all(request.processor is None for request in requests):
        return logits
    rows = []
    for row, request, path in zip(logits, requests, said, strict=True):
        if request.processor is None:
            rows.append(row.float())
            continue
        ids = torch.tensor([request.prompt + request.tokens + path], device=logits.device)  # [1,S]
        rows.append(request.processor(ids, row.float()[None])[0])
    return torch.stack(rows)


def likeliest(logits: Tensor) -> Tensor:
    """The first largest logit's token ``[...]`` int64 of ``[..., V]``; -1 where one is NaN, which is no choice."""
    value, token = logits.max(-1)
    return token.masked_fill_(value.isnan(), -1)


def draw_uniforms(requests: list[Request], count: int, device: torch.device) -> Tensor:
    """``[B, count]`` float64 in [0, 1), each row from its request's own stream (0 for greedy rows)."""
    return torch.stack([request.uniforms(count) for request in requests]).to(device)
