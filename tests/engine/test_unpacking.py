"""Packed numbers that no engine computes with on a CPU: vLLM's own code unpacks them as this toolkit does."""

import os
import subprocess

import torch
from safetensors.torch import load_file, save_file

from modelopt_eagle.export.quant_formats import pack, unpack

SCRIPT = """
import sys, torch
from safetensors.torch import load_file, save_file
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype
parts = load_file(sys.argv[1])
weight = dequantize_to_dtype(
    parts["weight"], parts["weight_scale"], parts["weight_scale_2"], torch.float32, 16, swizzle=False
)
save_file({"weight": weight.contiguous()}, sys.argv[2])
"""


def test_vllm_unpacks_nvfp4_as_we_do(engine_python, tmp_path):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 64, generator=generator) * torch.logspace(-3, 1, 48)[:, None]  # [out,in]
    weight[5, :16] = 0  # a block without a scale
    parts = pack(weight, 3.0, float(weight.abs().max()), "nvfp4")
    save_file({name: tensor.contiguous() for name, tensor in parts.items()}, tmp_path / "packed.safetensors")
    (tmp_path / "unpack.py").write_text(SCRIPT)
    files = [str(tmp_path / name) for name in ("unpack.py", "packed.safetensors", "theirs.safetensors")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(engine_python), *files], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = load_file(tmp_path / "theirs.safetensors")["weight"]
    torch.testing.assert_close(unpack(parts, "nvfp4"), theirs, rtol=1e-6, atol=0)
    assert float((theirs - weight).abs().max()) < float(weight.abs().max()) / 6
