"""P-EAGLE from the recipe to the export on the tiny target: trained, resumed, walked, decoded, written, read back."""

import json

import pytest
import torch

from modelopt_eagle.cli.estimate import EvenRows, estimate
from modelopt_eagle.decoding import PlainGenerator, PseudoSpeculativeGenerator
from modelopt_eagle.draft.algorithm import find_algorithm
from modelopt_eagle.draft.peagle.config import PEagleConfig
from modelopt_eagle.draft.peagle.draft_loop import ParallelLoop
from modelopt_eagle.draft.peagle.module import PEagleModule
from modelopt_eagle.errors import CheckpointError, RecipeError
from modelopt_eagle.export import export_checkpoint, load_draft
from modelopt_eagle.features.dump import TargetBackEnd, dump
from modelopt_eagle.recipe import load_recipe
from modelopt_eagle.target import load_target
from modelopt_eagle.training import train
from modelopt_eagle.training.data import read_data
from modelopt_eagle.validation import measure_acceptance
from tests.training.runs import interrupt_at, small_recipe, write_conversations

PROMPTS = [[5, 9, 40, 41], [7, 100, 12], [60, 61, 62, 63, 64, 65], [200]]
OPTIONS = ("algorithm=peagle", "peagle.depth=4", "eagle.num_layers=2")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_conversations(tmp_path_factory.mktemp("data") / "rows.jsonl", 120)


@pytest.fixture(scope="module")
def target(tiny_target_dir):
    return load_target(str(tiny_target_dir), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def trained(tiny_target_dir, data, tmp_path_factory):
    return train(small_recipe(tiny_target_dir, data, tmp_path_factory.mktemp("runs") / "online", *OPTIONS))


def test_it_learns_online_and_is_evaluated(trained):
    first, last = trained.history[0], trained.history[-1]
    assert last["loss"] < 0.97 * first["loss"] and len(last["per_step"]) == 4
    assert trained.finished and trained.evaluations[-1]["walked"] > 0
    module = load_draft(trained.best_checkpoint)
    assert isinstance(module, PEagleModule) and module.config.trained_depth == 4
    assert 0 <= module.config.mask_token_id < 256


def test_a_store_gives_the_same_head(trained, target, tiny_target_dir, data, tmp_path):
    """The drawn anchors are a function of seed and step, so another source of the same features changes nothing."""
    recipe = small_recipe(tiny_target_dir, data, tmp_path / "run", *OPTIONS)
    rows = read_data(recipe, target, [str(data)]).rows
    dump(TargetBackEnd(target, target.default_aux_layer_ids()), rows, tmp_path / "store", dtype="float32")
    stored = train(
        small_recipe(tiny_target_dir, data, tmp_path / "run", *OPTIONS, f"data.offline_data_path={tmp_path / 'store'}")
    )
    one, other = (load_draft(run.last_checkpoint).state_dict() for run in (trained, stored))
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-3, atol=2e-4, msg=name)


def test_killed_and_resumed_it_is_the_same_to_the_bit(tiny_target_dir, data, tmp_path, monkeypatch):
    options = (*OPTIONS, "training.max_steps=6", "training.save_steps=3", "data.max_rows=24")
    whole = train(small_recipe(tiny_target_dir, data, tmp_path / "whole", *options))
    with monkeypatch.context() as patch:
        interrupt_at(patch, 4)
        assert not train(small_recipe(tiny_target_dir, data, tmp_path / "halved", *options)).finished
    resumed = train(small_recipe(tiny_target_dir, data, tmp_path / "halved", *options))
    assert resumed.finished and resumed.steps == whole.steps == 6
    one, other = (load_draft(run.last_checkpoint).state_dict() for run in (whole, resumed))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize(
    "plan", [{"num_steps": 3}, {"num_steps": 6}, {"mode": "tree", "topk": 3, "depth": 3, "num_nodes": 10}]
)
def test_it_decodes_the_targets_own_text(trained, target, plan):
    module = load_draft(trained.best_checkpoint)
    plain = PlainGenerator(target).generate(PROMPTS, 32, eos_token_id=[]).tokens
    generator = PseudoSpeculativeGenerator(target, module, **plan)
    assert generator.generate(PROMPTS, 32, eos_token_id=[]).tokens == plain
    assert bool(generator.notes) == (plan.get("num_steps") == 6)


def test_a_tree_of_branching_one_is_the_chain(trained, target):
    module = load_draft(trained.best_checkpoint)
    chain = PseudoSpeculativeGenerator(target, module, num_steps=4).generate(PROMPTS, 24, eos_token_id=[])
    tree = PseudoSpeculativeGenerator(target, module, "tree", topk=1, depth=4).generate(PROMPTS, 24, eos_token_id=[])
    assert tree.tokens == chain.tokens and tree.accepted_lengths == chain.accepted_lengths


def test_a_perfect_drafter_is_always_accepted(trained, target, monkeypatch):
    """Its draft is replaced by the target's own text; all else is the loop's."""
    answers = PlainGenerator(target).generate(PROMPTS, 40, eos_token_id=[]).tokens
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, answers, strict=True)]

    def perfect(self, lengths, roots):
        return torch.tensor([text[n + 1 : n + 4] for text, n in zip(texts, lengths, strict=True)])

    monkeypatch.setattr(ParallelLoop, "draft", perfect)
    module = load_draft(trained.best_checkpoint)
    output = PseudoSpeculativeGenerator(target, module, num_steps=3).generate(PROMPTS, 24, eos_token_id=[])
    assert output.tokens == [answer[:24] for answer in answers]
    assert all(set(accepted) == {3} for accepted in output.accepted_lengths)


def test_it_is_measured_exported_and_read_back(trained, target, tmp_path):
    module = load_draft(trained.best_checkpoint)
    report = measure_acceptance(
        target, module, ["hello", "what is it"], max_new_tokens=16, num_steps=5, speedup_prompts=0
    )
    assert "note: drafts of 5 tokens by a head that was trained for 4" in report.table()
    written = export_checkpoint(module, None, tmp_path / "export", target=target, report=report.to_dict())
    assert written.logits_difference == 0
    assert any(need.startswith("vLLM 0.16.0 or newer") for need in written.needs)
    assert "SGLang serves no P-EAGLE heads" in written.needs
    assert [note for note in written.notes if note.startswith("vllm")] == []
    assert any("sglang" in note and "serves no P-EAGLE heads" in note for note in written.notes)
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["mask_token_id"] == module.config.mask_token_id
    again = load_draft(tmp_path / "export")
    assert isinstance(again.config, PEagleConfig) and again.config.trained_depth == 4
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in module.state_dict().items())
    card = (tmp_path / "export" / "README.md").read_text()
    assert "P-EAGLE draft head" in card and '"parallel_drafting": true' in card and "no P-EAGLE heads" in card


@pytest.mark.parametrize(
    ("overrides", "error", "says"),
    [
        (["peagle.mask_token_id=256"], CheckpointError, "mask_token_id is 256, the target has 256 tokens"),
        ([f"peagle.mask_token_id={ord('e')}"], RecipeError, "occurs .* times in the text to be learned"),
        (["eagle.ttt_steps=5"], RecipeError, r"eagle.ttt_steps shapes the steps of a rollout.*peagle.depth"),
        (["eagle.mix_hidden_states=0.1"], RecipeError, "eagle.mix_hidden_states shapes the steps"),
        (["eagle.norm_output=true"], RecipeError, "eagle.norm_output shapes the steps"),
    ],
)
def test_bad_input_is_refused(tiny_target_dir, data, tmp_path, overrides, error, says):
    with pytest.raises(error, match=says):
        train(small_recipe(tiny_target_dir, data, tmp_path / "run", *OPTIONS, "data.max_rows=12", *overrides))


@pytest.mark.parametrize("override", ["peagle.depth=0", "peagle.depth_keep=0", "peagle.depth_floor=1.5"])
def test_bad_numbers_are_refused_by_the_recipe(override):
    with pytest.raises(RecipeError, match="peagle"):
        load_recipe(None, [override])


def test_a_named_mask_is_kept_and_a_continued_head_keeps_its_own(trained, tiny_target_dir, data, tmp_path):
    options = (*OPTIONS, "data.max_rows=12", "training.max_steps=1")
    named = train(small_recipe(tiny_target_dir, data, tmp_path / "named", *options, "peagle.mask_token_id=200"))
    assert load_draft(named.last_checkpoint).config.mask_token_id == 200
    start = (f"model.draft_init={trained.best_checkpoint}", "eagle.draft_vocab_size=null")
    going_on = train(small_recipe(tiny_target_dir, data, tmp_path / "on", *options, *start))
    config = load_draft(trained.best_checkpoint).config
    assert load_draft(going_on.last_checkpoint).config.mask_token_id == config.mask_token_id
    with pytest.raises(RecipeError, match="the head was trained with"):
        train(small_recipe(tiny_target_dir, data, tmp_path / "other", *options, *start, "peagle.mask_token_id=201"))
    with pytest.raises(RecipeError, match="algorithm is eagle3, the head is of peagle"):
        train(small_recipe(tiny_target_dir, data, tmp_path / "eagle", "data.max_rows=12", *start))


@pytest.mark.parametrize(
    "options",
    [
        ("eagle.loss=lk",),
        ("eagle.self_logit_distillation=false",),
        ("eagle.init=target",),
        ("training.gradient_accumulation_steps=2", "eagle.in_vocab_only=true"),
        ("eagle.ttt_warmup=0.5", "eagle.draft_vocab_size=null", "training.optimizer=muon"),
    ],
)
def test_what_the_loss_can_do_it_can(tiny_target_dir, data, tmp_path, options):
    result = train(
        small_recipe(
            tiny_target_dir, data, tmp_path / "run", *OPTIONS, "data.max_rows=24", "training.epochs=4", *options
        )
    )
    assert result.history[-1]["per_step"][0] < result.history[0]["per_step"][0]


def test_the_cost_of_a_step_follows_the_shares():
    recipe = load_recipe("quickstart_peagle")
    sampled = estimate(recipe, EvenRows(100, 20000, 12000))
    whole = estimate(load_recipe("quickstart_peagle", ["peagle.depth_keep=1.0"]), EvenRows(100, 20000, 12000))
    one = estimate(load_recipe("quickstart_peagle", ["peagle.depth=1"]), EvenRows(100, 20000, 12000))
    assert one.head_flops < sampled.head_flops < whole.head_flops
    assert find_algorithm("peagle").recipe == "peagle"
