"""Folders of P-EAGLE heads: ours, and those of other tools; what engines do with them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelopt_eagle.draft.peagle.config import PEagleConfig
from modelopt_eagle.errors import CheckpointError, ExportError
from modelopt_eagle.export import convert_checkpoint, engine_reasons, export_checkpoint, inspect_checkpoint, load_draft
from modelopt_eagle.export.foreign import ReadOptions
from modelopt_eagle.export.quantize import quantize_drafter
from tests.export.conftest import LATENT, build_head, stand_in_tables


def peagle(**overrides):
    return build_head(algorithm="peagle", **{"mask_token_id": 63, "trained_depth": 5, **overrides})


@pytest.fixture
def folder(tmp_path):
    export_checkpoint(peagle(), None, tmp_path / "export", target=stand_in_tables(peagle().config))
    return tmp_path / "export"


def edit(folder, change):
    """Put config and tensors through ``change``."""
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    "overrides",
    [{}, {"num_hidden_layers": 3}, {"draft_vocab_size": 64}, LATENT, {"norm_before_fc": True, "fc_norm": True},
     {"hidden_size": 24, "own_embedding": True}],
)  # fmt: skip
def test_it_comes_back_as_it_was(overrides, tmp_path):
    module = peagle(**overrides)
    report = export_checkpoint(module, None, tmp_path / "export", target=stand_in_tables(module.config))
    again = load_draft(tmp_path / "export")
    assert report.logits_difference == 0 and again.config == module.config
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in module.state_dict().items())
    served = not engine_reasons(tmp_path / "export", "vllm")
    assert served == (overrides != LATENT)


def test_what_an_engine_reads_stands_where_it_reads_it(folder):
    """vLLM 0.32: any of three keys at top level, and a tensor of A·Ht numbers."""
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    assert config["mask_token_id"] == 63 and config["modelopt_eagle"]["algorithm"] == "peagle"
    assert tensors["mask_hidden"].numel() == 3 * 32
    assert engine_reasons(folder, "vllm") == []
    assert engine_reasons(folder, "sglang") == ["serves no P-EAGLE heads"]
    assert "P-EAGLE heads" in inspect_checkpoint(folder).text()


@pytest.mark.parametrize("key", ["pard_token", "ptd_token_id"])
def test_other_names_of_the_mask_token_are_read(folder, key):
    def rename(config, tensors):
        config[key] = config.pop("mask_token_id")
        del config["modelopt_eagle"]  # another tool wrote it
        tensors["mask_hidden"] = tensors["mask_hidden"].view(1, 1, -1)

    module = load_draft(edit(folder, rename))
    assert isinstance(module.config, PEagleConfig) and module.config.mask_token_id == 63
    assert torch.equal(module.mask_hidden, peagle().mask_hidden)


def lose_row(config, tensors):
    del tensors["mask_hidden"]


def lose_token(config, tensors):
    del config["mask_token_id"]


def two_tokens(config, tensors):
    config["pard_token"] = 62


def outside(config, tensors):
    config["mask_token_id"] = 64


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lose_row, "has a mask token and not the tensor mask_hidden"),
        (lose_token, "has mask_hidden and not a mask token"),
        (two_tokens, "names several mask tokens"),
        (outside, "mask_token_id is 64, the target has 64 tokens"),
    ],
)
def test_a_folder_that_is_half_a_peagle_head_is_refused(folder, change, says):
    with pytest.raises(CheckpointError, match=says):
        load_draft(edit(folder, change))


@pytest.mark.parametrize("layers", [1, 2])
def test_speculators_and_back(layers, tmp_path):
    """To the folder that speculators' own class reads, and again to ours; no number changes."""
    module = peagle(num_hidden_layers=layers)
    target = stand_in_tables(module.config)
    export_checkpoint(module, None, tmp_path / "ours", target=target)
    convert_checkpoint(tmp_path / "ours", tmp_path / "theirs", "speculators", target=target)
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert config["speculators_model_type"] == "peagle" and config["architectures"] == ["PEagleSpeculator"]
    assert config["mask_token_id"] == 63 and config["speculators_config"]["algorithm"] == "peagle"
    assert load_file(tmp_path / "theirs" / "model.safetensors")["mask_hidden"].shape == (1, 1, 96)
    convert_checkpoint(tmp_path / "theirs", tmp_path / "back", target=target)
    again = load_draft(tmp_path / "back")
    assert isinstance(again.config, PEagleConfig) and again.config.mask_token_id == 63
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in module.state_dict().items())


def test_a_folder_of_specforge_is_read(folder):
    """`midlayer.*`, nested ids, the target's token under its name there."""

    def like_specforge(config, tensors):
        del config["modelopt_eagle"], config["eagle_aux_hidden_state_layer_ids"]
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True}
        config["parallel_drafting"] = True

    module = load_draft(edit(folder, like_specforge))
    assert isinstance(module.config, PEagleConfig)
    assert all(torch.equal(module.state_dict()[name], tensor) for name, tensor in peagle().state_dict().items())


def test_it_is_not_quantised_by_a_rollout_that_it_never_makes(tmp_path):
    with pytest.raises(ExportError, match="heads of P-EAGLE are not quantised here"):
        quantize_drafter(peagle(), tmp_path / "fp8", "fp8", lambda module: None)


def test_safeailabs_code_has_no_place_for_it(folder, tmp_path):
    options = ReadOptions(target_layers=8)
    with pytest.raises(ExportError, match="SafeAILab's code has no place for .*P-EAGLE"):
        convert_checkpoint(folder, tmp_path / "eagle", "eagle", options=options)


@pytest.mark.parametrize("version", ["0.5.0", "0.5.23"])
def test_an_engine_that_serves_none_is_refused_for_that(version, tmp_path):
    """Not for the layers that the old release does not read either: a newer one would not help."""
    with pytest.raises(ExportError, match=f"SGLang {version} was asked for: SGLang serves no P-EAGLE heads$"):
        export_checkpoint(peagle(num_hidden_layers=2), None, tmp_path / "out", for_engines={"sglang": version})
    assert not (tmp_path / "out").exists()
