"""Online, in-memory and offline sources give the trainer the same batches."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from modelopt_eagle.errors import FeatureError
from modelopt_eagle.features import (
    FeatureContract,
    FeatureSource,
    MemorySource,
    OfflineSource,
    OnlineSource,
    SelectedSource,
    collate,
    needed_final_positions,
    predicting_positions,
)
from modelopt_eagle.features.compute import compute_features, compute_rows, length_batches
from modelopt_eagle.features.dump import TargetBackEnd, dump
from modelopt_eagle.features.prefetch import Prefetcher
from modelopt_eagle.target import load_target_tables

DUMP = Path(__file__).parents[2] / "collect_hidden_states" / "compute_hidden_states_hf.py"
AUX = (1, 3, 4)


@pytest.fixture(scope="module")
def store(tiny_target, dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    dump(TargetBackEnd(tiny_target, batch_tokens=400), dataset.rows, folder, dtype="float32", shard_bytes=60_000)
    return folder


def all_batches(source, **options):
    options = {"epoch": 1, "batch_size": 3, "seed": 5} | options
    return list(source.batches(options.pop("epoch"), **options))


def assert_same(ours, theirs, tolerance=0.0):
    assert ours.row_ids == theirs.row_ids
    for name in ("input_ids", "supervised", "document_ids", "target_top1"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    torch.testing.assert_close(ours.aux_hidden, theirs.aux_hidden, rtol=tolerance, atol=tolerance)
    needed = torch.cat(
        [needed_final_positions(ours.supervised[0][ours.document_ids[0] == d]) for d in range(len(ours.row_ids))]
    )
    final = [batch.final_hidden[0][needed] for batch in (ours, theirs)]
    torch.testing.assert_close(*final, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours.target_logsumexp, theirs.target_logsumexp, rtol=1e-4, atol=1e-4)


def test_padding_and_batching_change_no_value(tiny_target, dataset):
    rows = dict(compute_rows(tiny_target, dataset.rows, AUX, batch_tokens=2000))
    assert sorted(rows) == list(range(len(dataset.rows)))
    for index, row in enumerate(dataset.rows):
        alone = tiny_target.features(torch.tensor([row.input_ids]), None, AUX)
        torch.testing.assert_close(rows[index].aux_hidden, alone.aux_hidden[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(rows[index].final_hidden, alone.final_hidden[0], rtol=1e-4, atol=1e-4)
        predicting = predicting_positions(torch.tensor(row.supervised))
        logits = tiny_target.logits(alone.final_hidden[0])
        assert torch.equal(rows[index].target_top1[predicting], logits.argmax(-1)[predicting])
        assert (rows[index].target_top1[~predicting] == -1).all()


def test_length_batches_hold_every_row_once_within_the_budget():
    lengths = [5, 900, 17, 3, 3, 250, 64, 64]
    batches = length_batches(lengths, 256)
    assert sorted(sum(batches, [])) == list(range(len(lengths)))
    assert all(len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= 256 for batch in batches)
    assert batches[0] == [1]


def test_positions():
    supervised = torch.tensor([0, 0, 1, 1, 0, 0, 0], dtype=torch.bool)
    assert predicting_positions(supervised).tolist() == [False, True, True, False, False, False, False]
    assert needed_final_positions(supervised).tolist() == [False, True, True, True, True, False, False]


def test_online_memory_and_offline_agree(tiny_target, dataset, store):
    online, memory = OnlineSource(tiny_target, dataset, AUX), MemorySource.from_target(tiny_target, dataset, AUX)
    offline = OfflineSource(store, expected=online.contract)
    assert online.lengths == memory.lengths == offline.lengths
    for ours, theirs, stored in zip(*map(all_batches, (online, memory, offline)), strict=True):
        assert_same(ours, theirs, 1e-4)
        assert_same(ours, stored, 1e-4)
        assert stored.contract.final_is_normed
    assert all(isinstance(source, FeatureSource) for source in (online, memory, offline))


def test_batches_of_tokens_are_the_same_from_every_source(tiny_target, dataset, store):
    online, memory = OnlineSource(tiny_target, dataset, AUX), MemorySource.from_target(tiny_target, dataset, AUX)
    offline, most = OfflineSource(store), max(dataset.lengths) + 20
    counts = [int(sum(row.supervised)) for row in dataset.rows]
    assert [list(source.supervised_counts()) for source in (online, memory, offline)] == [counts] * 3
    assert list(SelectedSource(offline, [3, 1]).supervised_counts()) == [counts[3], counts[1]]
    for rank in range(2):
        options = {"max_tokens": most, "window": 2, "rank": rank, "world_size": 2}
        first, *others = ([batch and batch.row_ids for batch in all_batches(source, **options)] for source in
                          (online, memory, offline))  # fmt: skip
        assert others == [first, first]
        assert [batch and batch.row_ids for batch in all_batches(offline, start=1, **options)] == first[1:]


def test_a_long_row_among_short_ones_does_not_make_them_as_long(tiny_target, dataset, monkeypatch):
    shapes = []
    features = tiny_target.features
    monkeypatch.setattr(tiny_target, "features", lambda ids, *rest, **more: shapes.append(ids.shape) or features(
        ids, *rest, **more))  # fmt: skip
    rows = sorted(dataset.rows, key=lambda row: -len(row.input_ids))
    long, short = rows[0], [replace(row, input_ids=row.input_ids[:20], supervised=row.supervised[:20]) for row in rows]
    made = compute_features(tiny_target, [*short[1:5], long, *short[5:9]], AUX)
    assert [row.row_id for row in made] == [row.id for row in (*short[1:5], long, *short[5:9])]
    assert sum(batch * length for batch, length in shapes) <= 1.5 * sum(map(len, made)) and len(shapes) <= 3
    alone = compute_features(tiny_target, [long], AUX)[0]
    torch.testing.assert_close(made[4].aux_hidden, alone.aux_hidden, rtol=1e-4, atol=1e-4)


def test_memory_source_reports_progress_and_keeps_bfloat16(tiny_target, dataset):
    seen = []
    memory = MemorySource.from_target(
        tiny_target, dataset, AUX, dtype=torch.bfloat16, progress=lambda done, total: seen.append((done, total))
    )
    assert seen[-1] == (sum(dataset.lengths), sum(dataset.lengths)) and len(seen) == len(dataset.rows)
    full = MemorySource.from_target(tiny_target, dataset, AUX)
    assert memory.num_bytes * 2 == full.num_bytes
    batch, exact = memory.load([2, 0]), full.load([2, 0])
    assert batch.aux_hidden.dtype == torch.bfloat16 and memory.contract.dtype == "bfloat16"
    assert torch.equal(batch.aux_hidden, exact.aux_hidden.bfloat16())


def test_epochs_ranks_and_resume(store):
    source = OfflineSource(store)
    whole = [batch.row_ids for batch in all_batches(source)]
    assert sorted(sum(whole, [])) == sorted(f"talk-{i}" for i in range(12))
    assert [batch.row_ids for batch in all_batches(source, start=2)] == whole[2:]
    assert [batch.row_ids for batch in all_batches(source, epoch=2)] != whole
    in_order = all_batches(source, shuffle=False, batch_size=12)[0].row_ids
    assert in_order == [f"talk-{i}" for i in range(12)]
    ranks = [all_batches(source, rank=rank, world_size=3) for rank in range(3)]
    assert [len(batches) for batches in ranks] == [2, 2, 2]
    shared = [batch.row_ids for step in zip(*ranks, strict=True) for batch in step if batch is not None]
    assert shared == whole and sum(batch is None for batches in ranks for batch in batches) == 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3", "int8"])
def test_small_dtypes_keep_the_teacher(tiny_target, dataset, tmp_path, dtype):
    dump(TargetBackEnd(tiny_target), dataset.rows, tmp_path, dtype=dtype)
    source = OfflineSource(tmp_path, dtype=torch.float32)
    assert source.check_teacher(tiny_target.head) > 0.6
    exact = OnlineSource(tiny_target, dataset).load([0])
    error = (source.load([0]).aux_hidden - exact.aux_hidden).norm() / exact.aux_hidden.norm()
    assert 0 < error < 0.05


def test_template_of_another_dump_is_refused_naming_both(tiny_target, store):
    other = replace(FeatureContract.from_target(tiny_target), template_hash="another-template")
    own = tiny_target.identity()["template_hash"]
    with pytest.raises(FeatureError, match=f"template_hash: .*{own}.*another-template"):
        OfflineSource(store, expected=other)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "other"),
        ("revision", "other"),
        ("aux_layer_ids", (1, 2, 3)),
        ("tokenizer_hash", "other"),
        ("hidden_size", 65),
        ("vocab_size", 255),
    ],
)
def test_every_field_of_the_contract_is_checked(tiny_target, store, field, value):
    other = replace(FeatureContract.from_target(tiny_target), **{field: value})
    with pytest.raises(FeatureError, match=f"{field}: the features were made with"):
        OfflineSource(store, expected=other)


def test_tables_give_the_contract_of_the_dump(tiny_target_dir, store):
    tables = load_target_tables(tiny_target_dir)
    contract = FeatureContract.from_identity(tables.identity(), AUX)
    source = OfflineSource(store, expected=contract)
    assert source.check_teacher(tables.head) == 1.0


class Rows:
    """A reader of rows held in memory."""

    def __init__(self, contract, rows):
        self.contract, self._rows = contract, rows
        self.lengths = [len(row) for row in rows]

    def row(self, number):
        return self._rows[number]


def test_teacher_check_says_which_part_is_broken(tiny_target, dataset):
    contract = FeatureContract.from_target(tiny_target, AUX)
    rows = [row for _, row in compute_rows(tiny_target, dataset.rows, AUX)]
    last = tiny_target.num_layers - 1
    gain = torch.linspace(0.2, 3.0, tiny_target.hidden_size)
    norm = torch.nn.RMSNorm(tiny_target.hidden_size)
    with torch.no_grad():
        norm.weight.copy_(gain)
    states = [tiny_target.features(row.input_ids[None], None, [last]).aux_hidden[0] for row in rows]
    tops = []
    for row, state in zip(rows, states, strict=True):  # a target whose norm weights matter
        predicting = row.target_top1 >= 0
        logits = tiny_target.logits(norm(state))
        tops.append((torch.where(predicting, logits.argmax(-1), -1), logits.logsumexp(-1)))
    pre = [
        replace(r, final_hidden=s, target_top1=t, target_logsumexp=n)
        for r, s, (t, n) in zip(rows, states, tops, strict=True)
    ]
    source = OfflineSource(Rows(contract, pre))
    with pytest.raises(FeatureError, match="final_is_normed: .* pre-norm though the contract says post-norm"):
        source.check_teacher(tiny_target.head, final_norm=norm)
    plain = [replace(r, final_hidden=s) for r, s in zip(rows, states, strict=True)]
    with pytest.raises(FeatureError, match="log-sum-exp differs by .* pre-norm though the contract says post-norm"):
        # the tiny target's norm has weights of one: the argmax survives without it, the scale does not
        OfflineSource(Rows(contract, plain)).check_teacher(tiny_target.head, final_norm=tiny_target.final_norm)
    wrong = [replace(row, target_top1=torch.where(row.target_top1 < 0, -1, 7)) for row in rows]
    with pytest.raises(FeatureError, match="not those of this target"):
        OfflineSource(Rows(contract, wrong)).check_teacher(tiny_target.head)


def test_pre_norm_rows_need_the_norm_and_rows_without_teacher_the_head(tiny_target, dataset):
    exact = OnlineSource(tiny_target, dataset, AUX)
    contract = replace(exact.contract, final_is_normed=False)
    last = tiny_target.num_layers - 1
    rows = []
    for row in [row for _, row in sorted(compute_rows(tiny_target, dataset.rows, AUX))]:
        state = tiny_target.features(row.input_ids[None], None, [last]).aux_hidden[0]
        rows.append(replace(row, final_hidden=state, target_top1=None, target_logsumexp=None))
    with pytest.raises(FeatureError, match="pass the target's final norm"):
        OfflineSource(Rows(contract, rows))
    with pytest.raises(FeatureError, match="pass the target's head"):
        OfflineSource(Rows(contract, rows), final_norm=tiny_target.final_norm).load([0])
    source = OfflineSource(Rows(contract, rows), final_norm=tiny_target.final_norm, head=tiny_target.head)
    ours, theirs = source.load([1, 3]), exact.load([1, 3])
    torch.testing.assert_close(ours.final_hidden, theirs.final_hidden, rtol=1e-4, atol=1e-4)
    assert torch.equal(ours.target_top1, theirs.target_top1) and ours.contract.final_is_normed


def test_wrong_shapes_and_empty_sets_are_refused(tiny_target, dataset):
    contract = FeatureContract.from_target(tiny_target, AUX)
    row = next(row for _, row in compute_rows(tiny_target, dataset.rows[:1], AUX))
    short = replace(row, aux_hidden=row.aux_hidden[:-1])  # an engine that dropped the last state
    with pytest.raises(FeatureError, match="talk-0.*aux_hidden has shape"):
        collate([short], contract)
    with pytest.raises(FeatureError, match="no rows to pack"):
        collate([], contract)
    with pytest.raises(FeatureError, match="data set is empty"):
        OnlineSource(tiny_target, [])


def test_prefetch_is_bounded_ordered_and_raises_in_place():
    made = []

    def make(item):
        made.append(item)
        if item == 6:
            raise FeatureError("row 6 is bad")
        return item * 10

    prefetcher = Prefetcher(depth=2)
    results = prefetcher.run(range(8), make)
    assert next(results) == 0
    time.sleep(0.3)
    assert len(made) <= 1 + 2 + 1 and prefetcher.peak <= 2
    got = [0]
    with pytest.raises(FeatureError, match="row 6"):
        for value in results:
            got.append(value)
    assert got == [0, 10, 20, 30, 40, 50]
    closing = prefetcher.run(range(100), lambda item: item)
    next(closing)
    closing.close()  # joins the thread; hangs if it does not stop


class ShufflingEngine:
    """A back end that reorders rows, or hands out states of other tokens."""

    def __init__(self, inner, spoil):
        self._inner, self._spoil = inner, spoil
        self.contract = inner.contract

    def features(self, rows):
        results = list(self._inner.features(rows))[::-1]
        if self._spoil == "lost":
            results = results[1:]
        elif self._spoil == "mixed":
            results[0], results[1] = (results[0][0], results[1][1]), (results[1][0], results[0][1])
        return iter(results)


def test_reordering_back_end_gives_the_same_store(tiny_target, dataset, store, tmp_path):
    engine = ShufflingEngine(TargetBackEnd(tiny_target), None)
    dump(engine, dataset.rows, tmp_path, dtype="float32")
    for ours, theirs in zip(*(all_batches(OfflineSource(path)) for path in (tmp_path, store)), strict=True):
        assert_same(ours, theirs, 1e-4)


@pytest.mark.parametrize(("spoil", "message"), [("lost", "12 rows were asked for, 11"), ("mixed", "of other tokens")])
def test_spoiling_back_end_is_found(tiny_target, dataset, tmp_path, spoil, message):
    with pytest.raises(FeatureError, match=message):
        dump(ShufflingEngine(TargetBackEnd(tiny_target), spoil), dataset.rows, tmp_path)


def run_dump(target, conversations, folder, *options, **popen):
    command = [sys.executable, str(DUMP), "--model", str(target), "--input-file", str(conversations)]
    command += ["--output-dir", str(folder), "--dtype", "float32", "--shard-mib", "0.05", "--batch-tokens", "200"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, **popen
    )


def test_command_killed_goes_on(tiny_target, tiny_target_dir, conversations, store, tmp_path):
    process = run_dump(tiny_target_dir, conversations, tmp_path)
    while process.poll() is None and len(list(tmp_path.glob("*.safetensors"))) < 2:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    killed_at = len(list(tmp_path.glob("*.safetensors")))
    output = run_dump(tiny_target_dir, conversations, tmp_path).communicate()[0]
    assert killed_at >= 1 and "12 conversations read" in output, output
    online = OnlineSource(tiny_target, load_rows(tiny_target, conversations))
    for ours, theirs in zip(
        all_batches(OfflineSource(tmp_path, expected=online.contract)), all_batches(OfflineSource(store)), strict=True
    ):
        assert_same(ours, theirs, 1e-4)


def load_rows(target, conversations):
    from modelopt_eagle.data import prepare_dataset

    return prepare_dataset(target.tokenizer, conversations)


def test_command_line_errors_and_estimate(tiny_target_dir, conversations, tmp_path, capsys):
    from modelopt_eagle.cli.dump import main

    def call(*options):
        base = [
            "--model",
            str(tiny_target_dir),
            "--input-file",
            str(conversations),
            "--output-dir",
            str(tmp_path / "s"),
        ]
        code = main([*base, "--device", "cpu", *options])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    code, text = call("--estimate", "--dtype", "int8")
    assert code == 0 and "12 to make" in text and "GiB" in text and not (tmp_path / "s").exists()
    assert call("--shard", "2/2") == (2, "error: --shard i/n with 0 <= i < n expected, such as 0/4; found '2/2'\n")
    assert call("--aux-layers", "1,x")[0] == 2
    assert "--batch-tokens must be above 0" in call("--batch-tokens", "0")[1]
    code, text = call("--aux-layers", "7,2", "--shard", "1/2")
    assert code == 0 and "6 rows made, 0 were there" in text and "'dtype': 'bfloat16'" in text
    assert "rows    0 to make" in call("--shard", "1/2", "--estimate")[1]
    assert "rows    6 to make" in call("--shard", "0/2", "--estimate")[1]
    manifest = json.loads((tmp_path / "s" / "manifest-1-of-2.json").read_text())
    assert manifest["contract"]["aux_layer_ids"] == [2, 7] and manifest["contract"]["dtype"] == "bfloat16"
    code, text = call("--aux-layers", "7,2", "--shard", "1/2")
    assert code == 0 and "0 rows made, 6 were there" in text
    code, text = call("--shard", "0/2")  # the other layers
    assert code == 2 and "aux_layer_ids" in text
