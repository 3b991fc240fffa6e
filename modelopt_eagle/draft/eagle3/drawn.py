"""Drafts that are drawn from the head's distribution, for exact rejection: a chain, or T chains below one root.

Which nodes a tree keeps must not depend on what was drawn, else the tokens that are left follow another law than the
one they are judged by. So nothing is ranked and dropped: the root has T children, drawn without replacement, and each
of them is continued by one token a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from modelopt_eagle.draft.module import EagleModule
from modelopt_eagle.draft.plan import DraftPlan
from modelopt_eagle.draft.trees import RoundTree, SampledDraft, branches_tree
from modelopt_eagle.kernels import unpack_mask
from modelopt_eagle.kernels.inverse_cdf import draw_reference

Shape = Callable[[Tensor], Tensor]
"""Logits ``[B, n, Vd]`` to the distributions ``[B, n, Vd]`` that a batch's requests draw from."""


class Layers(Protocol):
    """What drawing needs of a draft loop: the places behind a prefix, and the pass over one layer of nodes."""

    module: EagleModule
    plan: DraftPlan
    target_ids: Tensor

    def places(self, lengths: list[int], device: torch.device) -> Any:
        """Where nodes behind ``lengths`` committed anchors are written."""
        ...

    def logits(self, output: Tensor) -> Tensor:
        """Float32 logits of outputs."""
        ...

    def later(self, tokens: Tensor, state: Tensor, where: Any, layer: int, sees: Tensor | None) -> Tensor:
        """The outputs of one layer of nodes."""
        ...


def draw_draft(
    loop: Layers, output: Tensor, lengths: list[int], roots: Tensor, shape: Shape, uniforms: Tensor
) -> SampledDraft:
    """Draw a draft behind a first step.

    Args:
        loop: with its plan: a chain, or a tree of branching T.
        output: ``[B, H]`` of the first step.
        lengths: B committed anchors.
        roots: ``[B]`` int64.
        shape: from logits to distributions.
        uniforms: ``[B, D, T]`` in [0, 1).

    Returns:
        the tokens, and the distributions that they were drawn from.
    """
    plan, where = loop.plan, loop.places(lengths, output.device)
    branching, batch = plan.topk or 1, len(roots)
    law = shape(loop.logits(output[:, None]))  # [B,1,Vd]
    laws, nodes, rest = [law], [], law[:, 0]
    for sibling in range(branching):  # without replacement
        index = draw_reference(rest, uniforms[:, 0, sibling]).clamp(min=0)  # [B]; of no mass: ``reject_path`` skips it
        rest = without(rest, index)
        nodes.append(loop.target_ids[index])
    node = torch.stack(nodes, 1)  # [B,T]
    tokens = [roots[:, None], node]
    state = loop.module.next_state(output)[:, None].expand(-1, branching, -1)  # [B,T,H]
    own = torch.eye(branching, dtype=torch.bool, device=output.device).expand(batch, -1, -1)  # [B,T,T]
    sees = own
    for layer in range(1, plan.depth):
        output = loop.later(node, state, where, layer, None if branching == 1 else sees)  # [B,T,H]
        law = shape(loop.logits(output))  # [B,T,Vd]
        laws.append(law)
        index = draw_reference(law.flatten(0, 1), uniforms[:, layer].flatten()).clamp(min=0)  # [B*T]
        node = loop.target_ids[index].view(batch, branching)
        tokens.append(node)
        state = loop.module.next_state(output)
        sees = torch.cat((sees, own), -1)  # [B,T,layers*T]
    tree = branches_tree(torch.cat(tokens, 1), branching)
    seen = unpack_mask(tree.mask, tree.num_nodes)  # [B,N,N]
    return SampledDraft(RoundTree(tree, seen), torch.cat(laws, 1), loop.target_ids, branching)


def without(law: Tensor, index: Tensor) -> Tensor:
    """Distributions ``[B, Vd]`` with the drawn entries ``[B]`` taken out."""
    return law.scatter(1, index[:, None], 0.0)
