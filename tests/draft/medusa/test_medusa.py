"""Medusa heads from their equations, and from the recipe to the export on the tiny target."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelopt_eagle.decoding import PlainGenerator, PseudoSpeculativeGenerator
from modelopt_eagle.draft import DraftVocab
from modelopt_eagle.draft.counting import counted_predictions
from modelopt_eagle.draft.documents import Documents, WholeAxis
from modelopt_eagle.draft.medusa.config import MedusaConfig
from modelopt_eagle.draft.medusa.draft_loop import MedusaLoop
from modelopt_eagle.draft.medusa.module import MedusaModule
from modelopt_eagle.draft.medusa.states import head_drafts, head_states
from modelopt_eagle.draft.plan import DraftPlan
from modelopt_eagle.draft.predictions import BatchView
from modelopt_eagle.errors import CheckpointError, DecodingError, ExportError, RecipeError
from modelopt_eagle.export import export_checkpoint, load_draft
from modelopt_eagle.features.dump import TargetBackEnd, dump
from modelopt_eagle.target import load_target
from modelopt_eagle.training import train
from modelopt_eagle.training.acceptance import walk
from modelopt_eagle.training.data import read_data
from modelopt_eagle.validation import measure_acceptance
from tests.training.runs import interrupt_at, small_recipe, write_conversations

PROMPTS = [[5, 9, 40, 41], [7, 100, 12], [60, 61, 62, 63, 64, 65], [200]]
OPTIONS = ("algorithm=medusa", "medusa.heads=3", "training.learning_rate=2e-2")


def make_heads(reduced=True, **overrides):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 24, "target_hidden_size": 24, "intermediate_size": 8, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 12, "vocab_size": 40, "draft_vocab_size": 16 if reduced else 40,
        "aux_layer_ids": (7,), "heads": 3,
    }  # fmt: skip
    vocab = DraftVocab.from_counts(torch.arange(40) % 3 + 0.5, 16, [0]) if reduced else None
    return MedusaModule(MedusaConfig.from_dict({**sizes, **overrides}), vocab).eval()


def make_view(length=12, documents=(5, 7)):
    generator = torch.Generator().manual_seed(1)
    ids = torch.cat([torch.full((n,), i) for i, n in enumerate(documents)])
    return BatchView(
        input_ids=torch.randint(40, (length,), generator=generator),
        supervised=torch.rand(length, generator=generator) < 0.8,
        documents=Documents.make(1, length, ids[None], "cpu"),
        aux_hidden=torch.zeros(length, 24),
        final_hidden=torch.randn(length, 24, generator=generator),
        embed=lambda places: None,
        length=length,
        axis=WholeAxis(length, "cpu"),
    )


@pytest.mark.parametrize("overrides", [{}, {"blocks": 3}, {"shared_output": False, "reduced": False}])
def test_training_rows_and_served_rows_are_those_of_the_equations(overrides):
    """``h + silu(W h)`` a block, then the output; values, gradients, and the draft of a round."""
    module, view = make_heads(**overrides), make_view()
    predictions = counted_predictions(view, 3, "served")
    shuffled = predictions.select(torch.randperm(len(predictions)))
    states = head_states(module, view, shuffled)
    rows = []
    for anchor, depth in zip(shuffled.anchor.tolist(), shuffled.depth.tolist(), strict=True):
        x = view.final_hidden[anchor]
        for layer in module.blocks[depth].layers:
            gate = layer.weight @ x
            x = x + gate * torch.sigmoid(gate)
        rows.append(x)
    torch.testing.assert_close(states, torch.stack(rows), rtol=1e-5, atol=1e-5)
    weights = torch.randn_like(states)
    blocks = list(module.blocks.parameters())
    for one, other in zip(
        torch.autograd.grad((states * weights).sum(), blocks),
        torch.autograd.grad((torch.stack(rows) * weights).sum(), blocks),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    loop = MedusaLoop(module, DraftPlan.chain(3)).loop(2, 9)
    loop.commit(torch.zeros(2, 3, dtype=torch.int64), view.final_hidden[:6].view(2, 3, 24), [0, 4], [2, 3])
    drafted = loop.draft([2, 7], torch.zeros(2, dtype=torch.int64))
    for row, place in enumerate((1, 5)):
        for depth, matrix in enumerate(module.output_weights(3)):
            best = (matrix @ module.blocks[depth](view.final_hidden[place])).argmax()
            assert drafted[row, depth] == module.target_ids[best]


def test_no_more_is_drafted_than_there_are_heads():
    module, view = make_heads(), make_view()
    predictions, states = head_drafts(module, view, 5)
    assert predictions.depths == 3 and len(states) == len(predictions)
    following = view.supervised[(predictions.anchor + 1).clamp(max=11)]
    assert following.all() and len(states) < len(counted_predictions(view, 3, "served"))
    result = walk(module, view, torch.zeros(12, dtype=torch.int64), 5)
    assert all(n <= 3 for row in result.accepted for n in row)
    with pytest.raises(DecodingError, match="nothing was committed"):
        MedusaLoop(module, DraftPlan.chain(2)).draft([1], torch.zeros(1, dtype=torch.int64))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_conversations(tmp_path_factory.mktemp("data") / "rows.jsonl", 120)


@pytest.fixture(scope="module")
def target(tiny_target_dir):
    return load_target(str(tiny_target_dir), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def trained(tiny_target_dir, data, tmp_path_factory):
    return train(small_recipe(tiny_target_dir, data, tmp_path_factory.mktemp("runs") / "online", *OPTIONS))


def test_they_learn_online_and_are_evaluated(trained):
    assert trained.history[-1]["loss"] < 0.97 * trained.history[0]["loss"]
    assert trained.evaluations[-1]["walked"] > 0


def test_a_store_gives_the_same_heads(target, tiny_target_dir, data, tmp_path):
    options = ("algorithm=medusa", "training.max_steps=6", "data.max_rows=24")
    online = train(small_recipe(tiny_target_dir, data, tmp_path / "online", *options))
    rows = read_data(small_recipe(tiny_target_dir, data, tmp_path / "run", *options), target, [str(data)]).rows
    dump(TargetBackEnd(target, (target.num_layers - 1,)), rows, tmp_path / "store", dtype="float32")
    stored = train(
        small_recipe(tiny_target_dir, data, tmp_path / "run", *options, f"data.offline_data_path={tmp_path / 'store'}")
    )
    one, other = (load_draft(run.last_checkpoint).state_dict() for run in (online, stored))
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


def test_resumed_they_are_the_same_to_the_bit(tiny_target_dir, data, tmp_path, monkeypatch):
    options = (*OPTIONS, "training.max_steps=6", "training.save_steps=3", "data.max_rows=24", "eagle.init=target")
    whole = train(small_recipe(tiny_target_dir, data, tmp_path / "whole", *options))
    with monkeypatch.context() as patch:
        interrupt_at(patch, 4)
        assert not train(small_recipe(tiny_target_dir, data, tmp_path / "halved", *options)).finished
    resumed = train(small_recipe(tiny_target_dir, data, tmp_path / "halved", *options))
    one, other = (load_draft(run.last_checkpoint).state_dict() for run in (whole, resumed))
    assert resumed.finished and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize("plan", [{"num_steps": 3}, {"mode": "tree", "topk": 3, "depth": 3, "num_nodes": 10}])
def test_they_decode_the_targets_own_text(trained, target, plan):
    module = load_draft(trained.best_checkpoint)
    plain = PlainGenerator(target).generate(PROMPTS, 32, eos_token_id=[]).tokens
    output = PseudoSpeculativeGenerator(target, module, **plan).generate(PROMPTS, 32, eos_token_id=[])
    assert output.tokens == plain
    with pytest.raises(DecodingError, match="4 drafted tokens were asked of 3 Medusa heads"):
        PseudoSpeculativeGenerator(target, module, num_steps=4)


def test_untrained_heads_that_start_from_the_target_say_its_next_token(target, tiny_target_dir, data, tmp_path):
    """Blocks that add nothing: each head gives the distribution that follows its state, as it reads it in a round."""
    options = ("algorithm=medusa", "eagle.init=target", "eagle.draft_vocab_size=null", "training.dry_run=true")
    module = load_draft(train(small_recipe(tiny_target_dir, data, tmp_path / "run", *options)).last_checkpoint)
    ids = torch.tensor([PROMPTS[2]])
    logits = target.model(ids).logits[0, -1]
    final = target.final_norm(target.features(ids, None, (target.num_layers - 1,)).aux_hidden)
    torch.testing.assert_close(module.logits(final[0, -1], 4)[2], logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("own_output", [False, True])
def test_exported_and_read_back(trained, target, tiny_target_dir, data, tmp_path, own_output):
    checkpoint = trained.best_checkpoint
    if own_output:
        options = (*OPTIONS, "medusa.shared_output=false", "medusa.blocks=2", "training.dry_run=true")
        checkpoint = train(small_recipe(tiny_target_dir, data, tmp_path / "own", *options)).last_checkpoint
    module = load_draft(checkpoint)
    report = measure_acceptance(target, module, ["hello"], max_new_tokens=12, speedup_prompts=0)
    written = export_checkpoint(module, None, tmp_path / "export", target=target, report=report.to_dict())
    assert written.logits_difference == 0
    again = load_draft(tmp_path / "export")
    assert again.config.heads == 3
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in module.state_dict().items())
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config["architectures"] == ["MedusaModel"] and config["num_heads"] == 3
    card = (tmp_path / "export" / "README.md").read_text()
    assert "does not start with a Medusa head over a reduced vocabulary" in card and "vllm serve" not in card
    with pytest.raises(ExportError, match="SGLang 0.5.23 was asked for: SGLang serves no Medusa heads"):
        export_checkpoint(module, None, tmp_path / "other", target=target, for_engines={"sglang": "0.5.23"})
    config["num_heads"] = 5
    (tmp_path / "export" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="num_heads 5 is not what the heads were trained with"):
        load_draft(tmp_path / "export")
    del config["modelopt_eagle"]
    (tmp_path / "export" / "config.json").write_text(json.dumps(config))
    save_file(load_file(tmp_path / "export" / "model.safetensors"), tmp_path / "export" / "model.safetensors")
    with pytest.raises(CheckpointError, match="Medusa heads of another tool"):
        load_draft(tmp_path / "export")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["eagle.num_layers=2"], "eagle.num_layers shapes a decoder layer"),
        (["eagle.ttt_steps=4"], "eagle.ttt_steps shapes a decoder layer or its steps"),
        (["eagle.aux_layer_ids=1,2"], r"eagle.aux_layer_ids is \[1, 2\], and Medusa heads read the last layer, 7"),
        (["medusa.heads=2"], "validation.num_steps 3 drafts more tokens than medusa.heads 2"),
        (["training.context_parallel=2"], "training.context_parallel: 2|has no training.context_parallel"),
    ],
)
def test_bad_input_is_refused(tiny_target_dir, data, tmp_path, overrides, says):
    with pytest.raises(RecipeError, match=says):
        train(small_recipe(tiny_target_dir, data, tmp_path / "run", *OPTIONS, "data.max_rows=12", *overrides))


def test_continued_heads_keep_their_number(trained, tiny_target_dir, data, tmp_path):
    start = (f"model.draft_init={trained.best_checkpoint}", "eagle.draft_vocab_size=null", "data.max_rows=12")
    going_on = train(small_recipe(tiny_target_dir, data, tmp_path / "on", *OPTIONS, *start, "training.max_steps=1"))
    assert load_draft(going_on.last_checkpoint).config.heads == 3
    with pytest.raises(RecipeError, match="medusa.heads is 4, the heads have 3"):
        train(small_recipe(tiny_target_dir, data, tmp_path / "four", *OPTIONS, *start, "medusa.heads=4"))
