"""Names in a store that lead outside of it, and links in it: refused, or not followed."""

import json

import pytest

from modelopt_eagle.cli.main import run_command
from modelopt_eagle.errors import FeatureError
from modelopt_eagle.features.hybrid import Claims
from modelopt_eagle.features.store import StoreReader, maintenance
from tests.features.rows import check_all, fill, open_writer

OUTSIDE = [
    "../precious", "/precious", "a/../../precious", "./features-0-of-1-000000.safetensors", "..", ".", "", "a\0b",
    "features-0-of-1-000000.safetensors/..", "\\\\host\\share", "con", "-rf", "~/.ssh/id_rsa", "manifest.json",
    ".lock-0-of-1", "features-0-of-1-000000.safetensors\n",
]  # fmt: skip


def rename(folder, name, checksum):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    if not checksum:
        del manifest["checksum"]  # as an older writer left it, or one that means ill
    manifest["shards"][0]["file"] = (
        name.replace("/precious", str(folder.parent / "precious")) if name == "/precious" else name
    )
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_manifest_that_names_what_lies_outside_is_refused(tmp_path, name, capsys):
    store, precious = tmp_path / "store", tmp_path / "precious"
    precious.write_bytes(b"kept")
    fill(store)
    rename(store, name, checksum=False)
    for attempt in (
        lambda: StoreReader(store, "read"), lambda: maintenance.verify(store, drop_bad=True),
        lambda: maintenance.merge(store), lambda: maintenance.summarise(store), lambda: fill(store),
    ):  # fmt: skip
        with pytest.raises(FeatureError, match="manifest.json cannot be read as a manifest"):
            attempt()
    assert run_command("features", ["verify", str(store), "--drop-bad"]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert precious.read_bytes() == b"kept" and (store / "features-0-of-1-000000.safetensors").is_file()


def test_links_under_temporary_names_are_not_written_through(tmp_path):
    store, precious = tmp_path / "store", tmp_path / "precious"
    precious.write_bytes(b"kept")
    store.mkdir()
    for name in (".writing-manifest.json", ".writing-features-0-of-1-000000.safetensors", ".claims-0-of-2"):
        (store / name).symlink_to(precious)
    fill(store)
    check_all(store)
    Claims(store, 0, 2, lambda: None)
    assert precious.read_bytes() == b"kept" and not (store / ".claims-0-of-2").is_symlink()


@pytest.mark.parametrize("name", [".lock-0-of-1", ".lock-0-of-2"])
def test_a_lock_that_is_a_link_is_refused(tmp_path, name):
    store = tmp_path / "store"
    store.mkdir()
    (store / name).symlink_to(tmp_path / "made")
    with pytest.raises(FeatureError):
        fill(store)
    assert not (tmp_path / "made").exists()


def test_dropping_a_bad_shard_that_is_a_link_drops_the_link(tmp_path):
    store, precious = tmp_path / "store", tmp_path / "precious"
    precious.write_bytes(b"kept")
    fill(store)
    shard = store / "features-0-of-1-000000.safetensors"
    shard.unlink()
    shard.symlink_to(precious)
    report = maintenance.verify(store, drop_bad=True)
    assert list(report.bad) == [shard.name] and not shard.is_symlink() and precious.read_bytes() == b"kept"
    fill(store)
    check_all(store)


def test_workers_of_another_count_are_refused_while_one_runs(tmp_path):
    """``--shard 0/3`` beside ``0/2`` would make rows twice."""
    with open_writer(tmp_path, worker=(0, 2)):
        with pytest.raises(FeatureError, match=r"another process already writes into .*\.lock-0-of-2"):
            open_writer(tmp_path, worker=(0, 3))
        with pytest.raises(FeatureError, match="another process already writes"):
            open_writer(tmp_path)
        open_writer(tmp_path, worker=(1, 2)).close()
    fill(tmp_path, worker=(0, 2))
    for worker in range(3):
        fill(tmp_path, worker=(worker, 3))
    check_all(tmp_path)
