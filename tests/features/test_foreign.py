"""Dumps of other tools, written here as those tools write them, give the same batches as our own."""

import gzip
import io

import pytest
import torch
from safetensors.torch import save_file

from modelopt_eagle.cli.main import run_command
from modelopt_eagle.errors import FeatureError
from modelopt_eagle.features import OfflineSource, OnlineSource
from modelopt_eagle.features.dump import EngineBackEnd, dump
from modelopt_eagle.features.foreign import ForeignReader, find_format, open_offline
from modelopt_eagle.features.trtllm_engine import saved_states, states
from modelopt_eagle.target import load_target_tables

AUX = (1, 3, 4)


@pytest.fixture(scope="module")
def target_states(tiny_target, dataset):
    """(row, aux [s,A*Ht], post-norm [s,Ht], pre-norm [s,Ht]) of every row."""
    last = tiny_target.num_layers - 1
    result = []
    for row in dataset.rows:
        ids = torch.tensor([row.input_ids])
        output = tiny_target.features(ids, None, AUX)
        pre = tiny_target.features(ids, None, [last]).aux_hidden[0]
        result.append((row, output.aux_hidden[0], output.final_hidden[0], pre))
    return result


def write_model_optimizer(folder, rows, **more):
    for row, aux, final, _ in rows:
        values = {"input_ids": torch.tensor(row.input_ids), "aux_hidden_states": aux, "hidden_states": final}
        values |= {"conversation_id": row.id, "loss_mask": torch.tensor(row.supervised).long(), **more}
        torch.save({k: v for k, v in values.items() if v is not None}, folder / f"{row.id}.pt")


def write_specforge(folder, rows, packed=False):
    place = folder / "rows_0-5000"
    place.mkdir()
    for number, (row, aux, final, _) in enumerate(rows):
        values = {"input_ids": torch.tensor(row.input_ids), "loss_mask": torch.tensor(row.supervised).long()}
        values |= {"aux_hidden_state": aux[None], "hidden_state": final[None]}
        if packed:
            buffer = io.BytesIO()
            torch.save(values, buffer)
            (place / f"data_{number}.ckpt.gz").write_bytes(gzip.compress(buffer.getvalue(), 1))
        else:
            torch.save(values, place / f"data_{number}.ckpt")


def write_speculators(folder, rows, old=False):
    from datasets import Dataset

    if not old:
        columns = {"input_ids": [r[0].input_ids for r in rows], "loss_mask": [r[0].supervised for r in rows]}
        Dataset.from_dict(columns).save_to_disk(str(folder))
        (folder / "hidden_states").mkdir()
    for number, (row, aux, _, pre) in enumerate(rows):
        stacked = torch.cat([aux.unflatten(-1, (3, -1)), pre.unsqueeze(1)], 1)
        ids = torch.tensor(row.input_ids)
        if old:
            values = {
                "input_ids": ids,
                "loss_mask": torch.tensor(row.supervised),
                "hidden_states": list(stacked.unbind(1)),
            }
            torch.save(values, folder / f"data_{number}.pt")
        else:
            tensors = {"hidden_states": stacked.contiguous(), "token_ids": ids}
            save_file(tensors, folder / "hidden_states" / f"hs_{number}.safetensors")


WRITERS = {
    "modelopt": (write_model_optimizer, {}, True),
    "specforge": (write_specforge, {}, True),
    "specforge-gz": (write_specforge, {"packed": True}, True),
    "speculators": (write_speculators, {}, False),
    "speculators-old": (write_speculators, {"old": True}, False),
}


@pytest.mark.parametrize("kind", list(WRITERS))
def test_foreign_dumps_give_our_rows(tiny_target, tiny_target_dir, dataset, target_states, tmp_path, kind):
    write, options, normed = WRITERS[kind]
    write(tmp_path, target_states, **options)
    source = open_offline(tmp_path, load_target_tables(tiny_target_dir), AUX, final_is_normed=normed)
    online = OnlineSource(tiny_target, dataset, AUX)
    for number in range(12):
        ours, theirs = source.load([number]), online.load([number])
        assert torch.equal(ours.input_ids, theirs.input_ids) and torch.equal(ours.supervised, theirs.supervised)
        assert torch.equal(ours.target_top1, theirs.target_top1)
        torch.testing.assert_close(ours.aux_hidden, theirs.aux_hidden, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.final_hidden, theirs.final_hidden, rtol=1e-4, atol=1e-4)


def test_import_makes_a_store(tiny_target, tiny_target_dir, dataset, target_states, tmp_path, capsys):
    (tmp_path / "theirs").mkdir()
    write_specforge(tmp_path / "theirs", target_states)
    with pytest.raises(FeatureError, match="is a dump of SpecForge: turn it into a store by"):
        OfflineSource(tmp_path / "theirs")
    base = ["import", str(tmp_path / "theirs"), "--model", str(tiny_target_dir), "--output-dir", str(tmp_path / "ours")]
    base += ["--dtype", "float32"]
    assert run_command("features", base) == 2
    assert "does not say which layers it holds" in capsys.readouterr().err
    assert run_command("features", [*base, "--aux-layers", "1,3,4"]) == 2
    assert "before or after the final norm" in capsys.readouterr().err
    assert run_command("features", [*base, "--aux-layers", "1,3,4", "--final-states", "normed"]) == 0
    source = open_offline(tmp_path / "ours", load_target_tables(tiny_target_dir), AUX)
    assert source.lengths == dataset.lengths
    assert torch.equal(source.load([3]).target_top1, OnlineSource(tiny_target, dataset, AUX).load([3]).target_top1)
    capsys.readouterr()
    assert run_command("features", [*base, "--aux-layers", "1,3,4", "--final-states", "normed"]) == 0
    assert "0 of 12 rows imported now" in capsys.readouterr().out


def test_questions_that_a_folder_leaves_open(tiny_target, target_states, tmp_path):
    identity = tiny_target.identity()
    write_model_optimizer(tmp_path, target_states, loss_mask=None)
    with pytest.raises(FeatureError, match="holds no loss mask"):
        ForeignReader(tmp_path, identity, AUX, final_is_normed=True)
    reader = ForeignReader(tmp_path, identity, AUX, final_is_normed=True, all_supervised=True)
    assert reader.row(0).supervised.all()
    write_model_optimizer(tmp_path, target_states, hidden_states_prenorm=True)
    assert ForeignReader(tmp_path, identity, AUX).contract.final_is_normed is False
    with pytest.raises(FeatureError, match="talk-0.pt.*aux_hidden has shape"):
        ForeignReader(tmp_path, identity, (1, 3)).row(0)


def test_damaged_and_unknown_folders(tiny_target, target_states, tmp_path):
    with pytest.raises(FeatureError, match="does not exist"):
        find_format(tmp_path / "absent")
    with pytest.raises(FeatureError, match="neither a feature store"):
        find_format(tmp_path)
    write_model_optimizer(tmp_path, target_states)
    damaged = tmp_path / "talk-3.pt"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    with pytest.raises(FeatureError, match="talk-3.pt cannot be read"):
        ForeignReader(tmp_path, tiny_target.identity(), AUX, final_is_normed=True)


class Bomb:
    def __reduce__(self):
        return (open, ("/dev/null",))


def test_pickles_cannot_run_code(tiny_target, tmp_path):
    torch.save({"input_ids": Bomb()}, tmp_path / "a.pt")
    with pytest.raises(FeatureError, match="a.pt cannot be read"):
        ForeignReader(tmp_path, tiny_target.identity(), AUX, final_is_normed=True)


def test_speculators_states_of_other_tokens_are_refused(tiny_target, target_states, tmp_path):
    write_speculators(tmp_path, target_states)
    first, second = (tmp_path / "hidden_states" / f"hs_{i}.safetensors" for i in range(2))
    second.write_bytes(first.read_bytes())
    with pytest.raises(FeatureError, match="hs_1.safetensors holds states of other tokens"):
        ForeignReader(tmp_path, tiny_target.identity(), AUX, final_is_normed=False)


def record_trtllm(target, folder, keep=None, reverse=True):
    """What TensorRT-LLM leaves behind: numbered files, in another order than the requests."""

    def generate(prompts):
        for number, ids in enumerate(prompts[::-1] if reverse else prompts):
            output = target.features(torch.tensor([ids]), None, AUX)
            value = {"id": number, "input_ids": torch.tensor(ids)}
            value |= {"hidden_state": output.final_hidden[0][:keep], "aux_hidden_states": output.aux_hidden[0][:keep]}
            torch.save([value], folder / f"states_{number + 1}.pt")

    return generate


def test_trtllm_recorded_files_make_the_same_store(tiny_target, tiny_target_dir, dataset, tmp_path):
    saved = tmp_path / "saved"
    saved.mkdir()
    generate = record_trtllm(tiny_target, saved)
    back_end = EngineBackEnd(
        load_target_tables(tiny_target_dir), AUX, lambda rows: states(rows, generate, saved), final_is_normed=True
    )
    dump(back_end, dataset.rows, tmp_path / "store", dtype="float32")
    source, online = OfflineSource(tmp_path / "store"), OnlineSource(tiny_target, dataset, AUX)
    for number in range(len(dataset.rows)):
        ours, theirs = source.load([number]), online.load([number])
        assert ours.row_ids == theirs.row_ids and torch.equal(ours.target_top1, theirs.target_top1)
        torch.testing.assert_close(ours.aux_hidden, theirs.aux_hidden, rtol=1e-4, atol=1e-4)
    assert not list(saved.iterdir())


def test_trtllm_lost_states_are_found(tiny_target, dataset, tmp_path):
    with pytest.raises(FeatureError, match="states were written"):
        list(states(dataset.rows, record_trtllm(tiny_target, tmp_path, keep=-2), tmp_path))
    with pytest.raises(FeatureError, match="wrote no states"):
        list(states(dataset.rows, lambda prompts: None, tmp_path / "nothing"))
    torch.save({"id": 1}, tmp_path / "x.pt")
    with pytest.raises(FeatureError, match="a list of one dictionary expected"):
        saved_states(tmp_path / "x.pt")
