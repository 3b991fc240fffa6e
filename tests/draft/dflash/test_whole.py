"""A DFlash head the whole way: trained online and from a store, resumed, decoded losslessly, exported, refused."""

import json

import pytest
import torch

from modelopt_eagle.decoding import PlainGenerator, PseudoSpeculativeGenerator
from modelopt_eagle.draft.dflash.module import DFlashModule
from modelopt_eagle.errors import CheckpointError, DecodingError, RecipeError
from modelopt_eagle.export import export_checkpoint, load_draft
from modelopt_eagle.features.dump import TargetBackEnd, dump
from modelopt_eagle.recipe import load_recipe
from modelopt_eagle.target import load_target
from modelopt_eagle.training import train
from modelopt_eagle.training.data import read_data
from tests.training.runs import interrupt_at, small_recipe, write_conversations

PROMPTS = [[5, 9, 40, 41], [7, 100, 12], [60, 61, 62, 63, 64, 65], [200]]
BLOCKS = ("algorithm=dflash", "dflash.block_size=4", "eagle.num_layers=2", "training.learning_rate=5e-3")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_conversations(tmp_path_factory.mktemp("data") / "rows.jsonl", 120)


@pytest.fixture(scope="module")
def target(tiny_target_dir):
    return load_target(str(tiny_target_dir), dtype="float32", device="cpu")


@pytest.fixture(scope="module", params=["own", "target"])
def trained(request, tiny_target_dir, data, tmp_path_factory):
    """Heads with an output layer of their own, and with the target's."""
    more = ("eagle.draft_vocab_size=64",) if request.param == "own" else ("eagle.draft_vocab_size=null",)
    output = tmp_path_factory.mktemp("runs") / request.param
    options = (*BLOCKS, f"dflash.head={request.param}", *more)
    return train(small_recipe(tiny_target_dir, data, output, *options))


def test_it_learns_and_is_evaluated(trained):
    first, last = trained.history[0], trained.history[-1]
    assert last["loss"] < first["loss"] and len(last["per_step"]) == 3
    assert trained.finished and trained.evaluations[-1]["walked"] > 0
    head = load_draft(trained.best_checkpoint)
    assert isinstance(head, DFlashModule) and head.config.mask_token_id is not None


@pytest.mark.parametrize(
    "plan", [{"num_steps": 3}, {"mode": "tree", "topk": 3, "depth": 3, "num_nodes": 9}, {"num_steps": 2}]
)
def test_it_decodes_the_targets_own_text(trained, target, plan):
    head = load_draft(trained.best_checkpoint)
    plain = PlainGenerator(target).generate(PROMPTS, 24).tokens
    drafted = PseudoSpeculativeGenerator(target, head, **plan).generate(PROMPTS, 24)
    assert drafted.tokens == plain


def test_it_is_exported_as_vllm_reads_it_and_read_back(trained, target, tmp_path):
    head = load_draft(trained.best_checkpoint)
    written = export_checkpoint(head, None, tmp_path / "export", target=target)
    assert written.logits_difference <= 1e-5
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"] and "eagle_config" not in config
    assert config["dflash_config"] == {
        "mask_token_id": head.config.mask_token_id,
        "target_layer_ids": list(head.config.aux_layer_ids),
        "causal": False,
    }
    again = load_draft(tmp_path / "export")
    assert again.config.shares_head == head.config.shares_head
    one, two = (PseudoSpeculativeGenerator(target, h, num_steps=3).generate(PROMPTS, 16) for h in (head, again))
    assert one.accepted_lengths == two.accepted_lengths
    card = (tmp_path / "export" / "README.md").read_text()
    assert '"method": "dflash"' in card and '"num_speculative_tokens": 3' in card and "norms the context keys" in card


def test_a_killed_run_goes_on_bit_equal(tiny_target_dir, data, tmp_path, monkeypatch):
    """Anchors are drawn by the step's own numbers, so the second half draws what an undisturbed run draws."""
    options = (*BLOCKS, "dflash.anchors=2", "eagle.draft_vocab_size=64", "training.max_steps=6")
    whole = train(small_recipe(tiny_target_dir, data, tmp_path / "whole", *options))
    with monkeypatch.context() as patch:
        interrupt_at(patch, 3)
        assert not train(small_recipe(tiny_target_dir, data, tmp_path / "parts", *options)).finished
    parts = train(small_recipe(tiny_target_dir, data, tmp_path / "parts", *options))
    a, b = (load_draft(run.last_checkpoint).state_dict() for run in (whole, parts))
    assert parts.steps == whole.steps == 6 and all(torch.equal(b[name], tensor) for name, tensor in a.items())


def test_a_store_trains_it_too_with_hard_labels_and_dpace(tiny_target_dir, target, data, tmp_path):
    options = (*BLOCKS, "eagle.draft_vocab_size=64", "dflash.weighting=dpace", "dflash.causal=true",
               "eagle.self_logit_distillation=false", f"data.offline_data_path={tmp_path / 'store'}")  # fmt: skip
    recipe = small_recipe(tiny_target_dir, data, tmp_path / "run", *options)
    rows = read_data(recipe, target, [str(data)]).rows
    dump(TargetBackEnd(target, target.default_aux_layer_ids()), rows, tmp_path / "store", dtype="float32")
    result = train(recipe)
    assert result.finished and result.history[-1]["loss"] < result.history[0]["loss"]
    longer = PseudoSpeculativeGenerator(target, load_draft(result.best_checkpoint), num_steps=5)  # causal: it may
    assert longer.generate(PROMPTS, 12).tokens == PlainGenerator(target).generate(PROMPTS, 12).tokens


def test_more_tokens_than_a_bidirectional_block_was_trained_with_are_refused(trained, target):
    with pytest.raises(DecodingError, match="bidirectional blocks of 3 tokens, and 4 are asked for: draft 3"):
        PseudoSpeculativeGenerator(target, load_draft(trained.best_checkpoint), num_steps=4)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["dflash.block_size=1"], "greater than or equal to 2"),
        (["eagle.norm_output=true"], "eagle.norm_output shapes heads of another kind"),
        (["eagle.init=target"], "algorithm dflash has no eagle.init: target"),
        (["training.context_parallel=2"], "multiple of 2|no training.context_parallel"),
        (["eagle.loss_decay=0.8", "dflash.gamma=4"], "both say how the weights fall by slot"),
        (["dflash.head=target", "eagle.hidden_size=32"], "takes the target's output layer"),
        (["dflash.mask_token_id=9999"], "the target has 256 tokens"),
        (["dflash.mask_token_id=101"], "occurs .* times in the text"),
    ],
)
def test_what_cannot_be_is_refused_by_name(tiny_target_dir, data, tmp_path, overrides, says):
    with pytest.raises((RecipeError, CheckpointError), match=says):
        train(small_recipe(tiny_target_dir, data, tmp_path / "run", *BLOCKS, "training.dry_run=true", *overrides))


def test_shipped_recipes_name_the_drafter():
    for name in ("dflash", "quickstart_dflash"):
        recipe = load_recipe(name)
        assert recipe.drafter.algorithm == "dflash" and recipe.validation.num_steps == recipe.dflash.block_size - 1
