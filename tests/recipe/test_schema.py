"""Checks across fields, and the values that follow from others."""

import ast
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

import modelopt_eagle
from modelopt_eagle.common.trees import default_tree_nodes, tree_node_bounds
from modelopt_eagle.draft.eagle3.algorithm import STRUCTURE
from modelopt_eagle.errors import RecipeError
from modelopt_eagle.recipe import ModelSection, Recipe, TrainingSection, load_recipe


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["validation.mode=tree"], "mode: tree needs topk > 0, found None"),
        (["validation.mode=tree", "validation.topk=0"], "mode: tree needs topk > 0, found 0"),
        (["validation.topk=4"], "topk: 4 shapes a tree, but mode is chain"),
        (["validation.depth=4", "validation.num_nodes=9"], "depth: 4, num_nodes: 9 shapes a tree"),
        (["data.offline_data_path=a", "data.streaming_server_url=http://h:1"], "two feature sources"),
        (["data.on_missing=skip"], "set offline_data_path"),
        (["data.cache_features=disk", "data.offline_data_path=a"], "cache_features: disk"),
        (["data.cache_features=memory", "data.streaming_server_url=http://h:1"], "cache_features: memory"),
        (["eagle.lk_eta=2"], "lk_eta is read only when loss is lk"),
        (["eagle.loss=lk", "eagle.self_logit_distillation=false"], "compares distributions"),
        (["eagle.loss=lk", "eagle.convention=eagle"], "set convention: served"),
        (["eagle.num_attention_heads=6", "eagle.num_key_value_heads=4"], "found 6 and 4"),
        (["eagle.decoder_type=kimik2", "eagle.num_key_value_heads=4"], "num_key_value_heads is read by layers of"),
        (["training.lr_scheduler=constant", "training.min_lr_ratio=0.1"], "min_lr_ratio is where a learning rate"),
        (["eagle.init=target", "eagle.hidden_size=64"], "remove hidden_size"),
        (["training.muon_learning_rate=0.01"], "set optimizer: muon"),
        (["eagle.init=target", "model.draft_init=dir"], "two starting points"),
        (["eagle.ttt_steps=1", "eagle.mix_hidden_states=0.1"], "mix_hidden_states speaks of the rollout's later steps"),
        (["eagle.ttt_steps=1", "eagle.ttt_warmup=0.5", "eagle.loss_decay=0.8"], "ttt_warmup, loss_decay speaks of"),
        (["eagle.draft_vocab_counts=text"], "set draft_vocab_size"),
        (
            ["eagle.draft_vocab_counts=text", "eagle.draft_vocab_size=64", "eagle.draft_vocab_path=map"],
            "leave draft_vocab_path at null",
        ),
        (["data.offline_data_path=a", "data.eval_path=e.jsonl"], "eval_path needs the features of a loaded target"),
        (["data.streaming_server_url=http://h:1", "data.eval_path=e.jsonl"], "rows are held out of the data"),
        (
            ["data.offline_data_path=a", "data.columns={prompt: q}", "data.workers=4"],
            "workers, columns says how conver",
        ),
        (["data.offline_data_path=a", "data.train_path=b.jsonl"], "train_path is b.jsonl, and the rows are those of"),
        (["data.offline_data_path=a", "data.supervise_reasoning=false"], "supervise_reasoning says how conversations"),
        (["validation.mode=none", "validation.ar_lower_bound=1.2"], "bounds what mode: none does not measure"),
        (["validation.mode=none", "validation.topk=4"], "topk: 4 shapes a tree, but mode is none"),
        (["validation.prompts=p.jsonl", "validation.dataset=mt_bench"], "both name the prompts"),
        (
            ["eagle.draft_vocab_size=4", "validation.mode=tree", "validation.topk=5"],
            "validation.topk 5 is larger than the draft vocabulary",
        ),
        (["dflash.block_size=16", "dflash.gamma=4"], "eagle3, which does not read dflash.block_size, dflash.gamma"),
        (["algorithm=dflash", "peagle.depth=4"], "peagle.depth: leave these keys out, or set algorithm"),
        (["algorithm=dflash", "dflash.weighting=dpace", "dflash.gamma=4"], "gamma is read only when weighting is expo"),
        (["algorithm=dflash", "dflash.dpace_alpha=0.3"], "set weighting: dpace"),
        (["training.max_tokens_per_batch=1024"], "is less than data.max_length 2048, and a row of that length"),
        (
            ["training.batch_size=2", "training.max_tokens_per_batch=4096"],
            "in rows or in tokens: leave one",
        ),
        (["algorithm=peagle", "medusa.heads=3"], "algorithm is peagle, which does not read medusa.heads"),
    ],
)
def test_options_that_do_not_fit_together(overrides, said):
    with pytest.raises(RecipeError, match="^(?!$)") as caught:
        load_recipe(None, overrides)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.offline_data_path=a", "data.streaming_server_url=http://h:1", "data.on_missing=generate"],
        ["data.offline_data_path=a", "data.on_missing=skip"],
        ["data.streaming_server_url=http://h:1,https://g:2"],
        ["eagle.loss=lk", "eagle.lk_eta=2"],
        ["data.offline_data_path=a", "data.on_missing=skip", "data.workers=4"],
        ["data.offline_data_path=a", "data.max_length=64", "data.max_rows=5"],
        ["eagle.draft_vocab_counts=text", "eagle.draft_vocab_size=64"],
        ["validation.mode=none", "validation.num_steps=5"],
        ["eagle.norm_before_fc=true", "eagle.fc_norm=true"],
        ["eagle.num_attention_heads=6", "eagle.num_key_value_heads=3"],
        ["peagle.depth=4", "algorithm=peagle", "dflash.causal=false"],
    ],
)
def test_options_that_fit_together(overrides):
    recipe = load_recipe(None, overrides)
    for key, text in (override.split("=", 1) for override in overrides):
        section, _, name = key.rpartition(".")
        if section:
            assert getattr(getattr(recipe, section), name) == yaml.safe_load(text), key


@pytest.mark.parametrize(("topk", "depth", "low", "high"), [(2, 3, 4, 11), (1, 5, 6, 6), (4, 1, 2, 5), (8, 6, 7, 329)])
def test_tree_nodes_lie_within_their_bounds(topk, depth, low, high):
    shape = ["validation.mode=tree", f"validation.topk={topk}", f"validation.depth={depth}"]
    assert tree_node_bounds(topk, depth) == (low, high)
    for nodes in (low, high):
        assert load_recipe(None, [*shape, f"validation.num_nodes={nodes}"]).validation.tree_nodes == nodes
    for nodes in (low - 1, high + 1):
        with pytest.raises(RecipeError) as caught:
            load_recipe(None, [*shape, f"validation.num_nodes={nodes}"])
        assert f"[{low}, {high}]" in str(caught.value) and f"found {nodes}" in str(caught.value)
    assert low <= default_tree_nodes(topk, depth) <= high


def test_tree_shape_follows_from_topk_and_steps():
    recipe = load_recipe(None, ["validation.mode=tree", "validation.topk=4", "validation.num_steps=5"])
    assert (recipe.validation.tree_depth, recipe.validation.tree_nodes) == (5, 21)
    assert Recipe().validation.tree_nodes is None


def test_output_and_export_folders_follow_from_the_model():
    recipe = load_recipe(None, ["model.base_model=org/Some Model"])
    assert recipe.training.output_dir == "ckpts/Some-Model-eagle3"
    assert recipe.export_path.as_posix() == "ckpts/Some-Model-eagle3/export"
    assert load_recipe(None, ["export.path=out"]).export_path.as_posix() == "out"


def test_assignments_are_checked():
    training = TrainingSection()
    with pytest.raises(ValidationError):
        training.epochs = 0
    with pytest.raises(ValidationError):
        training.lr = 1.0
    assert training.epochs == 1


def test_every_key_has_a_description_and_the_window_is_told_from_the_limit():
    for section, body in Recipe.sections().items():
        for key, field in body.model_fields.items():
            assert field.description and field.description.endswith((".", "...")), f"{section}.{key}"
    described = Recipe.sections()["data"].model_fields["max_length"].description
    assert "window" in described and "max_position_embeddings" in described


def test_target_arguments_on_a_cpu_are_float32():
    assert ModelSection(device="cpu").load_arguments()["dtype"] == "float32"
    assert ModelSection(device="cpu", dtype="bfloat16").load_arguments()["dtype"] == "bfloat16"
    assert ModelSection(device="cuda:1").load_arguments()["dtype"] == "auto"


def test_target_arguments_are_those_of_load_target():
    import inspect

    from modelopt_eagle.target import load_target

    given = ModelSection().load_arguments()
    assert given and given.keys() <= inspect.signature(load_target).parameters.keys()


def test_every_key_is_read_outside_the_schema():
    """No option that nothing reads: each key stands behind a name of its section somewhere in the package."""
    holders = {
        "drafter": {"drafter"},
        "model": {"model"},
        "data": {"data"},
        "training": {"training", "settings"},
        "eagle": {"eagle"},
        "medusa": {"medusa"},
        "peagle": {"peagle"},
        "dflash": {"dflash", "own", "section"},
        "target_lora": {"target_lora", "lora"},
        "validation": {"validation", "section"},
        "export": {"export", "section"},
        "recipe": {"recipe"},
    }
    package = Path(modelopt_eagle.__file__).parent
    read = {("eagle", key) for key in STRUCTURE}
    for file in package.rglob("*.py"):
        if file.parent == package / "recipe":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                holder = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", None)
                read |= {(section, node.attr) for section, names in holders.items() if holder in names}
    read |= {("validation", "depth")} if ("validation", "tree_depth") in read else set()
    read |= {("export", "path")} if ("recipe", "export_path") in read else set()
    if ("model", "load_arguments") in read:
        plain = ModelSection(device="cpu").load_arguments()
        others = {
            "base_model": "other", "revision": "v2", "dtype": "bfloat16", "device": "cuda",
            "attn_implementation": "eager", "trust_remote_code": True, "chat_template": "t",
        }  # fmt: skip
        for key, value in others.items():
            if ModelSection(**{"device": "cpu", key: value}).load_arguments() != plain:
                read.add(("model", key))
    assert set(Recipe.keys()) - read == set()
