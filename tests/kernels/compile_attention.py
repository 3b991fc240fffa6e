"""Compile the attention of training to machine code for a GPU that need not be there; prints JSON.

    python -m tests.kernels.compile_attention 80:128 90:192/128:float32     capability, widths, dtype (bfloat16)

The host code of each operation runs on CPU tensors with its launch replaced by an ahead-of-time compilation of the
same arguments, so that names, types and tile sizes are those of a real launch.
"""

import argparse
import importlib
import json
import os
import subprocess
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from modelopt_eagle.kernels import dispatch

column_attention = importlib.import_module("modelopt_eagle.kernels.column_attention")
SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Bytes of shared memory that a program may have, by compute capability."""

chosen: dict = {"capability": 90, "prefix": ""}
compiled: dict[str, dict] = {}


def compile_instead(self: dispatch.TritonKernel, grid):
    """Stand in for ``kernel[grid]``: compile the first launch of each kernel and warp count, write nothing."""
    kernel = self.load()

    def launch(*arguments, num_warps=4, num_stages=3, **constants):
        own = ", own" if constants.get("OWN") else ""
        label = f"{chosen['prefix']}{kernel.__name__.strip('_')}, {num_warps} warps{own}"
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
                if isinstance(value, torch.Tensor) and chosen["prefix"]:
                    attributes[(parameter.num,)] = [["tt.divisibility", 16]]
            else:
                signature[parameter.name] = "i32"
                if value % 16 == 0:
                    attributes[(parameter.num,)] = [["tt.divisibility", 16]]
        result = triton.compile(
            ASTSource(kernel, signature, fixed, attributes),
            target=GPUTarget("cuda", chosen["capability"], 32),
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

    return launch


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes of its stack: what did not fit into the registers."""
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    counts = dict(word.split(":", 1) for word in said.split() if word.startswith(("REG:", "STACK:", "LOCAL:")))
    return {"registers": int(counts["REG"]), "stack": int(counts["STACK"]) + int(counts["LOCAL"])}


def compile_attention(widths: str, dtype: torch.dtype) -> None:
    """Forward and backward of attention, four query heads on a key head, for heads of ``dk`` or ``dk/dv``."""
    dk, dv = (int(width) for width in (widths.split("/") * 2)[:2])
    shapes = [(64, 8, dk), (64, 2, dk), (64, 2, dv), (64, 3, 2, dk), (64, 3, 2, dv)]
    tensors = [torch.zeros(shape, dtype=dtype).requires_grad_() for shape in shapes]
    rows = torch.arange(64)
    out = column_attention.column_attention(*tensors, rows, torch.zeros_like(rows), dk**-0.5)
    torch.autograd.grad(out, tensors, torch.ones_like(out))


def main() -> None:
    """Run attention of some widths with compilation in the place of launches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", metavar="CAPABILITY:WIDTHS[:DTYPE]", help="90:128, or 80:192/128:float32")
    dispatch.TritonKernel.__getitem__ = compile_instead
    column_attention.choose_backend = lambda backend, device: "triton"
    column_attention.gpu_limits = lambda device: (chosen["capability"], SHARED[chosen["capability"]])
    for argument in parser.parse_args().cases:
        which, widths, dtype = (*argument.split(":"), "bfloat16")[:3]
        chosen.update(capability=int(which), prefix=f"{argument} ")
        compile_attention(widths, getattr(torch, dtype))
    print(json.dumps(compiled))


if __name__ == "__main__":
    main()
