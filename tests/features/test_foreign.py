"""Dumps of other tools, written here as those tools write them, give the same batches as our own."""

import gzip
import io
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from modelopt_eagle.cli.main import run_command
from modelopt_eagle.errors import FeatureError, TargetError
from modelopt_eagle.features import OfflineSource, OnlineSource
from modelopt_eagle.features.dump import EngineBackEnd, dump
from modelopt_eagle.features.engines.tensorrt_llm import saved_states, states
from modelopt_eagle.features.foreign.files import find_format
from modelopt_eagle.features.foreign.reader import RECIPE_KEYS, ForeignReader, open_offline
from modelopt_eagle.features.store import StoreWriter
from modelopt_eagle.target import load_target_tables

AUX = (1, 3, 4)


@pytest.fixture(scope="module")
def target_states(tiny_target, dataset):
    """(row, aux [s,A·Ht], post-norm [s,Ht], pre-norm [s,Ht]) of every row."""
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


def write_angelslim(folder, rows, ranks=2):
    """Each rank numbers its rows from 0; tensors keep the batch of one."""
    for number, (row, aux, final, _) in enumerate(rows):
        rank, place = divmod(number, len(rows) // ranks)
        path = folder / (f"rank_{rank}" if ranks > 1 else ".") / f"rows_0-5000/data_{place}.ckpt"
        path.parent.mkdir(parents=True, exist_ok=True)
        values = {"input_ids": torch.tensor([row.input_ids]), "loss_mask": torch.tensor([row.supervised]).long()}
        torch.save({**values, "hidden_states": aux[None], "target_hiddens": final[None]}, path)


WRITERS = {
    "modelopt": (write_model_optimizer, {}, True),
    "specforge": (write_specforge, {}, True),
    "specforge-gz": (write_specforge, {"packed": True}, True),
    "angelslim": (write_angelslim, {}, True),
    "angelslim-one-rank": (write_angelslim, {"ranks": 1}, True),
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
    asked = capsys.readouterr().err
    assert "--aux-layers a,b,c" in asked and "--final-states normed|pre-norm" in asked
    assert run_command("features", [*base, "--aux-layers", "1,3,4"]) == 2
    asked = capsys.readouterr().err
    assert "--aux-layers" not in asked and "--final-states normed|pre-norm" in asked
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
    with pytest.raises(FeatureError, match="says that its final states are pre-norm; leave out --final-states"):
        ForeignReader(tmp_path, identity, AUX, final_is_normed=True)
    with pytest.raises(FeatureError, match=r"talk-0.pt: auxiliary states of 3 layers found, 2 ids given \(1, 3\)"):
        ForeignReader(tmp_path, identity, (1, 3))
    with pytest.raises(FeatureError, match="64 wide, those of .* are 96: the dump is of another target"):
        ForeignReader(tmp_path, identity | {"hidden_size": 96}, AUX)


def test_layers_in_another_order_are_put_in_ours(tiny_target, target_states, tmp_path):
    turned = [
        (row, aux.unflatten(-1, (3, -1))[:, [2, 0, 1]].flatten(1), final, pre) for row, aux, final, pre in target_states
    ]
    write_model_optimizer(tmp_path, turned)
    reader = ForeignReader(tmp_path, tiny_target.identity(), (4, 1, 3), final_is_normed=True)
    assert reader.contract.aux_layer_ids == AUX
    assert torch.equal(reader.row(0).aux_hidden, target_states[0][1])
    for wrong in ((1, 3, 3), (1, 3, 8)):
        with pytest.raises(TargetError, match="expected distinct layer ids from 0 to 7"):
            ForeignReader(tmp_path, tiny_target.identity(), wrong, final_is_normed=True)


def test_all_open_questions_come_at_once_with_their_keys(tiny_target, target_states, tmp_path):
    write_model_optimizer(tmp_path, target_states, loss_mask=None)
    with pytest.raises(FeatureError) as raised:
        ForeignReader(tmp_path, tiny_target.identity(), None, answers=RECIPE_KEYS)
    for key in ("eagle.aux_layer_ids: [a, b, c]", "data.offline_final_states: normed|pre-norm",
                "data.offline_all_supervised: true"):  # fmt: skip
        assert key in str(raised.value)
    write_model_optimizer(tmp_path, target_states)
    with pytest.raises(FeatureError) as raised:
        ForeignReader(tmp_path, tiny_target.identity(), AUX, answers=RECIPE_KEYS)
    assert "offline_final_states" in str(raised.value) and "aux_layer_ids" not in str(raised.value)


def test_a_wrong_norm_is_found_by_the_text(tiny_target, dataset, target_states, tmp_path):
    """A target that knows its text finds it unlikely when the norm is left out, or applied twice."""
    norm = torch.nn.RMSNorm(tiny_target.hidden_size)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(-4.0, 4.0, tiny_target.hidden_size))
    generator = torch.Generator().manual_seed(0)
    told = []
    for row, aux, _, _ in target_states:
        ids = torch.tensor(row.input_ids)
        wanted = tiny_target.head.weight[ids.roll(-1)]  # [s,Ht] states whose logits know the next token
        pre = 50 * torch.nn.functional.normalize(wanted / norm.weight, dim=-1)
        told.append((row, aux, norm(pre).detach(), pre + 0.01 * torch.randn(pre.shape, generator=generator)))
    post, pre = tmp_path / "post", tmp_path / "pre"
    for folder, rows in ((post, told), (pre, [(r, a, p, p) for r, a, _, p in told])):
        folder.mkdir()
        write_model_optimizer(folder, rows)

    def check(folder, normed):
        reader = ForeignReader(folder, tiny_target.identity(), AUX, final_is_normed=normed, answers=RECIPE_KEYS)
        reader.check_final_states(norm, tiny_target.head)

    check(post, True)
    check(pre, False)
    with pytest.raises(FeatureError, match="they are pre-norm; mend data.offline_final_states"):
        check(pre, True)
    with pytest.raises(FeatureError, match="they are normed; mend data.offline_final_states"):
        check(post, False)


def test_no_store_is_begun_in_a_foreign_dump(tiny_target, target_states, tmp_path):
    write_specforge(tmp_path, target_states)
    with pytest.raises(FeatureError, match="holds a dump of SpecForge: write the store into a folder of its own"):
        StoreWriter(
            tmp_path,
            ForeignReader(tmp_path, tiny_target.identity(), AUX, final_is_normed=True).contract,
            dataset_hash="",
            dataset_rows=1,
        )


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


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ({"input_ids": lambda ids: ids.index_fill(0, torch.tensor([2]), 300)}, "holds the token id 300"),
        ({"input_ids": lambda ids: ids.index_fill(0, torch.tensor([2]), -1)}, "holds the token id -1"),
        ({"hidden_states_prenorm": lambda _: True}, "is pre-norm, unlike the folder's other files"),
        ({"loss_mask": lambda mask: mask[1:]}, "token ids, a loss mask of"),
        ({"loss_mask": lambda _: None}, "holds no loss mask: .*--all-supervised"),
        (dict.fromkeys(("input_ids", "loss_mask"), lambda part: part[:0]), "holds no token"),
        ({"input_ids": lambda ids: ids.tolist()}, "input_ids is a list, a Tensor expected"),
        ({"aux_hidden_states": lambda aux: aux.to(torch.float8_e4m3fn)}, "states are torch.float8_e4m3fn"),
        ({"hidden_states_prenorm": lambda _: None}, "does not say whether its final states are normed"),
    ],
)
def test_one_file_that_is_unlike_the_others_is_named(tiny_target, target_states, tmp_path, spoil, message):
    write_model_optimizer(tmp_path, target_states, hidden_states_prenorm=False)
    values = torch.load(tmp_path / "talk-3.pt")
    torch.save(values | {name: change(values[name]) for name, change in spoil.items()}, tmp_path / "talk-3.pt")
    with pytest.raises(FeatureError, match=rf"talk-3.pt.*{message}"):
        reader = ForeignReader(tmp_path, tiny_target.identity(), AUX)
        for number in range(len(reader)):
            reader.row(number)


def test_dots_in_ids_stay(tiny_target, target_states, tmp_path):
    for number, name in enumerate(("chat.v1.0", "chat.v1.1")):
        write_model_optimizer(tmp_path, [(replace(target_states[number][0], id=name), *target_states[number][1:])])
    reader = ForeignReader(tmp_path, tiny_target.identity(), AUX, final_is_normed=True)
    assert reader.row_ids == ["chat.v1.0", "chat.v1.1"]


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
