"""Stores, checkpoints and exports of commit 939f04f are read, and give the numbers that they gave then.

``make.py`` made the folders in ``made/`` with that commit's code.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from modelopt_eagle.data import prepare_dataset
from modelopt_eagle.decoding import PseudoSpeculativeGenerator
from modelopt_eagle.export import load_draft
from modelopt_eagle.features import OfflineSource
from modelopt_eagle.features.dump import TargetBackEnd, dump
from modelopt_eagle.features.store import StoreReader
from modelopt_eagle.features.store.maintenance import merge, verify
from modelopt_eagle.target import load_target
from modelopt_eagle.training import rollout, train
from tests.compatibility.make import LAYERS, losses, recipe

MADE = Path(__file__).parent / "made"
EXPECTED = json.loads((MADE / "expected.json").read_text(encoding="utf-8"))
CLOSE = dict(rtol=1e-4, atol=1e-4)


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A copy of the folders, as the working directory: their paths are relative."""
    folder = tmp_path / "made"
    shutil.copytree(MADE, folder, symlinks=True)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="module")
def tensors():
    return load_file(MADE / "expected.safetensors")


def test_the_store_gives_the_same_rows(tensors):
    reader = StoreReader(MADE / "store")
    rows = [reader.row(number) for number in range(len(reader))]
    assert [row.row_id for row in rows] == EXPECTED["rows"]
    for name in ("input_ids", "supervised", "aux_hidden", "final_hidden", "target_top1", "target_logsumexp"):
        assert torch.equal(getattr(rows[0], name), tensors[f"row0.{name}"]), name
    for name in ("aux_hidden", "final_hidden", "target_logsumexp"):
        sums = [float(getattr(row, name).double().abs().sum()) for row in rows]
        assert sums == pytest.approx(EXPECTED[name], rel=1e-9), name


def test_the_store_is_whole_and_of_its_target(made):
    assert not verify("store").bad
    tables = load_target("target")
    source = OfflineSource("store", verify="read")
    source.check_teacher(tables.head, final_norm=tables.final_norm)
    assert merge("store") == 2 and len(StoreReader("store")) == len(EXPECTED["rows"])


def test_a_dump_goes_on_in_the_store(made, tensors):
    """A worker's share is lost and made again by today's code, beside the other's rows of then."""
    for path in Path("store").glob("*-1-of-2*"):
        path.unlink()
    target = load_target("target")
    rows = prepare_dataset(target.tokenizer, "talks.jsonl", max_length=256).rows
    assert dump(TargetBackEnd(target, LAYERS), rows, "store", dtype="float32", worker=(1, 2)) == (4, 0)
    reader = StoreReader("store")
    sums = {reader.row_ids[n]: float(reader.row(n).aux_hidden.double().abs().sum()) for n in range(len(reader))}
    expected = dict(zip(EXPECTED["rows"], EXPECTED["aux_hidden"], strict=True))
    assert sums == pytest.approx(expected, rel=1e-5)


def test_offline_training_makes_the_same_steps(made):
    result = train(recipe("data.offline_data_path=store", "training.output_dir=offline"))
    assert losses(result) == pytest.approx(EXPECTED["offline_losses"], rel=1e-5)


def test_training_goes_on_from_the_checkpoint(made):
    result = train(recipe("data.train_path=talks.jsonl"))
    assert result.steps == 4 and losses(result) == pytest.approx(EXPECTED["losses"], rel=1e-5)


def test_training_begins_at_the_export(made):
    options = ["data.train_path=talks.jsonl", "model.draft_init=export", "training.output_dir=continued"]
    result = train(recipe(*options, "eagle.draft_vocab_size=null"))
    assert losses(result) == pytest.approx(EXPECTED["continued_losses"], rel=1e-5)


@pytest.mark.parametrize("name", ["checkpoint", "export"])
def test_heads_give_the_same_logits(name, tensors):
    module = load_draft(MADE / {"checkpoint": "run/checkpoint-2", "export": "export"}[name])
    assert module.config.draft_vocab_size == 64 and module.config.aux_layer_ids == LAYERS
    output = rollout(module, tensors["embeddings"], tensors["features"], steps=2)
    for k in range(2):
        torch.testing.assert_close(output.logits(k), tensors[f"{name}.logits{k}"], **CLOSE)


def test_the_exported_head_drafts_the_same(made):
    generator = PseudoSpeculativeGenerator(load_target("target"), load_draft("export"), num_steps=2, fast_linear=False)
    answer = generator.generate([[50, 60, 70], [9, 8, 100, 101]], 24, eos_token_id=[])
    assert answer.tokens == EXPECTED["tokens"] and answer.accepted_lengths == EXPECTED["accepted"]
