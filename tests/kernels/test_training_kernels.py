"""The benchmark of the training kernels: floors by hand, contestants that differ or fail are named, exit codes."""

import importlib
import json
from pathlib import Path

import pytest
import torch

from modelopt_eagle.kernels import MACHINES, Work, column_attention_work

FOLDER = Path(__file__).parents[2] / "scripts" / "benchmark"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module("training_kernels")
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: False)
    return module


@pytest.fixture
def cases(script):
    return importlib.import_module("training_cases")


def small(cases):
    """The attention with its first case alone."""
    kernel = cases.ATTENTION
    return cases.TrainingKernel(kernel.name, lambda: kernel.cases()[:1], kernel.reference, {}, kernel.tolerance)


def test_the_floor_is_the_slower_of_memory_and_arithmetic():
    h200 = MACHINES["H200"]
    assert Work(bytes=int(4.8e12), flops=1).floor(h200) == pytest.approx(1.0)
    assert Work(bytes=1, flops=int(2 * 989e12)).floor(h200) == pytest.approx(2.0)
    assert Work(1, 2) + Work(10, 20) == Work(11, 22)


def test_the_work_of_the_attention_by_hand():
    # 2 queries over 3 keys, 2 and 3 of them seen, 1 column key each; 2 heads on 1 key head of 4 and 3 wide; 2 bytes
    work = column_attention_work(5, 3, 2, 1, heads=2, groups=1, dk=4, dv=3, size=2)
    scores = 2 * (5 + 2)  # heads x (seen + column)
    assert work["forward"].flops == 2 * scores * (4 + 3)
    assert work["backward"].flops == 2 * scores * (4 + 3 + 3 + 4 + 4)
    q, keys, out, lse = 2 * 2 * 4 * 2, (3 + 2) * (4 + 3) * 2, 2 * 2 * 3 * 2, 2 * 2 * 4
    assert work["forward"].bytes == q + keys + out + lse
    assert work["backward"].bytes == 2 * q + 2 * keys + 2 * out + lse


def test_the_floors_are_printed_and_what_was_not_measured_is_said(script, capsys, tmp_path):
    assert script.main(["--json", str(tmp_path / "report.json")]) == script.NO_CUDA
    report = json.loads((tmp_path / "report.json").read_text())
    assert {line["kernel"] for line in report["floors"]} == {kernel.name for kernel in script.KERNELS}
    assert report["rows"] == [] and all(line["floor_us"] > 0 for line in report["floors"])
    said = capsys.readouterr().out
    assert "data sheet" in said and "nothing was timed" in said


def test_a_contestant_that_differs_or_fails_is_named(script, cases, monkeypatch, capsys):
    def wrong(given):
        return cases.dense(given) * 1.5

    def dies(given):
        raise RuntimeError("no such kernel\nand more")

    kernel = small(cases)
    kernel.contestants.update(
        chunks=cases.Contestant(cases.by_autograd(cases.chunked)),
        wrong=cases.Contestant(cases.by_autograd(wrong)),
        dies=cases.Contestant(dies),
        gpu=cases.Contestant(dies, cpu=False),
    )
    monkeypatch.setattr(script, "KERNELS", (kernel,))
    assert script.main(["--dry_run"]) == script.NO_CUDA
    said = capsys.readouterr().out
    assert "chunks: equal" in said and "wrong: not timed: forward differs" in said
    assert "dies: not timed: RuntimeError: no such kernel\n" in said and "gpu: not run on a CPU" in said
    kernel.contestants["wrong"] = cases.Contestant(cases.by_autograd(wrong), ours=True)
    assert script.main(["--dry_run"]) == script.WRONG


def test_a_gradient_that_differs_is_seen(script, cases):
    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad / 2

    kernel = small(cases)
    case = kernel.cases()[0]
    contestant = cases.Contestant(cases.by_autograd(lambda given: Halved.apply(cases.dense(given))))
    assert "backward differs" in script.check(kernel, case, contestant, "cpu")


def test_nan_differs(script):
    nan, one = torch.tensor([float("nan"), 1.0]), torch.ones(2)
    assert script.difference([nan], [one]) == float("inf") == script.difference([one], [nan])
    with pytest.raises(AssertionError, match="shapes"):
        script.difference([one], [one[:1]])
