"""Heads for the tiny target: a random one, and one that has learnt the target's own answers by heart."""

import torch

from modelopt_eagle.decoding import PlainGenerator
from modelopt_eagle.draft import DraftConfig, DraftVocab, EagleModule
from modelopt_eagle.training import distillation_loss, rollout

PROMPTS = [
    [5, 9, 33, 70],
    [100, 3, 50, 60, 70, 80, 90],
    [7],
    [44, 45, 46, 47, 48, 49],
    [200, 13],
    [90, 30, 60, 120, 180],
]

LLAMA_SIZES = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=0,
)
"""A small target of the names that most families share."""


def make_head(target, seed=1, draft_vocab_size=None, **overrides) -> EagleModule:
    """A random head; a reduced vocabulary takes every other token first."""
    torch.manual_seed(seed)
    config = DraftConfig.from_target(target.config, draft_vocab_size=draft_vocab_size, **overrides)
    vocab = None
    if draft_vocab_size is not None:
        counts = torch.arange(target.vocab_size) % 2 + 0.5
        vocab = DraftVocab.from_counts(counts, draft_vocab_size, [0, 1, 2, 3])
    return EagleModule(config, vocab).eval()


def learn_answers(target, head, prompts, length=48, updates=110) -> EagleModule:
    """Train a head until it knows the target's greedy answers to these prompts."""
    answers = PlainGenerator(target).generate(prompts, length, eos_token_id=[]).tokens
    rows = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt + answer])  # [1,S]
        features = target.features(ids, None, head.config.aux_layer_ids)
        supervised = torch.zeros_like(ids, dtype=torch.bool)
        supervised[:, len(prompt) :] = True
        rows.append((ids, supervised, features.aux_hidden, features.final_hidden))
    ids = torch.cat([row[0] for row in rows], 1)  # [1,N]
    documents = torch.cat([torch.full_like(row[0], i) for i, row in enumerate(rows)], 1)
    supervised, aux, final = (torch.cat([row[i] for row in rows], 1) for i in (1, 2, 3))
    embeddings = target.embedding(ids)
    optimizer = torch.optim.AdamW(head.parameters(), lr=4e-3)
    head.train()
    for _ in range(updates):
        output = rollout(head, embeddings, aux, 3, documents, supervised=supervised)
        loss = distillation_loss(output, head, supervised, target_hidden=final, target_lm_head=target.lm_head_weight)
        optimizer.zero_grad()
        loss.loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
    return head.eval()
