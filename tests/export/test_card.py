"""The model card: what was trained on, acceptance by category with its interval, commands, licence."""

import json
import shlex
from types import SimpleNamespace

import pytest
import yaml

from modelopt_eagle.cli.main import run_command
from modelopt_eagle.draft.dflash.layout import DFlashLayout
from modelopt_eagle.draft.medusa.layout import MedusaLayout
from modelopt_eagle.export import export_checkpoint
from modelopt_eagle.export.card import licence_of
from tests.export.conftest import build_head

REPORT = {
    "acceptance_length": 2.5, "ci95": [2.4, 2.6], "per_position": [0.7, 0.5, 0.3], "speedup": 1.4,
    "per_category": {"writing": 2.25, "math": 2.75}, "per_category_ci95": {"writing": [2.125, 2.375]},
    "data": "rows.jsonl; 12 conversations read", "recipe": "`training.epochs=3`", "training_steps": 18,
    "target_license": "apache-2.0",
}  # fmt: skip


def parts(card):
    """``(front matter, text)``."""
    _, head, text = card.split("---", 2)
    return yaml.safe_load(head), text


def test_everything_known_is_on_the_card(tmp_path):
    head = build_head(rope_scaling=None)
    export_checkpoint(head, None, tmp_path / "out", report=REPORT)
    data, text = parts((tmp_path / "out/README.md").read_text())
    assert data == {"tags": ["eagle3", "speculative-decoding"], "license": "apache-2.0", "base_model": "someone/target"}
    for line in (
        "* target: someone/target (llama)",
        "* data: rows.jsonl; 12 conversations read",
        "* recipe: `training.epochs=3`",
        "* optimizer steps: 18",
        "Mean acceptance length **2.500** (95 % interval 2.400 to 2.600), the target's own token included.",
        "| writing | 2.250 | 2.125 to 2.375 |",
        "| math | 2.750 | - |",
        "vllm serve someone/target",
        "eagle3_layers_to_capture: [1, 3, 4]",
        "vLLM 0.11.1 or newer (eagle_aux_hidden_state_layer_ids), tested with 0.32.0 (run on a CPU)",
        "The head was made from its target: apache-2.0.",
    ):
        assert line in text, line


def test_what_is_not_known_is_said_and_not_made_up(tmp_path):
    export_checkpoint(build_head(target_name=None), None, tmp_path / "out")
    data, text = parts((tmp_path / "out/README.md").read_text())
    assert data == {"tags": ["eagle3", "speculative-decoding"]}
    assert "Not measured." in text and "that of the target; see its model card" in text and "not recorded" in text


@pytest.mark.parametrize(
    ("files", "licence"),
    [
        ({"README.md": "---\nlicense: mit\n---\n# A model\n"}, "mit"),
        ({"README.md": "---\nlicense: other\nlicense_name: llama3.1\n---\n"}, "llama3.1"),
        (
            {"README.md": "# no metadata\n", "LICENSE": "\n  Gemma Terms of Use\n\n..."},
            "Gemma Terms of Use (its file LICENSE)",
        ),
        ({"README.md": "---\n: [broken\n---\n"}, None),
        ({}, None),
    ],
)
def test_the_licence_is_read_beside_the_target(tmp_path, files, licence):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert licence_of(tmp_path) == licence


def test_the_licence_of_names(tmp_path):
    assert licence_of("quickstart") == licence_of("HuggingFaceTB/SmolLM2-135M-Instruct") == "apache-2.0"
    assert licence_of("someone/never-downloaded") is None and licence_of("not a name") is None
    assert licence_of(None) is None


def test_export_command_puts_the_targets_licence_and_the_report_on_the_card(tmp_path, tiny_target, tiny_target_dir):
    import shutil

    target = tmp_path / "target"
    shutil.copytree(tiny_target_dir, target)
    (target / "README.md").write_text("---\nlicense: cc-by-4.0\n---\n")
    head = build_head(
        hidden_size=64, target_hidden_size=64, vocab_size=256, draft_vocab_size=256, target_name=None,
        tokenizer_hash=tiny_target.identity()["tokenizer_hash"],
    )  # fmt: skip
    export_checkpoint(head, None, tmp_path / "head")
    report = {name: value for name, value in REPORT.items() if name != "target_license"}
    (tmp_path / "acceptance.json").write_text(json.dumps(report))
    given = ["--model_path", tmp_path / "head", "--export_path", tmp_path / "out", "--base_model", target,
             "--report", tmp_path / "acceptance.json"]  # fmt: skip
    assert run_command("export_hf_checkpoint", [str(part) for part in given]) == 0
    data, text = parts((tmp_path / "out/README.md").read_text())
    assert data["license"] == "cc-by-4.0" and "made from its target: cc-by-4.0" in text and "**2.500**" in text


@pytest.mark.parametrize("layout", [DFlashLayout(), MedusaLayout()])
def test_the_targets_name_is_one_argument_of_every_command(layout):
    config = SimpleNamespace(
        target_name="a target; rm -rf b",
        block_size=4,
        causal=False,
        num_hidden_layers=1,
        heads=3,
        shared_output=True,
        vocab_size=64,
        draft_vocab_size=64,
    )
    command = next(line for line in layout.serve_lines(config, {}) if line.startswith("vllm serve"))
    assert shlex.split(command.removesuffix("\\"))[2:4] == ["a target; rm -rf b", "--speculative-config"]
