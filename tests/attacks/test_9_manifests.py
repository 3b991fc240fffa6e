"""Manifests and shards with values of other kinds, lengths, ranges and orders; single bits turned; other headers."""

import copy
import json
import random

import pytest
import torch
from safetensors.torch import load_file, save

from modelopt_eagle.cli.main import run_command
from modelopt_eagle.common.files import file_sha256
from modelopt_eagle.errors import FeatureError
from modelopt_eagle.features.store import StoreReader, maintenance
from modelopt_eagle.features.store.files import map_safetensors
from modelopt_eagle.features.store.shard import check_prefixes
from tests.features.rows import fill

NONE = object()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    fill(folder)
    return folder


def put(values, path, value):
    """Set one place in nested JSON; NONE removes it."""
    for key in path[:-1]:
        values = values[key]
    if value is NONE:
        del values[path[-1]]
    else:
        values[path[-1]] = value


ROWS = ("row_ids", "indices", "categories", "tokens", "supervised")
CASES = [
    *((("shards", 0, name), value) for name in ROWS for value in (None, 3, "x", {}, [None], [[]], [], NONE)),
    *((("shards", 0, name, 1), value) for name in ("indices", "tokens", "supervised") for value in (-1, 1.5, True, "1", 2**70)),  # noqa: E501
    *((("shards", 0, name, 1), value) for name in ("row_ids", "categories") for value in (7, None, [])),
    *((("shards", 0, name), value) for name in ("bytes", "shared") for value in (-1, None, "1", 1.0, True, 2**80)),
    *((("shards", 0, "sha256"), value) for value in (None, "", "0" * 63, "G" * 64, 5)),
    *((("shards", 0), value) for value in (None, [], "x", {}, 3)),
    *((("shards",), value) for value in (None, {}, "x", 3, NONE)),
    *((("contract",), value) for value in (None, [], "x", {}, NONE)),
    *((("contract", "aux_layer_ids"), value) for value in (None, "13", [], [1, 1], ["1"], [-1], [1.5], [True])),
    *((("contract", "hidden_size"), value) for value in (None, 0, -5, "12", 1.5, True)),
    *((("contract", "vocab_size"), value) for value in (None, 0, -5, "50", 1.5, True)),
    *((("contract", "dtype"), value) for value in (None, 3, "float7", [])),
    *((("contract", name), value) for name in ("model", "final_is_normed") for value in (None, 3, [])),
    (("contract", "more"), 1), (("more",), 1), (("shards", 0, "more"), 1),
    *((("dataset_rows",), value) for value in (None, -1, "20", 1.5, NONE)),
    *((("dataset_hash",), value) for value in (None, 3, [], NONE)),
    (("shards", 0, "indices", 1), 0),
    (("shards", 0, "supervised", 0), 99),
    (("shards", 0, "shared"), 10**6),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_manifest_with_another_value_is_an_error(store, tmp_path, number):
    values = json.loads((store / "manifest.json").read_text())
    del values["checksum"]
    put(values, *CASES[number])
    for path in store.glob("*.safetensors"):
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "manifest.json").write_text(json.dumps(values))
    for attempt in (lambda: StoreReader(tmp_path, "read"), lambda: maintenance.verify(tmp_path)):
        with pytest.raises(FeatureError, match="manifest.json"):
            attempt()


def test_columns_in_another_order_are_found(store, tmp_path):
    """Permuted ids cannot be told from right ones without the checksum; lengths and masks can."""
    values = json.loads((store / "manifest.json").read_text())
    for path in store.glob("*.safetensors"):
        (tmp_path / path.name).symlink_to(path)
    for name in ROWS:
        for checksum in (True, False):
            changed = copy.deepcopy(values)
            changed["shards"][0][name].reverse()
            if changed == values:
                continue
            if not checksum:
                del changed["checksum"]
            (tmp_path / "manifest.json").write_text(json.dumps(changed))
            if checksum:
                with pytest.raises(FeatureError, match="its checksum differs"):
                    StoreReader(tmp_path)
            elif name in ("tokens", "supervised"):
                with pytest.raises(FeatureError, match="is not what its manifest says|more supervised tokens than"):
                    StoreReader(tmp_path)


def test_no_turned_bit_is_accepted(store, tmp_path, capsys):
    for path in store.glob("*.safetensors"):
        (tmp_path / path.name).symlink_to(path)
    content, draw = (store / "manifest.json").read_bytes(), random.Random(0)
    for _ in range(600):
        spoilt = bytearray(content)
        spoilt[draw.randrange(len(spoilt))] ^= 1 << draw.randrange(8)
        (tmp_path / "manifest.json").write_bytes(spoilt)
        with pytest.raises(FeatureError):
            StoreReader(tmp_path, "read")
    assert run_command("features", ["verify", str(tmp_path)]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_no_turned_bit_of_a_shard_is_accepted(tmp_path):
    fill(tmp_path, rows=4, shard_bytes=10**6)
    (shard,) = tmp_path.glob("*.safetensors")
    content, draw = shard.read_bytes(), random.Random(0)
    for _ in range(200):
        spoilt = bytearray(content)
        spoilt[draw.randrange(len(spoilt))] ^= 1 << draw.randrange(8)
        shard.write_bytes(spoilt)
        with pytest.raises(FeatureError, match="was altered"):
            StoreReader(tmp_path)
        assert len(maintenance.verify(tmp_path).bad) == 1


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


HEADERS = {
    "no table": [],
    "null": None,
    "a tensor of null": {"a": None},
    "a tensor that is a list": {"a": []},
    "no fields": {"a": {}},
    "more fields": {"a": entry() | {"more": 1}},
    "shape of null": {"a": entry() | {"shape": None}},
    "shape of texts": {"a": entry(shape=("2",))},
    "negative shape": {"a": entry(shape=(-2, -1))},
    "shape that overflows": {"a": entry(shape=(2**63, 2))},
    "shape that wraps round": {"a": entry(shape=(2**62, 4), offsets=(0, 0))},
    "shape of a fraction": {"a": entry(shape=(2.0,))},
    "shape of true": {"a": entry(shape=(True, 2))},
    "offsets of null": {"a": entry() | {"data_offsets": None}},
    "one offset": {"a": entry(offsets=(8,))},
    "negative offsets": {"a": entry(offsets=(-8, 0))},
    "offsets the wrong way": {"a": entry(offsets=(8, 0))},
    "offsets that overflow": {"a": entry(offsets=(2**64, 2**64 + 8))},
    "offsets beyond the end": {"a": entry(offsets=(8, 16))},
    "a dtype of null": {"a": entry(dtype=None)},
    "another dtype": {"a": entry(dtype="C64", shape=(1,))},
    "a dtype that is a list": {"a": entry(dtype=["F32"])},
    "overlap": {"a": entry(), "b": entry()},
    "partial overlap": {"a": entry(), "b": entry(shape=(1,), offsets=(4, 8))},
    "a hole": {"a": entry(shape=(1,), offsets=(4, 8))},
    "metadata of null": {"a": entry(), "__metadata__": None},
    "metadata of numbers": {"a": entry(), "__metadata__": {"contract": 3}},
    "nothing": {},
}


def write_header(path, header):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_is_not_of_the_format_is_an_error(tmp_path, name):
    write_header(tmp_path / "a.safetensors", HEADERS[name])
    with pytest.raises(FeatureError, match="not a whole safetensors file"):
        map_safetensors(tmp_path / "a.safetensors")


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe", b"{", b'{"a": NaN}', b"9" * 5000])
def test_a_header_that_is_no_json_is_an_error(tmp_path, text):
    write_header(tmp_path / "a.safetensors", text)
    with pytest.raises(FeatureError, match="not a whole safetensors file"):
        map_safetensors(tmp_path / "a.safetensors")


def test_whole_headers_are_read(tmp_path):
    header = {"a": entry(shape=(1,), offsets=(0, 4)), "b": entry(shape=(1,), offsets=(4, 8))}
    write_header(tmp_path / "a.safetensors", header | {"c": entry(shape=(0, 3), offsets=(4, 4))})
    tensors, meta = map_safetensors(tmp_path / "a.safetensors")
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == {"a": [1], "b": [1], "c": [0, 3]}
    assert meta == {}


def forge(folder, change):
    """Change a shard's tensors, and let the manifest vouch for it."""
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    change(tensors)
    path.write_bytes(save({name: tensor.contiguous() for name, tensor in tensors.items()}))
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["checksum"]
    manifest["shards"][0] |= {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    (folder / "manifest.json").write_text(json.dumps(manifest))


SHARDS = {
    "offsets that go back": lambda t: t["row_offsets"].__setitem__(2, 1),
    "offsets beyond the end": lambda t: t["final_offsets"].__setitem__(-1, 10**6),
    "offsets that begin late": lambda t: t["final_offsets"].__setitem__(0, 1),
    "negative offsets": lambda t: t["final_offsets"].__setitem__(0, -1),
    "fewer offsets": lambda t: t.update(final_offsets=t["final_offsets"][:-1]),
    "offsets of another kind": lambda t: t.update(final_offsets=t["final_offsets"].float()),
    "a tensor less": lambda t: t.pop("supervised"),
    "a tensor more": lambda t: t.update(more=torch.zeros(1)),
    "another width": lambda t: t.update(aux_hidden=t["aux_hidden"][:, :-1]),
    "another dtype": lambda t: t.update(aux_hidden=t["aux_hidden"].bfloat16()),
    "one dimension": lambda t: t.update(final_hidden=t["final_hidden"].flatten()),
    "a position less": lambda t: t.update(aux_hidden=t["aux_hidden"][:-1]),
    "an id beyond the vocabulary": lambda t: t["input_ids"].__setitem__(0, 50),
    "a negative id": lambda t: t["input_ids"].__setitem__(0, -1),
    "a mask of twos": lambda t: t["supervised"].fill_(2),
    "another mask": lambda t: t.update(supervised=1 - t["supervised"]),
    "a choice beyond the vocabulary": lambda t: t["target_top1"].__setitem__(0, 50),
    "a choice less": lambda t: t.update(target_top1=t["target_top1"][:-1]),
    "a NaN in the middle": lambda t: t["aux_hidden"][1].__setitem__(3, float("nan")),
    "an infinity in the final states": lambda t: t["final_hidden"][1].__setitem__(3, float("inf")),
}


@pytest.mark.parametrize("verify", ["open", "read"])
@pytest.mark.parametrize("name", SHARDS)
def test_a_forged_shard_is_found_when_it_is_read(tmp_path, name, verify):
    fill(tmp_path, rows=6, shard_bytes=10**6)
    forge(tmp_path, SHARDS[name])
    assert len(maintenance.verify(tmp_path).bad) == 1
    with pytest.raises(FeatureError, match="shard "):
        StoreReader(tmp_path, verify).row(0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3", "int8"])
def test_a_nan_is_found_in_every_dtype(tmp_path, dtype):
    fill(tmp_path, rows=6, shard_bytes=10**6, dtype=dtype)
    name = "aux_scale" if dtype == "int8" else "aux_hidden"

    def spoil(tensors):
        tensors[name] = tensors[name].float()
        tensors[name][2, 1] = float("nan")
        tensors[name] = tensors[name].to(
            {"bfloat16": torch.bfloat16, "float8_e4m3": torch.float8_e4m3fn}.get(dtype, torch.float32)
        )

    forge(tmp_path, spoil)
    with pytest.raises(FeatureError, match=f"{name} holds NaN or infinity in 1 of 6 rows: 'row-0'"):
        StoreReader(tmp_path)


@pytest.mark.parametrize(("row", "sound"), [(0, True), (1, False), (2, False), (-1, False)])
def test_a_row_borrows_from_an_earlier_one_only(tmp_path, row, sound):
    """One that borrowed from itself would be looked for without end."""
    shard = {
        "row_offsets": torch.tensor([0, 4, 8, 12]),
        "input_ids": torch.tensor([5, 6, 7, 8] * 3),
        "prefix_row": torch.tensor([-1, row, -1]),
        "prefix_length": torch.tensor([0, 4, 0]),
        "aux_offsets": torch.tensor([0, 4, 4, 8]),
        "aux_hidden": torch.zeros(8, 2),
    }
    if sound:
        return check_prefixes(tmp_path / "shard", shard)
    with pytest.raises(FeatureError, match="row 1 names a prefix that no earlier row has"):
        check_prefixes(tmp_path / "shard", shard)
