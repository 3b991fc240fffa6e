"""Text of the target's own, text of others, and features that belong to other rows."""

from dataclasses import replace

import pytest
import torch

from modelopt_eagle.data import TokenizedRow
from modelopt_eagle.decoding import PlainGenerator
from modelopt_eagle.features import FeatureContract, MemorySource, OnlineSource
from modelopt_eagle.features.compute import compute_features
from modelopt_eagle.training.own_share import own_share, own_share_line


@pytest.fixture(scope="module")
def rows(tiny_target):
    """Ten answers of 24 tokens by the target."""
    prompts = [[5 + i, 60 + 3 * i, 100 - i, 7] for i in range(10)]
    answers = PlainGenerator(tiny_target).generate(prompts, 24, eos_token_id=[]).tokens
    return [
        TokenizedRow(str(i), "", prompt + answer, [False] * 4 + [True] * 24, 4)
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]


def test_the_targets_own_text_and_that_of_others(tiny_target, rows):
    """B137."""
    assert own_share(OnlineSource(tiny_target, rows)) == 1.0
    noise = torch.randint(4, 200, (len(rows), 28), generator=torch.Generator().manual_seed(0)).tolist()
    others = [replace(row, input_ids=ids) for row, ids in zip(rows, noise, strict=True)]
    share = own_share(OnlineSource(tiny_target, others))
    assert share < 0.1 and "warning" in own_share_line(share) and "warning" not in own_share_line(1.0)


def test_features_of_other_rows_are_seen(tiny_target, rows):
    """B95: each row with the states and choices of the next one."""
    made = compute_features(tiny_target, rows, tiny_target.default_aux_layer_ids())
    shifted = [
        replace(row, aux_hidden=other.aux_hidden, final_hidden=other.final_hidden, target_top1=other.target_top1)
        for row, other in zip(made, made[1:] + made[:1], strict=True)
    ]
    contract = FeatureContract.from_target(tiny_target)
    assert own_share(MemorySource(contract, made)) == 1.0
    assert own_share(MemorySource(contract, shifted)) < 0.5
    bare = [replace(row, target_top1=None) for row in made]
    assert own_share(MemorySource(contract, bare)) is None
