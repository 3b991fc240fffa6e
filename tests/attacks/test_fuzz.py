"""Every reader and both protocols of a feature server, fed with spoilt inputs for a given time (``--fuzz-seconds``).

Whatever comes is read or refused with an error of the project; nothing else is raised, and servers go on.
"""

import gzip
import io
import json
import random
import shutil
import time
import traceback

import pytest
import torch

from modelopt_eagle.common.files import file_sha256
from modelopt_eagle.common.sealed import seal
from modelopt_eagle.data.files import read_rows
from modelopt_eagle.errors import EagleError
from modelopt_eagle.export import export_checkpoint, load_draft
from modelopt_eagle.export.inspect import inspect_checkpoint
from modelopt_eagle.features.foreign.files import FORMATS, find_format
from modelopt_eagle.features.foreign.reader import ForeignTokens
from modelopt_eagle.features.store import StoreReader, maintenance
from modelopt_eagle.features.stream.client import MailboxClient
from modelopt_eagle.features.stream.mailbox import Mailbox
from modelopt_eagle.features.stream.message import FeatureMessage, decode, encode, parse_header
from modelopt_eagle.recipe import load_recipe
from modelopt_eagle.training.checkpoint import CheckpointFolder
from tests.attacks.fuzzing import bounded, spoil
from tests.attacks.test_5_links import head, save  # noqa: F401
from tests.attacks.wire import ask, send_bytes, send_frames, serving
from tests.features.rows import fill

READERS = (
    "manifest",
    "shard",
    "sealed shard",
    "foreign",
    "foreign packed",
    "rows",
    "recipe",
    "checkpoint",
    "head",
    "message",
)


def try_for(seconds, seed, one):
    """Call ``one(draw)`` again and again; says which seed brought an error that is not the project's.

    An input is a few kilobytes, so a minute or 4 GiB of memory are errors, too.
    """
    until, number = time.monotonic() + seconds, 0
    while time.monotonic() < until or number < 20:
        draw = random.Random(f"{seed}/{number}")
        try:
            with bounded(60, 4 << 30):
                one(draw)
        except EagleError:
            pass
        except BaseException:
            pytest.fail(f"input {seed}/{number}:\n{traceback.format_exc()}")
        number += 1
    return number


def read_store(folder):
    reader = StoreReader(folder, "read")
    for number in range(len(reader)):
        reader.row(number)


def make(kind, folder, head):  # noqa: F811
    """``(file to spoil, what reads the folder)`` of one kind."""
    if kind in ("manifest", "shard", "sealed shard"):
        fill(folder, rows=4, shard_bytes=10**6)
        manifest = json.loads((folder / "manifest.json").read_text())
        del manifest["checksum"]
        (folder / "manifest.json").write_text(json.dumps(manifest))
        shard = next(folder.glob("*.safetensors"))
        if kind == "manifest":
            return folder / "manifest.json", lambda: (maintenance.verify(folder), read_store(folder))
        if kind == "shard":
            return shard, lambda: read_store(folder)

        def vouched():
            manifest["shards"][0] |= {"bytes": shard.stat().st_size, "sha256": file_sha256(shard)}
            (folder / "manifest.json").write_text(json.dumps(manifest))
            read_store(folder)

        return shard, vouched
    if kind.startswith("foreign"):
        content = io.BytesIO()
        row = {"input_ids": torch.arange(5), "loss_mask": torch.ones(5), "hidden_state": torch.zeros(1, 5, 4)}
        torch.save(row | {"aux_hidden_state": torch.zeros(1, 5, 12)}, content)
        path = folder / ("data_0.ckpt.gz" if kind == "foreign packed" else "data_0.ckpt")
        path.write_bytes(gzip.compress(content.getvalue()) if kind == "foreign packed" else content.getvalue())

        def read():
            ForeignTokens(folder, all_supervised=True).scan()
            name, files = find_format(folder)
            FORMATS[name][1](files[0], None)

        return path, read
    if kind == "rows":
        talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
        (folder / "rows.jsonl").write_text(json.dumps({"id": "a", "messages": talk}))
        return folder / "rows.jsonl", lambda: list(read_rows(folder / "rows.jsonl"))
    if kind == "recipe":
        (folder / "recipe.yaml").write_text(
            "training:\n  epochs: 2\n  learning_rate: 1e-3\ndata:\n  train_path: [a, b]\n"
        )
        return folder / "recipe.yaml", lambda: load_recipe(folder / "recipe.yaml")
    if kind == "checkpoint":
        saved = save(CheckpointFolder(folder), head, 1)
        files = sorted(path for path in saved.iterdir() if path.name != "complete.json")

        def resealed():
            (saved / "complete.json").unlink()
            seal(saved, step=1)
            CheckpointFolder(folder).latest()

        return files, resealed
    if kind == "head":
        export_checkpoint(head, None, folder / "out")
        return sorted((folder / "out").iterdir()), lambda: (
            inspect_checkpoint(folder / "out"),
            load_draft(folder / "out"),
        )
    raise ValueError(kind)


@pytest.mark.parametrize("kind", READERS)
def test_readers(head, tmp_path, request, kind):  # noqa: F811
    seconds = request.config.getoption("--fuzz-seconds") / (len(READERS) + 2)
    seed = f"{kind}/{request.config.getoption('--fuzz-seed')}"
    if kind == "message":
        header, payload = encode(FeatureMessage("r", [1, 2, 3], [1], False, torch.zeros(3, 2, 4)))
        frame = json.dumps(header).encode()
        tried = try_for(
            seconds, seed, lambda draw: decode(parse_header(spoil(frame, draw), "server"), payload, "server")
        )
    else:
        files, read = make(kind, tmp_path, head)
        files = files if isinstance(files, list) else [files]
        contents = {path: path.read_bytes() for path in files}

        def one(draw):
            path = draw.choice(files)
            path.write_bytes(spoil(contents[path], draw))
            try:
                read()
            finally:
                path.write_bytes(contents[path])

        tried = try_for(seconds, seed, one)
    assert tried >= 20
    shutil.rmtree(tmp_path)


def test_the_mailbox(request):
    seconds = request.config.getoption("--fuzz-seconds") / (len(READERS) + 2)
    box = Mailbox({"model": "m"}, "127.0.0.1:0")
    requests = [
        json.dumps({"op": "hello", "token": "t"}).encode(),
        json.dumps({"op": "get", "key": "k", "transport": "tcp", "wait": 0.0, "token": None}).encode(),
    ]
    try:

        def one(draw):
            frames = [spoil(draw.choice(requests), draw) for _ in range(draw.choice((1, 1, 1, 3)))]
            send_frames(box.port, frames, wait=0.02)

        try_for(seconds, f"mailbox/{request.config.getoption('--fuzz-seed')}", one)
        assert MailboxClient(f"127.0.0.1:{box.port}", timeout=10.0).hello()["model"] == "m" and box.failure is None
    finally:
        box.close()


def test_the_http_side(tiny_target, request, capfd):
    seconds = request.config.getoption("--fuzz-seconds") / (len(READERS) + 2)
    body = json.dumps({"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 1, "temperature": 0.0}).encode()
    with serving(tiny_target) as server:

        def one(draw):
            spoilt = spoil(body, draw)
            head_ = b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(spoilt)
            send_bytes(server.url, (spoil(head_, draw) if draw.random() < 0.3 else head_) + spoilt, wait=0.05)

        try_for(seconds, f"http/{request.config.getoption('--fuzz-seed')}", one)
        assert ask(server.url)[0] == 200
    assert "Traceback" not in capfd.readouterr().err
