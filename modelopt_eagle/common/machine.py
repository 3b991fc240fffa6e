"""The machine and the packages that something was run with: for bug reports, and beside every number."""

from __future__ import annotations

import importlib.metadata
import os
import platform

from modelopt_eagle.common.package import package_commit

PACKAGES = ("torch", "transformers", "safetensors", "pydantic", "accelerate", "triton", "vllm", "nvidia-modelopt")


def environment() -> dict[str, str]:
    """Name to value, as text: this package, Python, system, processor, memory, accelerators, packages."""
    import torch

    return {
        "modelopt_eagle": package_commit(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": f"{processor()}, {usable_cores()} cores usable, {torch.get_num_threads()} torch threads",
        "memory": memory(),
        "devices": devices(),
        "packages": ", ".join(f"{name} {version}" for name in PACKAGES if (version := installed(name))),
    }


def machine_line() -> str:
    """The machine in a few words, to stand beside a time: its accelerators, or its processor."""
    found = devices()
    return f"{processor()}, {usable_cores()} cores" if found == "no accelerator" else found


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


def free_memory(device: str | None = None) -> int | None:
    """Bytes free on a device for this process, together with what it holds itself; ``None`` if that cannot be told.

    Processes that were launched together on one host share its main memory alike.

    Args:
        device: as torch names it; default: the accelerator if there is one.
    """
    import torch

    kind = torch.device(device).type if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        number = torch.device(device or "cuda")
        return int(torch.cuda.mem_get_info(number)[0]) + torch.cuda.memory_reserved(number)
    if kind != "cpu":
        return None
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            found = dict(line.split(":", 1) for line in lines if ":" in line)
        with open("/proc/self/statm", encoding="ascii") as numbers:
            own = int(numbers.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        free = int(found["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return None
    free += own
    for limit in CONTAINER_LIMITS:
        try:
            with open(limit, encoding="ascii") as most:
                free = min(free, int(most.read()))
        except (OSError, ValueError):
            continue
    return free // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files that hold the memory a container may use."""


def check_device_name(name: str) -> str:
    """The name of a device as it is: ``auto``, or what torch takes to hold numbers, here or on another machine.

    Raises:
        ValueError: it is none.
    """
    if name in ("auto", "cpu"):
        return name
    import torch

    try:
        known = str(torch.device(name)) == name and name != "meta"  # torch counts cuda:300 as cuda:44
    except RuntimeError:
        known = False
    if not known:
        raise ValueError(f"expected a device of torch (auto, cpu, cuda, cuda:1, ...), found {name!r}")
    return name


def devices() -> str:
    """Accelerators that torch sees."""
    import torch

    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None:
        return "no accelerator"
    if not torch.cuda.is_available():
        return f"{torch.accelerator.device_count()} of {found.type}"
    parts = []
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        parts.append(f"{card.name} ({card.total_memory / 2**30:.0f} GiB, sm_{card.major}{card.minor})")
    return "; ".join(parts) + f", CUDA {torch.version.cuda}"
