"""An engine's server on this machine, in a process and an environment of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from modelopt_eagle.errors import ExportError, StreamError
from modelopt_eagle.export.engines import ENGINES
from modelopt_eagle.features.engines.vllm import free_port

SERVERS = {
    key: Path(__file__).with_name(engine.runner.server)
    for key, engine in ENGINES.items()
    if engine.runner and engine.runner.server
}
"""Of the engines whose server can be started here, the script that serves inside the engine's own environment."""
START_SECONDS = 900.0
"""How long an engine may take until it serves: it reads weights and, on a GPU, records graphs."""


def engine_environment(python: Path) -> dict[str, str]:
    """Environment of the engine's process; what the user has set stays.

    Speculative decoding on a CPU is many times slower without Intel's OpenMP, which its package puts beside the
    interpreter and which must be loaded first.
    """
    environment = dict(os.environ)
    library = python.parent.parent / "lib" / "libiomp5.so"
    if library.is_file() and "LD_PRELOAD" not in environment:
        environment["LD_PRELOAD"] = str(library)
        environment.setdefault("KMP_BLOCKTIME", "1")
    if "OMP_NUM_THREADS" in environment:
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    environment.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    environment.pop("PYTHONPATH", None)
    return environment


@contextlib.contextmanager
def serve_engine(python: Path, engine: str, job: dict[str, Any], timeout: float = START_SECONDS) -> Iterator[str]:
    """Start an engine's OpenAI-compatible server, and end it with all of its processes.

    Args:
        python: the engine's interpreter.
        engine: its key.
        job: see the engine's server script; ``port`` is chosen here.
        timeout: seconds until it must serve.

    Yields:
        its address, as soon as it answers.

    Raises:
        ExportError: it ended before it served, or took too long; at the end of the block: it ended by itself while it
            served. The end of its output is in the message.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="engine-server-", ignore_cleanup_errors=True) as folder:
        paths = [Path(folder) / "job.json", Path(folder) / "log"]
        paths[0].write_text(json.dumps({**job, "port": port}), encoding="utf-8")
        with open(paths[1], "wb") as log:
            process = subprocess.Popen(
                [str(python), str(SERVERS[engine]), str(paths[0])], env=engine_environment(python), cwd=folder,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

        def ended(words: str) -> ExportError:
            said = paths[1].read_text(encoding="utf-8", errors="replace")
            return ExportError(f"{engine} {words}; the end of its output:\n  {last_lines(said)}")

        try:
            until = time.monotonic() + timeout
            while not _answers(f"{url}/health"):
                if process.poll() is not None:
                    words = f"ended with exit code {process.returncode} before it served"
                elif time.monotonic() < until:
                    time.sleep(0.5)
                    continue
                else:
                    words = f"did not serve within {timeout:.0f} s"
                raise ended(words)
            try:
                yield url
            except StreamError as error:
                if process.poll() is None:
                    raise
                raise ended(f"ended with exit code {process.returncode} while it served") from error
            if process.poll() is not None:
                raise ended(f"ended with exit code {process.returncode} while it served")
        finally:
            _end(process)


def last_lines(text: str, count: int = 12) -> str:
    """The end of what an engine said, without empty lines, indented for a message."""
    return "\n  ".join([line for line in text.splitlines() if line.strip()][-count:])


def _answers(url: str) -> bool:
    """Whether a local server answers; no proxy is asked."""
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


def _end(process: subprocess.Popen) -> None:
    """End a server and what it started: asked first, then made to."""
    for sign, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
