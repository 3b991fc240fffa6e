"""What is exported reads back as what was trained: names, config, numbers."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from modelopt_eagle import pipeline
from modelopt_eagle.common import folders as folders_module
from modelopt_eagle.draft import DraftConfig
from modelopt_eagle.draft.eagle3.probe import probe
from modelopt_eagle.draft.rotary import KEYS, check_scaling, inverse_frequencies
from modelopt_eagle.errors import CheckpointError, ExportError
from modelopt_eagle.export import export_checkpoint, load_draft, read_head
from modelopt_eagle.export import write as writer_module
from modelopt_eagle.recipe import load_recipe
from tests.export.conftest import LATENT, build_head

SHAPES = {
    "plain": {},
    "full_vocabulary": {"draft_vocab_size": 64},
    "two_layers": {"num_hidden_layers": 2},
    "latent": LATENT,
    "latent_without_q_rank": {**LATENT, "q_lora_rank": None},
    "qkv_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "narrow": {"target_hidden_size": 48},
    "own_embedding": {"own_embedding": True},
    "wide_heads": {"head_dim": 16},
    "two_captures": {"aux_layer_ids": (2, 5)},
    "last_layers": {"aux_layer_ids": (6, 9, 11)},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_reads_back_equal(tmp_path, shape):
    module = build_head(**SHAPES[shape])
    report = export_checkpoint(module, module.config, tmp_path / "out")
    loaded = read_head(tmp_path / "out")
    assert loaded.layout == "universal" and loaded.config == module.config
    for name, tensor in module.state_dict().items():
        assert torch.equal(loaded.module.state_dict()[name], tensor), name
    assert torch.equal(probe(loaded.module), probe(module))
    assert report.logits_difference == 0.0 and report.bytes == (tmp_path / "out/model.safetensors").stat().st_size


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"])
def test_each_flag_changes_the_head_and_is_written_only_when_on(tmp_path, flag):
    module = build_head(**{flag: True})
    export_checkpoint(module, None, tmp_path / "on")
    data = json.loads((tmp_path / "on/config.json").read_text())
    assert data[flag] is True
    export_checkpoint(build_head(), None, tmp_path / "off")
    assert flag not in json.loads((tmp_path / "off/config.json").read_text())
    without = build_head(**{flag: False})
    without.load_state_dict(module.state_dict(), strict=False)
    assert not torch.allclose(probe(without), probe(module), atol=1e-4)


def test_names_dtypes_and_ids_in_the_folder(tmp_path, head):
    export_checkpoint(head, None, tmp_path / "out", dtype="bfloat16")
    tensors = load_file(tmp_path / "out/model.safetensors")
    assert set(tensors) == {
        "fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d",
        *(f"midlayer.{n}.weight" for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")),
        *(f"midlayer.self_attn.{n}_proj.weight" for n in "qkvo"),
        *(f"midlayer.mlp.{n}_proj.weight" for n in ("gate", "up", "down")),
    }  # fmt: skip
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert {t.dtype for n, t in tensors.items() if n not in ("d2t", "t2d")} == {torch.bfloat16}
    ids = torch.arange(16) + tensors["d2t"]
    assert torch.equal(ids, tensors["t2d"].nonzero().squeeze(1)) and bool((ids % 2 == 1).sum() == 6)
    data = json.loads((tmp_path / "out/config.json").read_text())
    assert data["torch_dtype"] == "bfloat16" and data["draft_vocab_size"] == 16 and data["tie_word_embeddings"] is False
    assert data["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert data["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert data["eos_token_id"] == [2, 5] and data["pad_token_id"] == 0


def test_full_vocabulary_is_named_and_has_no_map(tmp_path):
    export_checkpoint(build_head(draft_vocab_size=64), None, tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["draft_vocab_size"] == 64
    assert not {"d2t", "t2d"} & set(load_file(tmp_path / "out/model.safetensors"))


def test_layers_on_request_and_both_norm_names_above_the_first(tmp_path):
    export_checkpoint(build_head(), None, tmp_path / "one", layer_names="layers")
    names = set(load_file(tmp_path / "one/model.safetensors"))
    assert "layers.0.hidden_norm.weight" in names and not any(n.startswith("midlayer") for n in names)
    export_checkpoint(build_head(num_hidden_layers=2), None, tmp_path / "two")
    tensors = load_file(tmp_path / "two/model.safetensors")
    assert torch.equal(tensors["layers.1.hidden_norm.weight"], tensors["layers.1.input_layernorm.weight"])


ROPES = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    "longrope": {
        "rope_type": "longrope", "long_factor": [1.5] * 4, "short_factor": [1.0] * 4, "factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
}  # fmt: skip


def test_every_type_that_transformers_knows_is_among_them():
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    assert set(ROPE_INIT_FUNCTIONS) <= set(ROPES)


@pytest.mark.parametrize("kind", ROPES)
def test_a_head_takes_over_the_rotary_table_of_its_target(kind):
    """From the target's configuration, as transformers reads it, to the head's frequencies."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    target = LlamaConfig(
        hidden_size=32, num_attention_heads=4, head_dim=8, num_hidden_layers=8, vocab_size=64,
        max_position_embeddings=2048, rope_parameters={"rope_theta": 7e5, **(ROPES[kind] or {"rope_type": "default"})},
    )  # fmt: skip
    config = DraftConfig.from_target(target)
    frequencies, factor = inverse_frequencies(config)
    assert config.rope_theta == 7e5
    if kind == "longrope":  # transformers' layer starts with the short list, and the head is fixed at its full length
        theirs, scale = ROPE_INIT_FUNCTIONS[kind](target, torch.device("cpu"), seq_len=2048)
    else:
        layer = LlamaRotaryEmbedding(target)
        theirs, scale = layer.inv_freq, layer.attention_scaling
    assert torch.equal(frequencies, theirs) and factor == pytest.approx(scale)
    plain = DraftConfig.from_target(LlamaConfig(**{**target.to_dict(), "rope_parameters": {"rope_theta": 1e4}}))
    assert plain.rope_theta == 1e4 and not torch.equal(inverse_frequencies(plain)[0], frequencies)


@pytest.mark.parametrize("kind", ROPES)
def test_rotary_tables_survive_and_transformers_reads_them(tmp_path, kind):
    module = build_head(rope_scaling=ROPES[kind], rope_theta=7e5)
    export_checkpoint(module, None, tmp_path / "out")
    loaded = load_draft(tmp_path / "out")
    for mine, theirs in zip(module.rotary(torch.arange(3000)), loaded.rotary(torch.arange(3000)), strict=True):
        assert torch.equal(mine, theirs)
    read = AutoConfig.from_pretrained(tmp_path / "out")
    assert read.rope_parameters["rope_theta"] == 7e5
    assert read.rope_parameters["rope_type"] == kind
    for key, value in (ROPES[kind] or {}).items():
        assert read.rope_parameters[key] == value
    data = json.loads((tmp_path / "out/config.json").read_text())
    for layout in ("rope_parameters", "rope_scaling"):  # either layout alone tells the same
        if layout == "rope_scaling" or kind == "default":
            other = {**data, "rope_parameters": None}
        else:
            other = {k: v for k, v in data.items() if k not in ("rope_scaling", "rope_theta")}
        (tmp_path / "out/config.json").write_text(json.dumps(other))
        assert load_draft(tmp_path / "out").config.rope_scaling == module.config.rope_scaling
        assert load_draft(tmp_path / "out").config.rope_theta == 7e5


def test_two_rotary_bases_are_refused(tmp_path, head):
    export_checkpoint(head, None, tmp_path / "out")
    data = json.loads((tmp_path / "out/config.json").read_text())
    (tmp_path / "out/config.json").write_text(json.dumps({**data, "rope_theta": 1e4}))
    with pytest.raises(CheckpointError, match="several rotary bases"):
        load_draft(tmp_path / "out")


def test_yarn_is_added_only_when_asked_and_said_so(tmp_path, head):
    yarn = {"rope_type": "yarn", "factor": 4.0}
    report = export_checkpoint(head, None, tmp_path / "out", rope_scaling=yarn)
    loaded = load_draft(tmp_path / "out")
    assert loaded.config.rope_scaling == {**yarn, "original_max_position_embeddings": 2048}
    assert loaded.config.max_position_embeddings == 8192 and head.config.rope_scaling is None
    assert any("yarn" in note for note in report.notes) and "yarn" in (tmp_path / "out/README.md").read_text()
    assert not torch.equal(probe(loaded), probe(head))
    with pytest.raises(ExportError, match="trained with rope_scaling"):
        export_checkpoint(build_head(rope_scaling=yarn), None, tmp_path / "again", rope_scaling=yarn)


def test_declared_length_is_at_least_the_targets(tmp_path, head):
    class TargetStandIn:
        class config:
            max_position_embeddings = 9000

        @staticmethod
        def identity():
            return {"model": "someone/target", "hidden_size": 32, "vocab_size": 64, "num_layers": 8,
                    "tokenizer_hash": "0123456789abcdef"}  # fmt: skip

    export_checkpoint(head, None, tmp_path / "out", target=TargetStandIn())
    assert load_draft(tmp_path / "out").config.max_position_embeddings == 9000


@pytest.mark.parametrize(
    ("identity", "message"),
    [
        ({"hidden_size": 64}, "width 32"),
        ({"vocab_size": 65}, "a vocabulary of 64"),
        ({"tokenizer_hash": "ffff"}, "the tokenizer"),
        ({"num_layers": 4}, "has 4"),
    ],
)
def test_a_head_for_another_target_is_refused(tmp_path, head, identity, message):
    with pytest.raises(ExportError, match=message):
        export_checkpoint(head, None, tmp_path / "out", target={"model": "other", **identity})
    assert not (tmp_path / "out").exists()


def test_same_sizes_but_another_tokenizer_is_refused_at_load(tmp_path, head):
    export_checkpoint(head, None, tmp_path / "out")
    assert load_draft(tmp_path / "out", vocab_size=64, tokenizer_hash="0123456789abcdef").config == head.config
    with pytest.raises(CheckpointError, match="another tokenizer"):
        load_draft(tmp_path / "out", vocab_size=64, tokenizer_hash="fedcba9876543210")
    with pytest.raises(CheckpointError, match="vocabulary of 64"):
        load_draft(tmp_path / "out", vocab_size=65)


def test_an_existing_folder_is_kept_unless_overwritten(tmp_path, head):
    out = tmp_path / "out"
    export_checkpoint(head, None, out)
    before = (out / "model.safetensors").read_bytes()
    other = build_head(seed=1)
    with pytest.raises(ExportError, match="--overwrite"):
        export_checkpoint(other, None, out)
    assert (out / "model.safetensors").read_bytes() == before
    export_checkpoint(other, None, out, overwrite=True)
    assert torch.equal(load_draft(out).fc.weight, other.fc.weight)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ExportError, match="not overwritten"):
        export_checkpoint(head, None, out, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_leaves_the_old_folder(tmp_path, head, monkeypatch):
    out = tmp_path / "out"
    export_checkpoint(head, None, out)
    before = (out / "model.safetensors").read_bytes()

    def full(tensors, path, metadata):
        with open(path, "wb") as file:
            file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer_module, "save_file", full)
    with pytest.raises(ExportError, match="disk is full"):
        export_checkpoint(build_head(seed=1), None, out, overwrite=True)
    assert (out / "model.safetensors").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_failed_rename_brings_the_old_folder_back(tmp_path, head, monkeypatch):
    out = tmp_path / "out"
    export_checkpoint(head, None, out)
    rename = folders_module.Path.rename

    def refusing(self, target):
        if ".part-" in self.name:
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(folders_module, "exchange", lambda a, b: False)  # a system that cannot
    monkeypatch.setattr(folders_module.Path, "rename", refusing)
    with pytest.raises(ExportError, match="unchanged"):
        export_checkpoint(build_head(seed=1), None, out, overwrite=True)
    assert torch.equal(load_draft(out).fc.weight, head.fc.weight)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_tensor_that_reads_back_differently_fails_the_export(tmp_path, head, monkeypatch):
    def nudging(tensors, path, metadata):
        save_file({**tensors, "norm.weight": tensors["norm.weight"] + 1e-3}, path, metadata=metadata)

    monkeypatch.setattr(writer_module, "save_file", nudging)
    with pytest.raises(ExportError, match="norm.weight differs"):
        export_checkpoint(head, None, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_unset_map_is_never_exported(tmp_path):
    from modelopt_eagle.draft import EagleModule

    with pytest.raises(CheckpointError, match="never set"):
        export_checkpoint(EagleModule(build_head().config), None, tmp_path / "out")


def test_training_checkpoints_and_run_folders(tmp_path, head):
    run = tmp_path / "run"
    for step, seed in ((10, 1), (20, 0), (30, 2)):
        folder = run / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        save_file(build_head(seed=seed).state_dict(), folder / "model.safetensors")
        (folder / "draft_config.json").write_text(json.dumps(head.config.to_dict()))
        if step < 30:
            (folder / "complete.json").write_text("{}")
    loaded = read_head(run)
    assert loaded.layout == "training" and loaded.folder.name == "checkpoint-20"
    assert torch.equal(loaded.module.fc.weight, head.fc.weight) and loaded.config == head.config
    with pytest.raises(CheckpointError, match="cut short"):
        load_draft(run / "checkpoint-30")
    (run / "best").symlink_to("checkpoint-10")
    assert read_head(run).folder.name == "checkpoint-10"
    shutil.rmtree(run / "checkpoint-20")
    (run / "best").unlink()
    (run / "checkpoint-10/complete.json").unlink()
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints"):
        load_draft(run)


def test_exporting_leaves_the_random_stream_alone(tmp_path, head):
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    export_checkpoint(head, None, tmp_path / "out")
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize(
    ("scaling", "says"),
    [
        ({"rope_type": "nonsense", "factor": 2}, "'nonsense' is unknown; transformers knows dynamic, linear"),
        ({"rope_type": "yarn"}, "'yarn' needs factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "needs high_freq_factor, low_freq_factor"),
        ({"rope_type": "yarn", "factor": "a"}, "factor must be a number above 0, found 'a'"),
        ({"rope_type": "yarn", "factor": -1}, "factor must be a number above 0"),
        ({"rope_type": "linear", "factor": 2, "beta_fast": 1}, "beta_fast is nothing that type 'linear' reads"),
        ({"rope_type": "yarn", "factor": 2, "rope_theta": 5e5}, "rope_theta is nothing"),
    ],
)
def test_a_scaling_that_nothing_reads_so_is_refused(tmp_path, scaling, says):
    with pytest.raises(CheckpointError, match=says):
        export_checkpoint(build_head(rope_scaling=None), None, tmp_path / "out", rope_scaling=scaling)
    assert not (tmp_path / "out").exists()
    recipe = load_recipe(
        "eagle3", [f"training.output_dir={tmp_path / 'run'}", f"export.rope_scaling={json.dumps(scaling)}"]
    )
    with pytest.raises(CheckpointError, match=says):  # before training, not after it
        pipeline.check_rope_scaling(recipe)


@pytest.mark.parametrize("scaling", [ROPE for ROPE in ROPES.values() if ROPE], ids=lambda scaling: scaling["rope_type"])
def test_a_scaling_as_transformers_writes_it_is_taken(scaling):
    check_scaling(scaling)
    assert KEYS.keys() == ROPES.keys() - {"default"}
