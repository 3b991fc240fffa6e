"""Links in a run's folder and under an export: only the link is touched, never what it points to."""

import json
import shutil

import pytest
import torch

from modelopt_eagle.draft import DraftConfig, EagleModule
from modelopt_eagle.errors import CheckpointError, ExportError
from modelopt_eagle.export import export_checkpoint, load_draft
from modelopt_eagle.export.hub import push_to_hub
from modelopt_eagle.training.checkpoint import CheckpointFolder, incomplete
from modelopt_eagle.training.run_folder import sweep


@pytest.fixture
def head():
    return EagleModule(
        DraftConfig(
            hidden_size=32, target_hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1,
            head_dim=16, num_hidden_layers=1, rms_norm_eps=1e-6, rope_theta=1e4, rope_scaling=None,
            max_position_embeddings=64, vocab_size=64, draft_vocab_size=64, aux_layer_ids=(1, 2, 3),
        )
    )  # fmt: skip


def save(folder, head, step):
    return folder.save(step, head, [torch.optim.SGD(head.parameters(), lr=0.1)], {}, "", step)


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_checkpoint_that_is_a_link_keeps_what_it_points_to(head, tmp_path):
    """Removed as surplus, written over, swept as unfinished: each time the link goes."""
    elsewhere = save(CheckpointFolder(tmp_path / "other"), head, 1)
    before = content(elsewhere)
    run = tmp_path / "run"
    folder = CheckpointFolder(run, limit=1)
    run.mkdir()
    (run / "checkpoint-1").symlink_to(elsewhere, target_is_directory=True)
    assert folder.latest().step == 1  # it can be read
    save(folder, head, 2)
    assert folder.steps() == [2] and not (run / "checkpoint-1").is_symlink()
    (run / "checkpoint-3").symlink_to(elsewhere, target_is_directory=True)
    save(folder, head, 3)
    assert not (run / "checkpoint-3").is_symlink()
    for name in (".checkpoint-4.part", "checkpoint-9"):
        (run / name).symlink_to(elsewhere, target_is_directory=True)
    sweep(run)
    save(folder, head, 4)
    assert content(elsewhere) == before


def test_a_planted_link_under_a_temporary_name_is_not_written_through(head, tmp_path):
    (tmp_path / "precious").write_text("kept")
    run = tmp_path / "run"
    run.mkdir()
    (run / ".best.link").symlink_to(tmp_path / "precious")
    (run / ".checkpoint-1.part").symlink_to(tmp_path, target_is_directory=True)
    save(CheckpointFolder(run), head, 1)
    assert (tmp_path / "precious").read_text() == "kept" and incomplete(run / "checkpoint-1") is None


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../outside", ""])
def test_a_seal_that_names_what_lies_outside_is_refused(head, tmp_path, name):
    folder = save(CheckpointFolder(tmp_path), head, 1)
    (tmp_path / "outside").write_text("x")
    seal = json.loads((folder / "complete.json").read_text())
    seal["files"][name] = {"bytes": 1, "sha256": "0" * 64}
    (folder / "complete.json").write_text(json.dumps(seal))
    assert "lies outside" in incomplete(folder)


@pytest.mark.parametrize("files", [None, 3, [], {"model.safetensors": None}, {"model.safetensors": {}}, {}])
def test_a_seal_of_another_kind_is_refused(head, tmp_path, files):
    folder = save(CheckpointFolder(tmp_path), head, 1)
    (folder / "complete.json").write_text(json.dumps({"files": files}))
    if files == {}:
        shutil.rmtree(folder)
        folder.mkdir()
        (folder / "complete.json").write_text(json.dumps({"files": files}))
    assert incomplete(folder)


def entries(folder):
    return sorted(path.name for path in folder.iterdir())


def test_an_export_over_a_link_replaces_what_it_names(head, tmp_path):
    """No old head is left behind the link, and no part beside it."""
    real, link = tmp_path / "real", tmp_path / "link"
    export_checkpoint(head, None, real)
    before = (real / "model.safetensors").read_bytes()
    link.symlink_to(real, target_is_directory=True)
    torch.nn.init.normal_(head.fc.weight)
    export_checkpoint(head, None, link, overwrite=True)
    assert link.is_symlink() and (real / "model.safetensors").read_bytes() != before
    assert entries(tmp_path) == ["link", "real"]


@pytest.mark.parametrize("name", ["README.md", "more.safetensors", "target_adapter"])
def test_an_export_that_holds_a_link_is_neither_uploaded_nor_replaced(head, tmp_path, name):
    out, secret = tmp_path / "out", tmp_path / "secret"
    export_checkpoint(head, None, out)
    secret.mkdir() if name == "target_adapter" else secret.write_text("secret")
    (out / name).unlink(missing_ok=True)
    (out / name).symlink_to(secret)
    with pytest.raises(ExportError, match="no links"):
        push_to_hub(out, "someone/head")
    with pytest.raises(ExportError, match="or links"):
        export_checkpoint(head, None, out, overwrite=True)
    assert secret.exists()


@pytest.mark.parametrize("name", ["model.safetensors", "draft_config.json"])
def test_a_checkpoint_that_was_altered_is_not_exported_or_measured(head, tmp_path, name):
    folder = save(CheckpointFolder(tmp_path), head, 1)
    content = bytearray((folder / name).read_bytes())
    content[-2] ^= 1
    (folder / name).write_bytes(content)
    for path in (folder, tmp_path):
        with pytest.raises(CheckpointError, match="was altered after it was written"):
            load_draft(path)
