"""Fixtures for every room: a tiny target in memory and on disk, no network, a fixed seed."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest  # noqa: E402
import torch  # noqa: E402

from modelopt_eagle.target import load_target  # noqa: E402
from modelopt_eagle.target.tiny import make_tiny_target  # noqa: E402


@pytest.fixture(autouse=True)
def _fixed_seed():
    """Every test starts from the same random state, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_target_dir(tmp_path_factory):
    """Folder of a saved tiny target: 8 layers, hidden 64, vocabulary 256, byte tokenizer, untied. Read only."""
    path = tmp_path_factory.mktemp("targets") / "tiny"
    make_tiny_target(path)
    return path


@pytest.fixture(scope="session")
def tiny_target(tiny_target_dir):
    """The target of ``tiny_target_dir``, loaded. Read only."""
    return load_target(tiny_target_dir)
