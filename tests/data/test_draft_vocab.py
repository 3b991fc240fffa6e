"""The draft vocabulary: what is in it, what it covers, and which maps are refused."""

import json

import pytest
import torch
from data_toy import talk, write_lines

from modelopt_eagle.cli.main import run_command
from modelopt_eagle.data import tokenize_conversations
from modelopt_eagle.data.vocab import (
    choose_draft_vocab,
    count_predictions,
    count_supervised,
    coverage_of,
    load_draft_vocab,
    save_draft_vocab,
)
from modelopt_eagle.draft import DraftVocab
from modelopt_eagle.errors import CheckpointError, DataError
from modelopt_eagle.target.identity import tokenizer_hash
from modelopt_eagle.target.tiny import make_byte_tokenizer, make_tiny_target


@pytest.fixture
def tokenizer():
    return make_byte_tokenizer()


@pytest.fixture
def rows(tokenizer):
    return tokenize_conversations(tokenizer, [talk("zzzzzzzz", "aaab", "zz", "ac")]).rows


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_counts_are_over_supervised_tokens_only(tokenizer, rows):
    counts = count_supervised(rows, 256)
    a, b, c, z = ids_of(tokenizer, "abcz")
    assert counts[[a, b, c, z, tokenizer.eos_token_id]].tolist() == [4, 1, 1, 0, 2]
    assert int(counts.sum()) == 8


def test_special_tokens_frequent_tokens_then_the_lowest_unused_ids(tokenizer, rows):
    a, b, c = ids_of(tokenizer, "abc")
    special = sorted(tokenizer.all_special_ids)
    choice = choose_draft_vocab(rows, tokenizer, 256, len(special) + 1)
    assert choice.vocab.target_ids.tolist() == sorted([*special, a])
    assert choice.coverage == pytest.approx(6 / 8) and choice.seen == 4
    assert "75.00% of the supervised tokens are inside" in choice.describe()
    filled = choose_draft_vocab(rows, tokenizer, 256, len(special) + 5)
    unused = [i for i in range(256) if i not in (*special, a, b, c)][:2]
    assert filled.vocab.target_ids.tolist() == sorted([*special, a, b, c, *unused])
    assert filled.coverage == 1.0 and "places filled" in filled.describe()
    assert choose_draft_vocab(rows, tokenizer, 256, 5, [200]).vocab.t2d[200]  # a further end token


def test_argmax_coverage_leaves_out_positions_that_predict_nothing():
    vocab = DraftVocab.from_target_ids(torch.tensor([1, 3]), 6)
    counts = count_predictions([torch.tensor([-1, 1, 3]), torch.tensor([5, -1, 1])], 6)
    assert coverage_of(counts, vocab) == 0.75
    assert coverage_of(torch.zeros(6, dtype=torch.long), vocab) == 0.0


def test_a_draft_vocabulary_larger_than_the_target(tokenizer, rows):
    with pytest.raises(CheckpointError, match="300 tokens was asked for, the target has 256"):
        choose_draft_vocab(rows, tokenizer, 256, 300)


def test_data_of_another_tokenizer(tokenizer, rows):
    with pytest.raises(DataError, match="token id .* the target has only 50"):
        choose_draft_vocab(rows, tokenizer, 50, 10)


def test_round_trip_and_refusals(tmp_path):
    vocab = DraftVocab.from_target_ids(torch.tensor([1, 3, 8]), 10)
    save_draft_vocab(tmp_path, vocab, {"tokenizer_hash": "aaaa", "model": "toy"})
    again = load_draft_vocab(tmp_path, "aaaa", 10)
    assert torch.equal(again.d2t, vocab.d2t) and torch.equal(again.t2d, vocab.t2d)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["draft_vocab.json", "draft_vocab.safetensors"]
    assert torch.equal(load_draft_vocab(tmp_path / "draft_vocab.safetensors", "aaaa").d2t, vocab.d2t)
    with pytest.raises(CheckpointError, match="another tokenizer .toy, hash aaaa; the target's is bbbb"):
        load_draft_vocab(tmp_path, "bbbb")
    with pytest.raises(CheckpointError, match="vocabulary of 10 tokens, the target has 12"):
        load_draft_vocab(tmp_path, "aaaa", 12)
    weights = tmp_path / "draft_vocab.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_draft_vocab(tmp_path)
    weights.unlink()
    with pytest.raises(CheckpointError, match="draft_vocab.safetensors is missing; make them with"):
        load_draft_vocab(tmp_path)


@pytest.fixture
def data_file(tmp_path):
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello there"}]
    return write_lines(tmp_path / "data.jsonl", *[{"messages": turns}] * 3)


def calibrate(target, data, folder, *more):
    arguments = ["--model", str(target), "--data", str(data), "--save_dir", str(folder), *more]
    return run_command("calibrate_draft_vocab", arguments)


def test_the_command_writes_map_and_record(tiny_target_dir, tiny_target, data_file, tmp_path, capsys):
    assert calibrate(tiny_target_dir, data_file, tmp_path / "map", "--draft_vocab_size", "64") == 0
    printed = capsys.readouterr().out
    assert "3 conversations read" in printed and "argmax tokens are inside" in printed
    record = json.loads((tmp_path / "map" / "draft_vocab.json").read_text())
    assert (record["draft_vocab_size"], record["vocab_size"], record["coverage"]) == (64, 256, 1.0)
    assert record["target_argmax_tokens"] == record["supervised_tokens"] == 3 * len("hello there") + 3
    vocab = load_draft_vocab(tmp_path / "map", tokenizer_hash(tiny_target.tokenizer), tiny_target.vocab_size)
    argmax = tiny_target.model(torch.tensor([_row(tiny_target.tokenizer)])).logits.argmax(-1)[0]
    predicting = argmax[-len("hello there") - 3 : -2]  # for the answer, its end, not for the line break
    assert record["target_argmax_coverage"] == pytest.approx(float(vocab.t2d[predicting].float().mean()))


def test_the_command_runs_a_target_of_few_layers_on_a_sample_or_not_at_all(data_file, tmp_path):
    make_tiny_target(tmp_path / "short", layers=2)
    common = (tmp_path / "short", data_file, tmp_path / "map", "--draft_vocab_size", "64", "--argmax_rows")
    assert calibrate(*common, "2") == 0
    record = json.loads((tmp_path / "map" / "draft_vocab.json").read_text())
    assert record["target_argmax_tokens"] == 2 * len("hello there") + 2 and record["supervised_tokens"] == 36
    assert calibrate(*common, "0") == 0
    assert "target_argmax_tokens" not in json.loads((tmp_path / "map" / "draft_vocab.json").read_text())


def _row(tokenizer):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello there"}]
    return tokenizer.apply_chat_template(messages, return_dict=False)


def test_the_command_reads_argmaxes_from_a_store_of_this_target(
    tiny_target_dir, tiny_target, data_file, tmp_path, capsys
):
    from dataclasses import replace

    from modelopt_eagle.data import prepare_dataset
    from modelopt_eagle.features import FeatureContract
    from modelopt_eagle.features.compute import compute_features
    from modelopt_eagle.features.store import StoreWriter

    rows = prepare_dataset(tiny_target.tokenizer, data_file).rows
    contract = FeatureContract.from_target(tiny_target)
    for name, hash_ in (("own", contract.tokenizer_hash), ("other", "beef")):
        changed = replace(contract, tokenizer_hash=hash_)
        with StoreWriter(tmp_path / name, changed, dataset_hash="d", dataset_rows=len(rows)) as writer:
            for place, row in enumerate(compute_features(tiny_target, rows, contract.aux_layer_ids)):
                writer.add(place, row)
    common = (tiny_target_dir, data_file, tmp_path / "map", "--draft_vocab_size", "64", "--features")
    assert calibrate(*common, str(tmp_path / "own")) == 0
    from_store = json.loads((tmp_path / "map" / "draft_vocab.json").read_text())
    assert calibrate(*common[:-1]) == 0
    assert from_store == json.loads((tmp_path / "map" / "draft_vocab.json").read_text())
    capsys.readouterr()
    assert calibrate(*common, str(tmp_path / "other")) == 2
    assert "another tokenizer (hash beef" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--draft_vocab_size", "300"], "300 is larger than the target's vocabulary of 256"),
        (["--draft_vocab_size", "2"], "cannot hold the 4 special and end tokens"),
        (["--draft_vocab_size", "64", "--role_alias", "robot"], "expects NAME=ROLE"),
        (["--draft_vocab_size", "64", "--argmax_rows", "-1"], "--argmax_rows must be at least 0"),
    ],
)
def test_the_command_refuses(tiny_target_dir, data_file, tmp_path, capsys, more, message):
    assert calibrate(tiny_target_dir, data_file, tmp_path / "map", *more) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "map").exists()


def test_the_command_maps_and_drops_roles(tiny_target_dir, tmp_path, capsys):
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "robot", "content": "beep"}]}
    good = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    data = write_lines(tmp_path / "data.jsonl", good, row)
    common = (tiny_target_dir, data, tmp_path / "map", "--draft_vocab_size", "64")
    assert calibrate(*common) == 2 and "unknown role 'robot'" in capsys.readouterr().err
    assert calibrate(*common, "--unknown_role", "drop") == 0 and "1 dropped" in capsys.readouterr().out
    assert calibrate(*common, "--role_alias", "robot=assistant") == 0 and "0 dropped" in capsys.readouterr().out
