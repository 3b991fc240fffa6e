"""A head that is continued: every option of the recipe is kept to or refused; and what is said of a head."""

import json

import pytest
from safetensors.torch import load_file

from modelopt_eagle.draft import DraftConfig, DraftVocab, EagleModule
from modelopt_eagle.errors import RecipeError
from modelopt_eagle.export import export_checkpoint, load_draft
from modelopt_eagle.recipe import load_recipe
from modelopt_eagle.target.tiny import make_tiny_target
from modelopt_eagle.training import train
from modelopt_eagle.training.head import continued_head
from modelopt_eagle.training.run import architecture_line
from tests.training.runs import small_recipe, write_conversations


@pytest.fixture
def folder(tiny_target, tmp_path):
    config = DraftConfig.from_target(tiny_target.config, 64)
    module = EagleModule(config, DraftVocab.from_target_ids(range(64), 256))
    export_checkpoint(module, None, tmp_path / "head", target=tiny_target)
    return tmp_path / "head"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("eagle.draft_vocab_size=32", "draft_vocab_size is 32, the head keeps its map of 64"),
        ("eagle.draft_vocab_path=some/map", "draft_vocab_path is some/map"),
    ],
)
def test_another_vocabulary_for_a_continued_head_is_refused(tiny_target, folder, override, says):
    """B27, B45: the map is kept, so an option that asks for another one is not passed over."""
    recipe = load_recipe(None, [f"model.draft_init={folder}", "eagle.draft_vocab_size=64"])
    assert continued_head(recipe, tiny_target.identity()).config.draft_vocab_size == 64
    with pytest.raises(RecipeError, match=says):
        continued_head(load_recipe(None, [f"model.draft_init={folder}", override]), tiny_target.identity())


def test_a_continued_head_records_this_runs_target(tiny_target, folder):
    """B35, B142: also one that comes from a tool that records nothing."""
    path, identity = folder / "config.json", tiny_target.identity()
    data = json.loads(path.read_text())
    data["modelopt_eagle"] = {"format": 1, "decoder_type": "llama"}
    path.write_text(json.dumps(data))
    assert load_draft(folder).config.tokenizer_hash is None
    recipe = load_recipe(None, [f"model.draft_init={folder}", "eagle.draft_vocab_size=null"])
    config = continued_head(recipe, identity).config
    assert config.tokenizer_hash == identity["tokenizer_hash"] and config.target_name == identity["model"]
    assert config.extra == {"template_hash": identity["template_hash"], "target_revision": identity["revision"]}


def test_the_architecture_is_said_with_every_flag():
    """B45."""
    sizes = dict(
        hidden_size=8, target_hidden_size=8, intermediate_size=12, num_attention_heads=4, num_key_value_heads=2,
        head_dim=2, vocab_size=16, aux_layer_ids=(1,), rope_theta=5e5,
    )  # fmt: skip
    line = architecture_line(DraftConfig(**sizes, norm_output=True, fc_norm=True))
    assert line == (
        "head: 1 llama layers of 8, 4 heads (2 of keys and values) of 2, feed-forward 12, rotary base 500000, "
        "flags fc_norm, norm_output"
    )
    assert "flags none" in architecture_line(DraftConfig(**sizes))


def test_a_tied_target_gives_a_head_of_its_own_rows(tmp_path):
    """B77: the target's tying goes nowhere: 64 rows in checkpoint, continued run and export, no second table."""
    make_tiny_target(tmp_path / "tied", tie=True)
    data = write_conversations(tmp_path / "data.jsonl", 8)
    first = train(small_recipe(tmp_path / "tied", data, tmp_path / "first", "training.max_steps=1"))
    second = train(
        small_recipe(
            tmp_path / "tied", data, tmp_path / "second", "training.max_steps=1",
            f"model.draft_init={first.best_checkpoint}",
        )
    )  # fmt: skip
    head = load_draft(second.best_checkpoint)
    export_checkpoint(head, None, tmp_path / "export")
    tensors = load_file(tmp_path / "export" / "model.safetensors")
    assert tensors["lm_head.weight"].shape[0] == 64 and not any("embed" in name for name in tensors)
    assert tensors["lm_head.weight"].equal(head.lm_head.weight)
