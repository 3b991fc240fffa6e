"""Compile every kernel to machine code for a GPU that need not be there, and print what came out as JSON.

    python -m tests.kernels.compile_kernels [--capability 90 ...] [--only distill_rows ...] [--large]

With ``--large`` the kernels of training are compiled with the tiles and dtypes of large targets, and nothing else.
The host code of each operation runs on CPU tensors with its launch replaced by an ahead-of-time compilation of the
same arguments, so that names, types and tile sizes are those of a real launch.
"""

import argparse
import importlib
import json
import re
import subprocess
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from modelopt_eagle import kernels
from modelopt_eagle.kernels import dispatch, parity

APART = ("column_attention",)
"""Compiled by compile_attention.py, by widths: its kernels are large."""

compiled: dict[str, dict] = {}
capabilities: list[int] = []
large: list[bool] = []  # whether labels tell every specialisation apart


def spilled_bytes(code: bytes) -> int:
    """Bytes of registers that a thread keeps in memory, read from the machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"(?:STACK|LOCAL):(\d+)", said)
    assert found, said
    return sum(map(int, found))


def compile_instead(self: dispatch.TritonKernel, grid):
    """Stand in for ``kernel[grid]``: compile the first launch of each kernel and its options, write nothing."""
    kernel = self.load()

    def launch(*arguments, num_warps=4, num_stages=3, **constants):
        for capability in capabilities:
            compile_once(kernel, capability, arguments, num_warps, num_stages, constants)

    return launch


def distill_rows_large() -> None:
    """Launches of the loss at a vocabulary of 32,000: every kind of term, short and long floats."""
    kinds: list[tuple[torch.dtype, bool, bool]] = [  # dtype, hard labels, mixed with the total variation
        (torch.bfloat16, False, False),
        (torch.bfloat16, False, True),
        (torch.float32, True, True),
    ]
    for dtype, hard, mixed in kinds:
        draft, teacher = (torch.empty(rows, 32000, dtype=dtype) for rows in (4, 1))
        given = torch.tensor([0]) if hard else teacher
        place, groups, top = torch.zeros(4, dtype=torch.int64), torch.tensor([[0, 4]]), torch.tensor([1])
        share = torch.ones(4) if mixed else None
        kernels.distill_rows(
            draft, given, place, groups, top, torch.ones(4), share, subtract_entropy=mixed, backend="triton"
        )


LARGE = {"distill_rows": distill_rows_large}
"""Kernels of training, by what launches them at their production sizes."""


def compile_once(kernel, capability: int, arguments, num_warps: int, num_stages: int, constants: dict) -> None:
    """Compile a kernel with the arguments of a launch, unless one like it was compiled."""
    label = f"{kernel.__name__.strip('_')}, {num_warps} warps"
    if large:
        dtypes = ", ".join(str(a.dtype).removeprefix("torch.") for a in arguments[:2])
        label += f", sm_{capability}, {dtypes}, {constants}"
    if label in compiled:
        return
    values = {**dict(zip(kernel.arg_names, arguments, strict=False)), **constants}
    signature, fixed, attributes = {}, {}, {}
    for parameter in kernel.params:
        value = values[parameter.name]
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            signature[parameter.name], fixed[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = triton.runtime.jit.mangle_type(value)
            if value.data_ptr() % 16 == 0:
                attributes[(parameter.num,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "i32"
            if value % 16 == 0:
                attributes[(parameter.num,)] = [["tt.divisibility", 16]]
    result = triton.compile(
        ASTSource(kernel, signature, fixed, attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": num_warps, "num_stages": num_stages},
    )
    ptx = result.asm["ptx"]
    compiled[label] = {
        "cubin": len(result.asm["cubin"]),
        "ptx_loads": ptx.count("ld.global"),
        "ptx_read_only_loads": ptx.count("ld.global.nc"),
        "spilled_bytes": spilled_bytes(result.asm["cubin"]),
    }


def main() -> None:
    """Run a few cases of every check with compilation in the place of launches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, nargs="+", default=[90])
    parser.add_argument(
        "--only", nargs="+", default=[name for name in parity.CHECKS if name not in APART], choices=list(parity.CHECKS)
    )
    parser.add_argument("--large", action="store_true", help="production sizes of the kernels of training")
    options = parser.parse_args()
    if options.large:
        large.append(True)
    capabilities.extend(options.capability)
    dispatch.TritonKernel.__getitem__ = compile_instead
    parity.compare = lambda what, found, expected: None  # nothing was launched, so the outputs hold nothing
    parity.compare_close = parity.compare
    for name in options.only:
        module = importlib.import_module(f"modelopt_eagle.kernels.{name}")
        module.choose_backend = lambda backend, device: "reference" if backend == "reference" else "triton"
        if options.large:
            if name in LARGE:
                LARGE[name]()
            continue
        for seed in range(4):
            parity.CHECKS[name](parity.Cases(seed, "cpu"), "triton")
    print(json.dumps(compiled))


if __name__ == "__main__":
    main()
