"""Heads of other tools, written here as those tools write them, and what is refused."""

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
    export_checkpoint,
    inspect_checkpoint,
    load_draft,
    read_head,
)
from modelopt_eagle.export.fitting import with_own_embedding
from tests.export.conftest import LATENT, build_head, stand_in_tables
from tests.export.foreign import TOOLS, foreign

EMBEDDED = ("eagle", "speculators")  # write the target's embedding along
EIGHT_LAYERS = ReadOptions(target_layers=8)  # their usual three outputs: 1, 3, 4


@pytest.mark.parametrize("kind", ["safetensors", "bin", "sharded"])
@pytest.mark.parametrize("tool", TOOLS)
def test_reads_each_tools_head(tmp_path, head, tool, kind):
    folder = foreign(tool, head, tmp_path / tool, kind)
    loaded = read_head(folder, options=EIGHT_LAYERS)
    assert loaded.layout == tool and loaded.config.aux_layer_ids == (1, 3, 4)
    assert torch.equal(loaded.module.d2t, head.d2t) and torch.equal(loaded.module.t2d, head.t2d)
    assert loaded.config.rope_theta == 5e4 and loaded.config.own_embedding == (tool in EMBEDDED)
    for name, tensor in head.state_dict().items():
        assert torch.equal(loaded.module.state_dict()[name], tensor), name
    plain = with_own_embedding(loaded.module, None)  # the table that two of the tools write along
    assert torch.equal(probe(plain), probe(head))
    assert bool(loaded.left_out) == (tool == "speculators")


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("to", ["universal", "speculators", "eagle"])
def test_converts_every_layout_into_every_other(tmp_path, head, tool, to):
    folder = foreign(tool, head, tmp_path / "in")
    target = stand_in_tables(head.config)
    report = convert_checkpoint(folder, tmp_path / "out", to, options=EIGHT_LAYERS, target=target)
    assert report.logits_difference == 0.0
    again = read_head(tmp_path / "out", options=EIGHT_LAYERS)
    assert again.layout == to and again.config.own_embedding == (tool in EMBEDDED or to == "speculators")
    for name, tensor in head.state_dict().items():
        assert torch.equal(again.module.state_dict()[name], tensor), name


@pytest.mark.parametrize("rounded", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tool", EMBEDDED)
def test_a_copy_of_the_targets_embedding_is_left_out(tmp_path, head, tool, rounded):
    """Engines that share the table would otherwise be said to replace it, and training would learn it."""
    target = stand_in_tables(head.config)
    folder = foreign(tool, head, tmp_path / "in", table=target.embedding_weight.to(rounded).float())
    assert read_head(folder, options=EIGHT_LAYERS).config.own_embedding
    report = convert_checkpoint(folder, tmp_path / "out", options=EIGHT_LAYERS, target=target)
    assert not load_draft(tmp_path / "out").config.own_embedding and "left out" in report.notes[0]
    other = stand_in_tables(head.config, seed=2)
    report = convert_checkpoint(folder, tmp_path / "other", options=EIGHT_LAYERS, target=other)
    assert load_draft(tmp_path / "other").config.own_embedding
    assert any("target's embedding in place of" in note for note in report.notes)


def test_a_head_that_names_another_target_is_said(tmp_path, head, capsys):
    """B35: sizes equal, and no tokenizer is recorded that could be compared."""
    folder = foreign("speculators", head, tmp_path / "in")
    same, other = stand_in_tables(head.config), stand_in_tables(head.config)
    other.identity = lambda: {"model": "else/where", "num_layers": 8, "vocab_size": 64}
    notes = convert_checkpoint(folder, tmp_path / "same", target=same).notes
    assert not any("records no tokenizer" in note for note in notes)
    notes = convert_checkpoint(folder, tmp_path / "other", target=other).notes
    assert "names someone/target as its target and records no tokenizer, the target given is else/where" in notes[0]
    given = ["--input", str(folder), "--output", str(tmp_path / "out")]
    assert run_command("convert_checkpoint", given) == 0
    shown = capsys.readouterr().out
    assert "needs      vLLM 0.11.1" in shown and "target's embedding in place" in shown


def test_a_speculators_folder_holds_the_embedding_of_its_target(tmp_path, head):
    """speculators leaves a table that is not in the folder uninitialised."""
    export_checkpoint(head, None, tmp_path / "in")
    with pytest.raises(ExportError, match="which target"):
        convert_checkpoint(tmp_path / "in", tmp_path / "out", "speculators")
    assert not (tmp_path / "out").exists()
    target = stand_in_tables(head.config)
    convert_checkpoint(tmp_path / "in", tmp_path / "out", "speculators", target=target)
    assert torch.equal(load_draft(tmp_path / "out").embed_tokens.weight, target.embedding_weight)
    convert_checkpoint(tmp_path / "out", tmp_path / "back", target=target)
    assert load_draft(tmp_path / "back").config.own_embedding is False
    target.embedding_weight = target.embedding_weight[:60]
    with pytest.raises(ExportError, match="another target"):
        convert_checkpoint(tmp_path / "in", tmp_path / "small", "speculators", target=target)


def test_the_target_says_how_many_layers_it_has(tmp_path, head):
    folder = foreign("eagle", head, tmp_path / "in")
    target = {"num_layers": 8, "vocab_size": head.config.vocab_size}
    convert_checkpoint(folder, tmp_path / "out", "eagle", target=target)
    assert read_head(tmp_path / "out", options=EIGHT_LAYERS).config.aux_layer_ids == (1, 3, 4)


def test_a_sharded_bf16_head_keeps_its_dtype_and_size(tmp_path, head):
    folder = foreign("specforge", head.bfloat16(), tmp_path / "in", "sharded")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
    convert_checkpoint(folder, tmp_path / "out")
    written = load_file(tmp_path / "out/model.safetensors")
    assert {t.dtype for t in written.values()} == {torch.bfloat16, torch.int64, torch.bool}


def test_norm_before_residual_of_speculators(tmp_path, head):
    folder = foreign("speculators", head, tmp_path / "in")
    data = json.loads((folder / "config.json").read_text())
    del data["norm_before_residual"]
    (folder / "config.json").write_text(json.dumps(data))
    assert load_draft(folder).config.norm_before_residual is True
    assert load_draft(folder, options=ReadOptions(norm_before_residual=False)).config.norm_before_residual is False


def test_a_config_that_repeats_the_small_size_does_not_erase_the_map(tmp_path, head):
    folder = foreign("specforge", head, tmp_path / "in")
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**data, "vocab_size": 16}))
    loaded = load_draft(folder)
    assert loaded.config.vocab_size == 64 and torch.equal(loaded.d2t, head.d2t) and not loaded.vocab.is_identity


def edit(folder, change):
    path = folder / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def edit_tensors(folder, change):
    path = folder / "model.safetensors"
    save_file({n: t.contiguous() for n, t in change(load_file(path)).items()}, path)


def test_what_is_not_said_is_asked_for(tmp_path, head):
    folder = foreign("eagle", head, tmp_path / "eagle")
    with pytest.raises(CheckpointError, match="How many layers has the target.*--target-layers"):
        load_draft(folder)
    assert load_draft(folder, options=ReadOptions(aux_layer_ids=(0, 2, 6))).config.aux_layer_ids == (0, 2, 6)
    with pytest.raises(CheckpointError, match="fc reads 3 layers, and 2 are named"):
        load_draft(folder, options=ReadOptions(aux_layer_ids=(0, 2)))
    with pytest.raises(CheckpointError, match="outside the target's layers"):
        load_draft(folder, options=ReadOptions(aux_layer_ids=(0, 2, 9), target_layers=8))
    both = foreign("specforge", head, tmp_path / "both")
    edit(both, lambda d: {**d, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]})
    with pytest.raises(CheckpointError, match="which were captured in training"):
        load_draft(both, strict=False)


def test_a_map_that_reads_either_way_is_asked_for(tmp_path):
    from modelopt_eagle.draft import DraftVocab

    head = build_head()
    head.set_vocab(DraftVocab.from_target_ids(torch.arange(16) * 2, 64))  # offsets 0, 1, 2, ...
    folder = foreign("modelopt", head, tmp_path / "in")
    with pytest.raises(CheckpointError, match="--d2t-convention"):
        load_draft(folder)
    assert torch.equal(load_draft(folder, options=ReadOptions(d2t_convention="offset")).d2t, head.d2t)
    absolute = load_draft(folder, options=ReadOptions(d2t_convention="absolute"))
    assert torch.equal(absolute.target_ids, torch.arange(16))


BAD_TENSORS = [
    ("t2d missing a token", lambda t: {**t, "t2d": t["t2d"].roll(1)}, "not the same tokens"),
    ("absolute ids", lambda t: {**t, "d2t": t["d2t"] + torch.arange(16)}, "not the same tokens|outside"),
    ("id out of range", lambda t: {**t, "d2t": t["d2t"] + 40}, r"outside \[0, 64\)"),
    ("falling ids", lambda t: {**t, "d2t": t["d2t"].flip(0)}, "strictly increasing"),
    ("no map", lambda t: {n: v for n, v in t.items() if n not in ("d2t", "t2d")}, "holds no d2t"),
    ("map of floats", lambda t: {**t, "d2t": t["d2t"].float()}, "d2t must be integers"),
    ("map too short", lambda t: {**t, "d2t": t["d2t"][:8]}, "d2t has 8 entries, lm_head 16"),
    ("a bias", lambda t: {**t, "fc.bias": torch.zeros(32)}, r"unexpected fc.bias \[32\]"),
    ("another architecture", lambda t: {"transformer.h.0.weight": torch.zeros(2)}, "no EAGLE-3 head that is known"),
    ("query norms", lambda t: {**t, "midlayer.self_attn.q_norm.weight": torch.ones(8)}, "q_norm"),
    ("a layer cut away", lambda t: {n: v for n, v in t.items() if "mlp" not in n}, "missing layers.0.mlp.gate_proj"),
    ("wrong shape", lambda t: {**t, "norm.weight": torch.ones(33)}, r"norm.weight is \[33\].*\[32\]"),
    ("mixed dtypes", lambda t: {**t, "norm.weight": t["norm.weight"].half()}, "mixes dtypes"),
    (
        "another dtype",
        lambda t: {n: v.bfloat16() if v.is_floating_point() else v for n, v in t.items()},
        "names float32",
    ),
    ("not finite", lambda t: {**t, "fc.weight": t["fc.weight"] * float("inf")}, "not finite"),
    ("scales of a quantised head", lambda t: {**t, "fc.weight_scale": torch.ones(1)}, "is quantised"),
    ("two names", lambda t: {**t, "layers.0.hidden_norm.weight": torch.zeros(32)}, "different values"),
    ("output bias", lambda t: {**t, "midlayer.self_attn.o_proj.bias": torch.ones(32)}, "no output bias"),
]


@pytest.mark.parametrize(("change", "message"), [row[1:] for row in BAD_TENSORS], ids=[row[0] for row in BAD_TENSORS])
def test_bad_tensors_are_refused(tmp_path, head, change, message):
    folder = foreign("specforge", head, tmp_path / "in")
    edit_tensors(folder, change)
    with pytest.raises(CheckpointError, match=message):
        load_draft(folder)


def test_bad_files_are_refused(tmp_path, head):
    folder = foreign("specforge", head, tmp_path / "cut")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cut short or damaged"):
        load_draft(folder)
    sharded = foreign("specforge", head, tmp_path / "sharded", "sharded")
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="missing: model-00002-of-00002"):
        load_draft(sharded)
    pickled = foreign("specforge", head, tmp_path / "pickled", "bin")
    torch.save({"fc.weight": print}, pickled / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="a pickle may hold tensors only"):
        load_draft(pickled)
    (pickled / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match="holds no weights"):
        load_draft(pickled)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cut short|not valid JSON"):
        load_draft(folder)
    with pytest.raises(CheckpointError, match="is no folder"):
        load_draft(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="holds no head"):
        load_draft(tmp_path / "empty")


def test_keys_that_nothing_reads_are_refused_unless_told(tmp_path, head):
    export_checkpoint(head, None, tmp_path / "out")
    edit(tmp_path / "out", lambda d: {**d, "norm_outputs": True})
    with pytest.raises(CheckpointError, match="did you mean 'norm_output'"):
        load_draft(tmp_path / "out")
    assert load_draft(tmp_path / "out", strict=False).config == head.config


def nested(**keys):
    return lambda d: {**d, "eagle_config": {**d["eagle_config"], **keys}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (nested(use_aux_hidden_state=False), "use_aux_hidden_state is False"),
        (nested(use_last_layernorm=False), "unexpected norm.weight"),
        (nested(eh_proj_before_attn=True), "eagle_config.eh_proj_before_attn True"),
        (nested(parallel_draft_step=4), "parallel_draft_step 4"),
        (lambda d: {**d, "residual_multiplier": 0.5}, "residual_multiplier 0.5"),
        (lambda d: {**d, "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        (lambda d: {**d, "rope_parameters": {"rope_theta": 5e4, "partial_rotary_factor": 0.5}}, "partial_rotary"),
    ],
)
def test_what_another_tools_head_does_otherwise_is_refused(tmp_path, head, change, message):
    """B40, B44: the names and shapes of its tensors would not tell."""
    folder = foreign("specforge", head, tmp_path / "in")
    edit(folder, nested(parallel_draft_step=1, use_mtp_layernorm=False, has_lm_head=True))
    edit(folder, lambda d: {**d, "sliding_window": 512, "use_sliding_window": False})
    assert load_draft(folder).config.aux_layer_ids == (1, 3, 4)
    edit(folder, change)
    with pytest.raises(CheckpointError, match=message):
        load_draft(folder)


def test_the_architecture_tells_the_layer_and_not_the_targets_model_type(tmp_path, head):
    """SpecForge's config for Kimi-K2 names the target's type beside a Llama draft."""
    folder = foreign("specforge", head, tmp_path / "in")
    edit(folder, lambda d: {**d, "model_type": "kimi_k2"})
    assert load_draft(folder).config.decoder_type == "llama"
    edit(folder, lambda d: {**d, "architectures": ["KimiDraft"]})
    with pytest.raises(CheckpointError, match="'kimi_k2' is no draft layer"):
        load_draft(folder)


def test_another_name_of_norm_output_is_understood(tmp_path, head):
    folder = foreign("specforge", head, tmp_path / "in")
    edit(folder, nested(return_hidden_post_norm=True))
    assert load_draft(folder).config.norm_output is True


def test_layouts_without_a_place_for_the_head_refuse_it(tmp_path):
    def source(**overrides):
        folder = tmp_path / "-".join(overrides)
        export_checkpoint(build_head(**overrides), None, folder)
        return folder

    for to, overrides, message in [
        ("speculators", LATENT, "no kimik2 decoder"),
        ("speculators", {"target_hidden_size": 48}, "own width"),
        ("eagle", {"norm_output": True}, "the flag norm_output"),
        ("eagle", {"num_hidden_layers": 2}, "2 layers"),
        ("eagle", {"aux_layer_ids": (0, 1, 2)}, r"captures the outputs of layers \[1, 3, 4\]"),
    ]:
        with pytest.raises(ExportError, match=message):
            convert_checkpoint(source(**overrides), tmp_path / "out", to, options=EIGHT_LAYERS)
    export_checkpoint(build_head(), None, tmp_path / "plain")
    with pytest.raises(ExportError, match="how many layers"):
        convert_checkpoint(tmp_path / "plain", tmp_path / "out", "eagle")
    with pytest.raises(ExportError, match="unknown; known are"):
        convert_checkpoint(tmp_path / "plain", tmp_path / "out", "ggml")
    assert not (tmp_path / "out").exists()


def test_speculators_folder_keeps_every_flag(tmp_path):
    for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        head = build_head(**{flag: True}, num_hidden_layers=2, attention_bias=True)
        export_checkpoint(head, None, tmp_path / flag / "universal")
        convert_checkpoint(
            tmp_path / flag / "universal", tmp_path / flag / "speculators", "speculators",
            target=stand_in_tables(head.config),
        )  # fmt: skip
        loaded = with_own_embedding(load_draft(tmp_path / flag / "speculators"), None)
        assert getattr(loaded.config, flag) and torch.equal(probe(loaded), probe(head))
        names = load_file(tmp_path / flag / "speculators/model.safetensors")
        assert "layers.1.hidden_norm.weight" not in names and "layers.0.hidden_norm.weight" in names


def test_inspection_tells_the_kind_of_map_and_the_layout(tmp_path, head):
    reduced = foreign("specforge", head, tmp_path / "reduced")
    full = build_head(draft_vocab_size=64)
    export_checkpoint(full, None, tmp_path / "full")
    missing = foreign("modelopt", head, tmp_path / "missing")
    edit_tensors(missing, lambda t: {n: v for n, v in t.items() if n != "d2t"})
    kinds = [inspect_checkpoint(folder).map for folder in (reduced, tmp_path / "full", missing)]
    assert kinds == ["reduced", "identity", "missing"]
    assert inspect_checkpoint(missing).problem and "holds no d2t" in inspect_checkpoint(missing).text()
    for tool in TOOLS:
        assert inspect_checkpoint(foreign(tool, head, tmp_path / f"as-{tool}")).layout == tool
    found = inspect_checkpoint(reduced)
    assert found.engines["sglang"] == [] and "default triple" in found.engines["vllm"][0]


def test_commands(tmp_path, head, capsys):
    folder = foreign("eagle", head, tmp_path / "in")
    out = tmp_path / "out"
    assert run_command("convert_checkpoint", ["--input", str(folder), "--output", str(out)]) == 2
    assert "--target-layers" in capsys.readouterr().err and not out.exists()
    given = ["--input", str(folder), "--output", str(out), "--target-layers", "8"]
    assert run_command("convert_checkpoint", given) == 0
    assert run_command("convert_checkpoint", given) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert run_command("inspect_checkpoint", [str(out)]) == 0
    assert "serves it as trained" in capsys.readouterr().out
    assert run_command("inspect_checkpoint", [str(folder), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["map"] == "reduced"
    export = ["--model_path", str(out), "--export_path", str(tmp_path / "exported"), "--dtype", "bfloat16"]
    assert run_command("export_hf_checkpoint", export) == 0
    assert "bfloat16" in capsys.readouterr().out
    assert load_draft(tmp_path / "exported").fc.weight.dtype == torch.bfloat16
    assert run_command("export_hf_checkpoint", [*export, "--overwrite", "--rope-scaling", "yarn"]) == 2
    assert "not JSON" in capsys.readouterr().err
