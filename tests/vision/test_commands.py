"""Commands on a vision-language target with rows of text and of images."""

import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from modelopt_eagle.cli import calibrate_draft_vocab, estimate, train_and_export
from modelopt_eagle.cli.main import run_command
from modelopt_eagle.data import load_prompts, prepare_dataset
from modelopt_eagle.export import load_draft
from modelopt_eagle.features import OfflineSource, OnlineSource
from modelopt_eagle.features.dump import TargetBackEnd, dump
from modelopt_eagle.recipe import load_recipe
from modelopt_eagle.serving.check import encode_prompts
from tests.vision.conftest import text

ROOT = Path(__file__).parents[2]


def test_training_on_images_online_and_from_a_dump(folders, targets, mixed, tmp_path):
    """Features made in the step, kept on disk and dumped by the command give the same head."""
    folder = folders["qwen3_vl"]
    dump = [sys.executable, "collect_hidden_states/compute_hidden_states_hf.py", "--model", str(folder), "--input-file",
            str(mixed), "--output-dir", str(tmp_path / "store"), "--dtype", "float32", "--device", "cpu"]  # fmt: skip
    done = subprocess.run(dump, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "4 rows made" in done.stdout, done.stderr
    rows = prepare_dataset(targets["qwen3_vl"].tokenizer, mixed, vision=targets["qwen3_vl"].vision).rows
    stored, online = OfflineSource(tmp_path / "store"), OnlineSource(targets["qwen3_vl"], rows)
    for number in range(4):
        one, two = stored.load([number]), online.load([number])
        torch.testing.assert_close(one.aux_hidden, two.aux_hidden, rtol=1e-4, atol=1e-4)
    common = ["--base_model", str(folder), "--recipe", "quickstart", "training.epochs=3", "training.batch_size=2",
              "training.time_budget_minutes=null", "training.report_to=none", "eagle.draft_vocab_size=64",
              "eagle.init=random", "eagle.draft_vocab_counts=text", "validation.num_samples=2",
              "validation.max_new_tokens=4", "validation.speedup_prompts=0"]  # fmt: skip
    runs = {
        "online": ["--data", str(mixed), "data.cache_features=none"],
        "disk": ["--data", str(mixed), "data.cache_features=disk"],
        "offline": ["--offline_data", str(tmp_path / "store"), "data.cache_features=none"],
    }
    heads = {}
    for name, own in runs.items():
        assert train_and_export.main([*common, *own, "--output_dir", str(tmp_path / name)]) == 0
        heads[name] = load_draft(tmp_path / name / "export").state_dict()
    for name in ("disk", "offline"):
        for key, tensor in heads["online"].items():
            torch.testing.assert_close(tensor, heads[name][key], rtol=1e-3, atol=1e-4)


def test_rows_with_images_are_not_computed_again_from_their_tokens(folders, targets, mixed, tmp_path, capsys):
    """Their states follow from pictures that a store does not hold; only rows of text can be compared."""
    target = targets["qwen3_vl"]
    rows = prepare_dataset(target.tokenizer, mixed, vision=target.vision).rows
    for name, part in (("all", rows), ("pictures", [row for row in rows if row.images is not None])):
        dump(TargetBackEnd(target), part, tmp_path / name)
    options = ["--model", str(folders["qwen3_vl"]), "--device", "cpu"]
    assert run_command("features", ["verify", str(tmp_path / "all"), *options]) == 0
    output = capsys.readouterr().out
    assert "1 of 4 rows computed again" in output and "3 of these rows left out: they have images" in output
    assert run_command("features", ["verify", str(tmp_path / "pictures"), *options]) == 2
    assert "all 3 rows of the sample have images" in capsys.readouterr().err


def test_vocabulary_and_estimate_count_rows_with_images(folders, targets, mixed, tmp_path):
    target = targets["llava"]
    rows = prepare_dataset(target.tokenizer, mixed, vision=target.vision).rows
    recipe = load_recipe(None, [f"model.base_model={folders['llava']}", f"data.train_path={mixed}"])
    sizes = estimate.read_rows(recipe)
    assert sizes.lengths == [len(r.input_ids) for r in rows]
    assert sizes.supervised_counts() == [sum(r.supervised) for r in rows]
    command = ["--model", str(folders["llava"]), "--data", str(mixed), "--draft_vocab_size", "40",
               "--save_dir", str(tmp_path), "--argmax_rows", "2"]  # fmt: skip
    assert calibrate_draft_vocab.main(command) == 0
    inside = load_file(tmp_path / "draft_vocab.safetensors")["t2d"]
    assert all(inside[token] for row in rows for token, flag in zip(row.input_ids, row.supervised, strict=True) if flag)


def test_prompts_of_text_are_rendered_by_templates_of_lists(targets, tmp_path):
    import json

    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"id": "a", "turns": ["who?"]}) + "\n" + json.dumps(text("why?")) + "\n")
    target = targets["llava"]
    _, ids, _ = encode_prompts(target, path, None, 100)
    shown = [target.tokenizer.decode(row) for row in ids]
    assert [p.turns for p in load_prompts(path)] == [("who?",), ("why?",)]
    assert ["who?" in shown[0], "why?" in shown[1]] == [True, True]
