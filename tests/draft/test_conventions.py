"""The table of loss conventions, and the places that speak of it without reading it."""

from typing import get_args

import pytest
import torch

from modelopt_eagle.draft.conventions import CONVENTIONS, convention_named
from modelopt_eagle.recipe import load_recipe
from modelopt_eagle.recipe.sections import EagleSection


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'best' is unknown; known are served, modelopt, eagle, speculators"):
        convention_named("best")


@pytest.mark.parametrize(
    "name, divisors", [("served", [4.0, 1.0]), ("modelopt", [4 + 1e-5, 1e-5]), ("eagle", [9.0, 9.0])]
)
def test_divisor(name, divisors):
    found = convention_named(name).divisor(torch.tensor([4, 0]), 9)
    torch.testing.assert_close(found, torch.tensor(divisors), atol=0.0, rtol=1e-7)


def test_the_recipe_knows_the_same_names_decays_and_drops():
    fields = EagleSection.model_fields
    assert list(get_args(fields["convention"].annotation)) == list(CONVENTIONS)
    for name, rule in CONVENTIONS.items():
        eagle = load_recipe("eagle3", overrides=[f"eagle.convention={name}"]).eagle
        assert eagle.counts_by_target_choice == rule.in_vocab_only
        assert f"{rule.decay}" in fields["loss_decay"].description.split(name)[1]
    assert load_recipe("eagle3", overrides=["eagle.in_vocab_only=true"]).eagle.counts_by_target_choice
