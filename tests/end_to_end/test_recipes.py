"""Every shipped recipe runs one step, on the tiny target through overrides."""

import threading

import pytest

from modelopt_eagle.data import prepare_dataset
from modelopt_eagle.features.dump import TargetBackEnd, dump
from modelopt_eagle.features.stream.target_server import TargetServer
from modelopt_eagle.recipe import load_recipe
from modelopt_eagle.recipe.loader import recipe_folder
from modelopt_eagle.training import train
from tests.training.runs import write_conversations

SHIPPED = sorted(file.stem for file in recipe_folder().glob("*.yaml"))


def test_recipes_are_found():
    assert {"eagle3", "quickstart", "eagle3_offline"} <= set(SHIPPED)


@pytest.fixture
def server(tiny_target):
    """A feature server of the tiny target."""
    running = TargetServer(tiny_target)
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    yield running
    running.close()
    thread.join(timeout=10)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipe_runs_one_step(name, tiny_target, tiny_target_dir, tmp_path, request):
    data = write_conversations(tmp_path / "rows.jsonl", 6)
    overrides = [
        f"model.base_model={tiny_target_dir}", f"training.output_dir={tmp_path / 'run'}", "training.max_steps=1",
        "eagle.draft_vocab_size=64",
    ]  # fmt: skip
    recipe = load_recipe(name, overrides)
    if recipe.data.offline_data_path is not None:
        rows = prepare_dataset(tiny_target.tokenizer, data).rows
        dump(TargetBackEnd(tiny_target), rows, tmp_path / "store")
        overrides.append(f"data.offline_data_path={tmp_path / 'store'}")
    else:
        overrides.append(f"data.train_path={data}")
    if recipe.data.streaming_server_url is not None:
        overrides.append(f"data.streaming_server_url={request.getfixturevalue('server').url}")
    result = train(load_recipe(name, overrides))
    assert result.finished and result.steps == 1 and result.history[0]["loss"] > 0
