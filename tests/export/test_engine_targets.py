"""Which targets an engine drafts for: said before training, in an inspection, on the card, and held by --for-engine."""

import json
from types import SimpleNamespace

import pytest

from modelopt_eagle.cli.main import run_command
from modelopt_eagle.errors import ExportError
from modelopt_eagle.export import ReadOptions, export_checkpoint, inspect_checkpoint
from modelopt_eagle.export.engines import ENGINES
from modelopt_eagle.export.engines.versions import engine_lines, needed_version, parts_of
from modelopt_eagle.target.load import architecture_of
from tests.export.conftest import build_head


def built_for(architecture, **overrides):
    return build_head(**overrides, extra={"target_architecture": architecture})


def test_the_lists_are_those_of_releases_up_to_the_one_that_was_read():
    for engine in ENGINES.values():
        names = [name for group in engine.targets.first.values() for name in group]
        assert len(set(names)) == len(names) and not set(names) & set(engine.targets.never)
        assert all(parts_of(release) <= parts_of(engine.version) for release in engine.targets.first)
        assert engine.targets.since("LlamaForCausalLM") and engine.targets.since("Qwen3ForCausalLM")


def test_a_target_without_the_interface_is_named_for_each_engine():
    head = build_head().config
    lines = engine_lines("Gemma3ForConditionalGeneration", head)
    assert lines[0].startswith("vLLM does not draft for this target: up to 0.32.0 its Gemma3ForConditionalGeneration")
    assert lines[1] == "SGLang drafts for Gemma3ForConditionalGeneration since 0.5.12"
    assert lines[2].startswith("TensorRT-LLM does not draft for this target")
    assert engine_lines("OddForCausalLM", head)[2] == "TensorRT-LLM: whether it drafts for OddForCausalLM was not read"
    assert engine_lines(None, head) == []


def test_the_target_sets_the_release_that_a_head_needs():
    assert needed_version("vllm", built_for("Qwen3NextForCausalLM").config).text("vllm") == (
        "vLLM 0.24.0 or newer (the target Qwen3NextForCausalLM)"
    )
    assert needed_version("vllm", built_for("LlamaForCausalLM", fc_norm=True).config).version == "0.22.0"
    assert "target" not in needed_version("vllm", build_head().config).text("vllm")


def test_the_card_prints_no_command_that_the_engine_refuses(tmp_path):
    head = built_for("Gemma3ForCausalLM")
    export_checkpoint(head, None, tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    assert "vLLM does not draft for this target: up to 0.32.0" in card and "vllm serve" not in card
    assert "sglang.launch_server" in card and "SGLang 0.5.12 or newer (the target Gemma3ForCausalLM)" in card
    shown = inspect_checkpoint(tmp_path / "out").text()
    assert "needs       vLLM does not draft for this target" in shown


def test_an_engine_that_does_not_draft_for_the_target_is_refused_at_export(tmp_path):
    head = built_for("Gemma3ForCausalLM")
    with pytest.raises(ExportError, match="vLLM 0.32.0 was asked for: vLLM does not draft for this target"):
        export_checkpoint(head, None, tmp_path / "out", for_engines={"vllm": "0.32.0"})
    with pytest.raises(ExportError, match=r"SGLang 0.5.5 does not read the target Gemma3ForCausalLM \(0.5.12\)"):
        export_checkpoint(head, None, tmp_path / "out", for_engines={"sglang": "0.5.5"})
    export_checkpoint(head, None, tmp_path / "out", for_engines={"vllm": "0.99.0", "sglang": "0.5.12"})


def test_a_target_given_to_a_command_tells_its_class(tmp_path, tiny_target, tiny_target_dir, capsys):
    head = build_head(
        hidden_size=64, target_hidden_size=64, vocab_size=256, draft_vocab_size=256,
        tokenizer_hash=tiny_target.identity()["tokenizer_hash"],
    )  # fmt: skip
    export_checkpoint(head, None, tmp_path / "head", target=tiny_target)
    data = json.loads((tmp_path / "head/config.json").read_text())
    assert data["modelopt_eagle"]["extra"]["target_architecture"] == "LlamaForCausalLM"
    export_checkpoint(head, None, tmp_path / "unsaid")
    assert run_command("inspect_checkpoint", [str(tmp_path / "unsaid"), "--base-model", str(tiny_target_dir)]) == 0
    options = ReadOptions(target_architecture="Gemma3ForCausalLM")
    assert "vLLM does not draft for this target" in inspect_checkpoint(tmp_path / "unsaid", options).text()


def test_the_class_of_a_target_is_that_of_its_whole_model():
    text = SimpleNamespace(architectures=None, model_type="qwen2")
    whole = SimpleNamespace(architectures=["Qwen2_5_VLForConditionalGeneration"], model_type="qwen2_5_vl")
    assert architecture_of(SimpleNamespace(config=text)) == "Qwen2ForCausalLM"
    assert architecture_of(SimpleNamespace(config=text, model=SimpleNamespace(config=whole))) == whole.architectures[0]
    assert architecture_of(None) is architecture_of({"model": "a dictionary"}) is None
