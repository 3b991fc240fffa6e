"""Whether a target, a head, a plan and a batch belong together; asked before anything runs."""

from __future__ import annotations

from modelopt_eagle.common.layers import check_layer_ids
from modelopt_eagle.decoding.requests import Request
from modelopt_eagle.decoding.supported import check_shape, position_limit
from modelopt_eagle.draft.algorithm import algorithm_of
from modelopt_eagle.draft.base import DraftModule
from modelopt_eagle.draft.plan import DraftPlan
from modelopt_eagle.errors import DecodingError
from modelopt_eagle.target.identity import tokenizer_hash
from modelopt_eagle.target.model import Target


def check_pair(target: Target, draft: DraftModule, plan: DraftPlan, sample_drafts: bool = False) -> list[str]:
    """Check that the head was made for this target and can draft this plan.

    Args:
        sample_drafts: whether drafts are to be drawn.

    Returns:
        What a user should know of drafting so with this head.

    Raises:
        DecodingError: other vocabulary, width, tokenizer or layers, a branching above the draft vocabulary, more tokens
            than the head can draft, trees or drawn drafts that it has none of, or a tree that the target cannot read.
        CheckpointError: the head's vocabulary map is unset.
    """
    config = draft.config
    if config.vocab_size != target.vocab_size:
        raise DecodingError(
            f"the head was made for a vocabulary of {config.vocab_size} tokens, {target.name} has "
            f"{target.vocab_size}: use the target that it was trained with ({config.target_name or 'not recorded'})"
        )
    if config.target_hidden_size != target.hidden_size:
        raise DecodingError(
            f"the head reads features of width {config.target_hidden_size}, {target.name} has {target.hidden_size}"
        )
    check_layer_ids(config.aux_layer_ids, target.num_layers)
    if config.tokenizer_hash and target.tokenizer is not None:
        found = tokenizer_hash(target.tokenizer)
        if found != config.tokenizer_hash:
            raise DecodingError(
                f"the head was trained with tokenizer {config.tokenizer_hash}, {target.name} has {found}: its token "
                "ids mean other words; use the target that it was trained with"
            )
    draft.vocab.validate()
    if plan.topk is not None and plan.topk > config.draft_vocab_size:
        raise DecodingError(
            f"topk must be at most the draft vocabulary, {config.draft_vocab_size} tokens, found {plan.topk}"
        )
    check_shape(target, siblings=has_siblings(plan), ragged=False, slots=None)
    algorithm = algorithm_of(config)
    if plan.is_tree and not algorithm.trees:
        raise DecodingError(f'{algorithm.title} heads draft no trees: draft a chain (mode="chain")')
    if sample_drafts and not algorithm.draws:
        raise DecodingError(f"{algorithm.title} heads draft the likeliest tokens only: leave sample_drafts at False")
    return algorithm.check_plan(config, plan)


def has_siblings(plan: DraftPlan) -> bool:
    """Whether a plan's nodes may have siblings."""
    return plan.is_tree and plan.topk > 1


def check_lengths(target: Target, requests: list[Request], plan: DraftPlan, cache_length: int | None) -> int:
    """Slots a request needs: prompt, new tokens and the nodes of the last round. Each request is told how many
    positions its target has.

    Returns:
        The capacity to allocate.

    Raises:
        DecodingError: more than the cache was given, positions that the target was not made for, or rows and trees
            that it cannot read (``supported.py``).
    """
    prompts = [len(request.prompt) for request in requests]
    each = [len(request.prompt) + request.max_new_tokens for request in requests]
    tokens = max(each)
    needed = tokens + plan.num_nodes
    limit = position_limit(target, prompts, each)
    ragged = len(requests) > 1 if plan.depth else len(set(prompts)) > 1
    instead = f"Answer the {len(requests)} prompts one a call (validation.batch_size=1 in a run, else batch_size 1)"
    check_shape(target, has_siblings(plan), ragged, needed, instead)
    if cache_length is not None and needed > cache_length:
        raise DecodingError(
            f"cache_length is {cache_length}, but {needed} slots are needed: {tokens} for prompt and new tokens and "
            f"{plan.num_nodes} for the nodes of a round; raise cache_length, or lower max_new_tokens or num_nodes"
        )
    for request in requests:
        request.position_limit = limit
    return needed
