"""One file an engine: every file is in the table, says the same things, and a new one needs a file and an entry."""

import dataclasses
import importlib
import pkgutil

import pytest

from modelopt_eagle.draft.decoders import DECODERS
from modelopt_eagle.errors import ExportError
from modelopt_eagle.export import engine_reasons, engines, export_checkpoint, inspect_checkpoint
from modelopt_eagle.export.engines import ENGINES, engine_of
from modelopt_eagle.export.engines.profile import LAYERS, Engine, Since
from modelopt_eagle.export.engines.versions import features_of, parse_versions, parts_of
from modelopt_eagle.export.universal import FLAGS
from modelopt_eagle.serving.check import RUNNERS
from modelopt_eagle.serving.engine_server import SERVERS
from tests.export.conftest import LATENT, build_head

FORMATS = {"FP8", "NVFP4", "INT8"}


def test_every_engine_file_is_in_the_table_once():
    files = [importlib.import_module(f"{engines.__name__}.{m.name}") for m in pkgutil.iter_modules(engines.__path__)]
    found = [module for module in files if isinstance(getattr(module, "ENGINE", None), Engine)]
    assert {module.ENGINE.key: module.ENGINE for module in found} == ENGINES and len(found) == len(ENGINES)
    for module in found:
        assert module.__name__.rpartition(".")[2] == module.ENGINE.key
    names = [name for engine in ENGINES.values() for name in (engine.key, *engine.aliases)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_every_engine_says_the_same_things(engine):
    rules, quantised = engine.loads, engine.quantised
    assert set(rules.architectures) <= set(LAYERS) and set(DECODERS) <= set(LAYERS) and set(rules.flags) == set(FLAGS)
    assert all(where in ("top", "nested", "both") for where, _ in rules.flags.values())
    assert rules.ids_key in ("top", "nested", "serving") and rules.counts_captures_by in ("nested", "served")
    assert set(quantised.algorithms.values()) <= FORMATS
    assert {method for method, _ in quantised.algorithms} == set(quantised.matches)
    assert all(set(formats) <= FORMATS for formats in quantised.refuses.values())
    assert engine.source and engine.tested.startswith(engine.version) and parts_of(engine.version)
    several = build_head(**LATENT, num_hidden_layers=2, aux_layer_ids=(1, 2), **dict.fromkeys(FLAGS, True))
    parts = set(features_of(several.config, quantised=True))
    other = build_head(attention_bias=True, qk_norm=True, sliding_window=64)
    parts |= set(features_of(other.config, layer_names="layers"))
    parts |= set(features_of(build_head(algorithm="peagle", mask_token_id=63).config))
    parts |= set(features_of(build_head(algorithm="dflash", mask_token_id=63).config))
    assert set(engine.since) <= parts
    assert engine.runner is None or RUNNERS[engine.key].is_file()
    assert engine.key not in SERVERS or SERVERS[engine.key].is_file()


def toy_engine() -> Engine:
    """Reads everything as vLLM does, from release 2 on, under a name nobody has heard of."""
    return dataclasses.replace(
        ENGINES["vllm"], key="toy", name="Toy", aliases=("toy-server",), version="3.0", tested="3.0 (never)",
        loads=dataclasses.replace(ENGINES["vllm"].loads, qkv_bias=()),
        since={"an EAGLE-3 head": Since("1.0", None, "toy.py"), "fc_norm": Since("2.0", "1.9", "toy.py")},
        serve=lambda order: [f"{order.need}: toy-serve {order.target}"], serve_adapted=None, runner=None,
    )  # fmt: skip


def test_a_new_engine_needs_a_file_and_an_entry(tmp_path, monkeypatch):
    monkeypatch.setitem(ENGINES, "toy", toy_engine())
    report = export_checkpoint(build_head(fc_norm=True), None, tmp_path / "out")
    assert any(need.startswith("Toy 2.0 or newer (fc_norm)") for need in report.needs)
    assert "toy-serve someone/target" in (tmp_path / "out/README.md").read_text()
    assert engine_reasons(tmp_path / "out", "toy-server") == []
    assert "engine      toy 3.0: serves it as trained" in inspect_checkpoint(tmp_path / "out").text()
    with pytest.raises(ExportError, match=r"Toy 1.5 does not read fc_norm \(2.0\)"):
        export_checkpoint(build_head(fc_norm=True), None, tmp_path / "old", for_engines=parse_versions(["Toy=1.5"]))
    with pytest.raises(ExportError, match="toy 3.0 would not serve this head as trained: .*no attention bias"):
        export_checkpoint(build_head(attention_bias=True), None, tmp_path / "bias", for_engines={"toy": "3.0"})


def test_other_spellings_are_taken_and_unknown_ones_refused():
    assert engine_of("TensorRT-LLM") is engine_of("trtllm") is ENGINES["tensorrt_llm"]
    assert parse_versions(["vLLM=0.22.0", "trtllm=1.3"]) == {"vllm": "0.22.0", "tensorrt_llm": "1.3"}
    with pytest.raises(ExportError, match="unknown; known are vllm, sglang"):
        parse_versions(["nobody=1"])
