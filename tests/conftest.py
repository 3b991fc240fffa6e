"""Fixtures for every room: a tiny target in memory and on disk, no network, a fixed seed; and which tests are run.

Tests that start a real engine are collected with ``--engine`` (vLLM) or ``--llama`` (llama.cpp), as of
``scripts/test.sh``, or when their file is named; then a missing engine is an error. Otherwise they are not collected,
and the head of the run says so. None is ever skipped.
"""

import os
import signal
from pathlib import Path
from typing import NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"

import hypothesis
import pytest
import torch

from modelopt_eagle.target import load_target
from modelopt_eagle.target.tiny import make_tiny_target

HERE = Path(__file__).parent
hypothesis.settings.register_profile("any machine", deadline=None)  # a busy one once took 0.8 s for what takes 0.5 ms
hypothesis.settings.load_profile("any machine")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs, and their children, ignore it


class Engine(NamedTuple):
    """An engine that tests start: the option that asks for them, where they and it lie, and what makes it."""

    name: str
    option: str
    tests: tuple[Path, ...]
    folder: Path

    @property
    def how(self) -> str:
        return f"bash scripts/test.sh {self.option}"

    def missing(self) -> str | None:
        """Why its tests cannot run."""
        if (self.folder / ".modelopt_eagle_complete").is_file():
            return None
        place = self.folder.name
        return f"these tests start {self.name} from {place}, which is not there or not whole: {self.how} makes it"


VLLM = Engine("vLLM", "--engine", (HERE / "engine", HERE / "features" / "test_vllm.py"), HERE.parent / ".venv-vllm")
LLAMA_CPP = Engine("llama.cpp", "--llama", (HERE / "llama_cpp",), HERE.parent / ".venv-llama")
ENGINES = (VLLM, LLAMA_CPP)


def pytest_addoption(parser):
    for engine in ENGINES:
        told = f"also the tests that start {engine.name}, in {engine.folder.name}"
        parser.addoption(engine.option, action="store_true", help=told)
    parser.addoption("--fuzz-seconds", type=float, default=20.0, help="for all readers and servers (default 20)")
    parser.addoption("--soak-seconds", type=float, default=10.0, help="of kills and restarts (default 10)")
    parser.addoption("--fuzz-seed", type=int, default=0, help="another seed tries other inputs (default 0)")


def pytest_configure(config):
    for engine in ENGINES:
        if config.getoption(engine.option) and (reason := engine.missing()):
            raise pytest.UsageError(reason)


def pytest_ignore_collect(collection_path, config):
    """Leave an engine's tests out without its option; ``None`` asks pytest's own rules."""
    left_out = any(collection_path in engine.tests and not config.getoption(engine.option) for engine in ENGINES)
    return True if left_out else None


def pytest_collection_modifyitems(config, items):
    """Of several processes, one begins with the longest piece, which is a single one: they end together."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: VLLM.tests[0] not in item.path.parents)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With ``-n``: files stay whole, and so does the folder whose files share heads trained for minutes."""
    from tests.side_by_side import ByFile

    return ByFile(config, log, VLLM.tests[0].relative_to(HERE.parent).as_posix())


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable():
    """What one process tells the other of a test."""
    from tests.side_by_side import sendable

    return sendable((yield))


def pytest_report_header(config):
    lines = []
    for engine in ENGINES:
        if config.getoption(engine.option):
            lines.append(f"engine: {engine.folder.name}")
        else:
            left_out = ", ".join(str(path.relative_to(HERE.parent)) for path in engine.tests)
            lines.append(f"without {engine.option} these are not collected: {left_out} ({engine.how} runs them)")
    return lines


def python_of(engine: Engine) -> Path:
    """The interpreter that has an engine; fails the test if there is none."""
    if reason := engine.missing():
        pytest.fail(reason)
    return engine.folder / "bin" / "python"


@pytest.fixture(scope="session")
def engine_python():
    """The interpreter that has vLLM."""
    return python_of(VLLM)


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
