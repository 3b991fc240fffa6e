"""Which engines serve a drafter's heads: said alike before training, at export, on the card and in an inspection."""

import pytest
import torch

from modelopt_eagle.draft import DraftVocab
from modelopt_eagle.draft.algorithm import algorithm_of, random_module
from modelopt_eagle.draft.dflash.config import DFlashConfig
from modelopt_eagle.draft.medusa.config import MedusaConfig
from modelopt_eagle.errors import ExportError
from modelopt_eagle.export import convert_checkpoint, engine_reasons, export_checkpoint, inspect_checkpoint, load_draft
from modelopt_eagle.export.engines.versions import engine_lines, needed_version
from modelopt_eagle.training import train
from tests.export.conftest import LATENT, SIZES, build_head, stand_in_tables
from tests.training.runs import small_recipe, write_conversations

LLAMA = {"target_architecture": "LlamaForCausalLM"}


def others(title):
    """What is said of the engines that serve no heads of a drafter."""
    engines = ("SGLang", "TensorRT-LLM", *(() if title == "DFlash" else ("llama.cpp",)))
    return [f"{engine} serves no {title} heads" for engine in engines]


def dflash(layers=2, **overrides):
    sizes = {**SIZES, "num_hidden_layers": layers, "block_size": 4, "mask_token_id": 63, "extra": LLAMA, **overrides}
    return made(DFlashConfig.from_dict({**sizes, "draft_vocab_size": 64}))


def medusa(size=64, **overrides):
    return made(MedusaConfig.from_dict({**SIZES, "draft_vocab_size": size, "aux_layer_ids": (7,), "heads": 3,
                                        "extra": LLAMA, **overrides}))  # fmt: skip


def made(config):
    size, whole = config.draft_vocab_size, config.vocab_size
    vocab = DraftVocab.identity(whole) if size == whole else DraftVocab.from_target_ids(torch.arange(size) * 2, whole)
    return random_module(config, vocab, seed=0)


def exported(head, path, **options):
    return export_checkpoint(head, None, path, target=stand_in_tables(head.config), **options)


def test_the_head_of_a_run_names_engines_by_drafter_too():
    parallel = build_head(algorithm="peagle", mask_token_id=63, trained_depth=5).config
    assert engine_lines("LlamaForCausalLM", parallel) == [
        "vLLM drafts for LlamaForCausalLM since 0.10.1", *others("P-EAGLE"),
    ]  # fmt: skip
    blocks = engine_lines("LlamaForCausalLM", dflash(layers=2).config)
    assert blocks[0].startswith("vLLM norms the context keys of every draft layer with the weights of the first one")
    assert blocks[1:] == [
        "vLLM drafts for LlamaForCausalLM since 0.10.1", *others("DFlash"),
        "llama.cpp drafts for LlamaForCausalLM since 10894",
    ]  # fmt: skip
    assert engine_lines(None, dflash(layers=1).config) == others("DFlash")


def test_medusa_heads_need_no_captured_layers_of_the_target():
    head = medusa(extra={"target_architecture": "Gemma3ForCausalLM"}).config
    assert engine_lines("Gemma3ForCausalLM", head) == [
        "vLLM: for which targets it serves Medusa heads was not read", *others("Medusa"),
    ]  # fmt: skip
    assert needed_version("vllm", head).unserved is None


def test_layers_that_an_engine_does_not_serve_are_no_release_away():
    latent = build_head(algorithm="peagle", mask_token_id=63, trained_depth=5, **LATENT).config
    told = "vLLM serves P-EAGLE heads of llama and qwen3 layers, this one has kimik2 layers"
    assert needed_version("vllm", latent).text("vllm") == told == engine_lines("LlamaForCausalLM", latent)[0]


@pytest.mark.parametrize("make", [dflash, medusa])
def test_export_card_and_inspection_say_the_same_engines(make, tmp_path):
    head = make()
    title = algorithm_of(head.config).title
    report = exported(head, tmp_path / "out")
    assert report.needs[0].startswith("vLLM") and f"{title} heads is not known" in report.needs[0]
    more = ["llama.cpp 10894 or newer (DFlash heads, the target LlamaForCausalLM)"] if title == "DFlash" else []
    assert report.needs[1:] == [*others(title), *more]
    assert any(f"sglang 0.5.23 would not serve this head as trained: it serves no {title} heads" in n
               for n in report.notes)  # fmt: skip
    assert "vllm serve" in (tmp_path / "out/README.md").read_text()
    found = inspect_checkpoint(tmp_path / "out")
    assert found.layout == head.config.algorithm and found.map == "identity" and found.problem is None
    assert found.engines["sglang"] == [f"serves no {title} heads"]
    assert f"no {title}" not in "".join(found.engines["vllm"])
    assert "parallel" not in found.text()


def test_what_an_engine_does_to_a_drafters_folders_is_told_wherever_engines_are_named(tmp_path):
    reduced, layers = medusa(size=16), dflash(layers=2)
    assert (
        "vllm 0.32.0 would not serve this head as trained: it does not start with a Medusa head over a reduced"
        in (exported(reduced, tmp_path / "reduced").notes[0])
    )
    assert "norms the context keys" in exported(layers, tmp_path / "layers").notes[0]
    for name, words in (("reduced", "does not start with"), ("layers", "norms the context keys")):
        assert words in engine_reasons(tmp_path / name, "vllm")[0]
        assert words in (tmp_path / name / "README.md").read_text()
    found = inspect_checkpoint(tmp_path / "reduced")
    assert (found.map, found.draft_vocab_size, found.vocab_size) == ("reduced", 16, 64)
    assert engine_reasons(exported(medusa(), tmp_path / "whole").path, "vllm") == []
    assert (
        "vllm 0.32.0: reads folders of this kind; this one was not looked into"
        in inspect_checkpoint(tmp_path / "whole").text()
    )


def test_an_export_for_an_engine_that_serves_the_head_wrongly_is_refused(tmp_path):
    with pytest.raises(ExportError, match="vLLM 0.32.0 was asked for: vllm 0.32.0 would not serve .* does not start"):
        exported(medusa(size=16), tmp_path / "out", for_engines={"vllm": "0.32.0"})
    with pytest.raises(ExportError, match="SGLang 0.5.23 was asked for: SGLang serves no DFlash heads"):
        exported(dflash(layers=1), tmp_path / "out", for_engines={"sglang": "0.5.23"})
    with pytest.raises(ExportError, match="does not read the target LlamaForCausalLM"):
        exported(dflash(layers=1), tmp_path / "out", for_engines={"vllm": "0.9.0"})
    assert not (tmp_path / "out").exists()
    exported(dflash(layers=1), tmp_path / "out", for_engines={"vllm": "0.32.0"})


def test_no_command_is_printed_for_a_target_that_the_engine_does_not_draft_for(tmp_path):
    exported(dflash(layers=1, extra={"target_architecture": "Gemma3ForCausalLM"}), tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    assert "vLLM does not draft for this target" in card and "vllm serve" not in card


@pytest.mark.parametrize("make", [dflash, medusa])
def test_heads_of_their_own_layout_are_converted_into_it_or_refused(make, tmp_path):
    head = make()
    exported(head, tmp_path / "out")
    report = convert_checkpoint(tmp_path / "out", tmp_path / "again", dtype="float32")
    assert report.logits_difference == 0
    again = load_draft(tmp_path / "again").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in load_draft(tmp_path / "out").state_dict().items())
    for to in ("speculators", "eagle"):
        title = algorithm_of(head.config).title
        says = f"eagle3, peagle and dflash heads|whole vocabulary take the target's|a {title} head"
        with pytest.raises(ExportError, match=says):
            convert_checkpoint(tmp_path / "out", tmp_path / to, to)


def test_a_run_says_it_before_the_first_step(tiny_target_dir, tmp_path, caplog):
    data = write_conversations(tmp_path / "rows.jsonl", 12)
    options = ("algorithm=dflash", "dflash.block_size=4", "eagle.num_layers=2", "training.dry_run=true")
    with caplog.at_level("INFO", logger="modelopt_eagle"):
        train(small_recipe(tiny_target_dir, data, tmp_path / "run", *options))
    engines = [line.removeprefix("engine: ") for line in caplog.messages if line.startswith("engine: ")]
    assert "vLLM drafts for LlamaForCausalLM since 0.10.1" in engines
    assert [line for line in engines if "DFlash" in line] == others("DFlash")
