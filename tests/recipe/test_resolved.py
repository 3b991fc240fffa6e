"""The resolved file of a run: it loads to the same recipe, and tells whether a folder may be gone on with."""

import pytest

from modelopt_eagle.errors import RecipeError
from modelopt_eagle.recipe import dump_resolved, load_recipe, resolved_text, same_recipe

FANCY = [
    "training.learning_rate=1e-5",
    "data.role_aliases={'a: b # c': assistant}",
    "data.train_path=[a b.jsonl, 'null']",
    "model.base_model='#odd: name'",
    "model.revision='1e5'",
    "model.chat_template={{ a }}\n# second line",
    "export.rope_scaling={rope_type: yarn, factor: 4.0}",
    "eagle.aux_layer_ids=[1, 2]",
    "validation.mode=tree",
    "validation.topk=2",
]


def test_the_resolved_file_loads_to_the_same_recipe(tmp_path):
    recipe = load_recipe(None, FANCY)
    dump_resolved(recipe, tmp_path / "new" / "recipe.yaml")
    assert load_recipe(tmp_path / "new" / "recipe.yaml") == recipe
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["recipe.yaml"]


def test_each_value_has_its_origin_as_a_comment(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("training:\n  epochs: 2\n")
    lines = resolved_text(load_recipe(path, ["training.seed=1"])).split("\n")
    assert f"  epochs: 2  # {path}:2" in lines
    assert "  seed: 1  # override" in lines
    assert "  batch_size: 4  # default" in lines


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "recipe.yaml"
    dump_resolved(load_recipe(), path)
    before = path.read_text()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        dump_resolved(load_recipe(None, ["training.seed=1"]), path)
    assert path.read_text() == before and len(list(tmp_path.iterdir())) == 1


def test_same_recipe_names_what_would_train_otherwise(tmp_path):
    path = tmp_path / "recipe.yaml"
    dump_resolved(load_recipe(), path)
    assert same_recipe(load_recipe(), path) == []
    harmless = ["training.log_steps=1", "training.output_dir=x", "export.overwrite=true", "validation.num_samples=2"]
    harmless += ["data.workers=4"]
    assert same_recipe(load_recipe(None, harmless), path) == []
    changed = load_recipe(None, [*harmless, "training.learning_rate=1e-3", "eagle.ttt_steps=5", "training.seed=1"])
    assert same_recipe(changed, path) == ["training.learning_rate", "training.seed", "eagle.ttt_steps"]


def test_a_previous_recipe_that_cannot_be_read(tmp_path):
    (tmp_path / "recipe.yaml").write_text("training: [")
    with pytest.raises(RecipeError, match="not valid YAML"):
        same_recipe(load_recipe(), tmp_path / "recipe.yaml")
