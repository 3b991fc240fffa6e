"""Heads for the tiny target: a random one, and one that has learnt the target's own answers by heart."""

import torch

from modelopt_eagle.decoding import PlainGenerator
from modelopt_eagle.draft import DraftConfig, DraftVocab, EagleModule
from modelopt_eagle.draft.algorithm import find_algorithm
from modelopt_eagle.features.batch import FeatureRow, collate, predicting_positions
from modelopt_eagle.features.dump import TargetBackEnd
from modelopt_eagle.recipe import load_recipe
from modelopt_eagle.training import distillation_loss, rollout
from modelopt_eagle.training.step import TeacherTables, TrainingStep, as_step_batch

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


def learn_by_recipe(target, prompts, overrides, *, length=48, updates=80, rate=6e-3, draft_vocab_size=None):
    """Train a head of any drafter, of the shape and by the loss of a recipe, on the greedy answers to these prompts.

    Norms do not begin at 1, so that one taken for another is seen.

    Args:
        overrides: of the recipe, the algorithm among them.
        draft_vocab_size: the most frequent tokens of the answers; ``None``: all.

    Returns:
        the head, in evaluation mode.
    """
    recipe = load_recipe(None, ["model.base_model=none", "data.train_path=none", *overrides])
    algorithm = find_algorithm(recipe.drafter.algorithm)
    answers = PlainGenerator(target).generate(prompts, length, eos_token_id=[]).tokens
    counts = torch.bincount(torch.tensor(sum(answers, [])), minlength=target.vocab_size)
    layers = recipe.eagle.aux_layer_ids or algorithm.default_layers(target.num_layers)
    config = algorithm.head_config(recipe, target.config, draft_vocab_size, layers)
    config.tokenizer_hash = target.identity()["tokenizer_hash"]
    if hasattr(config, "mask_token_id"):
        config.mask_token_id = int((counts == 0).nonzero()[-1])
    vocab = None
    if draft_vocab_size is not None:
        vocab = DraftVocab.from_counts(counts.double() + 0.5, draft_vocab_size, [0, 1, 2, 3])
    torch.manual_seed(3)
    head = algorithm.module(config, vocab)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    rows = []
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids = torch.tensor(prompt + answer)  # [s]
        states = target.features(ids[None], None, layers)
        supervised = torch.arange(len(ids)) >= len(prompt)
        best = target.logits(states.final_hidden[0]).argmax(-1)  # [s]
        top1 = torch.where(predicting_positions(supervised), best, -1)
        rows.append(FeatureRow(str(number), "", ids, supervised, states.aux_hidden[0], states.final_hidden[0], top1))
    batch = collate(rows, TargetBackEnd(target, layers).contract)
    tables = TeacherTables.make(target.embedding.weight, target.head, head.target_ids)
    step = TrainingStep(head, tables, recipe.eagle, settings=algorithm.settings(recipe))
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=rate)
    head.train()
    generator = torch.Generator().manual_seed(0)
    for _ in range(updates):
        placed = as_step_batch(batch)
        counted = step.count_positions(placed, generator)
        optimizer.zero_grad()
        step(placed, counted.double(), generator).loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
    return head.eval()
