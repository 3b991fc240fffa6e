"""Print what a bug report needs: versions, devices, threads, installed extras."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys

EXTRAS = {
    "train": ("accelerate", "tensorboard"),
    "data": ("datasets",),
    "report": ("matplotlib", "jinja2"),
    "stream": ("zmq",),
    "quantize": ("modelopt",),
    "kernels": ("triton",),
    "gguf": ("gguf",),
    "lora": ("peft",),
    "vision": ("PIL",),
}
"""Extra → modules that it brings."""

PACKAGES = ("torch", "transformers", "safetensors", "pydantic", "accelerate", "triton", "vllm", "nvidia-modelopt")


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="modelopt-eagle env", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    facts = collect()
    if args.json:
        print(json.dumps(facts, indent=1))
    else:
        width = max(map(len, facts))
        print("\n".join(f"{name:<{width}}  {value}" for name, value in facts.items()))
    return 0


def collect() -> dict[str, str]:
    """Name → value, as text."""
    import torch

    from modelopt_eagle.common.package import package_commit

    facts = {
        "modelopt_eagle": package_commit(),
        "python": f"{sys.version.split()[0]} ({sys.executable})",
        "system": platform.platform(),
        "cpu": f"{processor()}, {usable_cores()} cores usable, {torch.get_num_threads()} torch threads",
        "memory": memory(),
        "devices": devices(),
        "packages": ", ".join(f"{name} {version}" for name in PACKAGES if (version := installed(name))),
    }
    for extra, modules in EXTRAS.items():
        missing = [module for module in modules if importlib.util.find_spec(module) is None]
        facts[f"extra {extra}"] = "installed" if not missing else f"missing {', '.join(missing)}"
    for name in ("OMP_NUM_THREADS", "HF_HUB_OFFLINE", "HF_HOME", "MODELOPT_EAGLE_CACHE", "WORLD_SIZE"):
        facts[name] = os.environ.get(name, "not set")
    return facts


def installed(package: str) -> str | None:
    """Version of a package, ``None`` if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def usable_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """The processor's name, and whether it multiplies bfloat16 in hardware."""
    name, flags = platform.processor() or platform.machine(), ""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as stream:
            text = stream.read()
        names = [line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")]
        name = next(iter(names), name)
        flags = ", bf16 in hardware" if "avx512_bf16" in text or "amx_bf16" in text else ", no bf16 in hardware"
    except OSError:
        pass  # no Linux
    return name + flags


def memory() -> str:
    """Main memory."""
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"
    except (AttributeError, ValueError, OSError):
        return "unknown"


def devices() -> str:
    """Accelerators that torch sees."""
    import torch

    if not torch.accelerator.is_available():
        return "no accelerator"
    if not torch.cuda.is_available():
        return f"{torch.accelerator.device_count()} of {torch.accelerator.current_accelerator().type}"
    parts = []
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        parts.append(f"{found.name} ({found.total_memory / 2**30:.0f} GiB, sm_{found.major}{found.minor})")
    return "; ".join(parts) + f", CUDA {torch.version.cuda}"
