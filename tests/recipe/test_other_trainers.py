"""Recipes of Model-Optimizer and SpecForge: their keys are answered with ours."""

import pytest

from modelopt_eagle.errors import RecipeError
from modelopt_eagle.recipe import load_recipe


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("eagle.eagle_ttt_steps=3", "nearest valid name: ttt_steps"),
        ("eagle.eagle_loss_decay_factor=0.9", "nearest valid name: loss_decay"),
        ("eagle.eagle_self_logit_distillation=true", "nearest valid name: self_logit_distillation"),
        ("eagle.eagle_mix_hidden_states=0.5", "nearest valid name: mix_hidden_states"),
        ("eagle.eagle_architecture_config={}", "its parts are keys of eagle"),
        ("eagle.eagle_freeze_base_model=true", "the target is always frozen"),
        ("data.mode=online", "follow from data.offline_data_path and data.streaming_server_url"),
        ("data.train_data_path=a", "nearest valid name: train_path"),
        ("data.train_hidden_states_path=a", "nearest valid name: offline_data_path"),
        ("training.num_epochs=1", "nearest valid name: epochs"),
        ("training.total_steps=1", "nearest valid name: max_steps"),
        ("training.save_interval=1", "nearest valid name: save_steps"),
        ("training.tp_size=2", "model.device: auto"),
        ("training.training_seq_len=1024", "nearest valid name: data.max_length"),
        ("model.target_model_path=a", "nearest valid name: base_model"),
        ("dataset.path=a", "unknown section 'dataset'; nearest: data "),
    ],
)
def test_keys_of_others_are_answered_with_ours(override, says, tmp_path):
    with pytest.raises(RecipeError, match=says):
        load_recipe(None, [override])
    name, value = override.split("=")
    section, key = name.split(".")
    (tmp_path / "theirs.yaml").write_text(f"{section}:\n  {key}: {value}\n")
    with pytest.raises(RecipeError, match=rf"theirs\.yaml:[12]: .*{says}"):
        load_recipe(tmp_path / "theirs.yaml")
