"""DFlash heads in the folders of z-lab and of speculators: read, written, and computed with by speculators itself."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelopt_eagle.draft import DraftVocab
from modelopt_eagle.draft.algorithm import random_module
from modelopt_eagle.draft.dflash.block import run_blocks
from modelopt_eagle.draft.dflash.config import DFlashConfig
from modelopt_eagle.draft.documents import Documents, WholeAxis
from modelopt_eagle.draft.predictions import BatchView
from modelopt_eagle.errors import CheckpointError, ExportError
from modelopt_eagle.export import convert_checkpoint, export_checkpoint, load_draft
from modelopt_eagle.export.convert import without_record
from modelopt_eagle.target import load_target_tables
from tests.export.conftest import SIZES, build_head

OWN = {**SIZES, "hidden_size": 64, "target_hidden_size": 64, "intermediate_size": 96, "head_dim": 16,
       "vocab_size": 256, "num_hidden_layers": 2, "block_size": 4, "mask_token_id": 250, "aux_layer_ids": (1, 3, 4),
       "target_name": None, "tokenizer_hash": None, "extra": {}}  # fmt: skip
HEADS = {
    "reduced": {"draft_vocab_size": 32},
    "shared": {"draft_vocab_size": 256, "shares_head": True},
    "biases": {"draft_vocab_size": 32, "attention_bias": True, "num_hidden_layers": 1, "block_size": 8},
}


def make(**overrides):
    config = DFlashConfig.from_dict({**OWN, **overrides})
    size = config.draft_vocab_size
    vocab = DraftVocab.identity(256) if size == 256 else DraftVocab.from_target_ids(torch.arange(size) * 3, 256)
    head = random_module(config, vocab, seed=0)
    for name, parameter in head.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
    return head.eval()


def exported(head, path):
    export_checkpoint(head, None, path)
    return path


@pytest.mark.parametrize("name", HEADS)
def test_speculators_computes_a_block_as_we_do(name, tiny_target_dir, tmp_path, monkeypatch):
    speculators = pytest.importorskip("speculators")
    from speculators.models.dflash import DFlashSpeculatorConfig

    head, target = make(**HEADS[name]), load_target_tables(tiny_target_dir)
    head.meet_target(target.head.weight.__getitem__)
    folder = convert_checkpoint(exported(head, tmp_path / "own"), tmp_path / "out", "speculators").path
    config = DFlashSpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    config.speculators_config.verifier.name_or_path = str(tiny_target_dir)
    model = speculators.SpeculatorModel.from_pretrained(folder, config=config).float().eval()
    size, length, anchor = head.config.block_size, 14, 3
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(200, (1, length), generator=generator)  # [1,S]
    aux = torch.randn(1, length, head.config.fc_input_size, generator=generator)  # [1,S,A·Ht]
    allowed = torch.zeros(1, length)
    allowed[0, anchor + 1] = 1  # its anchor is the known token of the block, ours the last one with features
    documents = torch.zeros(1, length, dtype=torch.long)
    with torch.no_grad():
        hidden, logits, *_ = model._backbone_forward(
            aux, ids, allowed, torch.zeros(1, length, 64), documents, max_anchors=1
        )  # [1,B,H], [1,B,Vd]
        table = target.embedding_weight.float()
        view = BatchView(
            input_ids=ids[0], supervised=torch.ones(length, dtype=torch.bool),
            documents=Documents.make(1, length, documents, "cpu"), aux_hidden=aux[0], final_hidden=None,
            embed=lambda places: table[ids[0][places]], length=length, axis=WholeAxis(length, "cpu"),
            embed_ids=lambda tokens: table[tokens],
        )  # fmt: skip
        ours = run_blocks(head, view, torch.tensor([anchor]), size)  # [1,B,H]
    torch.testing.assert_close(hidden, ours, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits, head.lm_head(ours), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", HEADS)
def test_a_speculators_folder_reads_back_and_converts_to_ours(name, tmp_path):
    head = make(**HEADS[name])
    exported(head, tmp_path / "own")
    convert_checkpoint(tmp_path / "own", tmp_path / "out", "speculators")
    said = json.loads((tmp_path / "out/config.json").read_text())
    assert said["aux_hidden_state_layer_ids"] == [2, 4, 5] and said["sliding_window_non_causal"] is True
    convert_checkpoint(tmp_path / "out", tmp_path / "again")
    one, two = (load_draft(tmp_path / folder) for folder in ("own", "again"))
    assert without_record(one.config) == without_record(two.config)
    assert all(torch.equal(tensor, two.state_dict()[key]) for key, tensor in one.state_dict().items())


REFUSED = [
    ({"draft_vocab_size": 32, "causal": True}, "blocks are bidirectional"),
    ({"draft_vocab_size": 256}, "over the whole vocabulary take the target's output layer"),
    ({"draft_vocab_size": 32, "target_hidden_size": 48}, "as wide as their target"),
]


@pytest.mark.parametrize(("overrides", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_what_speculators_would_compute_otherwise_is_refused(overrides, says, tmp_path):
    exported(make(**overrides), tmp_path / "own")
    with pytest.raises(ExportError, match=says):
        convert_checkpoint(tmp_path / "own", tmp_path / "out", "speculators")
    assert not (tmp_path / "out").exists()


def z_lab(folder, nested=True, **changes):
    """An export as z-lab writes one: no record of ours, the block's size inside, no output layer."""
    data = json.loads((folder / "config.json").read_text())
    for key in ("modelopt_eagle", "target_hidden_size", "draft_vocab_size", "head_dim"):
        data.pop(key)
    data |= {"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "num_target_layers": 8}
    if nested:
        data["dflash_config"]["block_size"] = data.pop("block_size")
    data["dflash_config"].pop("causal")
    (folder / "config.json").write_text(json.dumps({**data, **changes}))
    return folder


@pytest.mark.parametrize("nested", [True, False])
def test_a_folder_of_z_lab_is_read(nested, tmp_path):
    head = make(**HEADS["shared"])
    read = load_draft(z_lab(exported(head, tmp_path / "head"), nested))
    for name in ("block_size", "aux_layer_ids", "mask_token_id", "causal", "shares_head", "head_dim", "vocab_size"):
        assert getattr(read.config, name) == getattr(head.config, name), name
    assert all(torch.equal(tensor, read.state_dict()[key]) for key, tensor in head.state_dict().items()
               if key != "lm_head.weight")  # fmt: skip


def test_folders_that_leave_something_open_are_refused(tmp_path):
    folder = z_lab(exported(make(**HEADS["shared"]), tmp_path / "head"))
    data = json.loads((folder / "config.json").read_text())
    for gone in ("block_size", "mask_token_id", "target_layer_ids"):
        block = {key: value for key, value in data["dflash_config"].items() if key != gone}
        (folder / "config.json").write_text(json.dumps({**data, "dflash_config": block}))
        with pytest.raises(CheckpointError, match=f"does not say {gone}"):
            load_draft(folder)
    convert_checkpoint(exported(make(**HEADS["reduced"]), tmp_path / "own"), tmp_path / "theirs", "speculators")
    data = json.loads((tmp_path / "theirs/config.json").read_text())
    for change, says in (({"sample_from_anchor": True}, "draft from the masks alone"),
                         ({"mask_token_id": None}, "does not say mask_token_id")):  # fmt: skip
        (tmp_path / "theirs/config.json").write_text(json.dumps({**data, **change}))
        with pytest.raises(CheckpointError, match=says):
            load_draft(tmp_path / "theirs")


def test_copies_of_the_targets_tensors_are_left_out(tmp_path):
    convert_checkpoint(exported(make(**HEADS["reduced"]), tmp_path / "own"), tmp_path / "theirs", "speculators")
    file = tmp_path / "theirs/model.safetensors"
    tensors = load_file(file) | {"verifier_norm.weight": torch.ones(64), "verifier_lm_head.weight": torch.ones(256, 64)}
    save_file(tensors, file, metadata={"format": "pt"})
    one, two = (load_draft(tmp_path / folder).config for folder in ("theirs", "own"))
    assert without_record(one) == without_record(two)


def test_layers_of_the_other_numbering_are_refused(tmp_path):
    """The same numbers by inputs and by outputs, and one more layer than the target has."""
    folder = exported(make(**HEADS["reduced"]), tmp_path / "head")
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**data, "eagle_aux_hidden_state_layer_ids": [2, 4, 5]}))
    assert load_draft(folder).config.aux_layer_ids == (1, 3, 4)
    (folder / "config.json").write_text(json.dumps({**data, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]}))
    with pytest.raises(CheckpointError, match="name other layers"):
        load_draft(folder)


def test_a_head_under_the_name_of_another_drafter_is_refused(tmp_path):
    """A DFlash head that says it is an EAGLE-3 head, and the reverse."""
    blocks = exported(make(**HEADS["reduced"]), tmp_path / "blocks")
    eagle = exported(build_head(), tmp_path / "eagle")
    for folder, name, says in ((blocks, "LlamaForCausalLMEagle3", "nothing reads the key 'block_size'"),
                               (eagle, "DFlashDraftModel", "dflash_config does not say")):  # fmt: skip
        data = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**data, "architectures": [name]}))
        with pytest.raises(CheckpointError, match=says):
            load_draft(folder)
