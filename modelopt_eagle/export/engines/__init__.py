"""Serving engines: one file each with all that is known of it, and this table of them.

A new engine is a new file and an entry here; check, versions, card, inspection and the serving room read the table.
"""

from modelopt_eagle.errors import ExportError
from modelopt_eagle.export.engines import llama_cpp, sglang, tensorrt_llm, vllm
from modelopt_eagle.export.engines.profile import Engine

ENGINES: dict[str, Engine] = {module.ENGINE.key: module.ENGINE for module in (vllm, sglang, tensorrt_llm, llama_cpp)}


def engine_of(name: str) -> Engine:
    """An engine by its key or another spelling of its name.

    Raises:
        ExportError: none is called so; the message names those that are known.
    """
    for engine in ENGINES.values():
        if engine.called(name):
            return engine
    raise ExportError(f"engine {name!r} is unknown; known are {', '.join(ENGINES)}")
