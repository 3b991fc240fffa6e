"""What to draft (``DraftPlan``) and how to sample (``SamplingOptions``), checked before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from modelopt_eagle.errors import DecodingError


def history_size(topk: int, depth: int) -> int:
    """Candidates that a tree of branching T and depth D scores: ``H = T + T²(D-1)``."""
    return topk + topk * topk * (depth - 1)


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
        largest = 1 + history_size(topk, depth)
        if num_nodes is None:
            num_nodes = min(1 + topk * depth, largest)
        _check_integer("num_nodes", num_nodes, 1)
        if not depth + 1 <= num_nodes <= largest:
            raise DecodingError(
                f"num_nodes (N, root included) must lie in [{depth + 1}, {largest}] for topk {topk} and depth {depth} "
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


@dataclass(frozen=True)
class SamplingOptions:
    """How one request turns logits into a token. ``temperature`` 0 is greedy; the filters need a temperature.

    Attributes:
        temperature: divides the logits.
        top_k: keep the k most likely tokens (0: all).
        top_p: keep the smallest set whose mass reaches p (1: all).
        min_p: drop tokens less likely than ``min_p`` times the likeliest (0: none).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):
            raise DecodingError(f"temperature must be finite and at least 0, found {self.temperature}")
        if isinstance(self.top_k, bool) or int(self.top_k) != self.top_k or self.top_k < 0:
            raise DecodingError(f"top_k must be an integer of at least 0 (0: all tokens), found {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise DecodingError(f"top_p must lie in (0, 1], found {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise DecodingError(f"min_p must lie in [0, 1], found {self.min_p}")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature == 0


def per_request(name: str, value, count: int) -> list:
    """One value a request: a single value for all of them, or a sequence of ``count``.

    Raises:
        DecodingError: a sequence of another length.
    """
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != count:
            raise DecodingError(
                f"{name} has {len(value)} values for {count} requests: pass one value, or one a request"
            )
        return list(value)
    return [value] * count


def _check_integer(name: str, value, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise DecodingError(f"{name} must be an integer of at least {least}, found {value!r}")
