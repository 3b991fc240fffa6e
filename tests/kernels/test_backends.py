"""The Triton kernels: interpreted against the reference, compiled for a GPU, and where they are refused.

Triton decides when it is first imported whether it interprets, so both run in processes of their own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from modelopt_eagle import kernels
from modelopt_eagle.errors import DecodingError
from modelopt_eagle.kernels import parity
from modelopt_eagle.kernels.dispatch import choose_backend
from tests.kernels.test_build_tree import worked_example

CASES = 24
REPOSITORY = Path(__file__).parents[2]


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Run this Python from the repository's root, without Triton's interpreter unless it is asked for."""
    inherited = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=REPOSITORY, env={**inherited, "OMP_NUM_THREADS": "1", **environment}, capture_output=True, text=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def interpreted() -> dict[str, list[str]]:
    """Failures of each kernel over CASES random cases in Triton's interpreter."""
    command = ("-m", "modelopt_eagle.kernels.parity", "--device", "cpu", "--cases", str(CASES), "--json")
    process = run_python(*command, TRITON_INTERPRET="1")
    assert process.stdout, process.stderr
    report = json.loads(process.stdout)
    assert report["cases"] == CASES and CASES * len(report["failures"]) >= 200
    return report["failures"]


@pytest.mark.parametrize("kernel", list(parity.CHECKS))
def test_interpreted_kernel_equals_reference(interpreted, kernel):
    assert interpreted[kernel] == []


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[str, dict]:
    """What compiling each kernel for an sm_90 GPU gave: its machine code's size, or the error."""
    folder = tmp_path_factory.mktemp("triton")
    process = run_python("-m", "tests.kernels.compile_kernels", TRITON_CACHE_DIR=str(folder))
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def test_every_kernel_compiles_to_gpu_code(compiled):
    assert len({name.split(",")[0] for name in compiled}) == 14
    for name, result in compiled.items():
        assert result["cubin"] > 1000, (name, result)


def test_kernels_of_training_compile_without_spills_for_three_generations(tmp_path):
    """At production sizes every specialisation keeps its numbers in registers."""
    capabilities = ("80", "90", "100")
    command = ("-m", "tests.kernels.compile_kernels", "--large", "--capability", *capabilities)
    process = run_python(*command, TRITON_CACHE_DIR=str(tmp_path))
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout)
    for capability in capabilities:
        assert sum(f"sm_{capability}," in name for name in found) >= 3
    for name, result in found.items():
        assert result["cubin"] > 1000 and result["spilled_bytes"] == 0, (name, result)
        assert result["ptx_read_only_loads"] == 0, name


ATTENTION = ("90:128", "80:64", "100:64")
"""Capability and head width; the other widths, dtypes and capabilities are in docs/kernels.md with their command."""


def test_attention_compiles_for_three_generations_without_a_spill(tmp_path):
    process = run_python(
        "-m", "tests.kernels.compile_kernels", "--attention", *ATTENTION, TRITON_CACHE_DIR=str(tmp_path)
    )
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout)
    assert len(found) == 4 * len(ATTENTION)  # forward, by queries, by keys, by column keys
    for name, result in found.items():
        assert result["cubin"] > 1000 and result["spilled_bytes"] == 0, (name, result)
        assert result["shared"] <= 163 << 10, (name, result)


def test_kernels_never_read_through_the_read_only_cache(compiled):
    """Kernels read back what other threads wrote, which ld.global.nc would not promise to see."""
    for name, result in compiled.items():
        assert result["ptx_loads"] > 0, name
        assert result["ptx_read_only_loads"] == 0, name


def test_the_self_check_sees_another_tie_rule(monkeypatch):
    """A 'kernel' that breaks ties the other way must fail the comparison."""
    right, calls = kernels.select_nodes, []

    def every_other_call_wrong(scores, count, *, backend):
        calls.append(backend)
        if len(calls) % 2:  # ties to the larger id
            wrong = right(scores.flip(1), count, backend="reference")
            return (scores.shape[1] - 1 - wrong).sort(1).values.to(torch.int32)
        return right(scores, count, backend="reference")

    def one_tied_case(cases, backend):
        scores = cases.integers(0, 3, 4, 20).float()
        results = (every_other_call_wrong(scores, 7, backend=b) for b in (backend, "reference"))
        parity.compare("flat ids", *results)

    monkeypatch.setitem(parity.CHECKS, "select_nodes", one_tied_case)
    failures = parity.run_checks("cpu", "reference", 5, names=["select_nodes"])
    assert len(failures["select_nodes"]) == 5
    assert "ParityError" in failures["select_nodes"][0]


def test_the_self_check_command(capsys):
    assert parity.main(["--device", "cpu", "--backend", "reference", "--cases", "2"]) == 0
    assert not torch.are_deterministic_algorithms_enabled()
    assert "relocate_kv          2 of 2 cases equal" in capsys.readouterr().out


def test_compare_sees_dtype_shape_and_value():
    ones = torch.ones(2, 3, dtype=torch.int32)
    for other in (ones.long(), ones[:1], ones + torch.eye(2, 3, dtype=torch.int32)):
        with pytest.raises(parity.ParityError):
            parity.compare("x", other, ones)


def test_triton_on_cpu_tensors_without_the_interpreter_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    scores, tokens, parent_list = worked_example()
    with pytest.raises(DecodingError, match="needs CUDA tensors, found cpu.*TRITON_INTERPRET=1"):
        kernels.build_tree(scores, tokens, parent_list, 6, 2, backend="triton")
    with pytest.raises(DecodingError, match="backend must be one of auto, triton, reference, found 'cuda'"):
        kernels.build_tree(scores, tokens, parent_list, 6, 2, backend="cuda")


def test_the_interpreter_asked_for_too_late_is_refused():
    script = (
        "import triton, os, torch; os.environ['TRITON_INTERPRET'] = '1'\n"
        "from modelopt_eagle import kernels\n"
        "kernels.select_nodes(torch.zeros(1, 3), 2, backend='triton')"
    )
    process = run_python("-c", script)
    assert process.returncode == 1
    assert "set after triton was imported" in process.stderr


def test_the_dispatch_rule():
    assert choose_backend("auto", torch.device("cpu")) == "reference"
    assert choose_backend("auto", torch.device("cuda")) == "triton"
    assert choose_backend("triton", torch.device("cuda")) == "triton"
    assert choose_backend("reference", torch.device("cuda")) == "reference"


def test_the_environment_switches_the_kernels_off(monkeypatch):
    monkeypatch.setenv("MODELOPT_EAGLE_KERNELS", "reference")
    assert choose_backend("auto", torch.device("cuda")) == "reference"
    assert choose_backend("triton", torch.device("cuda")) == "triton"
    monkeypatch.setenv("MODELOPT_EAGLE_KERNELS", "off")
    with pytest.raises(DecodingError, match="MODELOPT_EAGLE_KERNELS must be auto or reference, found 'off'"):
        choose_backend("auto", torch.device("cuda"))


def test_the_package_works_without_triton():
    script = (
        "import sys; sys.modules['triton'] = None\n"
        "import os, torch; from modelopt_eagle import kernels\n"
        "print(kernels.select_nodes(torch.tensor([[1.0, 2.0, 3.0]]), 2).tolist())\n"
        "os.environ['TRITON_INTERPRET'] = '1'\n"
        "kernels.select_nodes(torch.zeros(1, 3), 2, backend='triton')"
    )
    process = run_python("-c", script)
    assert process.stdout.strip() == "[[1, 2]]"
    assert f'pip install -e "{REPOSITORY}[kernels]"' in process.stderr
