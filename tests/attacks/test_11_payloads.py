"""Files that carry code, nest without end or unpack without end: an error of the project, no traceback, nothing run."""

import pickle

import pytest
import torch

from modelopt_eagle.common.sealed import seal
from modelopt_eagle.errors import CheckpointError
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
