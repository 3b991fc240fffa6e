"""Print what a bug report needs: versions, devices, threads, installed extras."""

from __future__ import annotations

import importlib.util
import json
import os
import sys

from modelopt_eagle.common.machine import environment
from modelopt_eagle.common.parser import command_parser

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


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = command_parser("env", __doc__, example="modelopt-eagle env --json")
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
    facts = environment() | {"python": f"{sys.version.split()[0]} ({sys.executable})"}
    for extra, modules in EXTRAS.items():
        missing = [module for module in modules if importlib.util.find_spec(module) is None]
        facts[f"extra {extra}"] = "installed" if not missing else f"missing {', '.join(missing)}"
    for name in ("OMP_NUM_THREADS", "HF_HUB_OFFLINE", "HF_HOME", "MODELOPT_EAGLE_CACHE", "WORLD_SIZE"):
        facts[name] = os.environ.get(name, "not set")
    return facts
