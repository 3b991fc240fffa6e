"""Heads of the other drafters, trained for a minute, exported, and judged by a real vLLM."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.heads import DRAFTERS

FIRST = 0.1
"""Least share of first drafted tokens that a head must get right, so that a wrong one is seen."""


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_engine_drafts_what_the_head_drafts(name, head, check):
    """Texts, acceptance at each position, and the drafted tokens one by one, as the engine's scheduler took them."""
    trained = head(name)
    report = check.check(trained.export, checkpoint=trained.checkpoint)
    print("\n" + name + "\n" + report.table())
    assert report.passed, report.table()
    assert report.our_per_position[0] > FIRST and report.drafts > 100
    assert report.proposals > 300 and report.proposals_equal >= 0.99 * report.proposals


def test_another_mask_row_is_noticed(head, check, tmp_path):
    """The control: the first draft of each round is right, the others are not the head's."""
    trained = head("parallel")
    folder = shutil.copytree(trained.export, tmp_path / "edited")
    tensors = load_file(folder / "model.safetensors")
    tensors["mask_hidden"] = torch.roll(tensors["mask_hidden"], 7) * 3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert json.loads((folder / "config.json").read_text())["mask_token_id"] >= 0
    report = check.check(folder, checkpoint=trained.checkpoint)
    print("\n" + report.table())
    assert not report.passed and report.proposals_equal < 0.95 * report.proposals
