"""Expected counts under the target's distribution."""

from types import SimpleNamespace

import torch

from modelopt_eagle.training.teacher_mass import teacher_mass


class Source:
    """Three rows of five tokens, of which tokens 2..4 are supervised, so positions 1..3 predict."""

    lengths = (5, 5, 5)

    def __init__(self):
        self.states = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
        self.loaded = []

    def load(self, numbers):
        self.loaded += numbers
        supervised = torch.tensor([[False, False, True, True, True]])
        return SimpleNamespace(supervised=supervised, final_hidden=self.states[numbers])


def test_mass_is_the_sum_of_the_targets_distributions_where_it_predicts():
    source, weight = Source(), torch.randn(7, 4, generator=torch.Generator().manual_seed(1))
    mass = teacher_mass(source, lambda h: h @ weight.T, 7)
    expected = (source.states[:, 1:4] @ weight.T).softmax(-1).sum((0, 1))
    torch.testing.assert_close(mass.float(), expected)
    assert source.loaded == [0, 1, 2]


def test_a_sample_is_scaled_to_all_rows():
    source, weight = Source(), torch.zeros(7, 4)
    mass = teacher_mass(source, lambda h: h @ weight.T, 7, positions=3)
    assert len(source.loaded) < 3
    torch.testing.assert_close(mass, torch.full((7,), 9 / 7, dtype=torch.float64))
