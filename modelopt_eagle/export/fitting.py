"""A head fitted to its target: its config completed and checked, a copy of the target's embedding found and left out.

Some tools write a copy of that embedding into a head's folder; a head here reads the target's own.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelopt_eagle.draft import DraftConfig, DraftVocab, EagleModule
from modelopt_eagle.draft.base import DraftModule
from modelopt_eagle.draft.build import bare_head
from modelopt_eagle.draft.rotary import check_scaling
from modelopt_eagle.errors import ExportError
from modelopt_eagle.target.identity import other_revision
from modelopt_eagle.target.load import architecture_of

NARROWER = (torch.bfloat16, torch.float16)
"""A copy may have been rounded to one of these when it was saved."""


def table_of(target: Any) -> Tensor | None:
    """``[V, Ht]``: the embedding of a ``Target`` or of its tables; ``None`` for an ``identity()`` or no target."""
    weight = getattr(target, "embedding_weight", None)
    return getattr(getattr(target, "embedding", None), "weight", None) if weight is None else weight


def holds_copy(module: EagleModule, table: Tensor | None) -> bool:
    """Whether the head's own table is the target's ``table [V, Ht]``, as it is or rounded to 16 bits."""
    config = module.config
    if table is None or not config.own_embedding or config.hidden_size != config.target_hidden_size:
        return False
    own, table = module.embed_tokens.weight.detach().cpu().float(), table.detach().cpu()
    if own.shape != table.shape:
        return False
    return any(torch.equal(own, table.to(dtype).float()) for dtype in (table.dtype, *NARROWER))


def with_own_embedding(module: EagleModule, table: Tensor | None) -> EagleModule:
    """The same head with ``table [V, H]`` as its own embedding, or without any for ``None``; ``module`` stays."""
    config = dataclasses.replace(module.config, own_embedding=table is not None)
    state = {name: tensor for name, tensor in module.state_dict().items() if name != "embed_tokens.weight"}
    if table is not None:
        if table.shape != (config.vocab_size, config.hidden_size):
            raise ExportError(
                f"the target's embedding is {list(table.shape)}, the head needs "
                f"[{config.vocab_size}, {config.hidden_size}]: it is a head for another target"
            )
        state["embed_tokens.weight"] = table.detach().to("cpu", module.fc.weight.dtype)
    return bare_head(type(module), config, module.vocab, state)


def without_copy(module: EagleModule, table: Tensor | None) -> EagleModule:
    """The head as it is, or without its own table if that only repeats the target's."""
    return with_own_embedding(module, None) if holds_copy(module, table) else module


def target_identity(target) -> dict[str, Any]:
    """``identity()`` of a target or of its tables, or a dictionary with the same keys; empty for ``None``."""
    if target is None:
        return {}
    return dict(target if isinstance(target, Mapping) else target.identity())


def with_target(config: DraftConfig, target) -> DraftConfig:
    """The config completed from the target it is exported for, and checked against it.

    The declared length becomes at least the target's: the head is served at the target's positions, however short the
    rows it was trained on.

    Raises:
        ExportError: another width, vocabulary, depth or tokenizer.
    """
    config, identity = copy.deepcopy(config), target_identity(target)
    for key, own, what in (
        ("hidden_size", config.target_hidden_size, "hidden states of width"),
        ("vocab_size", config.vocab_size, "a vocabulary of"),
        ("tokenizer_hash", config.tokenizer_hash, "the tokenizer"),
    ):
        if own and identity.get(key) and identity[key] != own:
            raise ExportError(
                f"the head was trained for {what} {own}, the target {identity.get('model')} has {identity[key]}"
            )
    layers = identity.get("num_layers")
    if layers and max(config.aux_layer_ids) >= layers:
        raise ExportError(f"the head reads layers {list(config.aux_layer_ids)}, the target has {layers} (0-based)")
    config.target_name = config.target_name or identity.get("model")
    config.tokenizer_hash = config.tokenizer_hash or identity.get("tokenizer_hash")
    if architecture := architecture_of(target):
        config.extra = {**config.extra, "target_architecture": architecture}
    text = getattr(target, "config", None)
    length = getattr(text, "max_position_embeddings", None)
    if length and config.max_position_embeddings < length:
        config.max_position_embeddings = int(length)
    return config


def target_notes(config: DraftConfig, target) -> list[str]:
    """Other weights than the head was trained for; or, of a head that records no tokenizer, that nothing tells."""
    identity, trained = target_identity(target), config.extra.get("target_revision")
    if "target_adapter" not in config.extra and other_revision(trained, identity.get("revision")):
        return [
            f"the head was trained for another revision of its target ({trained}; {identity.get('model')} is "
            f"{identity['revision']}): where the weights differ, measure it again"
        ]
    named, given = config.target_name, identity.get("model")
    if config.tokenizer_hash or not named or not given or Path(named).name == Path(given).name:
        return []
    return [
        f"the head names {named} as its target and records no tokenizer, the target given is {given}: if they are not "
        "one model, its token ids mean other words, and nothing but the acceptance length tells"
    ]


def with_rope_scaling(config: DraftConfig, rope_scaling: dict[str, Any] | None) -> tuple[DraftConfig, list[str]]:
    """The config with a scaling added for long contexts, and the note that says so.

    Raises:
        CheckpointError: a scaling that no rotary type reads so.
        ExportError: the head was trained with a scaling of its own.
    """
    if rope_scaling is None:
        return config, []
    check_scaling(rope_scaling)
    if config.rope_scaling is not None:
        raise ExportError(
            f"the head was trained with rope_scaling {config.rope_scaling}; adding {rope_scaling} would serve other "
            "numbers than were trained: leave export.rope_scaling empty"
        )
    config = copy.deepcopy(config)
    config.rope_scaling = dict(rope_scaling)
    original = int(rope_scaling.get("original_max_position_embeddings") or config.max_position_embeddings)
    config.rope_scaling.setdefault("original_max_position_embeddings", original)
    stretched = int(original * float(rope_scaling.get("factor", 1.0)))
    config.max_position_embeddings = max(config.max_position_embeddings, stretched)
    kind = rope_scaling.get("rope_type", rope_scaling.get("type"))
    return config, [
        f"rope scaling {kind!r} was added at export and not trained with: the acceptance measured before, on short "
        "contexts, changes with it; measure again with ar_validate.py on the exported folder"
    ]


@torch.no_grad()
def with_vocabulary(head: DraftModule, vocab: DraftVocab) -> tuple[DraftModule, int]:
    """The head under another map: a token that both maps hold keeps its row of ``lm_head``, under its new draft id.

    A token that is new starts with the mean of the old rows, so with a logit in the middle of the others.

    Returns:
        The head, and how many rows were carried over.
    """
    before = head.vocab.to_draft(vocab.target_ids.to(head.d2t.device))  # [Vd] old draft ids, -1: not inside
    kept = before >= 0
    weight = head.lm_head.weight
    rows = torch.where(kept[:, None], weight[before.clamp(min=0)], weight.mean(0, keepdim=True))  # [Vd,H]
    config = dataclasses.replace(head.config, draft_vocab_size=vocab.size)
    state = {**head.state_dict(), "lm_head.weight": rows, "d2t": vocab.d2t.cpu(), "t2d": vocab.t2d.cpu()}
    return bare_head(type(head), config, vocab, state), int(kept.sum())


def with_padded_vocabulary(head: DraftModule, multiple: int) -> tuple[DraftModule, int]:
    """The head with so many more tokens in its draft vocabulary that their number is a multiple.

    The tokens added are the first of the target's that were outside. Their rows are the mean of the others, so their
    logits never exceed the largest: a greedy draft stays what it was.

    Returns:
        The head, and how many tokens were added; the head as it is where nothing is to be added.

    Raises:
        ExportError: the target's vocabulary has not so many tokens.
    """
    config = head.config
    missing = -config.draft_vocab_size % multiple
    if not missing or config.draft_vocab_size == config.vocab_size:
        return head, 0
    outside = (~head.t2d.cpu()).nonzero().flatten()[:missing]
    if len(outside) < missing:
        raise ExportError(
            f"a draft vocabulary of {config.draft_vocab_size} cannot be padded to a multiple of {multiple}: the target "
            f"has {config.vocab_size} tokens; export a head with the full vocabulary, which engines pad themselves"
        )
    ids = torch.cat((head.target_ids.cpu(), outside)).sort().values
    return with_vocabulary(head, DraftVocab.from_target_ids(ids, config.vocab_size))[0], missing
