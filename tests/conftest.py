"""Fixtures for every room: a tiny target in memory and on disk, no network, a fixed seed; and which tests are run.

Tests that start a real engine are collected with ``--engine`` (``bash scripts/test.sh --engine``) or when their file is
named; then a missing engine is an error. Otherwise they are not collected, and the head of the run says so. None is
ever skipped.
"""

import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

from modelopt_eagle.target import load_target
from modelopt_eagle.target.tiny import make_tiny_target

HERE = Path(__file__).parent
ENGINE_TESTS = (HERE / "engine", HERE / "features" / "test_vllm.py")
ENGINE = HERE.parent / ".venv-vllm"
HOW = "bash scripts/test.sh --engine"


def pytest_addoption(parser):
    parser.addoption("--engine", action="store_true", help="also the tests that start vLLM, in .venv-vllm")
    parser.addoption("--fuzz-seconds", type=float, default=20.0, help="for all readers and servers (default 20)")
    parser.addoption("--fuzz-seed", type=int, default=0, help="another seed tries other inputs (default 0)")


def engine_missing():
    """Why the engine's tests cannot run, or ``None``."""
    if (ENGINE / ".modelopt_eagle_complete").is_file():
        return None
    return f"these tests start vLLM from {ENGINE.name}, which is not there or not whole: {HOW} makes it"


def pytest_configure(config):
    if config.getoption("--engine") and (reason := engine_missing()):
        raise pytest.UsageError(reason)


def pytest_ignore_collect(collection_path, config):
    """Leave the engine's tests out without ``--engine``; ``None`` asks pytest's own rules."""
    return True if collection_path in ENGINE_TESTS and not config.getoption("--engine") else None


def pytest_report_header(config):
    if not config.getoption("--engine"):
        left_out = ", ".join(str(path.relative_to(HERE.parent)) for path in ENGINE_TESTS)
        return f"without --engine these are not collected: {left_out} ({HOW} runs them)"
    return f"engine: {ENGINE.name}"


@pytest.fixture(scope="session")
def engine_python():
    """The interpreter that has vLLM."""
    if reason := engine_missing():
        pytest.fail(reason)
    return ENGINE / "bin" / "python"


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
