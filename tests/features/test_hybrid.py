"""A store filled while training gives the same batches whether a row was there or not."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from modelopt_eagle.data import TokenizedRow
from modelopt_eagle.errors import FeatureError
from modelopt_eagle.features import FeatureContract, HybridSource, OfflineSource, predicting_positions
from modelopt_eagle.features.compute import compute_features
from modelopt_eagle.features.dump import TargetBackEnd, dump
from modelopt_eagle.features.store import StoreReader
from tests.features.hybrid_fillers import ROWS, tokenised
from tests.features.rows import check_all, make_row
from tests.features.rows import contract as toy_contract

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


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_row_made_now_is_served_with_the_prefix_that_the_store_gives_it(tmp_path, dtype):
    """Two computations of a prefix differ by rounding; the store keeps the first."""
    noise = torch.Generator().manual_seed(0)
    tokens = [list(range(20)), [*range(20), 3, 4], [*range(12), 9, 9, 9], [*range(20), 3, 5, 6], [7] * 9]
    rows = []
    for number, ids in enumerate(tokens):
        row = replace(make_row(number), input_ids=torch.tensor(ids))
        supervised = torch.arange(len(ids)) % 3 == 0
        aux = torch.stack([make_row(token + 1).aux_hidden[0] for token in ids])
        aux *= 1 + 0.004 * torch.randn(len(ids), 1, generator=noise)
        final = torch.randn(len(ids), row.final_hidden.shape[1], generator=noise)
        row = replace(row, supervised=supervised, aux_hidden=aux, final_hidden=final, target_logsumexp=None)
        rows.append(replace(row, target_top1=torch.where(predicting_positions(supervised), 7, -1)))
    data = [TokenizedRow(row.row_id, "", row.input_ids.tolist(), row.supervised.tolist(), 0) for row in rows]
    made = {row.row_id: row for row in rows}

    def make(wanted):
        return [made[row.id] for row in wanted]

    asked = toy_contract(dtype)
    with HybridSource(tmp_path, data, asked, on_missing="generate", make=make) as source:
        now = [source.load([number]) for number in range(5)]
        assert source.generated == 5
    assert StoreReader(tmp_path).shards[0].shared >= 12 + 20 + 20
    for number, batch in enumerate(now):
        stored = OfflineSource(tmp_path).load([number])
        assert batch.aux_hidden.dtype == stored.aux_hidden.dtype
        assert torch.equal(batch.aux_hidden, stored.aux_hidden), number
        assert torch.equal(batch.final_hidden, stored.final_hidden)


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


FILLERS = Path(__file__).with_name("hybrid_fillers.py")


def fillers(folder, log, *pace):
    """Two processes that fill ``folder`` together, in a process group of their own."""
    environment = os.environ | {"PYTHONPATH": str(FILLERS.parents[2]), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, str(FILLERS), str(folder), str(log), *map(str, pace)]
    return subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)


def test_two_processes_fill_a_store_together_and_make_each_row_once(tmp_path):
    run = fillers(tmp_path / "store", tmp_path / "log")
    batches = [json.loads(line) for line in run.communicate(timeout=120)[0].splitlines()]
    assert run.returncode == 0
    made = (tmp_path / "log").read_text().split()
    assert sorted(made) == sorted(row.id for row in tokenised())  # also though the second epoch deals rows otherwise
    for epoch in (0, 1):
        rows = [row for batch in batches if batch["epoch"] == epoch for row in batch["rows"]]
        assert sorted(rows) == sorted(made)
    for batch in batches:
        wanted = sum(make_row(int(row.removeprefix("row-"))).aux_hidden.double().sum().item() for row in batch["rows"])
        assert batch["sum"] == pytest.approx(wanted, abs=1e-4)
    check_all(tmp_path / "store", ROWS)


def test_processes_that_are_killed_lose_only_what_was_not_written(tmp_path):
    draw, stored = random.Random(3), [0]
    for _ in range(5):
        run = fillers(tmp_path / "store", tmp_path / "log", 0.03)
        run.stdout.readline()  # both are at work
        time.sleep(draw.uniform(0.0, 0.3))
        os.killpg(run.pid, signal.SIGKILL)
        run.communicate()
        stored.append(len(StoreReader(tmp_path / "store")))
        if stored[-1] == ROWS:
            break
    assert stored == sorted(stored) and any(0 < rows < ROWS for rows in stored)
    before = set(StoreReader(tmp_path / "store").row_ids)
    (tmp_path / "log").unlink()
    run = fillers(tmp_path / "store", tmp_path / "log")
    run.communicate(timeout=120)
    assert run.returncode == 0
    log = tmp_path / "log"
    made = Counter(log.read_text().split()) if log.exists() else Counter()
    assert set(made.values()) <= {1} and set(made) == {row.id for row in tokenised()} - before
    check_all(tmp_path / "store", ROWS)


def toy_source(folder, rank=0, world_size=2, barrier=None, **options):
    def make(rows):
        return [make_row(int(row.id.removeprefix("row-"))) for row in rows]

    options = {"on_missing": "generate", "make": make} | options
    return HybridSource(
        folder, tokenised(), toy_contract(), rank=rank, world_size=world_size, barrier=barrier, **options
    )


def test_a_row_that_its_maker_does_not_write_in_time_is_made_again_and_not_stored_twice(tmp_path, monkeypatch):
    monkeypatch.setattr("modelopt_eagle.features.hybrid.WAIT_FOR_OTHERS", 0.2)
    barrier, sources = threading.Barrier(2), {}
    threads = [
        threading.Thread(target=lambda rank=rank: sources.update({rank: toy_source(tmp_path, rank, 2, barrier.wait)}))
        for rank in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    batches = sources[0].batches(0, batch_size=2, seed=0, shuffle=False)
    first = next(batches)  # claimed by the first process, in its memory
    second = sources[1].load([1, 40])
    assert torch.equal(second.aux_hidden[0, : len(make_row(1))], first.aux_hidden[0, len(make_row(0)) :])
    assert (sources[1].generated, sources[1].repeated) == (1, 1)
    assert sources[0].load([40]).row_ids == ["row-40"] and sources[0].repeated == 0  # written at once
    batches.close()
    assert sources[1].load([0]).row_ids == ["row-0"] and sources[1].repeated == 1
    for source in sources.values():
        source.close()
    assert len(StoreReader(tmp_path)) == sources[0].generated + sources[1].generated


def test_only_one_run_fills_a_store(tmp_path):
    with toy_source(tmp_path, world_size=1):
        with pytest.raises(FeatureError, match="already writes shard 0/1"):
            toy_source(tmp_path, world_size=1)
        with pytest.raises(FeatureError, match="a store is filled by one run at a time"):
            toy_source(tmp_path, world_size=2, barrier=lambda: None)
    with pytest.raises(FeatureError, match="only with a barrier"):
        toy_source(tmp_path, world_size=2)
