"""Whole training runs: streamed from a server, and from a store that is filled on the way."""

import threading
from dataclasses import replace

import pytest
import torch

from modelopt_eagle.errors import EagleError, FeatureError
from modelopt_eagle.features.dump import TargetBackEnd, dump
from modelopt_eagle.features.store import StoreReader
from modelopt_eagle.features.stream.target_server import TargetServer
from modelopt_eagle.training import train
from tests.training.runs import small_recipe, write_conversations
from tests.training.test_distributed import launch


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_conversations(tmp_path_factory.mktemp("data") / "rows.jsonl", 12)


def weights(result):
    from safetensors.torch import load_file

    return load_file(next(result.last_checkpoint.glob("*.safetensors")))


def assert_same_head(ours, theirs, tolerance):
    for name, tensor in weights(theirs).items():
        torch.testing.assert_close(weights(ours)[name].float(), tensor.float(), rtol=1e-2, atol=tolerance)


def run(target_dir, data, folder, *options):
    return train(small_recipe(target_dir, data, folder, "training.epochs=1", *options))


def test_streamed_run_equals_an_online_run(tiny_target, tiny_target_dir, data, tmp_path):
    online = run(tiny_target_dir, data, tmp_path / "online")
    server = TargetServer(tiny_target)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"data.streaming_server_url={server.url}"
        streamed = run(tiny_target_dir, data, tmp_path / "streamed", url)
        filled = run(
            tiny_target_dir, data, tmp_path / "filled", url, f"data.offline_data_path={tmp_path / 'store'}",
            "data.on_missing=generate",
        )  # fmt: skip
    finally:
        server.close()
    assert_same_head(streamed, online, 1e-4)
    assert streamed.history[-1]["loss"] == pytest.approx(online.history[-1]["loss"], abs=1e-4)
    assert_same_head(filled, online, 2e-2)  # the store is bfloat16
    assert len(StoreReader(tmp_path / "store")) == 12


def test_a_store_that_lacks_rows(tiny_target, tiny_target_dir, data, tmp_path):
    from modelopt_eagle.data import prepare_dataset

    rows = prepare_dataset(tiny_target.tokenizer, data, max_length=2048, end_token_ids=(2,)).rows
    dump(TargetBackEnd(tiny_target), rows, tmp_path / "store", worker=(0, 2))
    store = f"data.offline_data_path={tmp_path / 'store'}"
    skipped = run(tiny_target_dir, data, tmp_path / "skip", store, "data.on_missing=skip")
    assert skipped.steps == 2 and len(StoreReader(tmp_path / "store")) == 6
    made = run(tiny_target_dir, data, tmp_path / "generate", store, "data.on_missing=generate")
    assert made.steps == 3 and len(StoreReader(tmp_path / "store")) == 12
    with pytest.raises(EagleError, match="eval_path"):
        run(tiny_target_dir, data, tmp_path / "eval", store, "data.on_missing=skip", f"data.eval_path={data}")


def test_two_processes_fill_a_store_and_train_as_one_does(tiny_target_dir, data, tmp_path):
    options = ("training.batch_size=2", "data.on_missing=generate")
    launch(tiny_target_dir, data, tmp_path / "two", f"data.offline_data_path={tmp_path / 'store'}", *options)
    assert len(StoreReader(tmp_path / "store")) == 12  # a row that two processes had stored would be an error
    one = train(
        small_recipe(
            tiny_target_dir, data, tmp_path / "one", f"data.offline_data_path={tmp_path / 'alone'}", *options,
            "training.gradient_accumulation_steps=2",
        )
    )  # fmt: skip
    folder = tmp_path / "two" / one.last_checkpoint.name
    from safetensors.torch import load_file

    for name, tensor in load_file(folder / "model.safetensors").items():
        torch.testing.assert_close(weights(one)[name], tensor, rtol=1e-2, atol=1e-3, msg=name)


def test_a_store_of_spoiled_states_is_not_filled_up(tiny_target, tiny_target_dir, data, tmp_path):
    """B37: the states are held against the stored predictions also where a store lacks rows."""
    from modelopt_eagle.data import prepare_dataset

    class Spoiled(TargetBackEnd):
        def features(self, rows):
            for number, row in super().features(rows):
                yield number, replace(row, final_hidden=3 * row.final_hidden)

    rows = prepare_dataset(tiny_target.tokenizer, data, max_length=2048, end_token_ids=(2,)).rows
    dump(Spoiled(tiny_target), rows, tmp_path / "store", worker=(0, 2))
    with pytest.raises(FeatureError, match="teacher parity broken"):
        run(
            tiny_target_dir, data, tmp_path / "run", f"data.offline_data_path={tmp_path / 'store'}",
            "data.on_missing=skip",
        )  # fmt: skip
