"""The bench with llama.cpp's server started here, by a stand-in for it: the files that it is given and its counters."""

import itertools
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader, GGUFWriter

from modelopt_eagle.cli.main import run_command
from modelopt_eagle.export import convert_checkpoint, export_checkpoint
from modelopt_eagle.serving import llama_cpp_runner
from modelopt_eagle.serving.bench import prepare
from modelopt_eagle.target.tiny import make_tiny_target
from modelopt_eagle.target.to_gguf import token_numbers, write_out
from tests.export.conftest import build_head

SERVER = '''#!{python}
"""Takes llama-server's command line, checks its files, and answers as the server of the tests does."""
import os, sys, time
sys.path.insert(0, {root!r})
from tests.serving.fake_server import FakeServer
given = dict(zip(sys.argv[1:], sys.argv[2:]))
with open({log!r}, "a") as stream:
    print(" ".join(sys.argv[1:]), file=stream)
for key in ("--model", "--model-draft"):
    assert key not in given or open(given[key], "rb").read(4) == b"GGUF", key
server = FakeServer("llama_cpp", delay=0.05, drafts="--model-draft" in given, port=int(given["--port"]))
most = int(open({dies!r}).read()) if "--model-draft" in given and os.path.exists({dies!r}) else 10**6
for _ in range(6000):
    time.sleep(0.01)
    if len(server.asked) > most:
        print("ggml: out of memory", flush=True)
        os._exit(9)
'''


def words_file(path, words=256, width=64, layers=8, window=512):
    """A target's file by its keys, with a tensor of four-bit blocks; its numbers are never computed with."""
    import numpy as np
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import quantize

    writer = GGUFWriter(path, "llama")
    writer.add_vocab_size(words)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_context_length(window)
    for key, value in token_numbers(words, 2).items():
        writer.add_key_value(key, *value)
    packed = quantize(np.ones((words, width), np.float32), GGMLQuantizationType.Q4_1)
    writer.add_tensor("token_embd.weight", packed, raw_dtype=GGMLQuantizationType.Q4_1)
    write_out(writer)
    return path


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """A target's file, a head of it as a folder and as llama.cpp's file, and an environment with the stand-in."""
    root = tmp_path_factory.mktemp("there")
    head = build_head(
        hidden_size=64, target_hidden_size=64, vocab_size=256, draft_vocab_size=128, own_embedding=False,
        tokenizer_hash=None,
    )  # fmt: skip
    export_checkpoint(head, None, root / "export")
    convert_checkpoint(root / "export", root / "gguf", "gguf")
    words_file(root / "target.gguf")
    (root / "bin").mkdir()
    (root / "bin/python").symlink_to(sys.executable)
    text = SERVER.format(
        python=sys.executable, root=str(Path(__file__).parents[2]), log=str(root / "asked"), dies=str(root / "dies")
    )
    (root / "bin/llama-server").write_text(text)
    (root / "bin/llama-server").chmod(0o755)
    (root / "q.jsonl").write_text(json.dumps({"question": "one", "answer": "1"}))
    return root


def measure(root, export, target="target.gguf", *more):
    (root / "asked").unlink(missing_ok=True)
    options = {
        "url": "started", "engine": "llama.cpp", "engine_python": root / "bin/python", "base_model": root / target,
        "export_path": root / export, "prompts": root / "q.jsonl", "output": root / "b.json",
    }  # fmt: skip
    return run_command("bench", [str(w) for name, value in options.items() for w in (f"--{name}", value)] + [*more])


def test_both_servers_are_started_with_the_files_and_counted(there, capsys):
    assert measure(there, "gguf", "target.gguf", "--concurrency", "1", "2", "--num_speculative_tokens", "2") == 0
    found = json.loads((there / "b.json").read_text())
    assert found["whole"] and found["notes"] == [], found["notes"]
    assert [(side["name"], side["engine"]) for side in found["sides"]] == [
        ("without", "llama_cpp"), ("with", "llama_cpp"),
    ]  # fmt: skip
    for row in found["sides"][1]["rows"]:
        assert row["acceptance"]["accepted_per_position"] == [2, 1, 0] and row["acceptance"]["drafted"] == 6
    plain, headed = (there / "asked").read_text().splitlines()
    for line in (plain, headed):
        assert (
            "--metrics --no-cache-prompt --skip-chat-parsing" in line
            and "--parallel 2 " in line
            and "--ctx-size 1024 " in line
        )
        assert "--cache-type-k f32" in line and "--offline" in line
    assert "--model-draft" not in plain
    assert f"--model-draft {there}/gguf/draft.gguf --spec-type draft-eagle3 --spec-draft-n-max 2" in headed
    assert "--spec-draft-p-min 0" in headed and "starting llama.cpp with the head" in capsys.readouterr().err


def test_a_very_long_window_is_not_given_memory(there, tmp_path):
    file = words_file(tmp_path / "long.gguf", window=131072)
    job = prepare("llama_cpp", str(file), there / "gguf", tmp_path, num_speculative_tokens=5)
    assert (job["max_model_len"], job["num_speculative_tokens"]) == (4096, 5) and job["served_name"] == str(file)


@pytest.mark.parametrize("threads", [None, "2"])
def test_the_server_is_told_all_that_its_numbers_hang_on(monkeypatch, threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    job = {"model": "m.gguf", "max_model_len": 100, "num_speculative_tokens": 4}

    def told(words):
        return {word: after for word, after in itertools.pairwise([*words, ""]) if word.startswith("--")}

    plain = told(llama_cpp_runner.options(job, 3))
    headed = told(llama_cpp_runner.options({**job, "draft": "d.gguf", "draft_options": {"spec_type": "draft-dflash"}}))
    assert plain | {"--ctx-size": "100", "--parallel": "1"} == {k: v for k, v in headed.items() if k in plain}
    whole = {"--cache-type-k": "f32", "--cache-type-v": "f32", "--flash-attn": "off", "--fit": "off"}
    alone = {"--cache-ram": "0", "--ctx-size": "300", "--parallel": "3", "--model": "m.gguf"}
    assert (whole | alone).items() <= plain.items() and "--offline" in plain and "--model-draft" not in plain
    of_head = {"--model-draft": "d.gguf", "--spec-type": "draft-dflash", "--spec-draft-n-max": "4"}
    always = {"--spec-draft-n-min": "0", "--spec-draft-p-min": "0"}  # it drafts as many as asked for, however unsure
    numbers = {"--spec-draft-type-k": "f32", "--spec-draft-type-v": "f32"}
    assert headed.items() - plain.items() >= (of_head | always | numbers).items()
    assert all(plain.get(name) == threads for name in ("--threads", "--threads-batch"))


def test_a_server_that_dies_in_the_middle_leaves_what_was_measured_and_its_last_words(there, tmp_path, capsys):
    rows = [{"question": f"slow {n}", "answer": "1"} for n in range(30)]
    (tmp_path / "many.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (there / "dies").write_text("6")
    try:
        code = measure(there, "gguf", "target.gguf", "--prompts", str(tmp_path / "many.jsonl"), "--num_samples", "20")
    finally:
        (there / "dies").unlink()
    found = json.loads((there / "b.json").read_text())
    plain, headed = found["sides"]
    assert code == 1 and not found["whole"] and plain["stopped"] == ""
    assert (plain["rows"][0]["answered"], plain["rows"][0]["whole"]) == (20, True)
    row = headed["rows"][0]
    assert 2 <= row["answered"] <= 4 and row["failed"] >= 10 and row["speedup"] is None and not row["whole"]
    assert row["answered"] + row["failed"] + sum(row["not_asked"].values()) == 20
    assert "llama_cpp ended with exit code 9 while it served" in headed["stopped"]
    assert "ggml: out of memory" in headed["stopped"] and headed["stopped"] in capsys.readouterr().out


def test_a_folder_is_written_as_a_file_and_the_target_is_unpacked(there, monkeypatch):
    """Where the head is an export, the target's tokenizer is asked whether it is its own."""
    import modelopt_eagle.serving.bench as module

    make_tiny_target(there / "folder")
    seen = {}

    def serve(python, engine, job):
        seen.update(job)
        for key, file in (("model", job["model"]), ("draft", Path(job["model"]).parent / "head/draft.gguf")):
            seen[f"{key} tensors"] = {t.name: t.tensor_type.name for t in GGUFReader(file).tensors}
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "resolve", lambda name: there / "folder")
    monkeypatch.setattr(module, "serve_engine", serve)
    assert measure(there, "export") == 130
    assert seen["model tensors"] == {"token_embd.weight": "F32"} and seen["max_model_len"] == 512
    assert seen["draft tensors"]["fc.weight"] == "F32" and seen["draft"] is None  # it is the server without the head


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"words": 300}, "one of 256 tokens, not 300"),
        ({"width": 32}, "one of 64 numbers a state, not 32"),
        ({"layers": 2}, "layers, not 2"),
    ],
)
def test_a_file_for_another_target_is_refused_before_a_server_starts(changed, words, there, capsys):
    words_file(there / "other.gguf", **changed)
    assert measure(there, "gguf", "other.gguf") == 2
    said = capsys.readouterr().err
    assert "draft.gguf is a head for another target than" in said and words in said
    assert not (there / "asked").exists()


def test_targets_and_heads_that_it_cannot_be_given_are_refused(there, tmp_path, capsys):
    make_tiny_target(tmp_path / "folder")
    assert measure(there, "gguf", tmp_path / "folder") == 2
    assert "llama.cpp serves a target out of a GGUF file, with its words: convert" in capsys.readouterr().err
    (tmp_path / "half.gguf").write_bytes((there / "target.gguf").read_bytes()[:300])
    assert measure(there, "gguf", tmp_path / "half.gguf") == 2
    assert "half.gguf is no whole GGUF file" in capsys.readouterr().err
    shutil.copytree(there / "gguf", tmp_path / "swapped")
    shutil.copy(there / "target.gguf", tmp_path / "swapped/draft.gguf")
    assert measure(there, tmp_path / "swapped") == 2
    assert "is no head for llama.cpp: its architecture is llama" in capsys.readouterr().err
    assert measure(there, "nowhere") == 2
    assert not (there / "asked").exists()


def test_a_head_file_where_a_folder_is_asked_for_is_told_what_it_is(there, tmp_path, capsys):
    file = there / "gguf/draft.gguf"
    for command, options in (
        ("ar_validate", ["--model_path", there / "gguf", "--base_model", "x"]),
        ("inspect_checkpoint", [there / "gguf"]),
        ("inspect_checkpoint", [file]),
        ("export_hf_checkpoint", ["--model_path", there / "gguf", "--export_path", tmp_path / "e"]),
        ("convert_checkpoint", ["--input", file, "--output", tmp_path / "c"]),
        (
            "quantize_drafter",
            ["--model_path", there / "gguf", "--export_path", tmp_path / "q", "--format", "int8", "--calib_data", "x"],
        ),
        ("diagnose", ["--model_path", there / "gguf"]),
        ("check_serving", ["--export_path", there / "gguf", "--base_model", "x"]),
    ):
        assert run_command(command, list(map(str, options))) == 2, command
        said = [line for line in capsys.readouterr().err.splitlines() if line]
        assert len(said) == 1 and f"{file} is a draft head as a GGUF file (eagle3)" in said[0], (command, said)
        assert "--spec-type draft-eagle3" in said[0] and "--checkpoint FOLDER" in said[0]
    assert list(tmp_path.iterdir()) == []
    assert run_command("inspect_checkpoint", [str(there / "target.gguf")]) == 2
    assert "target.gguf is a model as a GGUF file (llama) and no head" in capsys.readouterr().err
    card = (there / "gguf/README.md").read_text()
    assert "ar_validate" not in card and "--export_path . --checkpoint FOLDER" in card


def test_a_head_file_for_another_target_is_refused_by_the_serving_check(there, tmp_path, capsys):
    make_tiny_target(tmp_path / "wide", hidden=32)
    head = build_head(
        hidden_size=32, target_hidden_size=32, vocab_size=256, draft_vocab_size=128, own_embedding=False,
        tokenizer_hash=None,
    )  # fmt: skip
    torch.manual_seed(0)
    export_checkpoint(head, None, tmp_path / "right")
    code = run_command(
        "check_serving",
        ["--export_path", str(there / "gguf"), "--checkpoint", str(tmp_path / "right"), "--base_model",
         str(tmp_path / "wide"), "--engine", "llama.cpp", "--engine-python", str(there / "bin/python"),
         "--max_new_tokens", "4", "--num_samples", "1"],
    )  # fmt: skip
    assert code == 2 and "one of 64 numbers a state, not 32" in capsys.readouterr().err
