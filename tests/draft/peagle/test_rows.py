"""What a P-EAGLE head computes over a training batch, held against its equations."""

import pytest
import torch

from modelopt_eagle.draft.attention import QueryPlan
from modelopt_eagle.draft.counting import counted_predictions
from modelopt_eagle.draft.documents import WholeAxis
from modelopt_eagle.draft.peagle.plan import ParallelSettings, plan_parallel
from modelopt_eagle.draft.peagle.rows import parallel_drafts, parallel_states
from modelopt_eagle.draft.predictions import Predictions
from tests.draft.peagle.oracle import LATENT, element, make_head, make_view

HEADS = {
    "one layer": {},
    "three layers, full vocabulary": {"num_hidden_layers": 3, "reduced": False},
    "latent": {**LATENT, "num_hidden_layers": 2},
    "norms": {"norm_before_fc": True, "fc_norm": True, "norm_before_residual": True, "attention_bias": True},
    "a window, norms of q and k": {"sliding_window": 4, "qk_norm": True, "num_hidden_layers": 2},
    "own embedding": {"hidden_size": 20, "own_embedding": True, "num_hidden_layers": 2},
}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("lengths", [(9,), (5, 2, 7)])
def test_every_element_is_that_of_the_equations(name, lengths, monkeypatch):
    """Values to 1e-5 and gradients of every parameter, of sampled predictions in packed documents with padding."""
    monkeypatch.setattr("modelopt_eagle.draft.attention.MAX_QUERIES", {"cpu": 3})
    module = make_head(**HEADS[name])
    view = make_view(module, lengths, padding=2)
    settings = ParallelSettings(4, 0.8, 0.3)
    predictions = plan_parallel(view, settings, torch.Generator().manual_seed(3))
    assert predictions.counts().tolist()[0] > 2 and len(predictions) > 6
    states = parallel_states(module, view, predictions)
    pairs = zip(predictions.anchor.tolist(), predictions.depth.tolist(), strict=True)
    expected = torch.stack([element(module, view, anchor, depth) for anchor, depth in pairs])
    torch.testing.assert_close(states, expected, rtol=1e-5, atol=1e-5)
    weights = torch.randn_like(states)
    ours, theirs = (
        torch.autograd.grad((result * weights).sum(), list(module.parameters()), allow_unused=True)
        for result in (states, expected)
    )
    for (parameter, _), one, other in zip(module.named_parameters(), ours, theirs, strict=True):
        if other is None:
            assert one is None, parameter
            continue
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5, msg=parameter)


def test_predictions_may_stand_in_any_order():
    module = make_head(num_hidden_layers=2)
    view = make_view(module, (6, 8))
    predictions = counted_predictions(view, 3, "served")
    states = parallel_states(module, view, predictions)
    shuffled = torch.randperm(len(predictions))
    torch.testing.assert_close(parallel_states(module, view, predictions.select(shuffled)), states[shuffled])


def test_a_missing_depth_in_between_changes_nothing():
    """A prediction that is not learned still has its row: the deeper ones see it."""
    module = make_head()
    view = make_view(module, (10,), supervised=1.0)
    every = counted_predictions(view, 4, "served")
    states = parallel_states(module, view, every)
    some = every.depth != 2
    torch.testing.assert_close(parallel_states(module, view, every.select(some)), states[some])


def test_a_neighbour_is_never_seen():
    module = make_head(num_hidden_layers=2)
    view = make_view(module, (6, 7))
    second = counted_predictions(view, 3, "served")
    second = second.select(second.anchor >= 6)
    states = parallel_states(module, view, second)
    view.aux_hidden[:6] += 5
    view.input_ids[:6] = 3
    torch.testing.assert_close(parallel_states(module, view, second), states, rtol=0, atol=0)
    view.aux_hidden[7] += 1  # the control: its own document is seen
    assert not torch.equal(parallel_states(module, view, second), states)


def test_one_depth_and_none():
    module = make_head()
    view = make_view(module, (6,), supervised=1.0)
    one = counted_predictions(view, 1, "served")
    torch.testing.assert_close(parallel_states(module, view, one)[2], element(module, view, 2, 0))
    nothing = one.select(one.anchor < 0)
    assert parallel_states(module, view, nothing).shape == (0, 24)


def test_depths_beyond_the_trained_ones_are_drafted():
    module = make_head()
    view = make_view(module, (12,), supervised=1.0)
    predictions, states = parallel_drafts(module, view, 9)
    place = int(((predictions.anchor == 1) & (predictions.depth == 8)).nonzero())
    torch.testing.assert_close(states[place], element(module, view, 1, 8), rtol=1e-5, atol=1e-5)


def test_a_batch_without_tokens_to_embed_is_refused():
    module = make_head()
    view = make_view(module, (6,))
    predictions = counted_predictions(view, 2, "served")
    with pytest.raises(ValueError, match="needs embed_ids"):
        parallel_states(module, type(view)(**{**vars(view), "embed_ids": None}), predictions)


class Halves:
    """Two processes in one: the rows of one half are computed here, the keys of the other are there already."""

    def __init__(self, tokens, length):
        self.tokens = self.host_tokens = tokens
        self._place = torch.full((length,), -1)
        self._place[tokens] = torch.arange(len(tokens))
        self.gathered, self.given = [], None

    def local(self, rows):
        return self._place[rows]

    def gather(self, values):
        self.gathered.append(values)
        if self.given is None:
            return values.new_zeros(len(self._place), *values.shape[1:]).index_copy(0, self.tokens, values)
        return self.given[len(self.gathered) - 1].index_copy(0, self.tokens, values)


def test_a_batch_shared_by_positions_gives_the_states_of_the_whole():
    module = make_head()
    view = make_view(module, (7, 6))
    predictions = counted_predictions(view, 3, "served")
    whole = parallel_states(module, view, predictions)
    axis = WholeAxis(13, "cpu")
    seen = []
    axis.gather = lambda values: seen.append(values) or values
    parallel_states(module, type(view)(**{**vars(view), "axis": axis}), predictions)
    for tokens in (torch.tensor([0, 1, 2, 10, 11, 12]), torch.arange(3, 10)):
        half = Halves(tokens, 13)
        half.given = seen
        own = torch.isin(predictions.anchor, tokens)
        shared = type(view)(**{**vars(view), "axis": half, "aux_hidden": view.aux_hidden[tokens]})
        torch.testing.assert_close(parallel_states(module, shared, predictions.select(own)), whole[own])


def test_the_plan_is_nested_of_its_size_and_drawn_from_the_generator():
    module = make_head()
    view = make_view(module, (40, 50), supervised=1.0)
    settings = ParallelSettings(6, 0.7, 0.2)
    plans = [plan_parallel(view, settings, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(plans[0].anchor, plans[1].anchor) and torch.equal(plans[0].depth, plans[1].depth)
    assert not (len(plans[0]) == len(plans[2]) and torch.equal(plans[0].anchor, plans[2].anchor))
    every = counted_predictions(view, 6, "served")
    anchors = len(every.anchor.unique())
    sets = [set(plans[0].anchor[plans[0].depth == d].tolist()) for d in range(6)]
    assert sets[0] == set(every.anchor[every.depth == 0].tolist())
    for depth in range(1, 6):
        possible = set(every.anchor[every.depth == depth].tolist())
        assert sets[depth] <= sets[depth - 1] | (possible - set(every.anchor[every.depth == depth - 1].tolist()))
        share = max(0.7**depth, 0.2)
        assert abs(len(sets[depth]) - share * len(possible)) <= 0.25 * anchors * share
    assert torch.equal(plans[0].teacher, plans[0].anchor + 1 + plans[0].depth)


def test_all_shares_of_one_are_the_whole_list():
    module = make_head()
    view = make_view(module, (20,))
    plan, every = plan_parallel(view, ParallelSettings(3, 1.0, 0.0)), counted_predictions(view, 3, "served")
    assert isinstance(plan, Predictions) and torch.equal(plan.anchor, every.anchor)
    assert QueryPlan.make(every.anchor[:0], every.anchor[:0]).chunks == ()
