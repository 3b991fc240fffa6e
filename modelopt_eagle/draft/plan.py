"""``DraftPlan``: the shape of one round of drafting, checked before anything runs."""

from __future__ import annotations

from dataclasses import dataclass

from modelopt_eagle.common.trees import default_tree_nodes, history_size, tree_node_bounds
from modelopt_eagle.errors import DecodingError


@dataclass(frozen=True)
class DraftPlan:
    """The shape of one round of drafting.

    Attributes:
        depth: K drafted tokens of a chain (0: none, plain decoding), or D layers of a tree.
        topk: T, branching of a tree; ``None`` for a chain.
        num_nodes: N, tokens that the target reads a round, root included.
    """

    depth: int
    topk: int | None
    num_nodes: int

    @property
    def is_tree(self) -> bool:
        """Whether this is a dynamic tree."""
        return self.topk is not None

    @property
    def branching(self) -> int:
        """T of a tree, 1 of a chain."""
        return 1 if self.topk is None else self.topk

    @classmethod
    def chain(cls, num_steps: int) -> DraftPlan:
        """A chain of ``num_steps`` drafted tokens; zero is plain decoding through the same code.

        Raises:
            DecodingError: not an integer of at least 0.
        """
        _check_integer("num_steps", num_steps, 0)
        return cls(num_steps, None, num_steps + 1)

    @classmethod
    def tree(cls, topk: int | None, depth: int | None, num_nodes: int | None = None) -> DraftPlan:
        """A dynamic tree; ``num_nodes`` defaults to ``1 + T·D``, cut to what the tree can hold.

        Raises:
            DecodingError: T or D missing or below 1, or N outside ``[D+1, 1+H]``.
        """
        if topk is None or depth is None:
            missing = "topk" if topk is None else "depth"
            raise DecodingError(f"a tree needs topk and depth, {missing} is missing: pass {missing}=... (at least 1)")
        _check_integer("topk", topk, 1)
        _check_integer("depth", depth, 1)
        least, largest = tree_node_bounds(topk, depth)
        if num_nodes is None:
            num_nodes = default_tree_nodes(topk, depth)
        _check_integer("num_nodes", num_nodes, 1)
        if not least <= num_nodes <= largest:
            raise DecodingError(
                f"num_nodes (N, root included) must lie in [{least}, {largest}] for topk {topk} and depth {depth} "
                f"(D+1 and 1+T+T²(D-1)), found {num_nodes}"
            )
        return cls(depth, topk, num_nodes)

    @classmethod
    def from_options(cls, mode: str, num_steps: int, topk, depth, num_nodes) -> DraftPlan:
        """The plan of a generator's options.

        Raises:
            DecodingError: unknown mode, tree options without ``mode="tree"``, or a bad size.
        """
        if mode == "tree":
            return cls.tree(topk, depth, num_nodes)
        if mode != "chain":
            raise DecodingError(f'mode must be "chain" or "tree", found {mode!r}')
        given = [
            name for name, value in (("topk", topk), ("depth", depth), ("num_nodes", num_nodes)) if value is not None
        ]
        if given:
            raise DecodingError(f'{", ".join(given)} given, but mode is "chain": these shape a tree, pass mode="tree"')
        return cls.chain(num_steps)

    @classmethod
    def from_engine_options(
        cls,
        *,
        max_draft_len: int,
        use_dynamic_tree: bool = False,
        dynamic_tree_topk: int | None = None,
        max_total_draft_tokens: int | None = None,
    ) -> DraftPlan:
        """The plan that TensorRT-LLM's ``EagleDecodingConfig`` keys ask for (draft tokens counted without the root).

        Raises:
            DecodingError: ``dynamic_tree_topk`` missing or not positive with ``use_dynamic_tree``, tree keys without
                the switch, or ``max_total_draft_tokens`` outside ``[D, T+T²(D-1)]``.
        """
        if not use_dynamic_tree:
            for name, value in (
                ("dynamic_tree_topk", dynamic_tree_topk),
                ("max_total_draft_tokens", max_total_draft_tokens),
            ):
                if value is not None:
                    raise DecodingError(f"{name} is {value}, but use_dynamic_tree is off: set use_dynamic_tree: true")
            return cls.chain(max_draft_len)
        if dynamic_tree_topk is None or dynamic_tree_topk <= 0:
            raise DecodingError(f"use_dynamic_tree needs dynamic_tree_topk > 0, found {dynamic_tree_topk}")
        if max_total_draft_tokens is not None:
            _check_integer("max_draft_len", max_draft_len, 1)
            largest = history_size(dynamic_tree_topk, max_draft_len)
            if not max_draft_len <= max_total_draft_tokens <= largest:
                raise DecodingError(
                    f"max_total_draft_tokens must lie in [{max_draft_len}, {largest}] for dynamic_tree_topk "
                    f"{dynamic_tree_topk} and max_draft_len {max_draft_len}, found {max_total_draft_tokens}"
                )
        nodes = None if max_total_draft_tokens is None else max_total_draft_tokens + 1
        return cls.tree(dynamic_tree_topk, max_draft_len, nodes)


def _check_integer(name: str, value, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise DecodingError(f"{name} must be an integer of at least {least}, found {value!r}")
