"""``DraftPlan``: the shape of one round of drafting, checked before anything runs."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

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
        max_draft_len: int | None = None,
        use_dynamic_tree: bool = False,
        dynamic_tree_max_topK: int | None = None,
        dynamic_tree_topk: int | None = None,
        max_total_draft_tokens: int | None = None,
        max_batch_size: int | None = None,
        **others,
    ) -> DraftPlan:
        """The plan that TensorRT-LLM's ``Eagle3DecodingConfig`` asks for (draft tokens counted without the root).

        Args:
            max_draft_len: K of a chain, D of a tree.
            use_dynamic_tree: draft a tree.
            dynamic_tree_max_topK: T, the engine's key; then its rules hold: ``max_batch_size`` is given and
                ``max_total_draft_tokens`` lies in ``[D, T·D]``.
            dynamic_tree_topk: T under our own name, with ``max_total_draft_tokens`` in ``[D, T+T²(D-1)]``.
            max_total_draft_tokens: N - 1; default T·D.
            max_batch_size: requests at a time, which the engine allocates for; a plan does not depend on it.
            others: keys of the engine that say nothing about the shape (``ENGINE_KEYS``).

        Raises:
            DecodingError: unknown keys, keys that are missing or contradict each other, or a number out of range.
        """
        _check_others(others)
        if max_draft_len is None:
            raise DecodingError(
                "max_draft_len is missing: the number of drafted tokens of a chain, or layers of a tree"
            )
        _check_integer("max_draft_len", max_draft_len, 1)
        if not isinstance(use_dynamic_tree, bool):
            raise DecodingError(f"use_dynamic_tree must be true or false, found {use_dynamic_tree!r}")
        if max_batch_size is not None:
            _check_integer("max_batch_size", max_batch_size, 1)
        tree_keys = {
            "dynamic_tree_max_topK": dynamic_tree_max_topK,
            "dynamic_tree_topk": dynamic_tree_topk,
            "max_total_draft_tokens": max_total_draft_tokens,
        }
        if not use_dynamic_tree:
            if max_total_draft_tokens == max_draft_len:
                tree_keys.pop("max_total_draft_tokens")  # what the engine fills in for a chain
            for name, value in tree_keys.items():
                if value is not None:
                    raise DecodingError(f"{name} is {value}, but use_dynamic_tree is off: set use_dynamic_tree: true")
            return cls.chain(max_draft_len)
        if dynamic_tree_max_topK is not None and dynamic_tree_topk is not None:
            raise DecodingError("dynamic_tree_max_topK and dynamic_tree_topk both say T: give one of them")
        name = "dynamic_tree_topk" if dynamic_tree_max_topK is None else "dynamic_tree_max_topK"
        topk = dynamic_tree_topk if dynamic_tree_max_topK is None else dynamic_tree_max_topK
        if isinstance(topk, bool) or not isinstance(topk, int) or topk <= 0:
            raise DecodingError(f"use_dynamic_tree needs {name} > 0, found {topk}")
        if dynamic_tree_max_topK is not None and max_batch_size is None:
            raise DecodingError("the engine's dynamic tree needs max_batch_size, the requests it allocates trees for")
        if max_total_draft_tokens is not None:
            _check_integer("max_total_draft_tokens", max_total_draft_tokens, 1)
            largest = history_size(topk, max_draft_len)
            if dynamic_tree_max_topK is not None:
                largest = min(largest, topk * max_draft_len)
            if not max_draft_len <= max_total_draft_tokens <= largest:
                raise DecodingError(
                    f"max_total_draft_tokens must lie in [{max_draft_len}, {largest}] for {name} "
                    f"{topk} and max_draft_len {max_draft_len}, found {max_total_draft_tokens}"
                )
        nodes = None if max_total_draft_tokens is None else max_total_draft_tokens + 1
        return cls.tree(topk, max_draft_len, nodes)


ENGINE_KEYS = (
    "decoding_type",
    "speculative_model",
    "speculative_model_dir",
    "eagle3_one_model",
    "eagle3_layers_to_capture",
    "eagle3_model_arch",
    "greedy_sampling",
    "load_format",
    "max_concurrency",
    "allow_advanced_sampling",
    "num_eagle_layers",
)
"""Keys of TensorRT-LLM's speculative configuration that do not change the shape of a draft."""


def read_engine_options(path: str | Path) -> DraftPlan:
    """The plan of a file of TensorRT-LLM's options, JSON or YAML: its ``speculative_config``, or that section alone.

    Raises:
        DecodingError: no such file, no mapping in it, or see :meth:`DraftPlan.from_engine_options`.
    """
    import yaml

    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise DecodingError(f"{path}: expected JSON or YAML of the engine's options: {error}") from error
    batch = None
    if isinstance(data, dict) and "speculative_config" in data:
        data, batch = data["speculative_config"], data.get("max_batch_size")
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise DecodingError(f"{path}: expected a mapping of options such as max_draft_len: 3, found {data!r}")
    if batch is not None:
        data = {"max_batch_size": batch, **data}
    return DraftPlan.from_engine_options(**data)


def _check_others(others: dict) -> None:
    """Refuse keys that nobody knows, and those that ask for what a plan cannot be."""
    kind = others.get("decoding_type", "Eagle3")
    if kind not in ("Eagle", "Eagle3"):
        raise DecodingError(
            f"decoding_type must be Eagle3 (or Eagle), found {kind!r}: other kinds draft without a head"
        )
    if others.get("eagle_choices"):
        raise DecodingError(
            "eagle_choices is a static tree: use use_dynamic_tree with dynamic_tree_max_topK, or a chain"
        )
    known = (*ENGINE_KEYS, "eagle_choices")
    for name in others:
        if name not in known:
            options = ("max_draft_len", "use_dynamic_tree", "dynamic_tree_max_topK", "max_total_draft_tokens")
            near = get_close_matches(name, (*options, "max_batch_size", *known), 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise DecodingError(f"unknown option {name}{hint}")


def _check_integer(name: str, value, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise DecodingError(f"{name} must be an integer of at least {least}, found {value!r}")
