"""The recipes that ship, their page, and the command line that picks one."""

import pytest

from modelopt_eagle.errors import RecipeError
from modelopt_eagle.recipe import load_recipe, train_recipe
from modelopt_eagle.recipe.docs import docs_path, recipe_docs
from modelopt_eagle.recipe.loader import recipe_folder
from modelopt_eagle.recipe.recipe import Recipe
from modelopt_eagle.recipe.yaml_file import read_yaml

RECIPES = sorted(file.stem for file in recipe_folder().glob("*.yaml"))


def test_the_promised_recipes_ship():
    assert {"eagle3", "quickstart", "eagle3_offline", "eagle3_streaming"} <= set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_a_shipped_recipe_loads_and_says_what_it_is_for(name):
    recipe = load_recipe(name)
    file = recipe_folder() / f"{name}.yaml"
    assert recipe == load_recipe(file)
    assert file.read_text().startswith("# ") and f"recipes/{name}.yaml" in recipe_docs()


def test_the_default_recipe_shows_nearly_every_key_of_training_and_eagle():
    content, _ = read_yaml(recipe_folder() / "eagle3.yaml")
    for section in ("training", "model"):
        missing = set(Recipe.sections()[section].model_fields) - set(content[section]) - {"dry_run"}
        assert not missing, missing


def test_the_page_of_options_is_up_to_date():
    assert docs_path().read_text(encoding="utf-8") == recipe_docs(), "run modelopt-eagle recipe-docs"
    for section, key in Recipe.keys():
        assert f"| `{key}` |" in recipe_docs().split(f"## `{section}`")[1]


@pytest.mark.parametrize(
    ("argv", "epochs_from"),
    [
        ([], "quickstart.yaml"),
        (["--base_model", "quickstart", "--dry_run"], "quickstart.yaml"),
        (["--base_model", "some/model"], "eagle3.yaml"),
        (["model.base_model=some/model"], "eagle3.yaml"),
        (["--offline_data", "features"], "eagle3_offline.yaml"),
        (["data.streaming_server_url=http://h:1"], "eagle3_streaming.yaml"),
        (["--base_model", "some/model", "--recipe", "quickstart"], "quickstart.yaml"),
    ],
)
def test_the_recipe_fits_the_flags(argv, epochs_from):
    assert epochs_from in train_recipe(argv).origin["training.epochs"]


def test_flags_win_over_the_file_and_overrides_over_flags():
    argv = ["--data", "a.jsonl", "b.jsonl", "eagle.ttt_steps=4", "--base_model", "m", "training.seed=3"]
    argv += ["--output_dir", "out=1.5", "--dry_run", "model.base_model=n"]
    recipe = train_recipe(argv)
    assert recipe.data.train_path == ["a.jsonl", "b.jsonl"]
    assert (recipe.eagle.ttt_steps, recipe.training.seed, recipe.training.dry_run) == (4, 3, True)
    assert (recipe.training.output_dir, recipe.model.base_model) == ("out=1.5", "n")
    assert recipe.origin["data.train_path"] == recipe.origin["eagle.ttt_steps"] == "override"


@pytest.mark.parametrize("path", ["a, b.jsonl", "it's.jsonl", "[x].jsonl", "null", "1e5", "a: b", "x #1.jsonl"])
def test_odd_paths_reach_the_recipe_as_typed(path):
    assert train_recipe(["--data", path]).data.train_path == path
    assert train_recipe(["--data", path, "c"]).data.train_path == [path, "c"]
    assert train_recipe(["--output_dir", path]).training.output_dir == path


def test_a_misspelt_override_after_data_is_named():
    with pytest.raises(RecipeError, match="nearest valid name: learning_rate"):
        train_recipe(["--data", "a.jsonl", "training.lr=1"])
