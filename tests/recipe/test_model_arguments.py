"""How the target is loaded for decoding."""

import pytest

from modelopt_eagle import pipeline
from modelopt_eagle.recipe import load_recipe
from modelopt_eagle.recipe.sections import ModelSection


class Asked(Exception):
    """Stops where the target would be loaded."""


@pytest.mark.parametrize(
    ("wanted", "used"), [("flash_attention_2", "sdpa"), ("flash_attention_3", "sdpa"), ("eager", "eager")]
)
def test_validation_after_training_needs_an_attention_with_masks(wanted, used, tmp_path, monkeypatch):
    """B120: a run trained with flash attention does not end in an error after hours."""
    assert ModelSection(device="cpu", attn_implementation=wanted).load_arguments()["attn_implementation"] == wanted

    def load_target(**arguments):
        raise Asked(arguments["attn_implementation"])

    monkeypatch.setattr("modelopt_eagle.target.load_target", load_target)
    monkeypatch.setattr(pipeline, "measurement_mark", lambda recipe, checkpoint: {})
    recipe = load_recipe(None, [f"model.attn_implementation={wanted}", f"training.output_dir={tmp_path}"])
    result = type("Result", (), {"output_dir": tmp_path, "best_checkpoint": tmp_path})
    with pytest.raises(Asked, match=f"^{used}$"):
        pipeline.validate(recipe, result)
