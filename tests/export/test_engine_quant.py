"""Quantised folders through each engine's rules, right ones and wrong ones."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelopt_eagle.errors import CheckpointError
from modelopt_eagle.export import engine_reasons, inspect_checkpoint, load_draft
from modelopt_eagle.export.quantize import calibrate, quantize_drafter, quantized_module
from modelopt_eagle.training import rollout
from tests.export.conftest import LATENT, build_head
from tests.export.test_quantize import Batch, calibration

WIDE_LATENT = {**LATENT, "q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 8}
SERVED = [
    ("fp8", {}, {"vllm": None, "sglang": "keeps fc as a plain layer", "tensorrt_llm": None}),
    ("nvfp4", {}, {"vllm": None, "sglang": "keeps fc as a plain layer", "tensorrt_llm": None}),
    ("int8", {}, {"vllm": None, "sglang": "keeps fc as a plain layer", "tensorrt_llm": "knows no modelopt W8A8_SQ"}),
    ("fp8", {"num_hidden_layers": 2, "attention_bias": True},
     {"vllm": None, "sglang": "no attention bias", "tensorrt_llm": None}),
    ("fp8", WIDE_LATENT, {"vllm": None, "sglang": "splits kv_b_proj", "tensorrt_llm": "not known to serve"}),
    ("nvfp4", WIDE_LATENT, {"vllm": None, "sglang": "for bfloat16", "tensorrt_llm": "not known to serve"}),
    ("int8", {**WIDE_LATENT, "q_lora_rank": None}, {"vllm": None}),
]  # fmt: skip


@pytest.mark.parametrize(("form", "overrides", "outcomes"), SERVED)
def test_each_engine_serves_the_folder_or_says_why_not(tmp_path, form, overrides, outcomes):
    head = build_head(**overrides)
    report = quantize_drafter(head, tmp_path / "out", form, calibration(head))
    for engine, message in outcomes.items():
        reasons = engine_reasons(tmp_path / "out", engine)
        assert (reasons == []) if message is None else any(message in reason for reason in reasons), (engine, reasons)
        assert (message is None) == (not any(note.startswith(f"{engine} ") for note in report.notes))
    assert all(note in (tmp_path / "out/README.md").read_text() for note in report.notes)


def ignore(*names):
    """Change the exclusions in both files."""

    def change(data, legacy, tensors):
        data["quantization_config"]["ignore"] = list(names)
        legacy["quantization"]["exclude_modules"] = list(names)

    return change


def plain(layer):
    """A layer put back unquantised."""

    def change(data, legacy, tensors):
        tensors[f"{layer}.weight"] = tensors[f"{layer}.weight"].float()
        for scale in ("weight_scale", "input_scale"):
            del tensors[f"{layer}.{scale}"]

    return change


def without_config(data, legacy, tensors):
    del data["quantization_config"]
    legacy.clear()


def other_scale(data, legacy, tensors):
    tensors["midlayer.self_attn.k_proj.weight_scale"] *= 2


def no_input_scale(data, legacy, tensors):
    del tensors["fc.input_scale"]


def packed_otherwise(data, legacy, tensors):
    tensors["fc.weight"] = tensors["fc.weight"].view(torch.int8)


def no_scales(data, legacy, tensors):
    for name in [name for name in tensors if name.endswith("_scale")]:
        del tensors[name]


def another_algorithm(data, legacy, tensors):
    data["quantization_config"]["quant_algo"] = "W4A16_AWQ"
    legacy["quantization"]["quant_algo"] = "W4A16_AWQ"


Q, GATE = "midlayer.self_attn.q_proj", "midlayer.mlp.gate_proj"
WRONG = [
    ("nothing excluded", ignore(), {"vllm": "takes lm_head for quantised", "tensorrt_llm": "takes lm_head for"}),
    ("an exclusion that hides more", ignore("lm_head", "mlp"), {"vllm": "mlp.gate_up_proj for plain because of",
                                                                "tensorrt_llm": None}),
    ("a pattern that hides all", ignore("*"), {"vllm": "fc for plain", "tensorrt_llm": "fc for plain"}),
    ("one of three", plain(Q), {"vllm": "of which only", "tensorrt_llm": "of which only"}),
    ("one of two", plain(GATE), {"vllm": "into layers.0.mlp.gate_up_proj, of which only layers.0.mlp.up_proj"}),
    ("an exclusion of one of three", ignore("lm_head", "q_proj"), {"vllm": "hide only some", "tensorrt_llm": None}),
    ("a plain layer that nothing names", plain("fc"),
     {"vllm": "takes fc for quantised", "tensorrt_llm": "takes fc for"}),
    ("its name in the file", lambda d, q, t: (plain("midlayer.self_attn.o_proj")(d, q, t),
                                              ignore("lm_head", "midlayer.self_attn.o_proj")(d, q, t)),
     {"vllm": "takes layers.0.self_attn.o_proj for quantised"}),
    ("scales that differ", other_scale, {"vllm": "takes one weight_scale for layers.0.self_attn.qkv_proj"}),
    ("a scale missing", no_input_scale, {"vllm": "does not find fc.input_scale"}),
    ("another packing", packed_otherwise, {"vllm": "as torch.float8_e4m3fn, the folder has torch.int8"}),
    ("no config", without_config, {"vllm": "finds no quantisation config", "tensorrt_llm": "knows no modelopt"}),
    ("no scales", no_scales, {"vllm": "finds no scales", "tensorrt_llm": "finds no scales"}),
    ("an algorithm nobody packed", another_algorithm, {"vllm": "knows no modelopt W4A16_AWQ"}),
]  # fmt: skip


@pytest.mark.parametrize(("change", "outcomes"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_a_wrong_folder_is_refused_with_the_reason(tmp_path, change, outcomes):
    head = build_head()
    quantize_drafter(head, tmp_path / "out", "fp8", calibration(head))
    files = [tmp_path / "out" / name for name in ("config.json", "hf_quant_config.json", "model.safetensors")]
    data, legacy, tensors = json.loads(files[0].read_text()), json.loads(files[1].read_text()), load_file(files[2])
    change(data, legacy, tensors)
    files[0].write_text(json.dumps(data))
    files[1].write_text(json.dumps(legacy))
    save_file(tensors, files[2])
    for engine, message in outcomes.items():
        reasons = engine_reasons(tmp_path / "out", engine, head.config)
        assert (reasons == []) if message is None else any(message in reason for reason in reasons), (engine, reasons)


def test_engines_that_look_into_another_file_disagree_only_with_it(tmp_path):
    """vLLM reads config.json, TensorRT-LLM hf_quant_config.json where it exists."""
    head = build_head()
    quantize_drafter(head, tmp_path / "out", "fp8", calibration(head))
    legacy = json.loads((tmp_path / "out/hf_quant_config.json").read_text())
    legacy["quantization"]["exclude_modules"] = []
    (tmp_path / "out/hf_quant_config.json").write_text(json.dumps(legacy))
    assert engine_reasons(tmp_path / "out", "vllm") == []
    assert engine_reasons(tmp_path / "out", "tensorrt_llm") != []
    (tmp_path / "out/hf_quant_config.json").unlink()
    assert engine_reasons(tmp_path / "out", "tensorrt_llm") == []


def test_inspection_of_a_quantised_folder(tmp_path):
    head = build_head()
    quantize_drafter(head, tmp_path / "out", "int8", calibration(head))
    found = inspect_checkpoint(tmp_path / "out")
    assert found.problem is None and found.quantised == "8 layers, weights in int8"
    assert found.aux_layer_ids == [1, 3, 4] and found.map == "reduced" and found.engines["vllm"] == []
    assert "quantised   8 layers" in found.text()


@pytest.mark.parametrize("form", ["fp8", "nvfp4", "int8"])
@pytest.mark.parametrize("overrides", [{}, WIDE_LATENT], ids=["llama", "kimik2"])
def test_a_quantised_folder_computes_as_it_did_when_it_was_made(tmp_path, form, overrides):
    head = build_head(**overrides)
    ranges = calibrate(head, form, calibration(head))
    made, _ = quantized_module(head, ranges, form)
    quantize_drafter(head, tmp_path / "out", form, calibration(head))
    with pytest.raises(CheckpointError, match="is quantised"):
        load_draft(tmp_path / "out")
    read = load_draft(tmp_path / "out", quantised=True)
    batch = Batch(7)
    embeddings = torch.nn.Embedding(64, 32)(batch.input_ids).detach()
    with torch.no_grad():
        one, two = (rollout(m, embeddings, batch.aux_hidden, steps=2).hidden for m in (made, read))
    assert torch.equal(one, two)


def test_what_is_packed_otherwise_cannot_be_measured(tmp_path):
    head = build_head()
    quantize_drafter(head, tmp_path / "out", "nvfp4", calibration(head))
    path = tmp_path / "out/model.safetensors"
    save_file({n: t for n, t in load_file(path).items() if n != "fc.weight_scale_2"}, path)
    with pytest.raises(CheckpointError, match="fc.weight is packed in a way"):
        load_draft(tmp_path / "out", quantised=True)
