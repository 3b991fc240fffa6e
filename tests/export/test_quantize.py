"""Quantised heads: the packed numbers, the exclusions, and the refusal of heads that lost too much."""

import json

import pytest
import torch
from safetensors.torch import load_file

from modelopt_eagle.cli.main import run_command
from modelopt_eagle.errors import CheckpointError, ExportError
from modelopt_eagle.export import export_checkpoint, load_draft
from modelopt_eagle.export.quant_formats import from_e2m1, pack, quantize_input, to_e2m1, unpack
from modelopt_eagle.export.quantize import calibrate, feed, quantize_drafter, quantized_module
from modelopt_eagle.features.batch import FeatureBatch
from modelopt_eagle.target.tiny import make_tiny_target
from modelopt_eagle.training import rollout
from tests.export.conftest import LATENT, build_head, stand_in_tables

STEP = {"fp8": 2.0**-4, "nvfp4": 0.25, "int8": 1 / 254}
"""Largest relative rounding error: of the number itself (fp8), of the largest in a block (nvfp4) or row (int8)."""


class Batch:
    """The part of a feature batch that calibration reads."""

    def __init__(self, seed, width=96):
        generator = torch.Generator().manual_seed(seed)
        self.input_ids = torch.randint(64, (1, 24), generator=generator)  # [1,N]
        self.document_ids = torch.zeros(1, 24, dtype=torch.long)
        self.aux_hidden = torch.randn(1, 24, width, generator=generator)  # [1,N,A·Ht]


def calibration(head):
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(64, 32)
    return feed([Batch(1, head.config.fc_input_size), Batch(2, head.config.fc_input_size)], embedding, 3)


def test_the_stand_in_batch_has_the_fields_of_a_real_one():
    assert {"input_ids", "document_ids", "aux_hidden"} <= set(FeatureBatch.__dataclass_fields__)


@pytest.mark.parametrize("form", STEP)
def test_unpacking_gives_the_weight_back_within_the_formats_step(form):
    torch.manual_seed(0)
    weight = torch.randn(24, 64) * torch.logspace(-2, 0, 24)[:, None]
    packed = pack(weight, 3.0, float(weight.abs().max()), form)
    error = (unpack(packed, form) - weight).abs()
    if form == "fp8":
        bound = weight.abs() * STEP[form] + weight.abs().max() * 2.0**-17
    elif form == "nvfp4":
        bound = (weight.unflatten(1, (-1, 16)).abs().amax(-1) * STEP[form]).repeat_interleave(16, 1)
    else:
        bound = weight.abs().amax(1, keepdim=True) * STEP[form] * 1.001
    assert bool((error <= bound).all())
    shapes = {"fp8": (24, 64), "nvfp4": (24, 32), "int8": (24, 64)}
    kinds = {"fp8": torch.float8_e4m3fn, "nvfp4": torch.uint8, "int8": torch.int8}
    assert packed["weight"].shape == shapes[form] and packed["weight"].dtype == kinds[form]


def test_e2m1_rounds_to_nearest_and_ties_to_even():
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    assert torch.equal(from_e2m1(to_e2m1(torch.cat((grid, -grid)))), torch.cat((grid, -grid)))
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 9.0])
    assert from_e2m1(to_e2m1(ties)).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]


def test_nvfp4_packs_as_modelopt_does():
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    torch.manual_seed(0)
    weight = torch.randn(32, 64)
    ours = pack(weight, 3.0, float(weight.abs().max()), "nvfp4")
    theirs, scales, scale_2 = NVFP4QTensor.quantize(weight, 16)
    assert torch.equal(theirs._quantized_data, ours["weight"])
    assert torch.equal(scales.float(), ours["weight_scale"].float()) and float(scale_2) == float(ours["weight_scale_2"])


@pytest.mark.parametrize("form", STEP)
@pytest.mark.parametrize("overrides", [{}, LATENT], ids=["llama", "kimik2"])
def test_folder_has_every_layer_quantised_but_lm_head(tmp_path, form, overrides):
    if form == "nvfp4" and overrides:
        overrides = {**LATENT, "q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 8}
    head = build_head(**overrides)
    report = quantize_drafter(head, tmp_path / "out", form, calibration(head))
    tensors = load_file(tmp_path / "out/model.safetensors")
    linear = [n.removesuffix(".weight") for n in head.state_dict() if "proj" in n or n.startswith("fc")]
    linear = [n.replace("layers.0.", "midlayer.") for n in linear if not n.endswith("norm")]
    assert report.layers == len(linear)
    for name in linear:
        scales = {"weight_scale"} if form == "int8" else {"weight_scale", "input_scale"}
        assert {f"{name}.{part}" for part in ("weight", *scales)} <= set(tensors), name
        assert not tensors[f"{name}.weight"].dtype.is_floating_point or form == "fp8"
    assert torch.equal(tensors["lm_head.weight"], head.lm_head.weight) and "lm_head.weight_scale" not in tensors
    legacy = json.loads((tmp_path / "out/hf_quant_config.json").read_text())
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert legacy["quantization"]["exclude_modules"] == config["ignore"] == ["lm_head"]
    assert config["quant_method"] == ("compressed-tensors" if form == "int8" else "modelopt")
    assert report.bytes_after < report.bytes_before
    with pytest.raises(CheckpointError, match="is quantised"):
        load_draft(tmp_path / "out")


def test_layers_that_engines_fuse_share_their_scales():
    head = build_head()
    ranges = calibrate(head, "fp8", calibration(head))
    for group in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
        assert len({ranges[f"layers.0.{name}"] for name in group}) == 1
        largest = max(float(head.get_parameter(f"layers.0.{name}.weight").detach().abs().max()) for name in group)
        assert ranges[f"layers.0.{group[0]}"][1] == pytest.approx(largest)
    assert ranges["layers.0.self_attn.o_proj"] != ranges["layers.0.self_attn.q_proj"]


@pytest.mark.parametrize(("form", "tolerance"), [("fp8", 0.12), ("int8", 0.08), ("nvfp4", 0.4)])
def test_the_quantised_head_computes_nearly_the_same(form, tolerance):
    head = build_head()
    ranges = calibrate(head, form, calibration(head))
    after, _ = quantized_module(head, ranges, form)
    batch, embedding = Batch(7), torch.nn.Embedding(64, 32)
    with torch.no_grad():
        one, two = (rollout(m, embedding(batch.input_ids), batch.aux_hidden, steps=2).hidden for m in (head, after))
    error = float((one - two).norm() / one.norm())
    assert 1e-4 < error < tolerance


def test_inputs_beyond_the_calibrated_range_are_held_at_its_edge():
    x = torch.tensor([[0.5, -9.0] + [0.0] * 14])
    assert float(quantize_input(x, torch.tensor(2.0 / 448), "fp8").abs().max()) == pytest.approx(2.0, rel=0.01)


def test_int8_scales_each_token_by_its_own_largest_number():
    x = torch.tensor([[0.5, -9.0, 0.0], [0.004, 0.0, -0.001], [0.0, 0.0, 0.0]])
    rounded = quantize_input(x, None, "int8")
    assert float((rounded - x).abs()[0].max()) <= 9 / 254 and float((rounded - x).abs()[1].max()) <= 0.004 / 254 * 1.001
    assert torch.equal(rounded[2], x[2])


def test_a_head_that_lost_too_much_is_not_exported(tmp_path, head):
    lengths = iter([2.0, 1.9])
    with pytest.raises(ExportError, match=r"from 2.000 to 1.900 \(5.0%\), more than --max_drop 2.0%"):
        quantize_drafter(head, tmp_path / "out", "fp8", calibration(head), measure=lambda module: next(lengths))
    assert not (tmp_path / "out").exists()
    lengths = iter([2.0, 1.99])
    report = quantize_drafter(head, tmp_path / "out", "fp8", calibration(head), measure=lambda module: next(lengths))
    assert report.drop == pytest.approx(0.005) and "1.990 after" in (tmp_path / "out/README.md").read_text()


def test_a_copy_of_the_targets_embedding_is_left_out(tmp_path):
    head = build_head(own_embedding=True)
    tables = stand_in_tables(head.config)
    with torch.no_grad():
        head.embed_tokens.weight.copy_(tables.embedding_weight)
    report = quantize_drafter(head, tmp_path / "out", "fp8", calibration(head), target=tables)
    assert "embed_tokens.weight" not in load_file(tmp_path / "out/model.safetensors")
    assert not any("embedding" in note for note in report.notes) and head.config.own_embedding


def test_bad_calibration_is_refused(head):
    with pytest.raises(ExportError, match="never reached"):
        calibrate(head, "fp8", lambda module: None)
    with pytest.raises(ExportError, match="unknown; known are fp8"):
        calibrate(head, "int4", calibration(head))
    with pytest.raises(ExportError, match="blocks of 16"):
        calibrate(build_head(intermediate_size=40), "nvfp4", calibration(head))


def test_command_on_a_tiny_target(tmp_path, capsys):
    target = make_tiny_target(tmp_path / "target")
    identity = target.identity()
    head = build_head(
        hidden_size=64, target_hidden_size=64, vocab_size=256, draft_vocab_size=256,
        tokenizer_hash=identity["tokenizer_hash"], target_name=None,
    )  # fmt: skip
    export_checkpoint(head, None, tmp_path / "head")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Count to {n}."},
                {"role": "assistant", "content": "One, two, three."},
            ]
        }
        for n in range(5)
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"id": "a", "category": "all", "turns": ["Say something."]}))
    given = ["--model_path", tmp_path / "head", "--format", "int8", "--calib_data", tmp_path / "data.jsonl",
             "--export_path", tmp_path / "out", "--prompts", tmp_path / "prompts.jsonl", "--max_new_tokens", "8",
             "--num_samples", "1", "--calib_samples", "3",
             "--max_drop", "0.9"]  # fmt: skip
    assert run_command("quantize_drafter", [str(part) for part in given]) == 2
    assert "--base_model" in capsys.readouterr().err
    given += ["--base_model", tmp_path / "target"]
    assert run_command("quantize_drafter", [str(part) for part in given]) == 0
    shown = capsys.readouterr().out
    assert "on 3 rows, 8 layers to int8" in shown and "before" in shown
    assert (tmp_path / "out/hf_quant_config.json").is_file()
    assert "| all |" in (tmp_path / "out/README.md").read_text()  # measured after quantisation, by category
    for option, value, message in (("--max_drop", "nan", "is a share"), ("--calib_samples", "0", "at least 1")):
        assert run_command("quantize_drafter", [*map(str, given), option, value]) == 2
        assert message in capsys.readouterr().err
