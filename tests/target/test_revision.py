"""A target whose weights differ in one value is another target, wherever its revision is looked at."""

import json
import os
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelopt_eagle.draft import DraftConfig
from modelopt_eagle.errors import CheckpointError
from modelopt_eagle.export.fitting import target_notes
from modelopt_eagle.features.batch import FeatureContract
from modelopt_eagle.target import hashes, load_target
from modelopt_eagle.target.identity import (
    file_fingerprint,
    folder_fingerprint,
    memory_fingerprint,
    other_revision,
    same_revision,
)
from modelopt_eagle.target.tiny import make_tiny_target
from modelopt_eagle.training.provenance import check_provenance


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MODELOPT_EAGLE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path):
    target = make_tiny_target(layers=6)
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def change_one_value(folder, keep_times=False):
    """The last value of some weight that no sample meets."""
    file = folder / "model.safetensors"
    before, sampled = file.stat(), folder_fingerprint(folder).partition("-")[0]
    tensors = load_file(file)
    for tensor in tensors.values():
        flat = tensor.view(-1)
        old = flat[-1].clone()
        flat[-1] += 1.0
        save_file(tensors, file, metadata={"format": "pt"})
        if folder_fingerprint(folder).partition("-")[0] == sampled:
            break
        flat[-1] = old
    else:
        raise AssertionError("every weight is sampled")
    if keep_times:
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_one_value_is_seen(folder):
    before = load_target(folder).identity()
    change_one_value(folder)
    after = load_target(folder).identity()
    assert before.revision.partition("-")[0] == after.revision.partition("-")[0]  # the samples do not tell them apart
    assert not same_revision(before.revision, after.revision)
    contracts = [FeatureContract.from_identity(identity, (1, 3, 4)) for identity in (before, after)]
    assert ["revision" in line for line in contracts[0].differences(contracts[1])] == [True]


def test_one_value_is_seen_though_the_times_are_kept(folder):
    before = folder_fingerprint(folder)
    change_one_value(folder, keep_times=True)
    assert folder_fingerprint(folder) != before


def test_one_value_in_memory_is_seen():
    target = make_tiny_target(layers=6)
    weights = [weight.detach().clone() for weight in target.model.parameters()]
    large = max(weights, key=torch.Tensor.numel)
    assert large.numel() > 2048  # so that some values are in no sample
    before = memory_fingerprint(target.config, weights)
    large.view(-1)[1] += 1.0
    after = memory_fingerprint(target.config, weights)
    assert before != after and before.partition("-")[0] == after.partition("-")[0]


def test_a_file_is_read_once(folder, monkeypatch):
    read = []
    monkeypatch.setattr(hashes, "file_sha256", lambda path, real=hashes.file_sha256: read.append(path) or real(path))
    first = folder_fingerprint(folder)
    assert len(read) == 2  # the config and the weights
    assert folder_fingerprint(folder) == first and len(read) == 2
    copy = shutil.copytree(folder, folder.with_name("copy"))
    assert folder_fingerprint(copy) == first and len(read) == 4  # another file may hold anything


@pytest.mark.parametrize("content", ["", "{", "[]", '{"a": 3}', "null"])
def test_a_broken_cache_is_written_anew(folder, cache, content):
    first = folder_fingerprint(folder)
    (cache / hashes.KEPT).write_text(content)
    assert folder_fingerprint(folder) == first
    assert len(json.loads((cache / hashes.KEPT).read_text())) == 2


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_cache_that_cannot_be_written(folder, cache):
    first = folder_fingerprint(folder)
    cache.chmod(0o500)
    try:
        (cache / hashes.KEPT).chmod(0o400)
        assert folder_fingerprint(folder) == first
    finally:
        cache.chmod(0o700)


def test_a_cache_in_the_place_of_a_file(folder, tmp_path, monkeypatch):
    first = folder_fingerprint(folder)
    (tmp_path / "file").touch()
    monkeypatch.setenv("MODELOPT_EAGLE_CACHE", str(tmp_path / "file"))
    assert folder_fingerprint(folder) == first


def test_the_cache_forgets_what_is_oldest(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(hashes, "MOST_KEPT", 2)
    for name in "abc":
        (tmp_path / name).write_text(name)
        file_fingerprint(tmp_path / name)
    assert [name.rsplit("/", 1)[1] for name in json.loads((cache / hashes.KEPT).read_text())] == ["b", "c"]


def test_revisions_of_before_are_compared_by_what_they_hold():
    commit, other_commit = "a" * 40, "b" * 40
    assert same_revision("12-34", "12-34") and not same_revision("12-34", "12-35")
    assert same_revision("12", "12-34") and same_revision("12-34", "12") and not same_revision("13", "12-34")
    assert same_revision(None, None) and not same_revision(None, "12-34") and not same_revision(commit, other_commit)
    assert other_revision(commit, other_commit) and not other_revision(commit, "12-34")  # perhaps the same files
    assert not other_revision(None, commit) and other_revision("12-34", "12-35") and not other_revision("12", "12-34")


def test_a_run_does_not_go_on_over_other_weights(folder):
    before = {"target": load_target(folder).identity().as_dict()}
    old = {"target": before["target"] | {"revision": before["target"]["revision"].partition("-")[0]}}
    change_one_value(folder)
    now = {"target": load_target(folder).identity().as_dict()}
    with pytest.raises(CheckpointError, match="trained on other features"):
        check_provenance(folder, before, now)
    check_provenance(folder, old, now)  # recorded before every byte was looked at
    with pytest.raises(CheckpointError, match="trained on other features"):
        check_provenance(folder, old, {"target": now["target"] | {"vocab_size": 7}})


def test_a_head_over_other_weights_says_so(folder):
    before = load_target(folder).identity()
    config = DraftConfig.from_target(load_target(folder).config, extra={"target_revision": before.revision})
    assert target_notes(config, before) == []
    change_one_value(folder)
    (note,) = target_notes(config, load_target(folder).identity())
    assert "another revision" in note and "measure it again" in note
    config.extra["target_adapter"] = "its folder"  # the target may be merged
    assert target_notes(config, load_target(folder).identity()) == []
