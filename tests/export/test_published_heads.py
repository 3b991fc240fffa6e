"""Heads as others publish them: each is read with what it computes, or refused with the way out."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelopt_eagle.cli.main import run_command
from modelopt_eagle.draft.eagle3.probe import probe
from modelopt_eagle.errors import CheckpointError, ExportError
from modelopt_eagle.export import (
    ReadOptions,
    convert_checkpoint,
    engine_reasons,
    export_checkpoint,
    inspect_checkpoint,
    load_draft,
    read_head,
)
from modelopt_eagle.export.fitting import with_own_embedding
from tests.export.conftest import build_head, stand_in_tables
from tests.export.foreign import foreign


def edit(folder, change):
    path = folder / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def nested(**keys):
    return lambda data: {**data, "eagle_config": {**data["eagle_config"], **keys}}


def edit_tensors(folder, change):
    path = folder / "model.safetensors"
    save_file({n: t.contiguous() for n, t in change(load_file(path)).items()}, path)


@pytest.mark.parametrize("tool", ["modelopt", "specforge"])
def test_layers_named_twice_are_no_sign_of_our_own_layout(tmp_path, head, tool):
    """As users edit a head to serve it in two engines; its config has no head_dim and no num_key_value_heads."""
    head = build_head(num_key_value_heads=4)
    folder = foreign(tool, head, tmp_path / "in")
    edit(folder, lambda d: {**d, "eagle_aux_hidden_state_layer_ids": [2, 4, 5]})
    edit(folder, lambda d: {k: v for k, v in d.items() if k not in ("head_dim", "num_key_value_heads")})
    loaded = read_head(folder)
    assert loaded.layout == tool and loaded.config.aux_layer_ids == (1, 3, 4)
    assert torch.equal(probe(loaded.module), probe(head))


def test_a_named_answer_settles_ids_that_disagree(tmp_path, head):
    folder = foreign("specforge", head, tmp_path / "in")
    edit(folder, lambda d: {**d, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]})
    with pytest.raises(CheckpointError, match="answer with --aux-layer-ids"):
        load_draft(folder)
    assert load_draft(folder, options=ReadOptions(aux_layer_ids=(0, 2, 3))).config.aux_layer_ids == (0, 2, 3)
    export_checkpoint(head, None, tmp_path / "ours")
    edit(tmp_path / "ours", lambda d: {**d, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]})
    with pytest.raises(CheckpointError, match="answer with --aux-layer-ids"):
        load_draft(tmp_path / "ours")
    given = ["--input", str(tmp_path / "ours"), "--output", str(tmp_path / "out"), "--aux-layer-ids", "1,3,4"]
    assert run_command("convert_checkpoint", given) == 0
    assert load_draft(tmp_path / "out").config == head.config


def test_sections_of_a_multimodal_rotary_embedding_are_left_out(tmp_path):
    head = build_head(rope_scaling=None)
    for number, scaling in enumerate((
        {"type": "mrope", "mrope_section": [1, 1, 2]},
        {"rope_type": "default", "type": "default", "mrope_section": [1, 1, 2], "mrope_interleaved": True},
    )):  # fmt: skip
        folder = foreign("specforge", head, tmp_path / str(number))
        edit(folder, lambda d, scaling=scaling: {**d, "rope_scaling": scaling})
        loaded = load_draft(folder)
        assert loaded.config.rope_scaling is None and torch.equal(probe(loaded), probe(head))
        assert engine_reasons(folder, "sglang") == []
    stretched = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    edit(folder, lambda d: {**d, "rope_scaling": {**stretched, "mrope_section": [1, 1, 2]}})
    assert load_draft(folder).config.rope_scaling == stretched


@pytest.mark.parametrize(
    "keys",
    [{"rope": {"theta": 7e4}}, {"rotary_emb_base": 7e4}, {"rope_base": 70000}, {"rotary_base": 7e4}],
    ids=lambda keys: next(iter(keys)),
)
def test_the_rotary_base_is_read_under_its_other_names(tmp_path, keys):
    head = build_head(rope_theta=7e4)
    folder = foreign("specforge", head, tmp_path / "in")
    edit(folder, lambda d: {**{k: v for k, v in d.items() if k != "rope_theta"}, **keys})
    assert load_draft(folder).config.rope_theta == 7e4
    assert any("takes the rotary base 10000" in reason for reason in inspect_checkpoint(folder).engines["vllm"])
    edit(folder, lambda d: {**d, "rope_theta": 1e4})
    with pytest.raises(CheckpointError, match="several rotary bases"):
        load_draft(folder)
    edit(folder, lambda d: {**d, "rope_theta": None, "rope": {"theta": 7e4, "scaling": 2}})
    with pytest.raises(CheckpointError, match="the key rope holds"):
        load_draft(folder)


QWEN3 = {"qk_norm": True, "attention_bias": True}


@pytest.mark.parametrize("tool", ["modelopt", "specforge", "speculators"])
def test_norms_of_queries_and_keys_are_read_and_written(tmp_path, tool):
    head = build_head(**QWEN3)
    folder = foreign(tool, head, tmp_path / "in")
    layer = "transformer_layer_config" if tool == "speculators" else None
    edit(folder, lambda d: {**d, layer: {**d[layer], "model_type": "qwen3"}} if layer else {**d, "model_type": "qwen3"})
    loaded = with_own_embedding(load_draft(folder), None)
    assert loaded.config.qk_norm and torch.equal(probe(loaded), probe(head))
    plain = build_head(attention_bias=True)
    assert not torch.equal(probe(plain), probe(head))  # the norms take part
    convert_checkpoint(folder, tmp_path / "out")
    data = json.loads((tmp_path / "out/config.json").read_text())
    assert data["architectures"] == ["Eagle3Qwen3ForCausalLM"] and data["model_type"] == "qwen3"
    assert load_draft(tmp_path / "out").config.qk_norm
    assert not any("o_proj.bias" in name for name in load_file(tmp_path / "out/model.safetensors"))
    assert engine_reasons(tmp_path / "out", "vllm") == []
    assert any("norms of queries and keys" in reason for reason in engine_reasons(tmp_path / "out", "sglang"))


def test_a_norm_that_the_config_asks_for_and_the_file_lacks_is_missed(tmp_path, head):
    folder = foreign("specforge", head, tmp_path / "in")
    edit(folder, lambda d: {**d, "use_qk_norm": True})
    with pytest.raises(CheckpointError, match="the file holds none"):
        load_draft(folder)
    edit(folder, lambda d: {**d, "use_qk_norm": False, "query_pre_attn_scalar": True})
    with pytest.raises(CheckpointError, match="query_pre_attn_scalar True"):
        load_draft(folder)


WINDOWS = [
    ({"sliding_window": 24, "layer_types": ["sliding_attention"]}, 24),
    ({"sliding_window": 24, "layer_types": ["full_attention"]}, None),
    ({"sliding_window": 24, "use_sliding_window": True}, 24),
    ({"sliding_window": 24, "use_sliding_window": False}, None),
    ({"sliding_window": 24, "model_type": "mistral"}, 24),
    ({"sliding_window": None}, None),
]


@pytest.mark.parametrize(("keys", "window"), WINDOWS)
def test_a_sliding_window_is_read_where_the_head_uses_it(tmp_path, head, keys, window):
    folder = foreign("specforge", head, tmp_path / "in")
    edit(folder, lambda d: {**{k: v for k, v in d.items() if k != "use_sliding_window"}, **keys})
    loaded = load_draft(folder)
    assert loaded.config.sliding_window == window
    assert torch.equal(probe(loaded), probe(build_head(sliding_window=window)))


def test_a_window_that_may_not_be_used_is_asked_for(tmp_path, head):
    folder = foreign("specforge", head, tmp_path / "in")
    edit(folder, lambda d: {**{k: v for k, v in d.items() if k != "use_sliding_window"}, "sliding_window": 24})
    with pytest.raises(CheckpointError, match="answer with --sliding-window"):
        load_draft(folder)
    given = ["--input", str(folder), "--output", str(tmp_path / "out"), "--sliding-window"]
    assert run_command("convert_checkpoint", [*given, "24"]) == 0
    data = json.loads((tmp_path / "out/config.json").read_text())
    assert data["sliding_window"] == 24 and data["layer_types"] == ["sliding_attention"]
    assert run_command("convert_checkpoint", [*given, "0", "--overwrite"]) == 0
    assert load_draft(tmp_path / "out").config.sliding_window is None
    two = foreign("modelopt", build_head(num_hidden_layers=2), tmp_path / "two")
    kinds = ["sliding_attention", "full_attention"]
    edit(two, lambda d: {**d, "num_hidden_layers": 2, "sliding_window": 24, "layer_types": kinds})
    with pytest.raises(CheckpointError, match="in some layers only"):
        load_draft(two)


def test_each_engine_is_told_of_a_window_or_does_not_serve_it(tmp_path):
    export_checkpoint(build_head(sliding_window=64), None, tmp_path / "out")
    assert engine_reasons(tmp_path / "out", "vllm") == engine_reasons(tmp_path / "out", "sglang") == []
    assert any("64 positions back" in reason for reason in engine_reasons(tmp_path / "out", "tensorrt_llm"))
    assert "--speculative-draft-window-size 63" in (tmp_path / "out/README.md").read_text()
    edit(tmp_path / "out", lambda d: {k: v for k, v in d.items() if k != "layer_types"})
    config = build_head(sliding_window=64).config
    assert any("see everything before" in reason for reason in engine_reasons(tmp_path / "out", "vllm", config))
    latent = build_head(sliding_window=None)
    edit(tmp_path / "out", lambda d: {**d, "layer_types": ["sliding_attention"]})
    assert any("see 64 positions back" in r for r in engine_reasons(tmp_path / "out", "vllm", latent.config))


@pytest.mark.parametrize("reduced", [True, False])
def test_a_head_without_its_own_lm_head_proposes_by_the_targets_rows(tmp_path, reduced):
    head = build_head(draft_vocab_size=16 if reduced else 64)
    target = stand_in_tables(head.config)
    rows = target.embedding_weight[head.target_ids]
    folder = foreign("specforge", head, tmp_path / "in")
    edit_tensors(folder, lambda t: {n: v for n, v in t.items() if "lm_head" not in n})
    with pytest.raises(CheckpointError, match="which target. answer with --base-model"):
        load_draft(folder)
    loaded = load_draft(folder, options=ReadOptions(lm_head=target.embedding_weight))
    assert torch.equal(loaded.lm_head.weight, rows) and torch.equal(loaded.d2t, head.d2t)
    with pytest.raises(CheckpointError, match="lm_head.weight is"):
        load_draft(folder, options=ReadOptions(lm_head=target.embedding_weight[:, :20]))


def test_a_tied_head_proposes_by_its_own_embedding(tmp_path):
    head = build_head(draft_vocab_size=64, own_embedding=True)
    folder = foreign("specforge", head, tmp_path / "in")
    edit_tensors(folder, lambda t: {n: v for n, v in t.items() if "lm_head" not in n})
    edit(folder, lambda d: {**d, "tie_word_embeddings": True})
    assert torch.equal(load_draft(folder).lm_head.weight, head.embed_tokens.weight)


def test_vllm_ties_no_draft(tmp_path, head):
    folder = foreign("specforge", head, tmp_path / "in")
    edit(folder, lambda d: {**d, "tie_word_embeddings": True, "eagle_aux_hidden_state_layer_ids": [2, 4, 5]})
    assert engine_reasons(folder, "vllm") == []
    assert any("told to tie lm_head" in reason for reason in engine_reasons(folder, "sglang"))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("key", "message"),
    [("use_aux_hidden_state", "vLLM serves such a head as it is"), ("next_layer_regular", "with the tool that made")],
)
def test_heads_of_another_build_are_refused_with_the_way_out(tmp_path, head, key, message, strict):
    theirs = foreign("specforge", head, tmp_path / "theirs")
    export_checkpoint(head, None, tmp_path / "ours")
    for folder in (theirs, tmp_path / "ours"):
        edit(folder, nested(**{key: False}))
        with pytest.raises(CheckpointError, match=f"{key} is False: .*{message}"):
            load_draft(folder, strict=strict)
        found = inspect_checkpoint(folder)
        assert found.problem and "serves it as trained" not in found.text()


@pytest.mark.parametrize(
    ("key", "field", "tensor"),
    [
        ("use_last_layernorm", "last_norm", "norm.weight"),
        ("use_input_layernorm_in_first_layer", "embedding_norm", "midlayer.input_layernorm.weight"),
    ],
)
def test_a_head_without_a_norm_is_read_and_no_engine_serves_it(tmp_path, key, field, tensor):
    head = build_head(**{field: False})
    folder = foreign("specforge", head, tmp_path / "in")
    edit(folder, nested(**{key: False}))
    assert tensor not in load_file(folder / "model.safetensors")
    loaded = load_draft(folder)
    assert getattr(loaded.config, field) is False and torch.equal(probe(loaded), probe(head))
    report = convert_checkpoint(folder, tmp_path / "out")
    assert getattr(load_draft(tmp_path / "out").config, field) is False
    assert all("trained without that norm" in note for note in report.notes) and len(report.notes) == 4


def test_vllm_takes_a_latent_head_of_another_type_for_something_else(tmp_path):
    from tests.export.conftest import LATENT

    export_checkpoint(build_head(**LATENT), None, tmp_path / "out")
    assert engine_reasons(tmp_path / "out", "vllm") == []
    edit(tmp_path / "out", lambda d: {**d, "model_type": "deepseek_v3"})
    assert any("multi-token-prediction" in reason for reason in engine_reasons(tmp_path / "out", "vllm"))


def test_the_targets_depth_in_a_heads_config_is_asked_about(tmp_path, head):
    folder = foreign("specforge", head, tmp_path / "in")
    edit(folder, lambda d: {**d, "num_hidden_layers": 40})
    with pytest.raises(CheckpointError, match="num_hidden_layers is 40, the file holds the layers 0 .*--draft-layers"):
        load_draft(folder)
    given = ["--input", str(folder), "--output", str(tmp_path / "out"), "--draft-layers", "1"]
    assert run_command("convert_checkpoint", given) == 0
    assert load_draft(tmp_path / "out").config.num_hidden_layers == 1


def test_a_language_model_is_no_head(tiny_target_dir, capsys):
    assert run_command("inspect_checkpoint", [str(tiny_target_dir)]) == 1
    shown = capsys.readouterr().out
    assert "layout      none that is known" in shown and "it is a language model (['LlamaForCausalLM'])" in shown
    with pytest.raises(CheckpointError, match="fuses the target's layers by fc"):
        load_draft(tiny_target_dir)


@pytest.mark.parametrize(("dtype", "said"), [("float16", True), ("bfloat16", False)])
def test_a_head_in_another_dtype_than_its_target_is_said_to_be_rounded(tmp_path, head, dtype, said):
    export_checkpoint(head, None, tmp_path / "out", dtype=dtype)
    shown = inspect_checkpoint(tmp_path / "out", ReadOptions(target_dtype=torch.bfloat16)).text()
    assert (f"the head's numbers are {dtype}, the target's bfloat16" in shown) == said
    assert "the target's" not in inspect_checkpoint(tmp_path / "out").text()


def test_layouts_without_a_place_for_these_layers_refuse_them(tmp_path):
    for to, overrides, message in (
        ("eagle", {"qk_norm": True}, "norms of queries and keys"),
        ("eagle", {"sliding_window": 64}, "a sliding window"),
        ("eagle", {"last_norm": False}, "use_last_layernorm false"),
        ("speculators", {"embedding_norm": False}, "use_input_layernorm_in_first_layer"),
    ):
        folder = tmp_path / "-".join(overrides)
        export_checkpoint(build_head(**overrides), None, folder)
        with pytest.raises(ExportError, match=message):
            convert_checkpoint(folder, tmp_path / "out", to, options=ReadOptions(target_layers=8))
