"""Slow answers in plain Python, written from the definitions and from nothing else, for the kernel tests."""

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
        for older, younger in zip(brothers, brothers[1:], strict=False):
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
