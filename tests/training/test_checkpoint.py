"""Checkpoints: whole or absent, the best kept, room checked, foreign world sizes refused."""

import json
import random
import resource
import shutil

import pytest
import torch
from safetensors.torch import load_file

from modelopt_eagle.errors import CheckpointError
from modelopt_eagle.export import load_draft
from modelopt_eagle.recipe import load_recipe
from modelopt_eagle.training.checkpoint import CheckpointFolder, rng_state, set_rng_state
from modelopt_eagle.training.optimizer import build_optimizers
from tests.training.test_optimizer import small_module


@pytest.fixture
def head():
    module = small_module()
    return module, build_optimizers(module, load_recipe(None).training)


def save(folder, head, step, best=None, **state):
    return folder.save(step, *head, {"note": step, **state}, "model: {}\n", step if best is None else best)


def names(folder):
    return sorted(entry.name for entry in folder.output_dir.iterdir())


def test_saved_checkpoint_reads_back_and_loads_as_a_head(head, tmp_path):
    folder = CheckpointFolder(tmp_path / "run")
    path = save(folder, head, 7)
    found = folder.latest()
    assert found.step == 7 and found.state["note"] == 7 and found.folder == path
    for name, tensor in head[0].state_dict().items():
        assert torch.equal(found.tensors[name], tensor)
    assert torch.equal(load_draft(tmp_path / "run").fc.weight, head[0].fc.weight)
    assert load_draft(path).vocab.size == 20


@pytest.mark.parametrize("damage", ["marker", "short", "altered", "missing"])
def test_damaged_checkpoint_is_passed_over_with_a_message(head, tmp_path, damage):
    said = []
    folder = CheckpointFolder(tmp_path, say=said.append)
    save(folder, head, 1)
    newest = save(folder, head, 2)
    weights = newest / "model.safetensors"
    if damage == "marker":
        (newest / "complete.json").unlink()
    elif damage == "short":
        weights.write_bytes(weights.read_bytes()[:-10])
    elif damage == "altered":
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
    else:
        (newest / "optimizer.pt").unlink()
    assert folder.latest().step == 1
    assert len(said) == 1 and "checkpoint-2 is passed over" in said[0]


def test_kill_between_weights_and_optimizer_leaves_the_previous_one(head, tmp_path, monkeypatch):
    folder = CheckpointFolder(tmp_path)
    save(folder, head, 1)

    class Killed(BaseException):
        pass

    def kill(*args, **kwargs):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(head[1][0], "state_dict", kill)
        with pytest.raises(Killed):
            save(folder, head, 2)
    assert folder.steps() == [1] and folder.latest().step == 1
    save(folder, head, 3)  # and what was left half-made is cleared away
    assert names(folder) == ["best", "checkpoint-1", "checkpoint-3"]


def test_full_disk_is_said_and_older_checkpoints_stay(head, tmp_path):
    folder = CheckpointFolder(tmp_path)
    before = load_file(save(folder, head, 1) / "model.safetensors")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # every larger file fails as on a full disk
    try:
        with pytest.raises(CheckpointError, match=r"the disk is full.*intact: checkpoint-1.*make room"):
            save(folder, head, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(folder) == ["best", "checkpoint-1"]
    assert torch.equal(load_file(folder.latest().folder / "model.safetensors")["fc.weight"], before["fc.weight"])


def test_room_is_checked_before_the_first_step(head, tmp_path, monkeypatch):
    folder = CheckpointFolder(tmp_path / "run")
    folder.require_room(head[0])
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(CheckpointError, match=r"two checkpoints need .* training\.output_dir"):
        folder.require_room(head[0])
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot save"):
        CheckpointFolder(tmp_path / "file").require_room(head[0])


def test_limit_keeps_the_best_and_the_newest(head, tmp_path):
    folder = CheckpointFolder(tmp_path, limit=3)
    for step in (0, 10, 20, 30, 40, 50):
        save(folder, head, step, best=min(step, 20))
    assert folder.steps() == [20, 40, 50]
    assert (tmp_path / "best").resolve().name == "checkpoint-20"
    one = CheckpointFolder(tmp_path / "one", limit=1)
    for step in (1, 2):
        save(one, head, step)
    assert one.steps() == [2]
    every = CheckpointFolder(tmp_path / "all")
    for step in (0, 1, 2):
        save(every, head, step)
    assert every.steps() == [1, 2]  # the one of step 0 only found out whether the disk would do


def test_a_process_that_was_not_there_has_no_random_state(head, tmp_path):
    folder = save(CheckpointFolder(tmp_path), head, 1)
    state = json.loads((folder / "trainer_state.json").read_text())
    assert state["world_size"] == 1
    assert CheckpointFolder(tmp_path, rank=0, world_size=2).latest().rng is not None
    assert CheckpointFolder(tmp_path, rank=1, world_size=2).latest().rng is None


def test_random_states_come_back():
    random.seed(3)
    torch.manual_seed(3)
    state = rng_state()
    drawn = random.random(), torch.rand(2)
    set_rng_state(state)
    assert random.random() == drawn[0] and torch.equal(torch.rand(2), drawn[1])
