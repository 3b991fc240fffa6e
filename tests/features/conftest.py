"""Conversations for the tiny target, as a file and as tokenised rows; servers of it, in-repo and (--engine) vLLM."""

import json
import random
from importlib.util import find_spec

import pytest

from modelopt_eagle.data import prepare_dataset
from modelopt_eagle.target import load_target
from modelopt_eagle.target.tiny import make_tiny_target
from tests.features.serving import ServerProcess

collect_ignore = [] if find_spec("nixl_cu12") or find_spec("nixl_cu13") else ["test_nixl.py"]

WORDS = "sun moon river stone cloud bird leaf wind rain fire snow tree".split()


@pytest.fixture(scope="session")
def conversations(tmp_path_factory):
    """A file of twelve conversations of different lengths, some with two turns."""
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("data") / "conversations.jsonl"
    with open(path, "w") as file:
        for number in range(12):
            messages = []
            for _ in range(1 + number % 2):
                messages.append({"role": "user", "content": " ".join(draw.choices(WORDS, k=draw.randint(1, 6)))})
                messages.append({"role": "assistant", "content": " ".join(draw.choices(WORDS, k=draw.randint(1, 9)))})
            row = {"id": f"talk-{number}", "category": ("chat", "sky")[number % 2], "messages": messages}
            file.write(json.dumps(row) + "\n")
    return path


@pytest.fixture(scope="session")
def dataset(tiny_target, conversations):
    """The same, tokenised for the tiny target."""
    return prepare_dataset(tiny_target.tokenizer, conversations)


SERVED_LAYERS = (1, 3, 4)
TOKEN = "a secret of the tests"


def pytest_generate_tests(metafunc):
    """Tests of ``server_kind`` run against the in-repo server, and with --engine against a real vLLM too."""
    if "server_kind" in metafunc.fixturenames:
        kinds = ["in-repo", "vllm"] if metafunc.config.getoption("--engine", default=False) else ["in-repo"]
        metafunc.parametrize("server_kind", kinds, scope="module")


@pytest.fixture(scope="session")
def served_dir(tmp_path_factory):
    """A tiny target whose heads are wide enough for vLLM's CPU kernels (32)."""
    path = tmp_path_factory.mktemp("served") / "tiny"
    make_tiny_target(path, heads=2, kv_heads=1)
    return path


@pytest.fixture(scope="session")
def served(served_dir):
    """The same, loaded."""
    return load_target(served_dir)


@pytest.fixture(scope="session")
def other_dir(tmp_path_factory):
    """A target of the same name and sizes, with other weights."""
    path = tmp_path_factory.mktemp("other") / "tiny"
    make_tiny_target(path, heads=2, kv_heads=1, seed=1)
    return path


class Fleet:
    """Two server processes that a module's tests share; what a test has killed is started again when it is needed."""

    def __init__(self, engine, target_dir, folder, longest):
        options = ("--aux-layers", ",".join(map(str, SERVED_LAYERS)), "--max-length", longest, "--dtype", "float32")
        self._target_dir = target_dir
        self._servers = [
            ServerProcess(engine, folder / f"server-{n}.log", TOKEN, *options, host=host)
            for n, host in enumerate(("127.0.0.1", "0.0.0.0"))
        ]

    def up(self, count):
        """The first ``count`` servers, running."""
        servers = self._servers[:count]
        for server in servers:
            if not server.runs:
                server.start(self._target_dir)
        for server in servers:
            server.wait()
        return servers

    def close(self):
        for server in self._servers:
            server.kill()


@pytest.fixture(scope="module")
def fleet(server_kind, request, served_dir, dataset, tmp_path_factory):
    """Servers of ``served_dir``: see :class:`Fleet`."""
    if server_kind == "vllm":
        engine = ("--engine-python", request.getfixturevalue("engine_python"))
    else:
        engine = ("--engine", "hf", "--device", "cpu")
    fleet = Fleet(engine, served_dir, tmp_path_factory.mktemp("servers"), max(dataset.lengths))
    yield fleet
    fleet.close()
