"""Every shipped recipe runs one step, on the tiny target through overrides."""

import pytest

from modelopt_eagle.data import prepare_dataset
from modelopt_eagle.features.dump import TargetBackEnd, dump
from modelopt_eagle.recipe import load_recipe
from modelopt_eagle.recipe.loader import recipe_folder
from modelopt_eagle.training import train
from tests.training.runs import write_conversations

SHIPPED = sorted(file.stem for file in recipe_folder().glob("*.yaml"))


def test_recipes_are_found():
    assert {"eagle3", "quickstart", "eagle3_offline"} <= set(SHIPPED)


@pytest.mark.parametrize("name", [name for name in SHIPPED if "stream" not in name])
def test_shipped_recipe_runs_one_step(name, tiny_target, tiny_target_dir, tmp_path):
    data = write_conversations(tmp_path / "rows.jsonl", 6)
    overrides = [
        f"model.base_model={tiny_target_dir}", f"training.output_dir={tmp_path / 'run'}", "training.max_steps=1",
        "eagle.draft_vocab_size=64",
    ]  # fmt: skip
    recipe = load_recipe(name, overrides)
    if recipe.data.offline_data_path is None:
        overrides.append(f"data.train_path={data}")
    else:
        rows = prepare_dataset(tiny_target.tokenizer, data).rows
        dump(TargetBackEnd(tiny_target), rows, tmp_path / "store")
        overrides.append(f"data.offline_data_path={tmp_path / 'store'}")
    result = train(load_recipe(name, overrides))
    assert result.finished and result.steps == 1 and result.history[0]["loss"] > 0
