"""Rows without a target: their values follow from their number, so that any process makes the same ones."""

import torch

from modelopt_eagle.features import FeatureContract, FeatureRow, needed_final_positions, predicting_positions
from modelopt_eagle.features.store import StoreReader, StoreWriter

WIDTH, LAYERS = 12, (1, 3)


def contract(dtype="float32", **changes):
    values = {
        "model": "toy",
        "revision": "r1",
        "aux_layer_ids": LAYERS,
        "final_is_normed": True,
        "dtype": dtype,
        "tokenizer_hash": "tok",
        "template_hash": "tpl-a",
        "hidden_size": WIDTH,
        "vocab_size": 50,
    }
    return FeatureContract(**(values | changes))


def make_row(index, seed=0):
    """A row that any process makes alike: its length and values follow from its number."""
    generator = torch.Generator().manual_seed(1000 * seed + index)
    length = 3 + index % 7
    supervised = torch.rand(length, generator=generator) < 0.5
    predicting = predicting_positions(supervised)
    top1 = torch.where(predicting, torch.randint(50, (length,), generator=generator), -1)
    return FeatureRow(
        row_id=f"row-{index}",
        category="chat" if index % 2 else "",
        input_ids=torch.randint(50, (length,), generator=generator),
        supervised=supervised,
        aux_hidden=torch.randn(length, WIDTH * len(LAYERS), generator=generator),
        final_hidden=torch.randn(length, WIDTH, generator=generator),
        target_top1=top1,
        target_logsumexp=torch.where(predicting, torch.rand(length, generator=generator), 0.0),
    )


def open_writer(folder, rows=20, dtype="float32", worker=(0, 1), shard_bytes=2000, dataset="data", **changes):
    return StoreWriter(
        folder,
        contract(dtype, **changes),
        dataset_hash=dataset,
        dataset_rows=rows,
        worker=worker,
        shard_bytes=shard_bytes,
    )


def fill(folder, rows=20, worker=(0, 1), **options):
    with open_writer(folder, rows, worker=worker, **options) as writer:
        for index in range(worker[0], rows, worker[1]):
            if index not in writer.done:
                writer.add(index, make_row(index))


def check_all(folder, rows=20):
    reader = StoreReader(folder)
    assert reader.indices == list(range(rows))
    for index in range(rows):
        row, made = reader.row(index), make_row(index)
        assert row.row_id == made.row_id and row.category == made.category
        assert torch.equal(row.input_ids, made.input_ids) and torch.equal(row.supervised, made.supervised)
        assert torch.equal(row.aux_hidden, made.aux_hidden)
        needed = needed_final_positions(made.supervised)
        assert torch.equal(row.final_hidden[needed], made.final_hidden[needed])
        assert not row.final_hidden[~needed].any()
        assert torch.equal(row.target_top1, made.target_top1)
        assert torch.equal(row.target_logsumexp, made.target_logsumexp)
