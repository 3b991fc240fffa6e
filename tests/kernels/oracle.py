"""Slow answers in plain Python, written from the definitions and from nothing else, for the kernel tests."""

import itertools
import math


def select(scores: list[float], count: int) -> list[int]:
    """Ids of the best scores: score descending, id ascending, NaN last; returned ascending."""

    def key(f: int):
        return (1, 0.0, f) if math.isnan(scores[f]) else (0, -scores[f], f)

    return sorted(sorted(range(len(scores)), key=key)[:count])


def tree(scores, tokens, parent_list, num_nodes, topk, root=-1) -> dict:
    """The fields of a DraftTree for one row, by walking from child to parent; the mask as booleans."""
    flat = select(scores, num_nodes - 1)
    node_of = {f: n + 1 for n, f in enumerate(flat)}
    parents, depths, children = [-1], [0], {n: [] for n in range(num_nodes)}
    for f in flat:
        parent = 0 if f < topk else node_of[parent_list[f // topk]]
        parents.append(parent)
        depths.append(depths[parent] + 1)
        children[parent].append(node_of[f])
    attends = []
    for node in range(num_nodes):
        line, at = [False] * num_nodes, node
        while at >= 0:
            line[at] = True
            at = parents[at]
        attends.append(line)
    next_sibling = [-1] * num_nodes
    for brothers in children.values():
        for older, younger in itertools.pairwise(brothers):
            next_sibling[older] = younger
    return {
        "tokens": [root] + [tokens[f] for f in flat],
        "flat_ids": flat,
        "parents": parents,
        "depths": depths,
        "first_child": [min(children[n], default=-1) for n in range(num_nodes)],
        "next_sibling": next_sibling,
        "attends": attends,
    }


def walk(tree_fields: dict, predict: list[int], depth: int) -> tuple[int, list[int], list[int]]:
    """The greedy walk over first_child and next_sibling: number accepted, path and emitted tokens, -1 padded."""
    node, path, out = 0, [0], [predict[0]]
    while True:
        child = tree_fields["first_child"][node]
        while child != -1 and tree_fields["tokens"][child] != predict[node]:
            child = tree_fields["next_sibling"][child]
        if child == -1:
            break
        node = child
        path.append(node)
        out.append(predict[node])
    padding = [-1] * (depth + 1 - len(path))
    return len(path) - 1, path + padding, out + padding


def children(tree_fields: dict, node: int) -> list[int]:
    """Children of a node in sibling order, over the links."""
    found, child = [], tree_fields["first_child"][node]
    while child != -1:
        found.append(child)
        child = tree_fields["next_sibling"][child]
    return found


def draw(masses: list[float], uniform: float) -> int:
    """First token whose cumulated mass exceeds ``uniform`` times the row's mass; the last one with mass, else -1."""
    goal, cumulated = uniform * sum(masses), 0.0
    for token, mass in enumerate(masses):
        cumulated += mass
        if mass > 0 and cumulated > goal:
            return token
    return max((token for token, mass in enumerate(masses) if mass > 0), default=-1)


def sample(tree_fields: dict, probs: list[list[float]], uniforms: list[float], depth: int, valid: bool):
    """The walk of ``sample_and_match`` for one row: number accepted, path and emitted tokens, -1 padded."""
    node, path, out = 0, [0], [draw(probs[0], uniforms[0])]
    while valid:
        match = [child for child in children(tree_fields, node) if tree_fields["tokens"][child] == out[-1]]
        if not match:
            break
        node = match[0]
        path.append(node)
        out.append(draw(probs[node], uniforms[len(path) - 1]))
    padding = [-1] * (depth + 1 - len(path))
    return len(path) - 1, path + padding, out + padding


def toss(tree_fields: dict, probs: list[list[float]], coins: list[float], last: float, depth: int, valid: bool):
    """The walk of ``reject_target_only`` for one row, results as of ``sample``."""
    node, path, out, rest = 0, [0], [], []
    while valid and len(path) <= depth:
        cumulated, taken = 0.0, None
        for child in children(tree_fields, node):
            mass = probs[node][tree_fields["tokens"][child]]
            cumulated += mass
            if mass > 0 and coins[len(path) - 1] < cumulated:
                taken = child
                break
        if taken is None:
            break
        node = taken
        path.append(node)
        out.append(tree_fields["tokens"][node])
    rest = list(probs[node])
    for child in children(tree_fields, node) if valid else []:
        rest[tree_fields["tokens"][child]] = 0.0
    out.append(draw(rest if any(rest) else probs[node], last))
    padding = [-1] * (depth + 1 - len(path))
    return len(path) - 1, path + padding, out + padding
