"""Compile every kernel to machine code for a GPU that need not be there, and print what came out as JSON.

    python -m tests.kernels.compile_kernels [--capability 90 ...] [--only distill_rows ...] [--large]
    python -m tests.kernels.compile_kernels --attention 80:128 90:192/128:float32   capability, widths, dtype (bfloat16)

With ``--large`` the kernels of training are compiled with the tiles and dtypes of large targets, and nothing else; with
``--attention`` those of its attention, for heads of some widths.
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

column_attention = importlib.import_module("modelopt_eagle.kernels.column_attention")
APART = ("column_attention",)
"""Compiled with ``--attention``, by widths: its kernels are large."""

SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Bytes of shared memory that a program may have, by compute capability."""

compiled: dict[str, dict] = {}
capabilities: list[int] = []
prefix: list[str] = []  # what labels begin with
large: list[bool] = []  # whether labels tell every specialisation apart


def resources(code: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes of them that it keeps in memory, read from the machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, spilled = (re.findall(rf"(?:{words}):(\d+)", said) for words in ("REG", "STACK|LOCAL"))
    assert registers and spilled, said
    return {"registers": max(map(int, registers)), "spilled_bytes": sum(map(int, spilled))}


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


def norm_concat_large() -> None:
    """Launches of the first layer's input, both ways: an 8B target's in mixed precision, and the widest."""
    for width, dtype, trained in ((4096, torch.float32, False), (8192, torch.bfloat16, True)):
        embedding = torch.empty(512, width, dtype=dtype, requires_grad=trained)
        state = torch.empty(512, width, dtype=torch.bfloat16, requires_grad=True)
        weights = [torch.ones(width, requires_grad=True) for _ in range(2)]
        out = kernels.norm_concat(embedding, state, *weights, 1e-5, torch.bfloat16, backend="triton")
        torch.autograd.grad(out, state, torch.empty_like(out))


def rotate_heads_large() -> None:
    """Launches of the rotation, both ways: heads that turn whole, and those of latent attention."""
    for width, pairs in ((128, 64), (192, 32)):
        x = torch.empty(64, 32, width, dtype=torch.bfloat16, requires_grad=True)
        angle = torch.zeros(64, pairs)
        out = kernels.rotate_heads(x, angle, angle, 2 * pairs < width, backend="triton")
        torch.autograd.grad(out, x, torch.empty_like(out))


LARGE = {
    "distill_rows": distill_rows_large,
    "norm_concat": norm_concat_large,
    "rotate_heads": rotate_heads_large,
}
"""Kernels of training, by what launches them at their production sizes."""


def attention(widths: str, dtype: torch.dtype) -> None:
    """Forward and backward of attention, four query heads on a key head, for heads of ``dk`` or ``dk/dv``."""
    dk, dv = (int(width) for width in (widths.split("/") * 2)[:2])
    shapes = [(64, 8, dk), (64, 2, dk), (64, 2, dv), (64, 3, 2, dk), (64, 3, 2, dv)]
    tensors = [torch.zeros(shape, dtype=dtype).requires_grad_() for shape in shapes]
    rows = torch.arange(64)
    out = column_attention.column_attention(*tensors, rows, torch.zeros_like(rows), dk**-0.5)
    torch.autograd.grad(out, tensors, torch.ones_like(out))


def compile_attention(cases: list[str]) -> None:
    """Compile attention of each case, ``90:128`` or ``80:192/128:float32``, with that GPU's tiles."""
    column_attention.choose_backend = lambda backend, device: "triton"
    for case in cases:
        which, widths, dtype = (*case.split(":"), "bfloat16")[:3]
        capability = int(which)
        column_attention.gpu_limits = lambda device, capability=capability: (capability, SHARED[capability])
        capabilities[:], prefix[:] = [capability], [f"{case} "]
        attention(widths, getattr(torch, dtype))


def compile_once(kernel, capability: int, arguments, num_warps: int, num_stages: int, constants: dict) -> None:
    """Compile a kernel with the arguments of a launch, unless one like it was compiled."""
    label = "".join(prefix) + f"{kernel.__name__.strip('_')}, {num_warps} warps"
    if constants.get("OWN"):  # a kernel of attention that is two
        label += ", own"
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
        elif isinstance(value, torch.Tensor | float):
            signature[parameter.name] = triton.runtime.jit.mangle_type(value)
            if isinstance(value, torch.Tensor) and value.data_ptr() % 16 == 0:
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
        "shared": result.metadata.shared,
        **resources(result.asm["cubin"]),
    }


def main() -> None:
    """Run a few cases of every check with compilation in the place of launches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, nargs="+", default=[90])
    parser.add_argument(
        "--only", nargs="+", default=[name for name in parity.CHECKS if name not in APART], choices=list(parity.CHECKS)
    )
    parser.add_argument("--large", action="store_true", help="production sizes of the kernels of training")
    parser.add_argument(
        "--attention", nargs="+", metavar="CAPABILITY:WIDTHS[:DTYPE]", help="90:128, 80:192/128:float32"
    )
    options = parser.parse_args()
    if options.large:
        large.append(True)
    capabilities.extend(options.capability)
    dispatch.TritonKernel.__getitem__ = compile_instead
    if options.attention:
        compile_attention(options.attention)
    else:
        compile_checks(options.only, options.large)
    print(json.dumps(compiled))


def compile_checks(names: list[str], at_large: bool) -> None:
    """Compile what a few cases of the checks launch, or at production sizes what ``LARGE`` does."""
    parity.compare = lambda what, found, expected: None  # nothing was launched, so the outputs hold nothing
    parity.compare_close = parity.compare
    parity.compare_within = lambda what, found, expected, tolerance: None
    for name in names:
        module = importlib.import_module(f"modelopt_eagle.kernels.{name}")
        module.choose_backend = lambda backend, device: "reference" if backend == "reference" else "triton"
        if at_large:
            if name in LARGE:
                LARGE[name]()
            continue
        for seed in range(4):
            parity.CHECKS[name](parity.Cases(seed, "cpu"), "triton")


if __name__ == "__main__":
    main()
