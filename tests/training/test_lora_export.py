"""From a run with adapters to an export that carries them, and its measurement, by the commands."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelopt_eagle import pipeline
from modelopt_eagle.cli import ar_validate, convert_checkpoint, export_hf_checkpoint, quantize_drafter, train_and_export
from modelopt_eagle.errors import TargetError
from modelopt_eagle.export import load_draft
from modelopt_eagle.export.folders import is_export
from modelopt_eagle.recipe import load_recipe
from modelopt_eagle.target import load_target
from modelopt_eagle.target.lora import TargetAdapter, check_adapter
from modelopt_eagle.target.tiny import make_tiny_target
from modelopt_eagle.training.head import continued_head
from tests.training.runs import write_conversations

SMALL = ["--num_samples", "4", "--max_new_tokens", "16", "--speedup_prompts", "0"]


@pytest.fixture(scope="module")
def output(tiny_target_dir, tmp_path_factory):
    """The output folder of a whole run with adapters."""
    folder = tmp_path_factory.mktemp("run")
    data = write_conversations(folder / "rows.jsonl")
    output = folder / "out"
    arguments = [
        f"model.base_model={tiny_target_dir}", f"data.train_path={data}", f"training.output_dir={output}",
        "training.epochs=2", "training.learning_rate=3e-3", "training.report_to=none", "eagle.draft_vocab_size=64",
        "eagle.ttt_warmup=0", "eagle.init=random", "training.time_budget_minutes=null", "data.cache_features=none",
        "target_lora.rank=4", "target_lora.first_layer=2", "target_lora.learning_rate=1e-2",
        "validation.num_samples=4", "validation.max_new_tokens=16", "validation.speedup_prompts=0",
    ]  # fmt: skip
    assert train_and_export.main(["--recipe", "eagle3", *arguments]) == 0
    return output


def test_the_export_carries_the_adapter_and_says_how_to_serve_it(tiny_target_dir, output):
    export = output / "export"
    assert {file.name for file in export.iterdir()} == {
        "config.json", "model.safetensors", "README.md", "target_adapter",
    }  # fmt: skip
    best = (output / "best").resolve()
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (export / "target_adapter" / name).read_bytes() == (best / "target_adapter" / name).read_bytes()
    config = json.loads((export / "target_adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["target_modules"]) == ("LORA", 4, ["q_proj", "v_proj"])
    assert config["base_model_name_or_path"] == str(tiny_target_dir) and config["inference_mode"]
    assert config["layers_to_transform"] == [2, 3, 4, 5, 6, 7]
    assert check_adapter(export / "target_adapter", tiny_target_dir) == 2 * 12
    card = (export / "README.md").read_text()
    assert "with the adapter in `target_adapter/`" in card and "merge_and_unload" in card
    assert "--enable-lora --max-lora-rank 8 --lora-modules adapted=THIS_FOLDER/target_adapter" in card
    assert "vllm serve MERGED_TARGET --speculative-config" in card
    assert "`target_lora.rank=4`" in card
    assert load_draft(export).config.extra["target_adapter"]["rank"] == 4
    assert is_export(export)


def test_the_same_command_measures_and_exports_nothing_again(tiny_target_dir, output, capsys):
    recipe = output / "recipe.yaml"
    assert train_and_export.main(["--recipe", str(recipe)]) == 0
    said = capsys.readouterr().err
    assert "training is complete" in said and "measured already" in said and "exported already" in said


def test_another_adapter_beside_the_same_head_is_measured_and_exported_anew(output, tmp_path):
    checkpoint = shutil.copytree((output / "best").resolve(), tmp_path / "checkpoint")
    before, file = pipeline.adapter_mark(checkpoint), checkpoint / "target_adapter/adapter_model.safetensors"
    save_file({name: 2 * tensor for name, tensor in load_file(file).items()}, file)
    assert before and pipeline.adapter_mark(checkpoint) != before


def test_validation_over_the_adapted_target_is_that_of_the_run(tiny_target_dir, output, tmp_path, capsys):
    measured = json.loads((output / "report" / "acceptance.json").read_text())
    command = ["--model_path", str(output / "export"), "--base_model", str(tiny_target_dir), *SMALL]
    result = tmp_path / "with.json"
    assert ar_validate.main([*command, "--target_adapter", str(output / "export"), "--output", str(result)]) == 0
    said = capsys.readouterr().out
    assert f"target adapter {output / 'export' / 'target_adapter'}, merged" in said and "warning" not in said
    with_adapter = json.loads(result.read_text())
    for key in ("prompts", "steps", "acceptance_length", "per_position"):
        assert with_adapter[key] == measured[key], key
    ar_validate.main([*command, "--output", str(tmp_path / "without.json")])
    assert "trained together with an adapter on its target" in capsys.readouterr().out


def test_a_checkpoint_is_exported_with_its_adapter(output, tmp_path):
    assert export_hf_checkpoint.main(["--model_path", str(output), "--export_path", str(tmp_path / "export")]) == 0
    again, first = (load_file(folder / "target_adapter" / "adapter_model.safetensors")
                    for folder in (tmp_path / "export", output / "export"))  # fmt: skip
    assert again.keys() == first.keys() and all(torch.equal(again[name], first[name]) for name in again)
    (tmp_path / "export" / "target_adapter" / "notes.txt").write_text("mine")
    assert not is_export(tmp_path / "export")  # so it is never overwritten


@pytest.mark.parametrize("to", ["universal", "speculators", "eagle"])
def test_a_conversion_keeps_the_adapter(tiny_target_dir, output, tmp_path, to):
    command = ["--input", str(output), "--output", str(tmp_path / to), "--to", to, "--base-model", str(tiny_target_dir)]
    assert convert_checkpoint.main(command) == 0
    kept, first = (
        folder / "target_adapter" / "adapter_model.safetensors" for folder in (tmp_path / to, output / "export")
    )
    assert kept.read_bytes() == first.read_bytes() and is_export(tmp_path / to)


def test_quantisation_keeps_the_adapter_and_says_whose_text_is_measured(tiny_target_dir, output, tmp_path, capsys):
    command = ["--model_path", str(output), "--format", "int8", "--calib_data", "quickstart", "--calib_samples", "2",
               "--base_model", str(tiny_target_dir), "--export_path", str(tmp_path / "int8"), "--num_samples", "2",
               "--max_new_tokens", "4", "--max_drop", "0.9"]  # fmt: skip
    assert quantize_drafter.main(command) == 0
    assert "trained together with an adapter on its target" in capsys.readouterr().out
    assert (tmp_path / "int8" / "target_adapter" / "adapter_config.json").is_file()


def test_a_head_that_goes_on_without_the_adapter_does_not_claim_it(tiny_target_dir, output):
    recipe = load_recipe("eagle3", [f"model.draft_init={output}", "eagle.draft_vocab_size=null"])
    continued = continued_head(recipe, load_target(tiny_target_dir).identity())
    assert "target_adapter" in load_draft(output).config.extra and "target_adapter" not in continued.config.extra


def test_an_adapter_without_a_place_in_the_target_is_found_by_reading_back(tmp_path):
    target = make_tiny_target(tmp_path / "target")
    TargetAdapter(target, rank=2, alpha=2, target_modules=["q_proj"]).save(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({name.replace("layers.7.", "layers.9."): tensor for name, tensor in tensors.items()}, file)
    with pytest.raises(TargetError, match="layers.[79].* is in the"):
        check_adapter(tmp_path / "adapter", tmp_path / "target")


def test_a_refused_adapter_is_said_by_the_command(tiny_target_dir, output, tmp_path):
    command = ["--model_path", str(output / "export"), "--base_model", str(tiny_target_dir), *SMALL]
    with pytest.raises(TargetError, match="expected a PEFT folder"):
        ar_validate.main([*command, "--target_adapter", str(tmp_path), "--output", str(tmp_path / "a.json")])
    TargetAdapter(make_tiny_target(layers=10), rank=2, alpha=2, target_modules=["q_proj"]).save(tmp_path / "deep")
    with pytest.raises(TargetError, match="adapter for another model"):
        ar_validate.main([*command, "--target_adapter", str(tmp_path / "deep"), "--output", str(tmp_path / "a.json")])


def test_merged_target_decodes_the_adapted_text(tiny_target_dir, output):
    """What the card's Python lines make is what was trained."""
    import peft

    adapted = peft.PeftModel.from_pretrained(load_target(tiny_target_dir).model, output / "export" / "target_adapter")
    ids = torch.arange(30, 50)[None]
    before = adapted(input_ids=ids).logits
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(input_ids=ids).logits, before, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(before, load_target(tiny_target_dir).model(input_ids=ids).logits, atol=1e-3)
