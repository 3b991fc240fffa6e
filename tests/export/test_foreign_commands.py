"""The commands on heads of other tools: measured, exported, quantised, with the same result as our own folder."""

import json

import pytest
import torch

from modelopt_eagle.cli.main import run_command
from modelopt_eagle.draft import DraftConfig, DraftVocab, EagleModule
from modelopt_eagle.export import export_checkpoint, load_draft
from tests.export.foreign import TOOLS, foreign


@pytest.fixture(scope="module")
def own_head(tiny_target):
    """A head that drafts what the target's last layer would, so that some of it is accepted."""
    from modelopt_eagle.draft.eagle3.initialise import start_from_target

    config = DraftConfig.from_target(tiny_target.config, 200)
    torch.manual_seed(0)
    module = EagleModule(config, DraftVocab.from_target_ids(torch.arange(200), 256))
    start_from_target(module, tiny_target)
    return module


def measured(folder, target, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": str(n), "category": "all", "turns": [f"Say {n}."]} for n in range(3)]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    given = ["--model_path", folder, "--base_model", target, "--prompts", prompts, "--max_new_tokens", "24",
             "--speedup_prompts", "0", "--output", tmp_path / "acceptance.json"]  # fmt: skip
    assert run_command("ar_validate", [str(part) for part in given]) == 0
    found = json.loads((tmp_path / "acceptance.json").read_text())
    return found["steps"], found["per_position"]


@pytest.mark.parametrize("tool", TOOLS)
def test_measured_and_exported_as_our_own_folder_is(tmp_path, tiny_target, tiny_target_dir, own_head, tool):
    export_checkpoint(own_head, None, tmp_path / "ours", target=tiny_target)
    folder = foreign(tool, own_head, tmp_path / tool, table=tiny_target.embedding.weight.detach())
    ours = measured(tmp_path / "ours", tiny_target_dir, tmp_path)
    assert measured(folder, tiny_target_dir, tmp_path) == ours and ours[0] > 10
    given = ["--model_path", folder, "--export_path", tmp_path / "out", "--base_model", tiny_target_dir]
    if tool == "modelopt":
        given += ["--d2t-convention", "offset"]
    assert run_command("export_hf_checkpoint", [str(part) for part in given]) == 0
    exported = load_draft(tmp_path / "out")
    assert not exported.config.own_embedding and torch.equal(exported.fc.weight, own_head.fc.weight)
    assert measured(tmp_path / "out", tiny_target_dir, tmp_path) == ours


def test_without_a_target_the_command_asks_for_it(tmp_path, own_head, capsys):
    folder = foreign("eagle", own_head, tmp_path / "eagle")
    assert run_command("ar_validate", ["--model_path", str(folder)]) == 2
    assert "answer with --base-model or --target-layers" in capsys.readouterr().err
    assert run_command("ar_validate", ["--model_path", str(folder), "--target-layers", "8"]) == 2
    assert "does not record its target" in capsys.readouterr().err
