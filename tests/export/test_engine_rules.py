"""Rules held against an engine's source: a small one, written here, in a folder and as a wheel."""

import dataclasses
import io
import tarfile
import zipfile

import pytest

from modelopt_eagle.cli.main import run_command
from modelopt_eagle.errors import ExportError
from modelopt_eagle.export.engines import ENGINES
from modelopt_eagle.export.engines.profile import Evidence, Targets
from modelopt_eagle.serving.rules import Source, check_rules

FILES = {
    "models/base.py": "class SupportsDrafts: ...\nclass Generic: ...\nclass Base(Generic[int], SupportsDrafts): ...\n",
    "models/llama.py": "from toy.models.base import Base as Parent\nclass LlamaForCausalLM(Parent): ...\n",
    "models/other.py": "class OtherForCausalLM: ...\nclass Newer(OtherForCausalLM):\n"
    "    def SupportsDrafts(self): ...\n",
    "models/registry.py": 'MODELS = {\n    "LlamaForCausalLM": ("llama", "LlamaForCausalLM"),\n'
    '    "OtherForCausalLM": (\n        "other",\n        "OtherForCausalLM",\n    ),\n'
    '    "NewerForCausalLM": ("other", "Newer"),\n    "EagleOtherForCausalLM": ("other", "Newer"),\n}\n',
    "models/broken.py": "def (:\n",
    "loader.py": 'scale = config.get("draft_scale", 1)\n',
}


@pytest.fixture
def toy():
    """An engine whose rules fit the files above."""
    return dataclasses.replace(
        ENGINES["vllm"], key="toy", name="Toy", package="toy", version="1.0",
        targets=Targets("models", {"1.0": ("LlamaForCausalLM",)}, True, folder="models", interface="SupportsDrafts"),
        evidence=(Evidence("scale is read", "loader.py", r'config\.get\("draft_scale"'),
                  Evidence("bias is not read", "loader.py", "bias", present=False)),
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    for name, text in FILES.items():
        (tmp_path / "site/toy" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "site/toy" / name).write_text(text)
    (tmp_path / "site/toy-1.1.dist-info").mkdir()
    return tmp_path / "site"


def test_rules_that_match_and_targets_that_came(toy, folder):
    report = check_rules(toy, Source(folder, toy))
    assert report.passed and report.version == "1.1" and report.checked == 2
    assert report.gone == [] and report.new == ["NewerForCausalLM"]
    assert "2 of 2 match" in report.text() and "new         NewerForCausalLM" in report.text()
    assert report.found == {
        "scale is read": 'loader.py:1: scale = config.get("draft_scale", 1)',
        "bias is not read": "loader.py has no 'bias'",
    }
    assert "  holds     scale is read\n            loader.py:1: scale" in report.text()
    assert check_rules(toy, Source(folder / "toy", toy)).passed


def test_a_rule_that_no_longer_matches_and_a_target_that_is_gone(toy, folder):
    (folder / "toy/loader.py").write_text("# a line\nbias = 1\n")
    (folder / "toy/models/base.py").write_text("class Base: ...\n")
    report = check_rules(toy, Source(folder, toy))
    assert not report.passed and set(report.broken) == {"scale is read", "bias is not read"}
    assert report.gone == ["LlamaForCausalLM"] and "loader.py has no" in report.text()
    assert report.broken["bias is not read"] == "loader.py:2: bias = 1" and not report.found
    (folder / "toy/loader.py").unlink()
    assert "loader.py is not there" in check_rules(toy, Source(folder, toy)).text()


def test_a_wheel_is_read_as_it_lies(toy, folder, tmp_path):
    wheel = tmp_path / "toy-2.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in FILES.items():
            archive.writestr(f"toy/{name}", text)
    report = check_rules(toy, Source(wheel, toy))
    assert report.passed and report.version == "2.0" and report.new == ["NewerForCausalLM"]


def test_the_command(folder, tmp_path, monkeypatch, capsys, toy):
    monkeypatch.setitem(ENGINES, "toy", toy)
    assert run_command("check_engine_rules", ["--engine", "toy", "--source", str(folder)]) == 0
    (folder / "toy/loader.py").write_text("bias = 1\n")
    assert run_command("check_engine_rules", ["--engine", "toy", "--source", str(folder)]) == 1
    assert "0 of 2 match" in capsys.readouterr().out
    for given, words in (
        (["--engine", "toy"], "--source PATH, or --download VERSION"),
        (["--engine", "toy", "--source", str(tmp_path / "none")], "holds no toy"),
        (["--engine", "tensorrt_llm", "--source", str(folder)], "holds no tensorrt_llm"),
        (["--engine", "nobody", "--source", str(folder)], "unknown; known are"),
    ):
        assert run_command("check_engine_rules", given) == 2
        assert words in capsys.readouterr().err
    with pytest.raises(ExportError, match="no lines of code are kept"):
        check_rules(dataclasses.replace(toy, evidence=()), Source(folder, toy))


def test_a_source_package_is_read_below_its_one_folder(toy, tmp_path):
    """As llama.cpp's is, whose code is called otherwise than its package."""
    packed = tmp_path / "toy_bin-77.0.0.tar.gz"
    with tarfile.open(packed, "w:gz") as archive:
        for name, text in {
            **FILES,
            "src/graph.cpp": "int toy;\nGGML_ASSERT(n_layer == 1);\n",
            "notes.txt": "x",
        }.items():
            entry = tarfile.TarInfo(f"toy_bin-77.0.0/toy.cpp/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    one_layer = Evidence("one layer", "src/graph.cpp", r"n_layer == 1")
    engine = dataclasses.replace(toy, package="toy-bin", code="toy.cpp", evidence=(*toy.evidence, one_layer))
    report = check_rules(engine, Source(packed, engine))
    assert report.passed and report.version == "77.0.0" and report.new == ["NewerForCausalLM"]
    assert report.found["one layer"] == "src/graph.cpp:2: GGML_ASSERT(n_layer == 1);"
    with pytest.raises(ExportError, match="holds no toy: name a package of Toy"):
        Source(packed, toy)


def test_evidence_is_kept_of_every_engine_and_names_each_rule_once():
    for engine in ENGINES.values():
        rules = [evidence.rule for evidence in engine.evidence]
        assert len(rules) > 10 and len(set(rules)) == len(rules), engine.key
