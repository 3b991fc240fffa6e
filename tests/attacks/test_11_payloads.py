"""Files that carry code, nest without end or unpack without end: an error of the project, no traceback, nothing run."""

import gzip
import io
import pickle
import resource

import pytest
import torch

from modelopt_eagle.common.sealed import seal
from modelopt_eagle.data.files import read_rows
from modelopt_eagle.errors import CheckpointError, DataError, EagleError, FeatureError, RecipeError
from modelopt_eagle.export import load_draft
from modelopt_eagle.export.inspect import inspect_checkpoint
from modelopt_eagle.export.tensors import read_file
from modelopt_eagle.features.foreign.reader import ForeignTokens
from modelopt_eagle.recipe import load_recipe
from modelopt_eagle.training.checkpoint import CheckpointFolder
from tests.attacks.test_5_links import head, save  # noqa: F401


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return open, (str(self.file), "w")


def reseal(folder):
    (folder / "complete.json").unlink()
    seal(folder, step=1)


@pytest.mark.parametrize("name", ["optimizer.pt", "rng-0.pt"])
@pytest.mark.parametrize("how", ["payload", "cut", "text", "other kind"])
def test_a_checkpoint_with_something_else_in_its_pickles(head, tmp_path, name, how):  # noqa: F811
    folder = save(CheckpointFolder(tmp_path), head, 1)
    file, made = folder / name, tmp_path / "made"
    if how == "payload":
        torch.save([Payload(made)], file)
    elif how == "cut":
        file.write_bytes(file.read_bytes()[:100])
    elif how == "text":
        file.write_bytes(pickle.dumps(Payload(made)))
    else:
        torch.save(3, file)
    reseal(folder)
    with pytest.raises(CheckpointError) as found:
        CheckpointFolder(tmp_path).latest()
    assert str(file) in str(found.value) and "remove this checkpoint" in str(found.value)
    assert "weights_only" not in str(found.value) and not made.exists()


@pytest.mark.parametrize("state", ["[" * 100_000, "null", "{}", '{"step": "1", "world_size": 1}', "\udcff", "{"])
def test_a_checkpoint_with_another_state(head, tmp_path, state):  # noqa: F811
    folder = save(CheckpointFolder(tmp_path), head, 1)
    (folder / "trainer_state.json").write_text(state, errors="surrogateescape")
    reseal(folder)
    with pytest.raises(CheckpointError, match="trainer_state.json"):
        CheckpointFolder(tmp_path).latest()


@pytest.mark.parametrize("suffix", [".pt", ".ckpt.gz", ".bin"])
def test_a_foreign_file_with_a_payload(tmp_path, suffix):
    """The message names what is in it, and does not advise to run it."""
    made, stream = tmp_path / "made", io.BytesIO()
    torch.save({"input_ids": torch.zeros(3), "loss_mask": Payload(made)}, stream)
    name = {".pt": "a.pt", ".ckpt.gz": "data_0.ckpt.gz", ".bin": "pytorch_model.bin"}[suffix]
    (tmp_path / name).write_bytes(gzip.compress(stream.getvalue()) if suffix == ".ckpt.gz" else stream.getvalue())
    read = read_file if suffix == ".bin" else lambda path: ForeignTokens(path.parent, all_supervised=True).scan()
    with pytest.raises(EagleError, match="more than tensors and plain values .*Unsupported") as found:
        read(tmp_path / name)
    assert "weights_only" not in str(found.value) and "trusted" not in str(found.value) and not made.exists()


def test_a_file_that_unpacks_without_end(tmp_path):
    (tmp_path / "data_0.ckpt.gz").write_bytes(gzip.compress(bytes(200 * 2**20)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(FeatureError, match="unpacks to more than"):
        ForeignTokens(tmp_path, all_supervised=True).scan()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024


DEEP = ["[" * 100_000, '{"a":' * 100_000]


@pytest.mark.parametrize("text", [*DEEP, "a: 2020-13-45", "a: " + "9" * 5000, "\udcff", "a: &a [*a]", "? [a]\n: b"])
def test_recipes_that_nest_without_end_or_hold_no_value(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(RecipeError, match="recipe.yaml"):
        load_recipe(path)


@pytest.mark.parametrize("text", DEEP)
def test_overrides_that_nest_without_end(text):
    with pytest.raises(RecipeError, match="nested too deeply"):
        load_recipe(None, [f"data.train_path={text}"])


@pytest.mark.parametrize("text", [*DEEP, '{"a": ' + "9" * 5000 + "}"])
@pytest.mark.parametrize("before", ["", "[{}, "])
def test_data_that_nests_without_end(tmp_path, text, before):
    (tmp_path / "rows.jsonl").write_text(before + text)
    with pytest.raises(DataError, match="rows.jsonl"):
        list(read_rows(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize("name", ["config.json", "draft_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("text", [*DEEP, "\udcff", "null"])
def test_heads_whose_json_nests_without_end(tmp_path, name, text):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_text(text, errors="surrogateescape")
    with pytest.raises(CheckpointError):
        inspect_checkpoint(tmp_path)
    with pytest.raises(CheckpointError):
        load_draft(tmp_path)
