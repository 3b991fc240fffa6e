"""Drafts that are right for a known number of tokens, for any architecture and without training."""

import torch

from modelopt_eagle.draft.eagle3 import draft_loop
from modelopt_eagle.draft.eagle3.draft_loop import DraftLoop
from modelopt_eagle.draft.trees import TreeHistory


def known_history(path, topk, vocab):
    """Scores, tokens and parents of a flat history that holds ``path``, its tokens the last of their siblings."""
    scores, tokens, parents = [], [], [-1]
    survivors, best = [None], 0.0  # flat ids, the right one last
    for layer, token in enumerate(path):
        start = len(scores)
        for slot in range(len(survivors)):
            on_path = slot == len(survivors) - 1
            for rank in range(topk):
                hit = on_path and rank == topk - 1
                below = best if on_path else best - 1
                scores.append(below - (0.01 if hit else 1.5 + 0.1 * rank))
                tokens.append(token if hit else (token + 1 + rank) % vocab)
        best -= 0.01
        order = sorted(range(start, len(scores)), key=lambda f: (-scores[f], f))[:topk]
        survivors = order[1:] + order[:1]
        if layer < len(path) - 1:
            parents += survivors
    return scores, tokens, parents


def install(monkeypatch, prompts, answers, vocab):
    """Let the generator draft from the known answers: right for ``length % (D+1)`` tokens, then wrong.

    In trees the right token is the last of its siblings, so that an accepted path never lies in place.
    """

    class OracleLoop(DraftLoop):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.rows = list(range(len(prompts)))

        def keep(self, rows):
            super().keep(rows)
            self.rows = [self.rows[row] for row in rows.tolist()]

        def right(self, row, length):
            """The D tokens after the last emitted one; wrong from some place on."""
            depth, text = self.plan.depth, prompts[self.rows[row]] + answers[self.rows[row]]
            true = (text[length + 1 :] + [0] * depth)[:depth]
            return [token if k < length % (depth + 1) else (token + 1) % vocab for k, token in enumerate(true)]

        def chain(self, output, lengths):
            super().chain(output, lengths)
            return torch.tensor([self.right(row, length) for row, length in enumerate(lengths)])

        def tree(self, output, lengths):
            super().tree(output, lengths)
            rows = [self.history(self.right(row, length)) for row, length in enumerate(lengths)]
            scores, tokens, parents = (torch.tensor(column) for column in zip(*rows, strict=True))
            return TreeHistory(scores.float(), tokens, parents)

        def history(self, path):
            return known_history(path, self.plan.topk, vocab)

    monkeypatch.setattr(draft_loop, "DraftLoop", OracleLoop)
