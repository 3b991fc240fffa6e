"""A round of a P-EAGLE head: its drafts are those of a decoder written from the equations, whatever came before."""

import pytest
import torch

from modelopt_eagle.draft.counting import counted_predictions
from modelopt_eagle.draft.peagle.draft_loop import ParallelDrafter
from modelopt_eagle.draft.peagle.rows import parallel_states
from modelopt_eagle.draft.plan import DraftPlan
from modelopt_eagle.draft.trees import history_of_marginals
from modelopt_eagle.errors import DecodingError
from tests.draft.peagle.oracle import draft_states, make_head, make_view
from tests.draft.peagle.test_rows import HEADS

K = 4


class Table(torch.nn.Module):
    """Embeddings of a view, as a target's table is."""

    def __init__(self, view):
        super().__init__()
        self.embed_ids = view.embed_ids

    def forward(self, ids):
        return self.embed_ids(ids)


def rounds(loop, views, counts):
    """Commit in rounds of ``counts`` a row, as a generator does; yields the states of each round and the lengths."""
    starts = [0] * len(views)
    for step in counts:
        most = max(step)
        tokens = torch.zeros(len(views), most, dtype=torch.int64)
        aux = torch.full((len(views), most, views[0].aux_hidden.shape[1]), 7.0)  # what padding holds is nobody's
        for row, (view, start, count) in enumerate(zip(views, starts, step, strict=True)):
            tokens[row, :count] = view.input_ids[start + 1 : start + count + 1]
            aux[row, :count] = view.aux_hidden[start : start + count]
        loop.commit(tokens, aux, starts, step)
        starts = [start + count for start, count in zip(starts, step, strict=True)]
        yield loop.states, starts


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("counts", [[[5], [1], [4], [2]], [[5, 3, 7], [1, 4, 2], [3, 3, 3], [1, 1, 5]]])
@torch.no_grad()
def test_every_round_drafts_what_the_equations_say(name, counts):
    """Chains of several rounds, rows of one length and of different lengths; keys of masks are never kept."""
    module = make_head(**HEADS[name])
    views = [make_view(module, (20,), seed=row) for row in range(len(counts[0]))]
    drafter = ParallelDrafter(module, Table(views[0]), DraftPlan.chain(K))
    embed = views[0].embed_ids
    views = [type(view)(**{**vars(view), "embed_ids": embed}) for view in views]
    loop = drafter.loop(len(views), 20)
    for states, lengths in rounds(loop, views, counts):
        for row, (view, length) in enumerate(zip(views, lengths, strict=True)):
            expected = draft_states(module, embed, view.input_ids, view.aux_hidden[:length], K)
            torch.testing.assert_close(states[row], expected, rtol=1e-5, atol=1e-5)
        drafted = loop.draft(lengths, torch.zeros(len(views), dtype=torch.int64))
        assert torch.equal(drafted, module.target_ids[module.lm_head(states).argmax(-1)])


@torch.no_grad()
def test_depth_k_in_training_is_depth_k_in_the_loop():
    module = make_head(num_hidden_layers=2)
    view = make_view(module, (14,), supervised=1.0)
    predictions = counted_predictions(view, K, "served")
    trained = parallel_states(module, view, predictions)
    loop = ParallelDrafter(module, Table(view), DraftPlan.chain(K)).loop(1, 14)
    for states, (length,) in rounds(loop, [view], [[1]] * 9):
        own = predictions.anchor == length - 1
        torch.testing.assert_close(trained[own], states[0, predictions.depth[own]], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_rows_that_are_kept_go_on():
    module = make_head()
    views = [make_view(module, (12,), seed=row) for row in range(3)]
    loop = ParallelDrafter(module, Table(views[0]), DraftPlan.chain(K)).loop(3, 12)
    list(rounds(loop, views, [[4, 2, 3]]))
    loop.keep(torch.tensor([2, 1]))
    tokens = torch.stack([views[row].input_ids[start + 1 : start + 3] for row, start in ((2, 3), (1, 2))])
    aux = torch.stack([views[row].aux_hidden[start : start + 2] for row, start in ((2, 3), (1, 2))])
    loop.commit(tokens, aux, [3, 2], [2, 2])
    for place, (row, length) in enumerate(((2, 5), (1, 4))):
        expected = draft_states(module, views[0].embed_ids, views[row].input_ids, views[row].aux_hidden[:length], K)
        torch.testing.assert_close(loop.states[place], expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_tree_of_the_marginals_is_the_list_of_all_paths():
    """Scores, tokens and parents of the history against plain enumeration; branching 1 is the chain."""
    logits = torch.randn(2, 3, 9, generator=torch.Generator().manual_seed(5))
    ids = torch.arange(9) * 3
    history = history_of_marginals(logits, ids, DraftPlan.tree(2, 3))
    logp = logits.log_softmax(-1)
    for row in range(2):
        best = [logp[row, depth].topk(2) for depth in range(3)]
        level, scores, tokens, parents = [(0.0, None)], [], [], [-1]
        for depth in range(3):
            start, grown = len(scores), []
            for score, _ in level:
                for value, index in zip(*best[depth], strict=True):
                    grown.append((score + float(value), len(scores)))
                    scores.append(score + float(value))
                    tokens.append(int(ids[index]))
            level = sorted(grown, key=lambda pair: (-pair[0], pair[1]))[:2] if depth else grown
            parents += [place for _, place in level] if depth < 2 else []
            assert start <= grown[0][1]
        torch.testing.assert_close(history.scores[row], torch.tensor(scores), rtol=1e-5, atol=1e-5)
        assert history.tokens[row].tolist() == tokens and history.parent_list[row].tolist() == parents
    narrow = history_of_marginals(logits, ids, DraftPlan.tree(1, 3))
    assert torch.equal(narrow.tokens, ids[logits.argmax(-1)])


def test_a_draft_before_anything_was_committed_is_refused():
    module = make_head()
    loop = ParallelDrafter(module, Table(make_view(module, (4,))), DraftPlan.chain(2)).loop(1, 8)
    with pytest.raises(DecodingError, match="nothing was committed"):
        loop.draft([0], torch.zeros(1, dtype=torch.int64))
