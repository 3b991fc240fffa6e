"""The store: rows come back as they went in, whatever happens to the process or the files."""

import errno
import json
import os
import shutil

import pytest
import torch
from filelock import FileLock

from modelopt_eagle.cli.main import run_command
from modelopt_eagle.errors import FeatureError
from modelopt_eagle.features.store import StoreReader, bytes_per_token, maintenance
from modelopt_eagle.features.store.codec import restore, shrink
from tests.features.rows import WIDTH, check_all, contract, fill, make_row, open_writer


def test_rows_come_back_equal(tmp_path):
    fill(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    check_all(tmp_path)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 2**-8), ("float8_e4m3", 2**-4), ("int8", 0.5 / 127)])
def test_small_dtypes_stay_within_their_step(dtype, tolerance):
    states = torch.randn(9, 2, WIDTH) * torch.tensor([1.0, 1000.0]).unsqueeze(-1)  # layers of very different size
    stored, scale = shrink(states.flatten(-2), 2, dtype)
    back = restore(stored, scale).float().unflatten(-1, (2, WIDTH))
    largest = states.abs().amax(-1, keepdim=True)
    bound = largest if dtype == "int8" else states.abs().clamp_min(1e-2 * largest)
    assert ((back - states).abs() <= 1.01 * tolerance * bound).all()
    assert stored.element_size() == (2 if dtype == "bfloat16" else 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3", "int8"])
def test_small_dtypes_through_files_and_estimated_size(tmp_path, dtype):
    fill(tmp_path, dtype=dtype, shard_bytes=10**6)
    reader = StoreReader(tmp_path)
    for index in range(20):
        error = (reader.row(index).aux_hidden.float() - make_row(index).aux_hidden).abs().max()
        assert 0 < error < 0.3
    summary = maintenance.summarise(tmp_path)
    # The estimate counts supervised tokens; rows this short keep many neighbours of them too.
    assert (
        0.7 < bytes_per_token(contract(dtype), summary.supervised / summary.tokens) * summary.tokens / summary.bytes < 1
    )


def test_a_second_run_adds_nothing_and_a_stopped_run_goes_on(tmp_path):
    with pytest.raises(KeyboardInterrupt), open_writer(tmp_path) as writer:
        for index in range(9):
            writer.add(index, make_row(index))
        raise KeyboardInterrupt
    assert len(StoreReader(tmp_path)) == 9
    fill(tmp_path)
    check_all(tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")}
    fill(tmp_path)
    assert before == {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")}


def test_half_written_files_are_removed_and_redone(tmp_path):
    fill(tmp_path, rows=20)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    del manifest["checksum"]
    last = manifest["shards"].pop()  # a kill between the shard's rename and the manifest's
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / ".writing-features-0-of-1-000099.safetensors").write_bytes(b"half")
    (tmp_path / ".writing-manifest.json").write_bytes(b"{")
    assert len(StoreReader(tmp_path)) == 20 - len(last["row_ids"])
    fill(tmp_path)
    check_all(tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".writing")]


def test_workers_write_side_by_side_and_merge(tmp_path):
    writers = [open_writer(tmp_path, worker=(i, 3)) for i in range(3)]
    for index in range(20):
        writers[index % 3].add(index, make_row(index))
    with pytest.raises(FeatureError, match="another process already"):
        open_writer(tmp_path, worker=(1, 3))
    with pytest.raises(FeatureError, match="another process already"):
        maintenance.merge(tmp_path)
    for writer in writers:
        writer.close()
    check_all(tmp_path)
    shards = maintenance.merge(tmp_path)
    assert [path.name for path in tmp_path.glob("manifest*")] == ["manifest.json"]
    assert shards == len(list(tmp_path.glob("*.safetensors")))
    check_all(tmp_path)
    fill(tmp_path, worker=(1, 3))  # finds its rows in the joined manifest
    check_all(tmp_path)


def test_merge_leaves_other_folders_alone(tmp_path):
    with pytest.raises(FeatureError, match="is not a feature store"):
        maintenance.merge(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damaged", [False, True])
def test_a_merge_that_was_killed_counts_and_loses_no_shard_twice(tmp_path, damaged):
    for worker in ((0, 2), (1, 2)):
        with open_writer(tmp_path, worker=worker) as writer:
            for index in range(worker[0], 20, 2):
                writer.add(index, make_row(index))
    left = (tmp_path / "manifest-1-of-2.json").read_bytes()
    shards = maintenance.merge(tmp_path)
    (tmp_path / "manifest-1-of-2.json").write_bytes(left)  # killed before it was deleted
    before = maintenance.summarise(tmp_path)
    assert (before.rows, before.shards) == (20, shards)
    if damaged:
        next(tmp_path.glob("features-1-of-2-*")).write_bytes(b"cut")
    report = maintenance.verify(tmp_path, drop_bad=True)
    assert (report.shards, report.rows, len(report.bad)) == (shards, 20, int(damaged))
    assert len(StoreReader(tmp_path)) == 20 - report.dropped_rows and bool(report.dropped_rows) == damaged
    fill(tmp_path, worker=(1, 2))
    check_all(tmp_path)


def test_reading_while_another_appends(tmp_path):
    writer = open_writer(tmp_path)
    for index in range(8):
        writer.add(index, make_row(index))
    reader = StoreReader(tmp_path)
    first = len(reader)
    assert 0 < first < 8
    row = reader.row(0)
    for index in range(8, 20):
        writer.add(index, make_row(index))
    writer.close()
    assert len(reader) == first and torch.equal(row.aux_hidden, make_row(0).aux_hidden)
    assert reader.refresh() == 20


def test_many_shards_roll_over_to_another_manifest(tmp_path, monkeypatch):
    monkeypatch.setattr("modelopt_eagle.features.store.writer.SHARDS_PER_MANIFEST", 3)
    fill(tmp_path, rows=11, shard_bytes=1)
    fill(tmp_path, rows=20, dataset="data", shard_bytes=1)
    assert len(list(tmp_path.glob("manifest*.json"))) == 7
    check_all(tmp_path)


def _damage(path, how):
    content = bytearray(path.read_bytes())
    if how == "cut":
        del content[-1:]
    elif how == "altered":
        content[len(content) // 2] ^= 1
    path.write_bytes(content)
    if how == "missing":
        path.unlink()


@pytest.mark.parametrize("how", ["cut", "altered", "missing"])
@pytest.mark.parametrize("verify", ["open", "read"])
def test_a_damaged_shard_is_named(tmp_path, how, verify):
    fill(tmp_path)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    _damage(shard, how)

    def read():
        reader = StoreReader(tmp_path, verify=verify)
        for number in range(len(reader)):
            reader.row(number)

    with pytest.raises(FeatureError, match=shard.name):
        read()
    report = maintenance.verify(tmp_path)
    assert list(report.bad) == [shard.name]
    dropped = maintenance.verify(tmp_path, drop_bad=True).dropped_rows
    assert len(StoreReader(tmp_path)) == 20 - dropped
    fill(tmp_path)
    check_all(tmp_path)


def test_nan_is_refused_by_the_writer_and_found_by_the_reader(tmp_path, monkeypatch):
    row = make_row(0)
    row.aux_hidden[1, 2] = float("nan")
    with open_writer(tmp_path / "a") as writer, pytest.raises(FeatureError, match="row-0.*NaN"):
        writer.add(0, row)
    monkeypatch.setattr(torch, "isfinite", lambda tensor: torch.ones_like(tensor, dtype=torch.bool))
    with open_writer(tmp_path / "b") as writer:  # a writer that does not look
        row.aux_hidden[:] = float("nan")
        writer.add(0, row)
    monkeypatch.undo()
    with pytest.raises(
        FeatureError,
        match="000000.safetensors: aux_hidden holds NaN or infinity in 1 of 1 rows: 'row-0'",
    ):
        StoreReader(tmp_path / "b")


def test_other_data_or_contract_are_refused(tmp_path):
    fill(tmp_path)
    with pytest.raises(FeatureError, match="begun with other data"):
        open_writer(tmp_path, dataset="other")
    with pytest.raises(FeatureError, match="template_hash.*'tpl-a'.*'tpl-b'"):
        open_writer(tmp_path, template_hash="tpl-b")
    with pytest.raises(FeatureError, match="i/n with 0 <= i < n"):
        open_writer(tmp_path, worker=(3, 3))
    with pytest.raises(FeatureError, match="'float64' is not known"):
        open_writer(tmp_path / "new", dtype="float64")


def test_format_version_is_checked(tmp_path):
    fill(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["contract"]["format_version"] = 3
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(FeatureError, match="format version 3 found, this reader knows versions 1 and 2"):
        StoreReader(tmp_path)


def test_what_is_no_store(tmp_path):
    with pytest.raises(FeatureError, match="does not exist"):
        StoreReader(tmp_path / "absent")
    with pytest.raises(FeatureError, match="holds no manifest"):
        StoreReader(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": ')
    with pytest.raises(FeatureError, match="cannot be read as a manifest"):
        StoreReader(tmp_path)


def test_rows_of_mismatched_workers_are_found(tmp_path):
    fill(tmp_path, worker=(0, 2))
    half = tmp_path / "half"
    fill(half, worker=(0, 4))
    for path in half.glob("[fm]*"):
        shutil.copy(path, tmp_path / path.name)
    with pytest.raises(FeatureError, match="is in .* and in .*same n in --shard"):
        StoreReader(tmp_path)


def test_a_full_disk_leaves_a_whole_store(tmp_path, monkeypatch):
    writer = open_writer(tmp_path)
    for index in range(8):
        writer.add(index, make_row(index))
    rows = len(StoreReader(tmp_path))

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FeatureError, match="the disk is full"):
        writer.close()
    monkeypatch.undo()
    assert len(StoreReader(tmp_path)) == rows
    fill(tmp_path)
    check_all(tmp_path)


def test_a_place_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(FeatureError, match="cannot make the folder .*file.*; name one that can be written"):
        open_writer(tmp_path / "file")

    def refuse(lock):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(FileLock, "acquire", refuse)
    with pytest.raises(FeatureError, match="cannot write into .*: Read-only file system"):
        open_writer(tmp_path / "store")


def test_commands(tmp_path, capsys):
    fill(tmp_path, worker=(0, 2))
    fill(tmp_path, worker=(1, 2))
    assert run_command("features", ["inspect", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "rows        20 of 20 (100.0% coverage)" in printed and "tpl-a" in printed
    assert run_command("features", ["inspect", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 20
    assert run_command("features", ["verify", str(tmp_path)]) == 0
    assert run_command("features", ["merge", str(tmp_path)]) == 0
    _damage(sorted(tmp_path.glob("*.safetensors"))[0], "altered")
    assert run_command("features", ["verify", str(tmp_path)]) == 1
    assert "was altered" in capsys.readouterr().out
    assert run_command("features", ["inspect", str(tmp_path / "absent")]) == 2
