"""The rollout and the loss as plainly as they can be written: one anchor at a time, every logit kept.

Slow on purpose. Tests hold the fast paths equal to these in value and gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from modelopt_eagle.draft import EagleModule
from modelopt_eagle.draft.conventions import CONVENTIONS
from modelopt_eagle.training.loss import LossOutput


def document_span(document_ids: Tensor | None, row: int, anchor: int, length: int) -> tuple[int, int]:
    """First token and one past the last token of the document that holds ``anchor`` in batch row ``row``."""
    if document_ids is None:
        return 0, length
    ids = document_ids[row].tolist()
    start = end = anchor
    while start > 0 and ids[start - 1] == ids[anchor]:
        start -= 1
    while end < length and ids[end] == ids[anchor]:
        end += 1
    return start, end


def reference_rollout(
    module: EagleModule, token_embeddings: Tensor, aux_hidden: Tensor, steps: int, document_ids: Tensor | None = None
) -> Tensor:
    """``[K, B, S, H]`` after the final norm, zero where no row exists. One draft layer only."""
    layer = module.layers[0]
    batch, length = token_embeddings.shape[:2]
    rows = [[[torch.zeros_like(token_embeddings[0, 0])] * length for _ in range(batch)] for _ in range(steps)]
    for b in range(batch):
        for anchor in range(length):
            start, end = document_span(document_ids, b, anchor, length)
            keys, values = [], []
            for j in range(start, min(anchor, end - 2) + 1):  # step-0 rows up to the anchor
                _, k, v, _ = _row(module, layer, token_embeddings[b, j + 1], module.fuse(aux_hidden[b, j]), j - start)
                keys.append(k)
                values.append(v)
            state = module.fuse(aux_hidden[b, anchor])
            for step in range(steps):
                if anchor + 1 + step >= end:
                    break
                embedding = token_embeddings[b, anchor + 1 + step]
                q, k, v, residual = _row(module, layer, embedding, state, anchor - start + step)
                if step > 0:
                    keys.append(k)
                    values.append(v)
                repeat, window = q.shape[0] // k.shape[0], module.config.sliding_window or len(keys)
                all_k = torch.stack(keys[-window:]).repeat_interleave(repeat, 1)  # [m,h,d] one key a position
                all_v = torch.stack(values[-window:]).repeat_interleave(repeat, 1)
                weights = (torch.einsum("hd,mhd->hm", q, all_k) * layer.scale).softmax(-1)
                output = layer.combine(torch.einsum("hm,mhd->hd", weights, all_v).flatten(), residual)  # [H]
                rows[step][b][anchor] = module.head_input(output)
                state = module.next_state(output)
    return torch.stack([torch.stack([torch.stack(row) for row in step]) for step in rows])


def _row(module, layer, embedding, state, position):
    cos, sin = module.rotary(torch.tensor([position]))
    q, k, v, residual = layer.project(embedding[None], state[None], cos, sin)
    return q[0], k[0], v[0], residual[0]


def reference_loss(
    hidden: Tensor,
    module: EagleModule,
    supervised: Tensor,
    target_logits: Tensor,
    decay: float | None = None,
    convention: str = "served",
    document_ids: Tensor | None = None,
    *,
    in_vocab_only: bool = False,
    labels: Tensor | None = None,
) -> LossOutput:
    """The loss from the dense ``[K, B, S, H]`` hidden states and the target's full logits ``[B, S, V]``."""
    rule = CONVENTIONS[convention]
    base = rule.decay if decay is None else decay
    ids = module.target_ids
    steps, batch, length = hidden.shape[:3]
    total, per_step, counts, hits, asked = 0.0, [], [], [], []
    for k in range(steps):
        sum_k, count, hit, wanted = hidden.new_zeros(()), 0, 0, 0
        for b in range(batch):
            for i in range(length):
                _, end = document_span(document_ids, b, i, length)
                token = i + k + rule.counted_token
                if i + 1 + k >= end or token >= end or not supervised[b, token]:
                    continue
                wanted += 1
                top = int(target_logits[b, i + 1 + k].argmax())
                if (in_vocab_only or rule.in_vocab_only) and not module.t2d[top]:
                    continue
                p = target_logits[b, i + 1 + k, ids].float().softmax(-1)  # [Vd]
                if labels is not None:
                    if i + 2 + k >= end or not module.t2d[labels[b, i + 2 + k]]:
                        continue
                    p = (ids == labels[b, i + 2 + k]).float()
                log_q = module.lm_head(hidden[k, b, i]).float().log_softmax(-1)
                term = -(p * log_q).sum()
                if rule.subtract_entropy:
                    term = term + torch.special.xlogy(p, p).sum()
                sum_k, count = sum_k + term, count + 1
                hit += int(ids[log_q.argmax()]) == top
        divisor = {"counted": max(count, 1), "mask": count + 1e-5, "all": batch * length}[rule.normaliser]
        per_step.append(sum_k / divisor)
        total = total + base**k * per_step[-1]
        counts.append(count)
        hits.append(hit)
        asked.append(wanted)
    return LossOutput(total, torch.stack(per_step), *(torch.tensor(part) for part in (counts, hits, asked)))
