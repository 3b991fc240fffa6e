"""Putting a run together: rows held out, heads continued, stores, starting weights, bad input."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from modelopt_eagle.data import prepare_dataset
from modelopt_eagle.draft import DraftConfig, DraftVocab
from modelopt_eagle.draft.algorithm import random_module
from modelopt_eagle.draft.eagle3.initialise import norm_weight, start_from_target
from modelopt_eagle.errors import CheckpointError, DataError, FeatureError, RecipeError, TrainingError
from modelopt_eagle.features.dump import TargetBackEnd, dump
from modelopt_eagle.target import load_target_tables
from modelopt_eagle.target.tables import LayerFiles
from modelopt_eagle.target.tiny import make_tiny_target
from modelopt_eagle.training import train
from modelopt_eagle.training.data import held_out_rows
from modelopt_eagle.training.trainer import Trainer
from tests.training.runs import interrupt_at, small_recipe, write_conversations

SHORT = ("training.epochs=1", "training.max_steps=2")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_conversations(tmp_path_factory.mktemp("data") / "rows.jsonl", 12)


def config_of(checkpoint):
    return json.loads((checkpoint / "draft_config.json").read_text())


def test_held_out_rows_are_spread_and_few():
    assert held_out_rows(99) == []
    assert held_out_rows(100) == [6, 18, 31, 43, 56, 68, 81, 93]
    assert len(held_out_rows(1000)) == 20 and len(set(held_out_rows(10**6))) == 64


def test_rows_are_held_out_of_a_large_set_and_evaluated(tiny_target_dir, tmp_path):
    rows = write_conversations(tmp_path / "rows.jsonl", 100)
    result = train(small_recipe(tiny_target_dir, rows, tmp_path / "run", "training.batch_size=50", "training.epochs=1"))
    assert any("evaluation: 8 of these rows" in line for line in result.header)
    (found,) = result.evaluations
    assert found["step"] == 2 and found["walked"] > 0 and 1 <= found["acceptance_length"] <= 4
    state = json.loads((result.last_checkpoint / "trainer_state.json").read_text())
    assert state["provenance"]["rows"] == 92


def test_several_evaluation_files_get_a_number_each(tiny_target_dir, tmp_path, capsys):
    """B137: the pooled number is what all steps together give; each file's is what it gives alone."""
    rows = write_conversations(tmp_path / "rows.jsonl", 12)
    first, second = write_conversations(tmp_path / "a.jsonl", 3), write_conversations(tmp_path / "b.jsonl", 6)
    options = ["training.epochs=1", "training.batch_size=6", "data.cache_features=disk"]
    pair = small_recipe(tiny_target_dir, rows, tmp_path / "pair", *options, f"data.eval_path=[{first},{second}]")
    (both,) = train(pair).evaluations
    said = capsys.readouterr().err
    assert set(both["by_file"]) == {str(first), str(second)}
    parts = list(both["by_file"].values())
    assert both["walked"] == sum(part["walked"] for part in parts)
    total = sum(part["acceptance_length"] * part["walked"] for part in parts)
    assert both["acceptance_length"] == pytest.approx(total / both["walked"])
    for place, file in enumerate((first, second)):
        alone = small_recipe(tiny_target_dir, rows, tmp_path / f"alone{place}", *options, f"data.eval_path={file}")
        (found,) = train(alone).evaluations
        assert "by_file" not in found
        assert {key: found[key] for key in parts[place]} == parts[place]
        assert f"{parts[place]['acceptance_length']:.3f} on" in said and f"answers of {file}" in said


def test_offline_training_equals_online(tiny_target, tiny_target_dir, data, tmp_path):
    rows = prepare_dataset(tiny_target.tokenizer, data, max_length=2048).rows
    dump(TargetBackEnd(tiny_target), rows, tmp_path / "store", dtype="float32")
    options = ("training.log_steps=1", "eagle.init=target")  # read from the target's files where it is not loaded
    online = train(small_recipe(tiny_target_dir, data, tmp_path / "online", *options))
    store = f"data.offline_data_path={tmp_path / 'store'}"
    offline = train(small_recipe(tiny_target_dir, data, tmp_path / "offline", store, *options))
    assert online.steps == offline.steps == 6
    for a, b in zip(online.history, offline.history, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
    assert torch.equal(
        load_file(online.last_checkpoint / "model.safetensors")["d2t"],
        load_file(offline.last_checkpoint / "model.safetensors")["d2t"],
    )


def test_a_start_from_layers_that_are_not_there_is_refused(tiny_target, tiny_target_dir, data, tmp_path, monkeypatch):
    rows = prepare_dataset(tiny_target.tokenizer, data, max_length=2048).rows
    dump(TargetBackEnd(tiny_target), rows, tmp_path / "store", dtype="float32")
    options = (f"data.offline_data_path={tmp_path / 'store'}", "eagle.init=target", *SHORT)
    recipe, tables = (
        small_recipe(tiny_target_dir, data, tmp_path / "run", *options),
        load_target_tables(tiny_target_dir),
    )
    elsewhere = LayerFiles(tables.layers[-8:], tiny_target_dir, None, "elsewhere.", torch.float32)
    for layers, says in (
        ((), "copies the last 1 of the target's layers, and .* has 0: set eagle.init: random"),
        (elsewhere, r"reads the target's last layer from its files.*elsewhere\.7\.self_attn.*set eagle.init: random"),
    ):
        given = replace(tables, layers=layers)
        monkeypatch.setattr("modelopt_eagle.training.run.load_target_tables", lambda given=given, **_: given)
        with pytest.raises(RecipeError, match=says):
            train(recipe)


def test_offline_rows_keep_to_the_window_and_the_number_asked_for(tiny_target, tiny_target_dir, data, tmp_path):
    """The store holds longer rows than the run wants: the same rows and losses as online, by the same options."""
    rows = prepare_dataset(tiny_target.tokenizer, data, max_length=2048).rows
    dump(TargetBackEnd(tiny_target), rows, tmp_path / "store", dtype="float32")
    store = f"data.offline_data_path={tmp_path / 'store'}"
    window = sorted(len(row.input_ids) for row in rows)[6]
    for policy, kept, share in (("truncate", 10, "40.0% truncated"), ("drop", 6, "4 dropped")):
        options = ["data.max_rows=10", f"data.max_length={window}", f"data.overlong={policy}", *SHORT]
        options += ["training.batch_size=16", "training.max_steps=1"]
        online = train(small_recipe(tiny_target_dir, data, tmp_path / f"online-{policy}", *options))
        offline = train(small_recipe(tiny_target_dir, data, tmp_path / f"offline-{policy}", store, *options))
        assert offline.header[0] == online.header[0] and share in online.header[0]
        state = json.loads((offline.last_checkpoint / "trainer_state.json").read_text())
        assert state["provenance"]["rows"] == kept
        assert offline.history[-1]["loss"] == pytest.approx(online.history[-1]["loss"], rel=1e-4)
    with pytest.raises(DataError, match="no supervised token"):
        train(small_recipe(tiny_target_dir, data, tmp_path / "none", store, "data.max_length=16"))


def test_store_of_another_target_is_refused(tiny_target, data, tmp_path):
    rows = prepare_dataset(tiny_target.tokenizer, data, max_length=2048).rows
    dump(TargetBackEnd(tiny_target), rows, tmp_path / "store", dtype="float32")
    make_tiny_target(tmp_path / "tiny", seed=5)
    recipe = small_recipe(tmp_path / "tiny", data, tmp_path / "run", f"data.offline_data_path={tmp_path / 'store'}")
    with pytest.raises(FeatureError, match="revision"):
        train(recipe)
    other_layers = small_recipe(
        tmp_path / "tiny", data, tmp_path / "run2", f"data.offline_data_path={tmp_path / 'store'}",
        "eagle.aux_layer_ids=[0,2,4]",
    )  # fmt: skip
    with pytest.raises(FeatureError, match="aux_layer_ids"):
        train(other_layers)


def test_continued_head_keeps_its_vocabulary_on_other_data(tiny_target_dir, data, tmp_path):
    """Rows of the head must keep their target ids although the new corpus has other frequent words."""
    first = train(small_recipe(tiny_target_dir, data, tmp_path / "first", *SHORT))
    other = tmp_path / "other.jsonl"
    row = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "QQQ ZZZ 12345 ÜÜ"}]}
    other.write_text("\n".join(json.dumps({"id": str(i), **row}) for i in range(8)) + "\n")
    said = train(
        small_recipe(tiny_target_dir, other, tmp_path / "second", f"model.draft_init={first.best_checkpoint}", *SHORT)
    )
    fresh = train(small_recipe(tiny_target_dir, other, tmp_path / "fresh", *SHORT))
    before, after, counted = (load_file(r.last_checkpoint / "model.safetensors") for r in (first, said, fresh))
    assert torch.equal(before["d2t"], after["d2t"]) and torch.equal(before["t2d"], after["t2d"])
    assert not torch.equal(counted["d2t"], after["d2t"])
    assert not torch.equal(before["fc.weight"], after["fc.weight"])
    assert any("kept" in line for line in said.header)
    with pytest.raises(RecipeError, match=r"eagle\.num_layers is 2, the head has 1"):
        train(
            small_recipe(
                tiny_target_dir, data, tmp_path / "third", f"model.draft_init={first.best_checkpoint}",
                "eagle.num_layers=2",
            )
        )  # fmt: skip


def test_vocabulary_map_from_disk(tiny_target_dir, tiny_target, data, tmp_path):
    from modelopt_eagle.data.vocab import save_draft_vocab

    vocab = DraftVocab.from_target_ids(torch.arange(0, 200, 2), 256)
    tokenizer = tiny_target.identity()["tokenizer_hash"]
    save_draft_vocab(tmp_path / "map", vocab, {"tokenizer_hash": tokenizer, "model": "tiny"})
    path = f"eagle.draft_vocab_path={tmp_path / 'map'}"
    result = train(small_recipe(tiny_target_dir, data, tmp_path / "run", *SHORT, path, "eagle.draft_vocab_size=null"))
    assert torch.equal(load_file(result.last_checkpoint / "model.safetensors")["d2t"], vocab.d2t)
    with pytest.raises(RecipeError, match="draft_vocab_size is 64, the map .* has 100"):
        train(small_recipe(tiny_target_dir, data, tmp_path / "other", path))
    save_draft_vocab(tmp_path / "foreign", vocab, {"tokenizer_hash": "other", "model": "other"})
    with pytest.raises(CheckpointError, match="another tokenizer"):
        train(
            small_recipe(
                tiny_target_dir, data, tmp_path / "third", f"eagle.draft_vocab_path={tmp_path / 'foreign'}",
                "eagle.draft_vocab_size=null",
            )
        )  # fmt: skip


def test_start_from_target_is_the_targets_last_layer(tiny_target, monkeypatch):
    """Without the small random parts the untrained head gives what the last layer makes of the captured state."""
    monkeypatch.setattr("modelopt_eagle.draft.eagle3.initialise.SMALL", 0.0)
    monkeypatch.setattr("modelopt_eagle.draft.eagle3.initialise.SOFT", 1.0)
    config = DraftConfig.from_target(tiny_target.config, 256, (1, 3, 6))  # layer 6 feeds the last layer, 7
    module = random_module(config, DraftVocab.identity(256), seed=0)
    start_from_target(module, tiny_target)
    ids = torch.randint(4, 200, (1, 12))
    output = tiny_target.features(ids, None, (1, 3, 6))
    from modelopt_eagle.training import rollout

    got = rollout(module, tiny_target.embedding(ids), output.aux_hidden, 1)
    torch.testing.assert_close(
        got.logits(0)[:, :-1], tiny_target.logits(output.final_hidden)[:, :-1], rtol=1e-3, atol=1e-3
    )


def test_norm_weight_reads_both_ways_of_writing_it():
    class OnePlus(torch.nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = torch.nn.Parameter(weight)

        def forward(self, x):
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True)) * (1 + self.weight)

    weight = torch.linspace(-0.5, 0.5, 8)
    torch.testing.assert_close(norm_weight(OnePlus(weight), 8), 1 + weight)
    plain = torch.nn.RMSNorm(8)
    plain.weight.data = weight
    torch.testing.assert_close(norm_weight(plain, 8), weight)


@pytest.mark.parametrize(
    ("overrides", "error", "says"),
    [
        (("data.train_path=missing.jsonl",), DataError, "no such file"),
        (("eagle.draft_vocab_size=300",), CheckpointError, "300"),
        (("eagle.init=target", "eagle.fc_norm=true"), RecipeError, "eagle.init: random"),
        (("eagle.aux_layer_ids=[1,40]",), ValueError, "40"),
        (("data.max_length=16", "data.overlong=drop"), DataError, "too_long|no supervised"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_bad_input_is_said_before_training(tiny_target_dir, data, tmp_path, overrides, error, says):
    with pytest.raises(error, match=says):
        train(small_recipe(tiny_target_dir, data, tmp_path / "run", *overrides))
    assert not list((tmp_path / "run").glob("checkpoint-*"))


def test_a_head_that_cannot_be_built_is_refused_before_features_are_made(tiny_target_dir, data, tmp_path):
    for overrides in (
        ["eagle.draft_vocab_size=300"],
        [f"eagle.draft_vocab_path={tmp_path}"],
        ["eagle.decoder_type=kimik2"],
    ):
        with pytest.raises(CheckpointError):
            train(small_recipe(tiny_target_dir, data, tmp_path / "run", "data.cache_features=disk", *overrides))
    assert not (tmp_path / "run" / "features").exists()


def test_target_of_few_layers_needs_ids(data, tmp_path):
    make_tiny_target(tmp_path / "five", layers=5)
    with pytest.raises(ValueError, match="aux_layer_ids"):
        train(small_recipe(tmp_path / "five", data, tmp_path / "run"))
    result = train(small_recipe(tmp_path / "five", data, tmp_path / "run2", "eagle.aux_layer_ids=[0,2,3]", *SHORT))
    assert config_of(result.last_checkpoint)["aux_layer_ids"] == [0, 2, 3]


def test_loss_that_is_not_finite_stops_the_run_and_is_not_saved(tiny_target_dir, data, tmp_path, monkeypatch):
    original = Trainer.optimise

    def optimise(self, index, window):
        original(self, index, window)
        if index == 1:
            with torch.no_grad():
                self.step.module.fc.weight[0, 0] = float("nan")

    monkeypatch.setattr(Trainer, "optimise", optimise)
    with pytest.raises(TrainingError, match="not finite|loss is nan"):
        train(small_recipe(tiny_target_dir, data, tmp_path / "run", "training.save_steps=2"))
    assert [f.name for f in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-0"]


def test_features_on_disk_are_not_made_twice(tiny_target_dir, data, tmp_path, monkeypatch):
    recipe = small_recipe(tiny_target_dir, data, tmp_path / "run", "data.cache_features=disk")
    with monkeypatch.context() as patch:
        interrupt_at(patch, 1)
        train(recipe)
    made = []
    from modelopt_eagle.features import dump as module

    monkeypatch.setattr(module, "compute_rows", lambda *a, **k: made.append(a) or iter(()))
    assert train(recipe).finished and not made


def test_metrics_go_where_the_recipe_says(tiny_target_dir, data, tmp_path, monkeypatch):
    import sys
    import types

    logged, ended = [], []
    run = types.SimpleNamespace(
        log=lambda scalars, step: logged.append((step, scalars)), finish=lambda: ended.append(1)
    )
    fake = types.SimpleNamespace(init=lambda **options: run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    train(small_recipe(tiny_target_dir, data, tmp_path / "wandb", *SHORT, "training.report_to=wandb"))
    assert [step for step, _ in logged] == [1, 2] and ended
    assert {"train/loss", "train/accuracy_step_0", "train/learning_rate"} <= logged[0][1].keys()
    train(small_recipe(tiny_target_dir, data, tmp_path / "board", *SHORT, "training.report_to=tensorboard"))
    assert list((tmp_path / "board" / "logs").glob("events.*"))
