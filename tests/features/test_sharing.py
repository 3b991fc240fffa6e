"""Prefixes that rows have in common are stored once, and nobody who reads the rows can tell."""

import json
import random
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelopt_eagle.cli.main import run_command
from modelopt_eagle.common.files import file_sha256
from modelopt_eagle.errors import FeatureError
from modelopt_eagle.features import FeatureRow, OfflineSource, predicting_positions
from modelopt_eagle.features.dump import import_rows, shared_tokens
from modelopt_eagle.features.store import StoreReader, StoreWriter, bytes_per_token, maintenance
from modelopt_eagle.features.store.codec import restore, widen_e4m3
from modelopt_eagle.features.store.sharing import BLOCK, PrefixIndex, agreeing
from tests.features.rows import LAYERS, WIDTH, contract


def causal_row(number, ids, noise=0.0, ahead=False):
    """A row whose state at a position follows from the tokens up to it (``ahead``: from all of them)."""
    ids = torch.tensor(ids)
    state, aux = 1, []
    end = hash(tuple(ids.tolist())) if ahead else 0
    for token in ids.tolist():
        state = (state * 1_000_003 + token + end) % 2**31
        generator = torch.Generator().manual_seed(state)
        aux.append(torch.randn(WIDTH * len(LAYERS), generator=generator))
    generator = torch.Generator().manual_seed(number)
    supervised = torch.rand(len(ids), generator=generator) < 0.5
    predicting = predicting_positions(supervised)
    return FeatureRow(
        row_id=f"row-{number}",
        category="",
        input_ids=ids,
        supervised=supervised,
        aux_hidden=torch.stack(aux) * (1 + noise * torch.randn(len(ids), 1, generator=generator)),
        final_hidden=torch.randn(len(ids), WIDTH, generator=generator),
        target_top1=torch.where(predicting, 7, -1),
        target_logsumexp=torch.where(predicting, 0.5, 0.0),
    )


def conversations(ahead=False, noise=0.0):
    """Rows with a common system prompt; some go on from others, as turns of one conversation do; one stands alone."""
    draw = random.Random(3)
    system = [draw.randrange(50) for _ in range(13)]
    rows = []
    for _ in range(5):
        ids = list(system)
        for _ in range(3):
            ids = ids + [draw.randrange(50) for _ in range(draw.randint(3, 20))]
            rows.append(ids)
        rows.append(rows[-2] + [draw.randrange(50) for _ in range(9)])  # a branch of the conversation
    rows.append(system)
    rows.append([49] * 11)
    return [causal_row(number, ids, noise, ahead) for number, ids in enumerate(rows)]


def write(folder, rows, dtype="float32", shard_bytes=10**6, **options):
    with StoreWriter(
        folder, contract(dtype), dataset_hash="d", dataset_rows=len(rows), shard_bytes=shard_bytes, **options
    ) as writer:
        for index, row in enumerate(rows):
            if index not in writer.done:
                writer.add(index, row)


def batches(folder, **options):
    return list(OfflineSource(folder, **options).batches(1, batch_size=4, seed=3))


def assert_equal(ours, theirs):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.row_ids == b.row_ids
        for name in ("input_ids", "supervised", "document_ids", "aux_hidden", "final_hidden", "target_top1"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name
        assert a.aux_hidden.dtype == b.aux_hidden.dtype


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3", "int8"])
@pytest.mark.parametrize("shard_bytes", [12000, 10**6])
def test_batches_are_bit_equal_with_and_without_sharing(tmp_path, dtype, shard_bytes):
    rows = conversations()
    write(tmp_path / "shared", rows, dtype, shard_bytes)
    write(tmp_path / "plain", rows, dtype, shard_bytes, share_prefixes=False)
    shared, plain = (maintenance.summarise(tmp_path / name) for name in ("shared", "plain"))
    assert shared.shared > (0.5 if shard_bytes > 10**5 else 0.05) * shared.tokens and plain.shared == 0
    assert shared.bytes < plain.bytes
    assert_equal(batches(tmp_path / "shared"), batches(tmp_path / "plain"))
    for cast in (torch.float32, torch.bfloat16):
        assert_equal(batches(tmp_path / "shared", dtype=cast), batches(tmp_path / "plain", dtype=cast))
    assert not maintenance.verify(tmp_path / "shared").bad


def test_every_token_is_stored_once(tmp_path):
    rows = conversations()
    write(tmp_path, rows)
    own = {tuple(row.input_ids[: n + 1].tolist()) for row in rows for n in range(len(row))}
    shard = load_file(next(tmp_path.glob("*.safetensors")))
    assert len(own) <= len(shard["aux_hidden"]) < len(own) + BLOCK * len(rows)
    assert (shard["prefix_row"] < torch.arange(len(rows))).all()
    summary = maintenance.summarise(tmp_path)
    assert summary.shared == summary.tokens - len(shard["aux_hidden"])
    assert summary.saved_bytes == summary.shared * WIDTH * len(LAYERS) * 4


def test_two_computations_of_a_prefix_are_one_within_rounding(tmp_path):
    write(tmp_path / "close", conversations(noise=1e-5))
    write(tmp_path / "ahead", conversations(ahead=True))  # a target that is not causal
    assert maintenance.summarise(tmp_path / "close").shared > 0
    assert maintenance.summarise(tmp_path / "ahead").shared == 0
    reader = StoreReader(tmp_path / "close")
    for number, row in enumerate(conversations(noise=1e-5)):
        torch.testing.assert_close(reader.row(number).aux_hidden, row.aux_hidden, rtol=2e-4, atol=0)


def test_a_damaged_shard_loses_only_its_own_rows(tmp_path):
    rows = conversations()
    write(tmp_path, rows, shard_bytes=3000)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 3
    shards[0].unlink()
    assert list(maintenance.verify(tmp_path, drop_bad=True).bad) == [shards[0].name]
    reader = StoreReader(tmp_path)
    assert reader.indices == list(range(len(rows) - len(reader), len(rows)))
    for number, index in enumerate(reader.indices):
        assert torch.equal(reader.row(number).aux_hidden, rows[index].aux_hidden)
    write(tmp_path, rows, shard_bytes=3000)
    assert len(StoreReader(tmp_path)) == len(rows)


@pytest.mark.parametrize("spoil", ["row", "length", "tokens", "span"])
def test_prefixes_that_are_not_there_are_found(tmp_path, spoil):
    write(tmp_path, conversations())
    path = next(tmp_path.glob("*.safetensors"))
    shard = load_file(path)
    if spoil == "row":
        shard["prefix_row"][3] = 5  # a later row
    elif spoil == "length":
        shard["prefix_length"][3] += 1
    elif spoil == "tokens":
        shard["input_ids"][int(shard["row_offsets"][3])] += 1
    else:
        shard["aux_hidden"] = shard["aux_hidden"][:-1].contiguous()
    save_file(shard, path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    del manifest["checksum"]
    manifest["shards"][0] |= {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(FeatureError, match="names a prefix that no earlier row has"):
        StoreReader(tmp_path)


def test_a_store_of_version_1_is_read_and_continued(tmp_path):
    """As it was written before prefixes were shared: no ``shared`` in the manifest, no prefix tensors."""
    rows = conversations()
    write(tmp_path / "old", rows[:9], shard_bytes=2000, share_prefixes=False)
    path = tmp_path / "old" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["contract"]["format_version"] = 1
    del manifest["checksum"]
    for shard in manifest["shards"]:
        del shard["shared"]
    manifest["dataset_rows"] = len(rows)
    path.write_text(json.dumps(manifest))
    assert len(StoreReader(tmp_path / "old")) == 9
    write(tmp_path / "old", rows)  # one shard, whose rows have prefixes in common
    assert json.loads(path.read_text())["contract"]["format_version"] == 1
    write(tmp_path / "new", rows)
    assert json.loads((tmp_path / "new" / "manifest.json").read_text())["contract"]["format_version"] == 2
    asked = replace(contract(), final_is_normed=True)
    assert_equal(batches(tmp_path / "old", expected=asked), batches(tmp_path / "new", expected=asked))
    assert maintenance.summarise(tmp_path / "old").shared == 0
    assert import_rows(OfflineSource(tmp_path / "old"), tmp_path / "again", "bfloat16") == len(rows)
    again = maintenance.summarise(tmp_path / "again")
    assert again.shared == maintenance.summarise(tmp_path / "new").shared and again.contract.format_version == 2


def test_inspect_says_what_is_saved(tmp_path, capsys):
    write(tmp_path, conversations())
    assert run_command("features", ["inspect", str(tmp_path)]) == 0
    summary = maintenance.summarise(tmp_path)
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("prefixes"))
    assert f"{summary.shared:,} tokens ({summary.shared / summary.tokens:.1%})" in line
    assert f"{summary.saved_bytes:,} bytes saved" in line


def test_the_estimate_counts_what_is_shared(tmp_path):
    rows = conversations()
    write(tmp_path, rows)
    summary = maintenance.summarise(tmp_path)
    assert shared_tokens(rows, contract()) == summary.shared
    assert 0 < shared_tokens(rows, contract(), shard_bytes=12000) < summary.shared
    share = summary.supervised / summary.tokens
    size = summary.tokens * bytes_per_token(contract(), share, summary.shared / summary.tokens)
    assert 0.6 < size / summary.bytes < 1  # rows this short keep many neighbours of supervised tokens


def test_index_finds_the_longest_prefix_by_blocks():
    index = PrefixIndex()

    def add(*ids):
        return index.add(torch.tensor(ids, dtype=torch.int32))

    base = tuple(range(20))
    assert add(*base) == (-1, 0)
    assert add(*base[:10], 99, 98) == (0, 10)
    assert add(*base[: BLOCK - 1], 99) == (-1, 0)
    assert add(*base, 1, 2, 3, 4, 5) == (0, 20)
    assert add(*base, 1, 2, 3, 4, 6) == (3, 24)
    assert add(*base) == (0, 20)
    assert add() == (-1, 0) and len(index) == 7


def test_agreement_ends_at_the_first_position_apart():
    ours = torch.randn(6, 2 * WIDTH)
    theirs = ours.clone()
    theirs[4, WIDTH:] *= 1.01
    assert agreeing(ours, theirs, 2, "float32") == 4 and agreeing(ours, theirs, 2, "bfloat16") == 6
    assert agreeing(ours[:0], theirs[:0], 2, "float32") == 0


def test_fast_widening_of_fp8_is_exact():
    stored = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    stored = stored[torch.isfinite(stored.float())].view(1, -1)
    assert torch.equal(widen_e4m3(torch.empty(stored.shape), stored), stored.float())
    scale = torch.tensor([[3e5]])
    assert torch.equal(restore(stored, scale), stored.float() * scale)
