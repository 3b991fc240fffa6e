"""The seam for drafters: one that is registered here goes the whole way without a touch of the package."""

import dataclasses
import json

import pytest
import torch

from modelopt_eagle.decoding import PlainGenerator, PseudoSpeculativeGenerator
from modelopt_eagle.draft.algorithm import SHIPPED, algorithm_of, find_algorithm, known_algorithms
from modelopt_eagle.draft.eagle3.algorithm import STRUCTURE
from modelopt_eagle.errors import DecodingError, ExportError, RecipeError
from modelopt_eagle.export import export_checkpoint, load_draft
from modelopt_eagle.features.dump import TargetBackEnd, dump
from modelopt_eagle.recipe import load_recipe
from modelopt_eagle.recipe.sections.eagle import LATENT
from modelopt_eagle.target import load_target
from modelopt_eagle.training import train
from modelopt_eagle.training.data import read_data
from modelopt_eagle.training.run import check_drafter
from modelopt_eagle.validation import measure_acceptance
from tests.draft.toy_drafter import NAME, BigramConfig, BigramModule
from tests.training.runs import small_recipe, write_conversations

PROMPTS = [[5, 9, 40, 41], [7, 100, 12], [60, 61, 62, 63, 64, 65], [200]]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_conversations(tmp_path_factory.mktemp("data") / "rows.jsonl", 120)


@pytest.fixture(scope="module")
def trained(tiny_target_dir, data, tmp_path_factory):
    """A table trained online, with evaluations while training."""
    output = tmp_path_factory.mktemp("runs") / "online"
    recipe = small_recipe(tiny_target_dir, data, output, f"algorithm={NAME}", "training.learning_rate=2e-2")
    return train(recipe)


@pytest.mark.parametrize("name", [name for name in SHIPPED if name != "eagle3"])
def test_keys_that_shape_an_eagle_head_are_read_or_refused(name):
    """Of each drafter: a key that it does not take over into the head's configuration is an error, not ignored."""
    algorithm, other_values = find_algorithm(name), {
        "decoder_type": "kimik2", "sliding_window": 64, "rope_scaling": "{rope_type: default}", "hidden_act": "gelu",
        "rms_norm_eps": 0.1,
    }  # fmt: skip
    for key in STRUCTURE:
        value = other_values.get(key, "true" if load_recipe(None).eagle.default(key) is False else 2)
        layers = ["eagle.decoder_type=kimik2"] if key in LATENT else []
        recipe = load_recipe(None, [f"algorithm={name}", *layers, f"eagle.{key}={value}"])
        if key in algorithm.structure or (name, key) == ("dflash", "qk_norm"):  # DFlash heads have these norms always
            algorithm.check_recipe(recipe)
            continue
        with pytest.raises(RecipeError, match=f"eagle.{key} "):
            algorithm.check_recipe(recipe)


def test_the_table_learns_online_and_is_evaluated(trained):
    first, last = trained.history[0], trained.history[-1]
    assert last["loss"] < 0.97 * first["loss"] and len(last["per_step"]) == 3
    assert trained.finished and trained.evaluations[-1]["walked"] > 0
    config = json.loads((trained.best_checkpoint / "draft_config.json").read_text())
    assert config["algorithm"] == NAME


def test_a_store_gives_the_same_table(trained, tiny_target_dir, data, tmp_path):
    target = load_target(str(tiny_target_dir), dtype="float32", device="cpu")
    recipe = small_recipe(tiny_target_dir, data, tmp_path / "run", f"algorithm={NAME}", "training.learning_rate=2e-2")
    rows = read_data(recipe, target, [str(data)]).rows
    dump(TargetBackEnd(target, target.default_aux_layer_ids()), rows, tmp_path / "store", dtype="float32")
    stored = train(
        small_recipe(
            tiny_target_dir, data, tmp_path / "run", f"algorithm={NAME}", "training.learning_rate=2e-2",
            f"data.offline_data_path={tmp_path / 'store'}",
        )
    )  # fmt: skip
    assert stored.steps == trained.steps
    one, other = (load_draft(run.last_checkpoint).state_dict() for run in (trained, stored))
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("plan", [{"num_steps": 3}, {"mode": "tree", "topk": 3, "depth": 1, "num_nodes": 4}])
def test_it_decodes_the_targets_own_text(trained, tiny_target_dir, plan):
    target = load_target(str(tiny_target_dir), dtype="float32", device="cpu")
    module = load_draft(trained.best_checkpoint)
    assert isinstance(module, BigramModule) and isinstance(module.config, BigramConfig)
    plain = PlainGenerator(target).generate(PROMPTS, 24).tokens
    drafted = PseudoSpeculativeGenerator(target, module, **plan).generate(PROMPTS, 24)
    assert drafted.tokens == plain
    assert drafted.accepted > 0


def test_it_is_measured_exported_and_read_back(trained, tiny_target_dir, tmp_path):
    target = load_target(str(tiny_target_dir), dtype="float32", device="cpu")
    module = load_draft(trained.best_checkpoint)
    report = measure_acceptance(target, module, ["hello", "what is it"], max_new_tokens=16, speedup_prompts=0)
    assert report.acceptance_length >= 1
    written = export_checkpoint(module, None, tmp_path / "export", target=target, report=report.to_dict())
    assert written.logits_difference == 0
    again = load_draft(tmp_path / "export")
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in module.state_dict().items())
    card = (tmp_path / "export" / "README.md").read_text()
    assert "table of bigrams" in card and f"tags: [{NAME}, " in card
    with pytest.raises(ExportError, match="vLLM .* was asked for: vLLM serves no bigram heads"):
        export_checkpoint(module, None, tmp_path / "other", target=target, for_engines={"vllm": "0.32.0"})


def test_a_run_goes_on_where_it_was(tiny_target_dir, data, tmp_path):
    """A checkpoint of a drafter from outside is resumed, and another drafter is refused in its folder."""
    options = (f"algorithm={NAME}", "training.max_steps=4", "training.save_steps=2")
    first = train(small_recipe(tiny_target_dir, data, tmp_path / "run", *options))
    assert first.steps == 4
    with pytest.raises(RecipeError, match="drafter.algorithm was 'bigram', is 'eagle3'"):
        train(small_recipe(tiny_target_dir, data, tmp_path / "run", *options[1:]))


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("training.context_parallel=1", None),
        ("eagle.init=target", "algorithm bigram has no eagle.init: target"),
    ],
)
def test_what_a_drafter_does_not_have_is_refused_first(tiny_target_dir, data, tmp_path, override, says):
    recipe = small_recipe(
        tiny_target_dir, data, tmp_path / "run", f"algorithm={NAME}", "training.dry_run=true", override
    )
    if says is None:
        assert not train(recipe).finished
        return
    with pytest.raises(RecipeError, match=says):
        train(recipe)


@pytest.mark.parametrize("name", [*SHIPPED, NAME])
def test_who_draws_its_drafts_says_so_before_training(name):
    """Else a run would train to its end and then be told."""
    recipe = load_recipe(None, [f"algorithm={name}", "validation.sample_drafts=true", "validation.temperature=1"])
    if name == "eagle3":
        check_drafter(recipe)
        return
    with pytest.raises(RecipeError, match=f"algorithm {name} has no validation.sample_drafts"):
        check_drafter(recipe)


def test_what_a_head_cannot_draft_is_refused_when_a_generator_is_made(trained, tiny_target_dir, monkeypatch):
    target = load_target(str(tiny_target_dir), dtype="float32", device="cpu")
    module = load_draft(trained.best_checkpoint)
    with pytest.raises(DecodingError, match="draft the likeliest tokens only: leave sample_drafts at False"):
        PseudoSpeculativeGenerator(target, module, sample_drafts=True)
    without = dataclasses.replace(algorithm_of(module.config), trees=False)
    monkeypatch.setattr("modelopt_eagle.decoding.checks.algorithm_of", lambda config: without)
    with pytest.raises(DecodingError, match=f"{without.title} heads draft no trees: draft a chain"):
        PseudoSpeculativeGenerator(target, module, "tree", topk=3, depth=1)


def test_names_are_known_and_unknown_ones_refused():
    assert {"eagle3", NAME} <= set(known_algorithms())
    assert find_algorithm("eagle3").title == "EAGLE-3"
    with pytest.raises(RecipeError, match="algorithm 'eagle9' is unknown; known are"):
        find_algorithm("eagle9")
    assert load_recipe(None, [f"algorithm={NAME}"]).drafter.algorithm == NAME
    assert load_recipe({"algorithm": NAME}).drafter.algorithm == NAME


def test_the_head_of_a_config_says_its_drafter(trained):
    assert algorithm_of(load_draft(trained.best_checkpoint).config).name == NAME
