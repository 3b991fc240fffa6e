"""The head's shape in the recipe: widths, rotary table, activation, epsilon and latent ranks, whatever the target's."""

import itertools

import pytest
import transformers

from modelopt_eagle.decoding import PlainGenerator, PseudoSpeculativeGenerator
from modelopt_eagle.draft import DraftConfig
from modelopt_eagle.errors import CheckpointError, RecipeError, TargetError
from modelopt_eagle.export import export_checkpoint, load_draft
from modelopt_eagle.recipe import load_recipe
from modelopt_eagle.target import load_target
from modelopt_eagle.training import train, trainer
from tests.training.runs import small_recipe, write_conversations

PROMPTS = [[5, 9, 40, 41], [7, 100, 12]]
ROTARY = ("eagle.rope_theta=5000", "eagle.rope_scaling={rope_type: linear, factor: 2.0}", "eagle.rms_norm_eps=1e-4")
SHAPE = ("eagle.head_dim=24", "eagle.hidden_act=gelu", *ROTARY)
LATENT = ("eagle.decoder_type=kimik2", "eagle.q_lora_rank=20", "eagle.kv_lora_rank=16", "eagle.qk_nope_head_dim=12",
          "eagle.qk_rope_head_dim=8", "eagle.v_head_dim=10", *ROTARY)  # fmt: skip
CLOCK = ("training.time_budget_minutes=0.004", "training.time_budget_clock=processor")
HEADS = {
    "eagle3": SHAPE,
    "latent": LATENT,
    "peagle": ("algorithm=peagle", "peagle.depth=3", *SHAPE),
    "dflash": ("algorithm=dflash", "dflash.block_size=4", *SHAPE),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_conversations(tmp_path_factory.mktemp("data") / "rows.jsonl", 12)


@pytest.fixture(scope="module")
def target(tiny_target_dir):
    return load_target(str(tiny_target_dir), dtype="float32", device="cpu")


@pytest.mark.parametrize("name", HEADS)
def test_a_head_has_the_recipes_shape_from_training_to_a_read_export(name, tiny_target_dir, data, target, tmp_path):
    """A latent head too, over a target that has no latent attention."""
    recipe = small_recipe(tiny_target_dir, data, tmp_path / "run", "training.max_steps=1", *HEADS[name])
    head = load_draft(train(recipe, quiet=True).last_checkpoint)
    export_checkpoint(head, None, tmp_path / "export", target=target)
    for config in (head.config, load_draft(tmp_path / "export").config):
        assert config.rope_theta == 5000.0 and config.rms_norm_eps == 1e-4
        assert config.rope_scaling == {"rope_type": "linear", "factor": 2.0}
        if name == "latent":
            sizes = (config.q_lora_rank, config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim)
            assert (*sizes, config.v_head_dim) == (20, 16, 12, 8, 10)
        else:
            assert config.head_dim == 24 and config.hidden_act == "gelu"
    drafted = PseudoSpeculativeGenerator(target, load_draft(tmp_path / "export"), num_steps=3).generate(PROMPTS, 10)
    assert drafted.tokens == PlainGenerator(target).generate(PROMPTS, 10).tokens


def test_the_targets_scaling_can_be_left_out_and_a_continued_head_must_agree(tiny_target_dir, data, tmp_path):
    first = small_recipe(tiny_target_dir, data, tmp_path / "a", "training.max_steps=1", *ROTARY)
    made = train(first, quiet=True).last_checkpoint
    more = ("training.max_steps=1", f"model.draft_init={made}")
    agreeing = small_recipe(tiny_target_dir, data, tmp_path / "b", *more, "eagle.rope_theta=5000")
    assert train(agreeing, quiet=True).finished
    for asked, says in (
        ("rope_theta=1000", "rope_theta is 1000"),
        ("rope_scaling={rope_type: default}", "the head has"),
    ):
        with pytest.raises(RecipeError, match=says):
            train(small_recipe(tiny_target_dir, data, tmp_path / "c", *more, f"eagle.{asked}"), quiet=True)
    plain = small_recipe(tiny_target_dir, data, tmp_path / "d", "training.dry_run=true",
                         "eagle.rope_scaling={rope_type: default}")  # fmt: skip
    assert load_draft(train(plain, quiet=True).last_checkpoint).config.rope_scaling is None


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["eagle.kv_lora_rank=16"], "kv_lora_rank is read by layers of decoder_type kimik2"),
        (["eagle.decoder_type=kimik2", "eagle.head_dim=8"], "head_dim is read by layers of decoder_type llama"),
        (["eagle.head_dim=7"], "multiple of 2"),
        (["eagle.hidden_act=swish"], "silu"),
        (["eagle.rope_scaling={factor: 2}"], "expected the key rope_type"),
        (["eagle.init=target", "eagle.head_dim=8"], "remove head_dim"),
        (["algorithm=medusa", "eagle.rope_theta=5"], "eagle.rope_theta shapes a decoder layer"),
        (["algorithm=dflash", "eagle.decoder_type=kimik2", "eagle.kv_lora_rank=4"], "shapes heads of another kind"),
        (["eagle.decoder_type=kimik2"], "needs kv_lora_rank"),
        (["eagle.rope_scaling={rope_type: warp}"], "rope type 'warp' is unknown"),
        (["eagle.rope_scaling={rope_type: yarn}"], "rope type 'yarn' needs factor"),
    ],
)
def test_shapes_that_cannot_be_are_refused_before_anything_is_done(overrides, says, tiny_target_dir, data, tmp_path):
    with pytest.raises((RecipeError, CheckpointError), match=says):
        train(small_recipe(tiny_target_dir, data, tmp_path / "run", "training.dry_run=true", *overrides), quiet=True)
    assert not list((tmp_path / "run").glob("checkpoint*"))


def test_the_processors_clock_ends_a_run_and_wants_a_budget(tiny_target_dir, data, tmp_path, monkeypatch):
    with pytest.raises(RecipeError, match="time_budget_clock says what the minutes"):
        load_recipe(None, ["training.time_budget_clock=processor"])
    with pytest.raises(RecipeError, match="run_budget_minutes are those of a watch"):
        load_recipe(None, [*CLOCK, "training.run_budget_minutes=1"])
    result = train(small_recipe(tiny_target_dir, data, tmp_path / "run", *CLOCK, "training.epochs=4000"), quiet=True)
    assert result.finished and 0.24 <= result.seconds < 30 and 0 < result.steps < 4000
    ticks = itertools.count()
    monkeypatch.setattr(trainer, "processor_seconds", lambda: next(ticks) * 0.1)  # three looks at it are the budget
    result = train(small_recipe(tiny_target_dir, data, tmp_path / "few", *CLOCK, "training.epochs=4000"), quiet=True)
    assert result.finished and 0 < result.steps <= 2


def test_a_target_whose_layers_differ_gives_the_head_what_most_of_them_have():
    """Gemma 3n lists its feed-forward widths, Gemma 4 has wider heads in some layers."""
    sizes = dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_hidden_layers=6)
    lists = DraftConfig.from_target(transformers.Gemma3nTextConfig(**sizes, intermediate_size=[96] + [48] * 5))
    assert (lists.intermediate_size, lists.num_key_value_heads, lists.head_dim) == (48, 2, 8)
    wider = transformers.Gemma4TextConfig(**sizes, intermediate_size=48, per_layer_config={5: {"head_dim": 16}})
    made = DraftConfig.from_target(wider)
    assert (made.intermediate_size, made.num_attention_heads, made.head_dim) == (48, 4, 8)


def test_a_target_without_attention_leaves_the_heads_to_the_recipe():
    config = transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=6)
    with pytest.raises(TargetError, match="does not say num_attention_heads: set eagle.num_attention_heads"):
        DraftConfig.from_target(config)
    assert DraftConfig.from_target(config, num_attention_heads=4).head_dim == 8


@pytest.mark.parametrize("given", [{"num_attention_heads": 6}, {"num_key_value_heads": 3}])
def test_heads_that_do_not_divide_are_refused_and_not_changed(given):
    config = transformers.LlamaConfig(hidden_size=64, num_attention_heads=8, num_key_value_heads=4, vocab_size=64,
                                      num_hidden_layers=6)  # fmt: skip
    with pytest.raises(TargetError, match=r"heads are no multiple of . heads of keys .*set eagle.num_attention_heads"):
        DraftConfig.from_target(config, **given)
    made = DraftConfig.from_target(config, num_attention_heads=12)
    assert (made.num_attention_heads, made.num_key_value_heads) == (12, 4)
