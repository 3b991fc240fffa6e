"""Our folder through each engine's loading rules, and wrong folders refused with the reason."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelopt_eagle.draft import DraftConfig
from modelopt_eagle.errors import ExportError
from modelopt_eagle.export import ReadOptions, export_checkpoint, inspect_checkpoint
from modelopt_eagle.export.engines import ENGINES as PROFILES
from modelopt_eagle.export.engines.check import check_engine, engine_reasons, tensor_reasons
from tests.export.conftest import LATENT, build_head

EVERYWHERE = {
    "plain": {},
    "full_vocabulary": {"draft_vocab_size": 64},
    "latent": LATENT,
    "narrow": {"target_hidden_size": 48},
    "wide_heads": {"head_dim": 16},
    "latent_yarn": {
        **LATENT,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    },
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}},
}


@pytest.mark.parametrize("engine", PROFILES)
@pytest.mark.parametrize("shape", EVERYWHERE)
def test_every_engine_loads_the_universal_folder(tmp_path, engine, shape):
    head = build_head(**EVERYWHERE[shape])
    export_checkpoint(head, None, tmp_path / "out")
    latent = engine == "llama_cpp" and shape.startswith("latent")  # the one that has no such layers
    refused = ["serves EAGLE-3 heads of llama layers, this one has kimik2 layers"] if latent else []
    assert engine_reasons(tmp_path / "out", engine, head.config) == refused


SOME = [
    ({"num_hidden_layers": 2}, {"vllm": None, "sglang": None, "tensorrt_llm": None}),
    ({**LATENT, "num_hidden_layers": 2}, {"vllm": None, "sglang": "heads of one layer", "tensorrt_llm": None}),
    ({"attention_bias": True}, {"vllm": None, "sglang": "no attention bias", "tensorrt_llm": None}),
    ({"norm_before_residual": True},
     {"vllm": None, "sglang": "norm_before_residual", "tensorrt_llm": "norm_before_residual"}),
    ({"norm_before_fc": True}, {"vllm": None, "sglang": None, "tensorrt_llm": None}),
    ({"fc_norm": True}, {"vllm": None, "sglang": None, "tensorrt_llm": None}),
    ({"norm_output": True}, {"vllm": None, "sglang": None, "tensorrt_llm": None}),
    ({"own_embedding": True}, {"vllm": None, "sglang": "target's embedding", "tensorrt_llm": "target's embedding"}),
    ({"aux_layer_ids": (2, 5)}, {"vllm": None, "sglang": None, "tensorrt_llm": None}),
    ({"mlp_bias": True}, {"vllm": None, "sglang": "no bias in the feed-forward part", "tensorrt_llm": None}),
    ({"norm_before_fc": True, "fc_norm": True},
     {"vllm": None, "sglang": None, "tensorrt_llm": "trained with both"}),
    ({"target_hidden_size": 16, "aux_layer_ids": (2, 5)},
     {"vllm": None, "sglang": "leaves out fc", "tensorrt_llm": "leaves out fc"}),
    ({"aux_layer_ids": (2,)}, {"vllm": None, "sglang": "leaves out fc", "tensorrt_llm": "leaves out fc"}),
    ({**LATENT, "q_lora_rank": None}, {"vllm": None, "sglang": "q_lora_rank", "tensorrt_llm": "q_lora_rank"}),
    ({**LATENT, "norm_output": True}, {"vllm": None, "sglang": None, "tensorrt_llm": None}),
    ({**LATENT, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
     {"vllm": "for yarn", "sglang": "for yarn", "tensorrt_llm": "for yarn"}),
    ({**LATENT, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512,
                                 "truncate": False}},
     {"vllm": "rounds the bounds of YaRN"}),
    ({**LATENT, "norm_before_fc": True}, {"vllm": "norm_before_fc", "sglang": "norm_before_fc", "tensorrt_llm": None}),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "outcomes"), SOME)
def test_what_only_some_engines_know_is_refused_by_the_others(tmp_path, overrides, outcomes):
    export_checkpoint(build_head(**overrides), None, tmp_path / "out")
    for engine, message in outcomes.items():
        reasons = engine_reasons(tmp_path / "out", engine)
        assert (reasons == []) if message is None else any(message in reason for reason in reasons), (engine, reasons)


def test_export_names_the_engines_that_would_serve_something_else(tmp_path):
    """B42, B62: no flag is left out by an engine without a word at export, in the report and on the card."""
    assert export_checkpoint(build_head(), None, tmp_path / "plain").notes == []
    notes = export_checkpoint(build_head(attention_bias=True), None, tmp_path / "flag").notes
    assert [note.split()[0] for note in notes] == ["sglang", "llama_cpp"]
    assert all("it has no attention bias" in note for note in notes)
    assert notes[0] in (tmp_path / "flag/README.md").read_text()


def test_the_last_layer_of_the_target_is_captured_by_two_engines(tmp_path):
    """SGLang and llama.cpp capture layer inputs, and the last output is no layer's input."""
    head = build_head(aux_layer_ids=(1, 3, 7))
    for layers, engines in ((8, ["sglang", "llama_cpp"]), (12, [])):
        target = {"model": "someone/target", "num_layers": layers, "vocab_size": 64}
        notes = export_checkpoint(head, None, tmp_path / str(layers), target=target).notes
        assert [note.split()[0] for note in notes] == engines and all("last layer (7)" in note for note in notes)


PUBLISHED = {
    "d2t": (32000,), "t2d": (128256,), "fc.weight": (4096, 12288), "lm_head.weight": (32000, 4096),
    "norm.weight": (4096,), "midlayer.hidden_norm.weight": (4096,), "midlayer.input_layernorm.weight": (4096,),
    "midlayer.post_attention_layernorm.weight": (4096,), "midlayer.self_attn.q_proj.weight": (4096, 8192),
    "midlayer.self_attn.k_proj.weight": (1024, 8192), "midlayer.self_attn.v_proj.weight": (1024, 8192),
    "midlayer.self_attn.o_proj.weight": (4096, 4096), "midlayer.mlp.gate_proj.weight": (14336, 4096),
    "midlayer.mlp.up_proj.weight": (14336, 4096), "midlayer.mlp.down_proj.weight": (4096, 14336),
}  # fmt: skip
"""Names and shapes of a published head for an 8B Llama."""


@pytest.mark.parametrize("engine", PROFILES)
def test_names_and_shapes_of_a_published_head(engine):
    """B64, B67: checked from the list alone, no tensor is made."""
    config = DraftConfig(
        hidden_size=4096, target_hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=128256, draft_vocab_size=32000, aux_layer_ids=(1, 15, 28),
    )  # fmt: skip
    with torch.device("meta"):
        assert tensor_reasons(PUBLISHED, config, PROFILES[engine].loads) == []
        config.head_dim = 64
        assert any("q_proj" in reason for reason in tensor_reasons(PUBLISHED, config, PROFILES[engine].loads))


def drop(*keys):
    return lambda data: {key: value for key, value in data.items() if key not in keys}


WRONG_CONFIGS = [
    ("vllm", drop("eagle_aux_hidden_state_layer_ids"), "default triple"),
    ("vllm", lambda d: {**d, "num_aux_hidden_states": 2}, "fc for 2 captured"),
    ("sglang", lambda d: {**d, "num_aux_hidden_states": 4}, "fc for 4 captured"),
    ("vllm", lambda d: {**d, "eagle_config": {}, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, r"layers \[0, 2, 3\]"),
    ("sglang", drop("eagle_config"), "default triple"),
    ("sglang", drop("draft_vocab_size"), "draft_vocab_size"),
    ("tensorrt_llm", drop("draft_vocab_size"), "draft_vocab_size"),
    ("tensorrt_llm", drop("rope_theta", "rope_scaling"), "rotary base 10000"),
    ("vllm", drop("rope_theta", "rope_parameters"), "rotary base 10000"),
    ("sglang", lambda d: {**d, "tie_word_embeddings": True}, "tie"),
    ("vllm", lambda d: {**d, "norm_output": True}, "turns norm_output on"),
    ("vllm", lambda d: {**d, "max_position_embeddings": 96}, "max_position_embeddings 96"),
    ("vllm", lambda d: {**d, "num_hidden_layers": 30}, "num_hidden_layers 30"),
    ("sglang", lambda d: {**d, "architectures": ["LlamaForCausalLM"]}, "routes LlamaForCausalLMEagle3"),
]


@pytest.mark.parametrize(("engine", "change", "message"), WRONG_CONFIGS)
def test_a_wrong_config_is_refused_with_the_reason(tmp_path, head, engine, change, message):
    export_checkpoint(head, None, tmp_path / "out")
    path = tmp_path / "out/config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(ExportError, match=message):
        check_engine(tmp_path / "out", engine, head.config)


def renamed(old, new):
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


WRONG_TENSORS = [
    ("sglang", renamed("midlayer.", "blocks.0."), "does not know blocks.0.*drops it without a word"),
    ("vllm", renamed("hidden_norm", "hidden_layernorm"), "does not find layers.0.hidden_norm"),
    ("vllm", lambda t: {**t, "fc.bias": torch.zeros(32)}, "does not know fc.bias and fails"),
    ("tensorrt_llm", lambda t: {**t, "fc.bias": torch.zeros(32)}, "does not know fc.bias and drops"),
    ("vllm", lambda t: {n: v for n, v in t.items() if n not in ("d2t", "t2d")}, "does not find d2t"),
    ("sglang", lambda t: {**t, "lm_head.weight": torch.zeros(64, 32)}, r"lm_head.weight as \[16, 32\]"),
    ("vllm", lambda t: {n: v for n, v in t.items() if "q_proj" not in n}, "q_proj"),
]


@pytest.mark.parametrize(("engine", "change", "message"), WRONG_TENSORS)
def test_wrong_tensors_are_refused_with_the_reason(tmp_path, head, engine, change, message):
    export_checkpoint(head, None, tmp_path / "out")
    path = tmp_path / "out/model.safetensors"
    save_file(change(load_file(path)), path)
    with pytest.raises(ExportError, match=message):
        check_engine(tmp_path / "out", engine, head.config)


def test_a_map_beside_a_full_vocabulary_fails_in_vllm_only(tmp_path):
    head = build_head(draft_vocab_size=64)
    export_checkpoint(head, None, tmp_path / "out")
    path = tmp_path / "out/model.safetensors"
    save_file({**load_file(path), "d2t": torch.zeros(64, dtype=torch.int64)}, path)
    assert any("d2t and fails" in reason for reason in engine_reasons(tmp_path / "out", "vllm"))
    assert engine_reasons(tmp_path / "out", "sglang") == []


def test_layers_names_are_read_by_every_engine_of_today(tmp_path, head):
    report = export_checkpoint(head, None, tmp_path / "out", layer_names="layers")
    assert all(engine_reasons(tmp_path / "out", engine) == [] for engine in PROFILES)
    assert "SGLang 0.5.12 or newer (layers.0 names)" in report.needs
    assert (
        "SGLang 0.4.9 or newer (eagle_aux_hidden_state_layer_ids)"
        in export_checkpoint(head, None, tmp_path / "plain").needs
    )
    with pytest.raises(ExportError, match="unknown"):
        check_engine(tmp_path / "out", "nobody.cpp")


def test_the_targets_depth_tells_whether_its_last_layer_is_captured(tmp_path):
    export_checkpoint(build_head(aux_layer_ids=(2, 5, 11)), None, tmp_path / "out")
    for layers, serves in ((None, True), (16, True), (12, False)):
        found = inspect_checkpoint(tmp_path / "out", ReadOptions(target_layers=layers)).engines["sglang"]
        assert found == [] if serves else "does not capture the output of the target's last layer (11)" in found
