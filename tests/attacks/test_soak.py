"""Real processes, killed at random moments for a given time (``--soak-seconds``) by ``scripts/soak.py``."""

import importlib.util
import random
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def soak():
    spec = importlib.util.spec_from_file_location("soak", ROOT / "scripts" / "soak.py")
    module = sys.modules["soak"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["soak"]


def test_ends_are_those_of_undisturbed_runs(soak, tmp_path, request, monkeypatch):
    monkeypatch.chdir(ROOT)
    counts = soak.soak(request.config.getoption("--soak-seconds"), request.config.getoption("--fuzz-seed"), tmp_path)
    print(counts.line())
    assert counts.rounds.total() and counts.signals.total()


def test_a_difference_is_found(soak, tmp_path, monkeypatch):
    """Of a dump whose rows are others when it goes on."""
    monkeypatch.chdir(ROOT)
    whole = soak.made
    monkeypatch.setattr(soak, "made", lambda folder, dump: whole(folder, dump) | {"name": folder.name})
    monkeypatch.setattr(soak, "drawn", lambda draw, target, data: ("dump", [
        "dump", "--model", str(target), "--input-file", str(data), "--dtype", "float32"
    ]))  # fmt: skip
    with pytest.raises(soak.Difference, match=r"dump --model .* after \[.*\]: .*undisturbed"):
        soak.soak(0, 0, tmp_path)
    assert (tmp_path / "round-0" / "log.txt").is_file()


def test_every_kind_is_drawn(soak):
    kinds = {soak.drawn(random.Random(seed), Path("t"), Path("d"))[0] for seed in range(60)}
    assert kinds == {"dump", *(f"train {name}" for name in ("eagle3", "peagle", "medusa", "dflash"))}
