"""Which releases of an engine read a head, and exports that are refused for older ones (B65)."""

import pytest

from modelopt_eagle.cli.main import run_command
from modelopt_eagle.errors import ExportError
from modelopt_eagle.export import export_checkpoint, inspect_checkpoint
from modelopt_eagle.export.engines import ENGINES as PROFILES
from modelopt_eagle.export.engines.versions import (
    check_versions,
    features_of,
    needed_version,
    parse_versions,
    parts_of,
)
from tests.export.conftest import LATENT, build_head

SINCE = {key: engine.since for key, engine in PROFILES.items()}
NEEDS = [
    ({}, "0.11.1", "0.4.9"),
    ({"norm_before_residual": True}, "0.11.1", "0.4.9"),
    ({"attention_bias": True}, "0.16.0", "0.4.9"),
    ({"norm_before_fc": True}, "0.18.0", "0.5.17"),
    ({"fc_norm": True}, "0.22.0", "0.5.12"),
    ({"norm_output": True, "norm_before_fc": True}, "0.22.0", "0.5.17"),
    ({"aux_layer_ids": (2, 5)}, "0.22.0", "0.5.12"),
    ({"num_hidden_layers": 2}, "0.11.1", "0.5.12"),
    (LATENT, "0.18.0", "0.5.12"),
    ({"sliding_window": 64}, "0.11.1", "0.5.12"),
    ({"qk_norm": True}, "0.24.0", "0.4.9"),
]


@pytest.mark.parametrize(("overrides", "vllm", "sglang"), NEEDS)
def test_the_newest_feature_of_a_head_sets_the_release(overrides, vllm, sglang):
    config = build_head(**overrides).config
    assert needed_version("vllm", config).version == vllm
    assert needed_version("sglang", config).version == sglang


def test_what_no_release_is_known_for_is_said():
    config = build_head(fc_norm=True).config
    assert needed_version("tensorrt_llm", config).version is None
    assert "TensorRT-LLM: which releases read" in needed_version("tensorrt_llm", config).text("tensorrt_llm")
    biased = needed_version("sglang", build_head(attention_bias=True).config)
    assert biased.unknown == ("attention_bias",) and "is not known" in biased.text("sglang")


def test_every_release_is_newer_than_the_one_without_and_no_newer_than_the_profile():
    for engine, known in SINCE.items():
        for feature, since in known.items():
            assert since.without is None or parts_of(since.without) < parts_of(since.version), (engine, feature)
            assert parts_of(since.version) <= parts_of(PROFILES[engine].version), (engine, feature)
    features = set(features_of(build_head(**LATENT, fc_norm=True, norm_output=True, norm_before_fc=True,
                                          norm_before_residual=True, num_hidden_layers=2, aux_layer_ids=(1, 2)).config,
                               quantised=True))  # fmt: skip
    other = build_head(attention_bias=True, qk_norm=True, sliding_window=64)
    features |= set(features_of(other.config, layer_names="layers"))
    features |= set(features_of(build_head(algorithm="peagle", mask_token_id=63).config))
    assert set(SINCE["vllm"]) | set(SINCE["sglang"]) == features


def test_llama_cpp_counts_builds():
    config = build_head(norm_before_fc=True).config
    assert parse_versions(["llama.cpp=10894"]) == {"llama_cpp": "10894"}
    assert needed_version("llama_cpp", config).text("llama_cpp").startswith("llama.cpp 10894 or newer (an EAGLE-3 head")
    check_versions({"llama.cpp": "b10894".removeprefix("b")}, config)
    with pytest.raises(ExportError, match=r"llama.cpp 9999 does not read an EAGLE-3 head \(10894\)"):
        check_versions({"llama.cpp": "9999"}, config)
    peagle = build_head(algorithm="peagle", mask_token_id=63).config
    assert needed_version("llama_cpp", peagle).unserved == "llama.cpp serves no P-EAGLE heads"


def test_versions_are_ordered_by_number():
    order = ["0.4.4.post2", "0.4.9", "0.5.2", "0.5.12", "0.10.1", "0.11.1", "1.0"]
    assert sorted(order, key=parts_of) == order
    assert parts_of("0.22.0+cpu") == parts_of("v0.22.0") == parts_of("0.22") and parts_of("0.5 (main at 1)") < parts_of(
        "0.5.1"
    )
    with pytest.raises(ExportError, match="such as 0.22.0"):
        parts_of("newest")


def test_an_engine_that_has_never_read_it_is_refused_at_export(tmp_path):
    head, folder = build_head(attention_bias=True), tmp_path / "out"
    for version in ("0.5.12", "0.5.23"):
        with pytest.raises(ExportError, match=f"SGLang {version} was asked for: .* it has no attention bias"):
            export_checkpoint(head, None, folder, for_engines={"sglang": version})
    assert not folder.exists()
    report = export_checkpoint(head, None, folder, for_engines={"vllm": "0.22.0", "sglang": "9.0"})  # not read here
    assert any("it has no attention bias" in note for note in report.notes)


def test_an_older_release_is_refused_at_export(tmp_path, capsys):
    """The case of B65: a feature that appeared in the release after the one that will serve it."""
    head = build_head(fc_norm=True, norm_before_fc=True)
    with pytest.raises(ExportError, match=r"vLLM 0.21.0 does not read fc_norm \(0.22.0\); the releases"):
        export_checkpoint(head, None, tmp_path / "out", for_engines={"vllm": "0.21.0"})
    assert not (tmp_path / "out").exists()
    export_checkpoint(head, None, tmp_path / "out", for_engines={"vllm": "0.22", "sglang": "0.5.17"})
    given = ["--model_path", str(tmp_path / "out"), "--export_path", str(tmp_path / "again")]
    assert run_command("export_hf_checkpoint", [*given, "--for-engine", "sglang=0.5.16"]) == 2
    assert "SGLang 0.5.16 does not read norm_before_fc (0.5.17)" in capsys.readouterr().err
    assert run_command("export_hf_checkpoint", [*given, "--for-engine", "vllm=0.22.0"]) == 0
    assert "needs     vLLM 0.22.0 or newer (fc_norm)" in capsys.readouterr().out
    card = (tmp_path / "again/README.md").read_text()
    assert "vLLM 0.22.0 or newer (fc_norm), tested with 0.32.0" in card
    assert "needs       SGLang 0.5.17 or newer (norm_before_fc)" in inspect_checkpoint(tmp_path / "again").text()
    with pytest.raises(ExportError, match="unknown; known are"):
        check_versions({"nobody.cpp": "1"}, head.config)
    for wrong in ("vllm", "=0.22.0", "vllm="):
        with pytest.raises(ExportError, match="ENGINE=VERSION"):
            parse_versions([wrong])
