"""What the engine's tests share: features, heads and the engine's run without a head, each made once."""

import json
import shutil

import pytest

from modelopt_eagle.data.files import ASSETS
from modelopt_eagle.serving.check import ServingCheck
from modelopt_eagle.target import load_target
from tests.engine.heads import make_stores, train_head

PROMPTS = 10


@pytest.fixture(scope="session")
def target():
    """The quick-start target, loaded. Read only."""
    return load_target("quickstart")


@pytest.fixture(scope="session")
def stores(target, tmp_path_factory):
    """A feature store for each set of layers."""
    folder = tmp_path_factory.mktemp("stores")
    yield make_stores(target, folder)
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def head(target, stores, tmp_path_factory):
    """``head(name)``: one of ``HEADS``, trained at its first use."""
    made = {}

    def make(name):
        if name not in made:
            made[name] = train_head(name, target, stores, tmp_path_factory.mktemp("heads") / name)
        return made[name]

    return make


@pytest.fixture(scope="session")
def prompts(tmp_path_factory):
    """Questions that the heads were trained on: a minute of training shows there first."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [json.loads(line) for line in (ASSETS / "quickstart_conversations.jsonl").read_text().splitlines()]
    rows = [{"id": row["id"], "turns": [row["messages"][0]["content"]]} for row in rows[: 8 * PROMPTS : 8]]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture(scope="session")
def check(engine_python, prompts):
    """The serving check: one run of the engine without a head serves all of them."""
    return ServingCheck(
        "quickstart", engine_python=engine_python, prompts=prompts, num_samples=PROMPTS, max_new_tokens=40,
        batch_size=PROMPTS,
    )  # fmt: skip
