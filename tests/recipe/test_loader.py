"""Files and overrides: typing, origins, and errors that name file, line, key and the nearest valid name."""

import pytest

from modelopt_eagle.errors import EagleError, RecipeError
from modelopt_eagle.recipe import Recipe, as_recipe, load_recipe, replaced


def write(tmp_path, text, name="recipe.yaml"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def message(path=None, *overrides):
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    return str(caught.value)


def test_defaults_are_a_whole_recipe():
    recipe = load_recipe()
    assert recipe == Recipe()
    assert recipe.model.base_model == "quickstart" and recipe.training.output_dir == "ckpts/quickstart-eagle3"
    assert set(recipe.origin.values()) == {"default"} and len(recipe.origin) == len(Recipe.keys())


def test_a_mapping_is_a_recipe():
    recipe = as_recipe({"training": {"epochs": 2}, "data": {"role_aliases": {"bot": "assistant"}}, "export": None})
    assert recipe.training.epochs == 2 and recipe.data.role_aliases == {"bot": "assistant"}
    assert recipe.origin["training.epochs"] == "given in Python" and recipe.origin["training.seed"] == "default"
    assert as_recipe(recipe) is recipe and as_recipe("quickstart") == load_recipe("quickstart")
    with pytest.raises(RecipeError, match="training.epochz.*nearest valid name: epochs|epochz.*epochs"):
        as_recipe({"training": {"epochz": 2}})
    with pytest.raises(RecipeError, match="unknown section 'trainin'; nearest: training"):
        as_recipe({"trainin": {}})


def test_values_are_replaced_in_a_copy():
    recipe = load_recipe(None, ["training.seed=7"])
    other = replaced(recipe, {"model.base_model": "mine/head"})
    assert (other.model.base_model, other.training.output_dir) == ("mine/head", "ckpts/head-eagle3")
    assert (other.origin["model.base_model"], other.origin["training.seed"]) == ("given in Python", "override")
    assert recipe.model.base_model == "quickstart" and recipe.training.output_dir == "ckpts/quickstart-eagle3"
    kept = replaced(load_recipe(None, ["training.output_dir=here"]), {"model.base_model": "mine/head"})
    assert kept.training.output_dir == "here"
    with pytest.raises(RecipeError, match="draft_init"):
        replaced(recipe, {"model.draft_init_vocab": "rebuild"})


def test_origin_of_each_value(tmp_path):
    path = write(tmp_path, "training:\n  epochs: 2\n\n  seed: 7\neagle:\n  ttt_steps: 4\n")
    recipe = load_recipe(path, ["training.seed=8"])
    assert (recipe.training.epochs, recipe.training.seed, recipe.eagle.ttt_steps) == (2, 8, 4)
    assert recipe.origin["training.epochs"] == f"{path}:2"
    assert recipe.origin["eagle.ttt_steps"] == f"{path}:6"
    assert recipe.origin["training.seed"] == "override"
    assert recipe.origin["training.batch_size"] == "default"


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("training.learning_rate=1e-3", 1e-3),
        ("training.learning_rate=2E-5", 2e-5),
        ("training.max_steps=1e3", 1000),
        ("training.max_steps=null", None),
        ("training.save_steps=", None),
        ("training.dry_run=true", True),
        ("model.revision=12345678", "12345678"),
        ("model.revision=1e10", "1e10"),
        ("model.revision=2024-01-02", "2024-01-02"),
        ("model.base_model=C:\\models: [x", "C:\\models: [x"),
        ("model.chat_template=a=b", "a=b"),
        ("eagle.aux_layer_ids=[14, 2, 25]", [2, 14, 25]),
        ("eagle.aux_layer_ids=14,2,25", [2, 14, 25]),
        ("data.train_path=[a.jsonl, b.jsonl]", ["a.jsonl", "b.jsonl"]),
        ("data.role_aliases={bot: assistant}", {"bot": "assistant"}),
        ("data.role_aliases.bot=assistant", {"bot": "assistant"}),
        ("export.rope_scaling={rope_type: yarn, factor: 4}", {"rope_type": "yarn", "factor": 4}),
    ],
)
def test_overrides_are_typed_by_the_schema(override, value):
    section, _, key = override.partition("=")[0].partition(".")
    key = key.partition(".")[0]
    recipe = load_recipe(None, [override])
    found = getattr(getattr(recipe, section), key)
    assert found == value and type(found) is type(value)
    assert recipe.origin[f"{section}.{key}"] == "override"


def test_scientific_floats_in_files_are_numbers(tmp_path):
    recipe = load_recipe(write(tmp_path, "training: {learning_rate: 1e-3, max_grad_norm: 5E-1}\n"))
    assert (recipe.training.learning_rate, recipe.training.max_grad_norm) == (1e-3, 0.5)


def test_an_override_below_a_mapping_keeps_the_files_other_keys(tmp_path):
    path = write(tmp_path, "data:\n  role_aliases: {bot: assistant}\n")
    recipe = load_recipe(path, ["data.role_aliases.me=user", "data.role_aliases.bot=system"])
    assert recipe.data.role_aliases == {"bot": "system", "me": "user"}


def test_later_overrides_win():
    assert load_recipe(None, ["training.epochs=2", "training.epochs=3"]).training.epochs == 3


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("training.lr=1", "unknown key 'lr' in section 'training'; nearest valid name: learning_rate"),
        ("training.optimiser=adamw", "nearest valid name: optimizer"),
        ("training.ttt_steps=3", "nearest valid name: eagle.ttt_steps"),
        ("eagle.eagle_ttt_steps=4", "nearest valid name: ttt_steps"),
        ("training.num_train_epochs=4", "nearest valid name: epochs"),
        ("training.qqqq=1", "unknown key 'qqqq' in section 'training'; see docs/recipes.md"),
        ("trainng.epochs=3", "unknown section 'trainng'; nearest: training"),
        ("learning_rate=1", "expected section.key=value; nearest valid name: training.learning_rate"),
        ("training.seed", "expected section.key=value"),
        ("training.=1", "expected section.key=value"),
        ("training.seed.x=1", "training.seed has no keys below it"),
        ("eagle.loss=kll", "expected one of kl, lk, found 'kll'; nearest valid value: kl"),
        ("eagle.loss=5", "expected one of kl, lk"),
        ("training.epochs=true", "not a boolean, found True"),
        ("training.epochs=1.5", "expected an integer"),
        ("training.epochs=0", "greater than or equal to 1, found 0"),
        ("training.learning_rate=2", "less than or equal to 1, found 2"),
        ("training.learning_rate=fast", "expected a number"),
        ("training.learning_rate=.nan", "finite number"),
        ("training.max_steps=none", "write null for no value"),
        ("eagle.aux_layer_ids=[2, 2]", "distinct layer ids, found [2, 2]"),
        ("eagle.aux_layer_ids=[]", "at least one layer id, or null"),
        ("eagle.aux_layer_ids=[-1, 2]", "greater than or equal to 0"),
        ("data.role_aliases.bot=robot", "expected one of system, user, assistant"),
        ("data.role_aliases={a: user, a: user}", "'a' stands twice"),
        ("data.train_path=[]", "a path or a list of paths"),
        ("data.streaming_server_url=localhost:80", "expected http://HOST:PORT"),
        ("export.push_to_hub=name", "owner/name"),
        ("export.rope_scaling={factor: 4}", "rope_type"),
    ],
)
def test_a_wrong_override_is_named(override, said):
    found = message(None, override)
    assert found.startswith(f"override {override!r}: ") or override.endswith("a: user}")
    assert said in found


def test_keys_below_a_value_that_has_none_are_named():
    with pytest.raises(RecipeError, match="'data.template_arguments.a.b=1': a is 5, which has no keys below it"):
        load_recipe(None, ["data.template_arguments={a: 5}", "data.template_arguments.a.b=1"])
    with pytest.raises(RecipeError, match="role_aliases is 5, which has no keys below it"):
        load_recipe({"data": {"role_aliases": 5}}, ["data.role_aliases.bot=assistant"])


def test_a_wrong_file_is_named_with_line_and_key(tmp_path):
    path = write(tmp_path, "training:\n  epochs: 1\n  lr: 1e-3\n  batch_size: many\neagle:\n  loss: klx\n")
    found = message(path).split("\n")
    assert len(found) == 3
    assert f"{path}:3: training.lr: unknown key 'lr' in section 'training'; nearest valid name: learning_rate" in found
    assert any(line.startswith(f"{path}:4: training.batch_size: expected an integer") for line in found)
    assert f"{path}:6: eagle.loss: expected one of kl, lk, found 'klx'; nearest valid value: kl" in found


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("training:\n  epochs: 1\n  epochs: 2\n", 3, "'epochs' already stands in line 2"),
        ("training:\n  epochs: 1\neagle:\n  ttt_steps: 3\ntraining:\n  seed: 1\n", 5, "'training' already stands"),
        ("data:\n  role_aliases:\n    a: user\n    a: user\n", 4, "'a' already stands in line 3"),
        ("training:\n  epochs: [1\n", 3, "not valid YAML"),
        ("training:\n\tepochs: 1\n", 2, "not valid YAML"),
        ("a: 1\n---\nb: 2\n", 2, "not valid YAML"),
        ("training:\n- epochs\n", 1, "expected keys below section 'training'"),
        ("trainig:\n  epochs: 1\n", 1, "unknown section 'trainig'; nearest: training"),
        ("model:\n  revision: 12345678\n", 2, "put it in quotes"),
        ("validation:\n  topk: 2\n", 1, "mode is chain"),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path, text, line, said):
    path = write(tmp_path, text)
    found = message(path)
    assert found.startswith(f"{path}:{line}: ") and said in found


def test_a_list_in_place_of_sections(tmp_path):
    assert "expected sections such as 'training:'" in message(write(tmp_path, "- a\n"))


def test_empty_files_and_sections_mean_defaults(tmp_path):
    assert load_recipe(write(tmp_path, "# nothing\n")) == Recipe()
    assert load_recipe(write(tmp_path, "training:\n")) == Recipe()


def test_a_file_that_is_not_text(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"training:\n  output_dir: \xff\xfe\n")
    assert "expected UTF-8 text" in message(path)


def test_a_missing_file_names_the_shipped_recipes(tmp_path):
    found = message("quikstart")
    assert "no such recipe; nearest: quickstart" in found and "eagle3_offline" in found
    assert "found a folder" in message(tmp_path)


def test_recipe_errors_are_eagle_errors():
    with pytest.raises(EagleError):
        load_recipe(None, ["training.lr=1"])


def test_an_override_that_does_not_fit_is_named_and_not_the_file_alone(tmp_path):
    path = write(tmp_path, "training:\n  epochs: 2\n  eval_steps: null\n")
    said = message(path, "training.seed=3", "training.early_stopping=2")
    assert said.startswith(f"override 'training.early_stopping=2' (beside {path}:1): training: early_stopping counts")
    said = message(None, "training.early_stopping=2", "training.eval_steps=null")
    assert said.startswith("override 'training.early_stopping=2' 'training.eval_steps=null': training: ")
    path = write(tmp_path, "training:\n  early_stopping: 2\n  eval_steps: null\n")
    assert message(path, "training.seed=3").startswith(f"{path}:1: training: early_stopping counts")
