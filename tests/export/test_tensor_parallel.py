"""Tensor-parallel sizes: which divide a head, which engines pad, and an export made for one."""

import dataclasses

import pytest
import torch

from modelopt_eagle.cli.main import run_command
from modelopt_eagle.draft import DraftVocab, EagleModule
from modelopt_eagle.errors import ExportError
from modelopt_eagle.export import export_checkpoint, inspect_checkpoint, load_draft
from modelopt_eagle.export.engines.parallel import check_parallel, indivisible, parallel_text
from tests.export.conftest import LATENT, build_head


@pytest.mark.parametrize(
    ("overrides", "size", "wrong"),
    [
        ({}, 2, []),
        ({}, 4, []),  # 2 key heads are repeated
        ({}, 8, ["4 attention heads"]),
        ({"num_attention_heads": 9, "num_key_value_heads": 3}, 2, ["9 attention heads", "3 key and value heads"]),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, 4, ["3 key and value heads"]),
        ({"intermediate_size": 50}, 4, ["a feed-forward width of 50"]),
        (LATENT, 4, []),
    ],
)
def test_what_does_not_divide_is_named(overrides, size, wrong):
    config = build_head(**overrides).config
    assert indivisible(config, size) == wrong
    if wrong:
        with pytest.raises(ExportError, match=f"{wrong[0]}.*do not divide by {size}.*draft_tensor_parallel_size"):
            check_parallel(config, size)
    else:
        check_parallel(config, size)


def test_the_card_and_the_inspection_say_which_sizes_fit(tmp_path):
    head = build_head(draft_vocab_size=17)
    text = parallel_text(head.config)
    assert text.startswith("2 fits (vLLM pads the 17 rows of lm_head to 64, SGLang pads the 17 rows")
    assert "8 fails (4 attention heads do not divide)" in text and '"draft_tensor_parallel_size": 1' in text
    export_checkpoint(head, None, tmp_path / "out")
    assert f"Tensor-parallel sizes: {text}." in (tmp_path / "out/README.md").read_text()
    assert f"parallel    {text}" in inspect_checkpoint(tmp_path / "out").text()


def test_an_export_for_a_size_is_padded_and_drafts_as_before(tmp_path, capsys):
    head = build_head(draft_vocab_size=17)
    export_checkpoint(head, None, tmp_path / "plain")
    given = ["--model_path", str(tmp_path / "plain"), "--export_path", str(tmp_path / "out"), "--tensor-parallel"]
    assert run_command("export_hf_checkpoint", [*given, "8"]) == 2
    assert "4 attention heads of the head do not divide by 8" in capsys.readouterr().err
    assert run_command("export_hf_checkpoint", [*given, "0"]) == 2 and not (tmp_path / "out").exists()
    assert run_command("export_hf_checkpoint", [*given, "4"]) == 0
    assert "3 tokens, never the likeliest, pad the draft vocabulary to a multiple of 4" in capsys.readouterr().out
    padded = load_draft(tmp_path / "out")
    assert padded.config.draft_vocab_size == 20 and bool((padded.target_ids.diff() > 0).all())
    assert set(head.target_ids.tolist()) < set(padded.target_ids.tolist())
    states = torch.randn(2000, 32)
    one = head.target_ids[head.lm_head(states).argmax(-1)]
    assert torch.equal(one, padded.target_ids[padded.lm_head(states).argmax(-1)])
    assert torch.equal(padded.layers[0].mlp.up_proj.weight, head.layers[0].mlp.up_proj.weight)


def test_full_and_divisible_vocabularies_stay_as_they_are(tmp_path):
    for number, size in enumerate((64, 16)):
        head = build_head(draft_vocab_size=size)
        report = export_checkpoint(head, None, tmp_path / str(number), tensor_parallel=4)
        assert load_draft(tmp_path / str(number)).config.draft_vocab_size == size and report.notes == []
    config = dataclasses.replace(build_head().config, vocab_size=63, draft_vocab_size=62)
    tight = EagleModule(config, DraftVocab.from_target_ids(torch.arange(62), 63))
    with pytest.raises(ExportError, match="cannot be padded to a multiple of 4: the target has 63 tokens"):
        export_checkpoint(tight, None, tmp_path / "no", tensor_parallel=4)
