"""The three tables read from safetensors are the ones that the whole model would use."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from target_families import CONFIGS, make_family, make_vision_wrapper

from modelopt_eagle.errors import TargetError
from modelopt_eagle.target import Target, load_target, load_target_tables
from modelopt_eagle.target.tiny import make_byte_tokenizer, make_tiny_target


def assert_same_tables(tables, target):
    assert torch.equal(tables.embedding_weight, target.embedding.weight)
    x = torch.randint(3, 90, (2, 5))
    final = target.features(x, None, (target.num_layers - 1,))
    torch.testing.assert_close(tables.final_norm(final.aux_hidden), final.final_hidden)
    torch.testing.assert_close(tables.head(final.final_hidden), target.model(x).logits, rtol=1e-5, atol=1e-5)
    assert not any(p.requires_grad for p in tables.final_norm.parameters())


def assert_same_layers(tables, target, count=2):
    """The last layers, read from the files when they are asked for, hold what the loaded ones hold."""
    assert len(tables.layers) == target.num_layers
    for read, loaded in zip(tables.layers[-count:], target.layers[-count:], strict=True):
        theirs = loaded.state_dict()
        assert read.state_dict().keys() == theirs.keys() and type(read) is type(loaded)
        assert all(torch.equal(tensor, theirs[key]) for key, tensor in read.state_dict().items())
        assert not any(p.requires_grad for p in read.parameters())


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_single_or_sharded_tied_or_untied(tmp_path, tie, sharded):
    target = make_tiny_target(tie=tie)
    target.model.save_pretrained(tmp_path, max_shard_size="100KB" if sharded else "5GB")
    target.tokenizer.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors.index.json").exists() == sharded
    tables = load_target_tables(tmp_path)
    assert_same_tables(tables, target)
    assert_same_layers(tables, target)
    assert (tables.head.weight.data_ptr() == tables.embedding_weight.data_ptr()) == tie
    assert tables.identity() == load_target(tmp_path).identity()


@pytest.mark.parametrize("family", CONFIGS)
def test_every_family(family, tmp_path):
    model = make_family(family)
    model.save_pretrained(tmp_path)
    make_byte_tokenizer().save_pretrained(tmp_path)
    assert_same_tables(load_target_tables(tmp_path), Target(model, None, name=family))


def test_dtype(tiny_target_dir):
    tables = load_target_tables(tiny_target_dir, dtype="bfloat16")
    kinds = {tables.embedding_weight.dtype, tables.final_norm.weight.dtype, tables.head.weight.dtype}
    kinds |= {tensor.dtype for tensor in tables.layers[-1].parameters()}
    assert kinds == {torch.bfloat16}


def test_a_layer_that_is_not_in_the_files_is_named(tmp_path):
    make_tiny_target(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    last = max(int(key.split(".")[2]) for key in tensors if ".layers." in key)
    name = f"model.layers.{last}.mlp.up_proj.weight"
    for wrong, says in (
        (None, f"expected a tensor {name}, found none"),
        (tensors[name][1:], f"{name} is .* in the files"),
    ):
        others = {key: value for key, value in tensors.items() if key != name}
        save_file(others | ({} if wrong is None else {name: wrong}), tmp_path / "model.safetensors", {"format": "pt"})
        tables = load_target_tables(tmp_path)
        assert tables.layers[0] is not None
        with pytest.raises(TargetError, match=says):
            tables.layers[last]


def save_wrapper(folder, rename, extra=()):
    """Save the vision wrapper with keys renamed and tables added; return the target."""
    model = make_vision_wrapper()
    model.save_pretrained(folder)
    make_byte_tokenizer().save_pretrained(folder)
    tensors = {rename(key): value for key, value in load_file(folder / "model.safetensors").items()} | dict(extra)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return Target(model, None, name="wrapper")


NESTINGS = {
    "as saved": lambda key: key,
    "deeper": lambda key: "model.language_model.model." + key.split("language_model.")[-1].removeprefix("model."),
    "bare": lambda key: key.split("language_model.")[-1].removeprefix("model."),
}


@pytest.mark.parametrize("nesting", NESTINGS)
def test_nested_keys(tmp_path, nesting):
    def rename(key):
        return NESTINGS[nesting](key) if "language_model" in key else key

    target = save_wrapper(tmp_path, rename)
    assert_same_tables(load_target_tables(tmp_path), target)


def test_of_two_tables_named_alike_the_text_models_is_taken(tmp_path):
    decoy = torch.full((96, 32), 9.0)
    extra = {
        "model.audio_tower.embed_tokens.weight": decoy,
        "model.audio_tower.norm.weight": torch.ones(32),
        "model.mtp.embed_tokens.weight": decoy.clone(),
        "model.mtp.layers.0.mlp.weight": torch.ones(2),
        "model.mtp.norm.weight": torch.ones(32),
    }
    target = save_wrapper(tmp_path, lambda key: key, extra)
    assert_same_tables(load_target_tables(tmp_path), target)


def test_two_tables_that_both_fit_are_not_guessed_between(tmp_path):
    def twice(tensors, name):
        return {name + key.removeprefix("model."): value.clone() for key, value in tensors.items() if "model." in key}

    target = make_tiny_target(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(twice(tensors, "a.") | twice(tensors, "b.") | {"lm_head.weight": tensors["lm_head.weight"]},
              tmp_path / "model.safetensors")  # fmt: skip
    with pytest.raises(TargetError, match="found several: a.embed_tokens.weight, b.embed_tokens.weight"):
        load_target_tables(tmp_path)
    assert target.num_layers == 8


def test_the_nearest_of_two_heads_is_taken(tmp_path):
    target = make_tiny_target(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors.pop("lm_head.weight")
    nested = {"thinker." + key: value for key, value in tensors.items()}
    nested |= {"thinker.lm_head.weight": head, "talker.lm_head.weight": torch.zeros_like(head)}
    save_file(nested, tmp_path / "model.safetensors")
    assert_same_tables(load_target_tables(tmp_path), target)


@pytest.fixture
def folder(tiny_target_dir, tmp_path):
    return shutil.copytree(tiny_target_dir, tmp_path / "model")


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_missing_head_without_tying(folder):
    change_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(TargetError, match="one output head .*found none.*model.embed_tokens.weight"):
        load_target_tables(folder)


def test_missing_embedding_lists_near_matches(folder):
    def rename(tensors):
        tensors["model.token_embedder.weight"] = tensors.pop("model.embed_tokens.weight")

    change_tensors(folder, rename)
    with pytest.raises(TargetError, match=r"found none. Near matches:.*model.token_embedder.weight \(256, 64\)"):
        load_target_tables(folder)


def test_table_of_another_size(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    with pytest.raises(TargetError, match=r"300 x 64.*model.embed_tokens.weight \(256, 64\)"):
        load_target_tables(folder)


def test_quantised_table_is_refused(folder):
    change_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": torch.ones(256, 64, dtype=torch.int8)}))
    with pytest.raises(TargetError, match="lm_head.weight in plain floating point, found torch.int8"):
        load_target_tables(folder)


def test_no_safetensors(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(TargetError, match="expected model.safetensors or"):
        load_target_tables(folder)


def test_missing_shard(tmp_path):
    target = make_tiny_target()
    target.model.save_pretrained(tmp_path, max_shard_size="100KB")
    target.tokenizer.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shard = index["weight_map"]["model.embed_tokens.weight"]
    (tmp_path / shard).unlink()
    with pytest.raises(TargetError, match=f"shard {shard} named in the index is missing"):
        load_target_tables(tmp_path)
