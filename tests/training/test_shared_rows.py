"""Processes of one run read its data once, all of them know of a failure, and nothing stays behind."""

import json
import re
from pathlib import Path

import pytest

from modelopt_eagle.data import prepare_dataset
from modelopt_eagle.errors import DataError
from modelopt_eagle.features.store import dataset_hash
from modelopt_eagle.target.tiny import make_byte_tokenizer
from modelopt_eagle.training import train
from modelopt_eagle.training.run_folder import sweep
from modelopt_eagle.training.shared_rows import PREFIX, RowsOfARun
from tests.training.runs import small_recipe, write_conversations
from tests.training.test_distributed import launch

SCRIPT = Path(__file__).with_name("shared_rows.py")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = write_conversations(tmp_path_factory.mktemp("data") / "rows.jsonl", 30)
    with path.open("a") as lines:
        lines.write(json.dumps({"id": "empty", "messages": []}) + "\n")
    return path


def said(folder, data, *options):
    return sorted(re.findall(r"\[(\d .*?)\]\n", launch(folder, data, *options, script=SCRIPT)))


def test_one_process_reads_for_all(tmp_path, data):
    digest = dataset_hash(prepare_dataset(make_byte_tokenizer(), data).rows)[:8]
    has = f"has {digest} of 31 [('no_messages', 1)]"
    assert said(tmp_path, data) == [*[f"0 {has}"] * 2, *["0 reads"] * 2, *[f"1 {has}"] * 2]
    assert not any((tmp_path / "all").iterdir())


def test_a_failure_reaches_all(tmp_path, data):
    words = "the first process could not read the data: DataError: row 3 is broken"
    assert said(tmp_path, data, "--fail") == ["0 reads", "0 refuses: row 3 is broken", f"1 refuses: {words}"]
    (left,) = (tmp_path / "all").iterdir()  # for those that have not looked yet; the next run takes it away
    assert left.name.startswith(PREFIX) and "1 temporary files" in sweep(tmp_path / "all") and not left.exists()


def test_without_a_folder_in_common_each_reads_for_itself(tmp_path, data):
    lines = said(tmp_path, data, "--apart")
    assert [line for line in lines if "reads" in line] == [*["0 reads"] * 2, *["1 reads"] * 2]
    assert len({line[2:] for line in lines if "has" in line}) == 1 and len(lines) == 8


def test_a_run_keeps_its_tokens_on_the_disk_and_leaves_nothing(tmp_path, data, tiny_target_dir, monkeypatch):
    places = []
    original = RowsOfARun.read

    def read(self, make):
        return original(self, lambda place: places.append(place) or make(place))

    monkeypatch.setattr(RowsOfARun, "read", read)
    train(small_recipe(tiny_target_dir, data, tmp_path / "run", "training.max_steps=1"))
    assert len(places) == 1 and places[0].parent == tmp_path / "run" and not places[0].exists()
    assert not list((tmp_path / "run").glob(f"{PREFIX}*"))


def test_a_process_that_ended_is_not_waited_for(tmp_path):
    from modelopt_eagle.training.shared_rows import _await

    with pytest.raises(DataError, match="the process that read the data has ended"):
        _await(tmp_path / "gone")
