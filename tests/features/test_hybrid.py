"""A store filled while training gives the same batches whether a row was there or not."""

from dataclasses import replace

import pytest
import torch

from modelopt_eagle.errors import FeatureError
from modelopt_eagle.features import FeatureContract, HybridSource, OfflineSource
from modelopt_eagle.features.compute import compute_features
from modelopt_eagle.features.dump import TargetBackEnd, dump

AUX = (1, 3, 4)


@pytest.fixture
def contract(tiny_target):
    return FeatureContract.from_target(tiny_target, AUX, "bfloat16")


def half_store(target, dataset, folder, dtype="bfloat16"):
    """A store with every other row."""
    dump(TargetBackEnd(target, AUX), dataset.rows, folder, dtype=dtype, worker=(0, 2))
    return folder


def counting(target):
    made = []

    def make(rows):
        made.extend(row.id for row in rows)
        return compute_features(target, rows, AUX)

    return made, make


def test_rows_are_made_once_stored_and_read(tiny_target, dataset, contract, tmp_path):
    half_store(tiny_target, dataset, tmp_path)
    made, make = counting(tiny_target)
    with HybridSource(tmp_path, dataset, contract, on_missing="generate", make=make, shard_bytes=9000) as source:
        epochs = [list(source.batches(epoch, batch_size=4, seed=0)) for epoch in (0, 0)]
    assert sorted(made) == sorted(f"talk-{i}" for i in range(1, 12, 2)) and source.generated == 6
    dump(TargetBackEnd(tiny_target, AUX), dataset.rows, tmp_path / "whole", dtype="bfloat16")
    whole = list(OfflineSource(tmp_path / "whole").batches(0, batch_size=4, seed=0))
    filled = list(OfflineSource(tmp_path).batches(0, batch_size=4, seed=0))
    for first, second, stored, reference in zip(*epochs, filled, whole, strict=True):
        assert first.row_ids == reference.row_ids
        assert torch.equal(first.aux_hidden, second.aux_hidden) and torch.equal(first.aux_hidden, stored.aux_hidden)
        assert torch.equal(first.final_hidden, stored.final_hidden)
        torch.testing.assert_close(first.aux_hidden, reference.aux_hidden, rtol=1e-2, atol=1e-2)
        assert torch.equal(first.target_top1, reference.target_top1)


def test_an_empty_folder_is_filled_and_an_interrupted_run_goes_on(tiny_target, dataset, contract, tmp_path):
    made, make = counting(tiny_target)
    with HybridSource(tmp_path, dataset, contract, on_missing="generate", make=make) as source:
        next(iter(source.batches(0, batch_size=4, seed=0)))
    again, make = counting(tiny_target)
    with HybridSource(tmp_path, dataset, contract, on_missing="generate", make=make) as source:
        assert len(list(source.batches(0, batch_size=4, seed=0))) == 3
    assert sorted(made + again) == sorted(row.id for row in dataset.rows)
    HybridSource(tmp_path, dataset, contract)  # nothing is missing any more


def test_fail_and_skip(tiny_target, dataset, contract, tmp_path):
    half_store(tiny_target, dataset, tmp_path)
    with pytest.raises(FeatureError, match="lacks 6 of 12 rows"):
        HybridSource(tmp_path, dataset, contract)
    source = HybridSource(tmp_path, dataset, contract, on_missing="skip")
    ids = sum((batch.row_ids for batch in source.batches(0, batch_size=4, seed=0)), [])
    assert sorted(ids) == sorted(f"talk-{i}" for i in range(0, 12, 2)) and source.skipped == 6
    with pytest.raises(FeatureError, match="choose fail, skip or generate"):
        HybridSource(tmp_path, dataset, contract, on_missing="ignore")
    with pytest.raises(FeatureError, match="needs a target or a feature server"):
        HybridSource(tmp_path, dataset, contract, on_missing="generate")
    with pytest.raises(FeatureError, match="template_hash"):
        HybridSource(tmp_path, dataset, replace(contract, template_hash="other"), on_missing="skip")
    with pytest.raises(FeatureError, match="other data"):
        HybridSource(tmp_path, dataset.rows[:5], contract, on_missing="skip")
