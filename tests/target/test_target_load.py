"""What ``load_target`` accepts and what it says of the rest."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from target_families import make_family, make_vision_wrapper

from modelopt_eagle.errors import TargetError
from modelopt_eagle.target import load_target, load_target_tables
from modelopt_eagle.target.tiny import make_byte_tokenizer, make_tiny_target


@pytest.fixture
def folder(tiny_target_dir, tmp_path):
    """A copy of the tiny target's folder that a test may damage."""
    return shutil.copytree(tiny_target_dir, tmp_path / "model")


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_saved_target_equals_the_one_in_memory(tiny_target_dir):
    loaded, built = load_target(tiny_target_dir), make_tiny_target()
    x = torch.randint(3, 247, (1, 9))
    assert torch.equal(loaded.features(x).aux_hidden, built.features(x).aux_hidden)
    assert loaded.identity()["tokenizer_hash"] == built.identity()["tokenizer_hash"]
    assert loaded.identity()["template_hash"] == built.identity()["template_hash"]
    assert loaded.dtype == torch.float32 and loaded.name == str(tiny_target_dir)


def test_dtype_is_followed(tiny_target_dir):
    assert (
        load_target(tiny_target_dir, dtype="bfloat16").features(torch.tensor([[5, 6]])).aux_hidden.dtype
        == torch.bfloat16
    )
    with pytest.raises(TargetError, match="found 'fp8'"):
        load_target(tiny_target_dir, dtype="fp8")


def test_vision_wrapper_from_a_folder(tmp_path):
    make_vision_wrapper().save_pretrained(tmp_path)
    make_byte_tokenizer().save_pretrained(tmp_path)
    target = load_target(tmp_path)
    target.check_parity(torch.randint(3, 96, (2, 7)))
    assert target.parts.names["layers"] == "model.language_model.layers"


def test_a_family_without_sdpa_runs_eager_and_says_so(tmp_path, caplog):
    make_family("gemma2").save_pretrained(tmp_path)
    make_byte_tokenizer().save_pretrained(tmp_path)
    caplog.set_level("INFO", logger="modelopt_eagle")
    found, eager = load_target(tmp_path), load_target(tmp_path, attn_implementation="eager")
    assert found.model.config._attn_implementation == "eager"
    assert [line for line in caplog.messages if "SDPA" in line] == [
        "target: Gemma2ForCausalLM has no attention by SDPA in this transformers: it runs eager"
    ]
    x = torch.randint(3, 96, (1, 7))
    assert torch.equal(found.features(x).aux_hidden, eager.features(x).aux_hidden)


def test_sdpa_is_what_a_family_runs_that_has_it(tiny_target):
    assert tiny_target.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such/folder", "no such folder"),
        ("nowhere/no-such-model", "neither a local folder nor a model that could be fetched"),
        ("/no/such.gguf", "no such GGUF file"),
    ],
)
def test_missing_models(name, message):
    with pytest.raises(TargetError, match=message):
        load_target(name)


def test_folder_without_config(tmp_path):
    with pytest.raises(TargetError, match="expected a model folder with config.json"):
        load_target(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(TargetError, match="merge it into its base model"):
        load_target(tmp_path)


def test_unknown_model_type_is_not_replaced_by_a_near_one(folder):
    edit_config(folder, model_type="lama")
    with pytest.raises(TargetError, match="unknown model type 'lama'.*nearest are .*llama"):
        load_target(folder)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
        {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
        {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
        {"model_type": "vit"},
    ],
)
def test_models_without_next_token_logits_are_refused(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    for load in (load_target, load_target_tables):
        with pytest.raises(TargetError, match="expected a causal language model"):
            load(tmp_path)


def test_broken_config(folder):
    (folder / "config.json").write_text('{"model_type": "llama"')
    with pytest.raises(TargetError, match="config.json cannot be read"):
        load_target(folder)


def test_truncated_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    for load in (load_target, load_target_tables):
        with pytest.raises(TargetError, match="cannot load the weights|cut short"):
            load(folder)


def test_missing_tensors_are_not_filled_with_random_ones(folder):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetError, match="1 missing keys, such as model.layers.3.mlp.up_proj.weight"):
        load_target(folder)


def test_weights_of_another_size(folder):
    edit_config(folder, intermediate_size=96)
    with pytest.raises(TargetError, match="mlp"):
        load_target(folder)


def test_missing_tokenizer(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(TargetError, match="cannot load its tokenizer"):
        load_target(folder)


def test_chat_template_from_text_or_file(folder, tmp_path):
    template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    file = tmp_path / "template.jinja"
    file.write_text(template)
    hashes = set()
    for given in (template, file, str(file)):
        target = load_target(folder, chat_template=given)
        text = target.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
        assert text == "[hi]"
        hashes.add(target.identity()["template_hash"])
    assert len(hashes) == 1 and load_target(folder).identity()["template_hash"] not in hashes
    with pytest.raises(TargetError, match="found no file 'nofile.jinja'"):
        load_target(folder, chat_template="nofile.jinja")


def test_hub_id_takes_the_commit_as_revision(tiny_target_dir, tmp_path):
    """A hub cache laid out as huggingface_hub does, read offline in a process of its own."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--acme--tiny"
    shutil.copytree(tiny_target_dir, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    code = (
        "from modelopt_eagle.target import load_target, load_target_tables\n"
        "target, tables = load_target('acme/tiny'), load_target_tables('acme/tiny')\n"
        "assert target.identity() == tables.identity(), (target.identity(), tables.identity())\n"
        "print(target.identity()['model'], target.identity()['revision'])"
    )
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["acme/tiny", commit]
