"""Rules held against an engine's source: a small one, written here, in a folder and as a wheel."""

import dataclasses
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
    report = check_rules(toy, Source(folder, "toy"))
    assert report.passed and report.version == "1.1" and report.checked == 2
    assert report.gone == [] and report.new == ["NewerForCausalLM"]
    assert "2 of 2 match" in report.text() and "new         NewerForCausalLM" in report.text()
    assert check_rules(toy, Source(folder / "toy", "toy")).passed


def test_a_rule_that_no_longer_matches_and_a_target_that_is_gone(toy, folder):
    (folder / "toy/loader.py").write_text("bias = 1\n")
    (folder / "toy/models/base.py").write_text("class Base: ...\n")
    report = check_rules(toy, Source(folder, "toy"))
    assert not report.passed and set(report.broken) == {"scale is read", "bias is not read"}
    assert report.gone == ["LlamaForCausalLM"] and "loader.py has no" in report.text()
    (folder / "toy/loader.py").unlink()
    assert "loader.py is not there" in check_rules(toy, Source(folder, "toy")).text()


def test_a_wheel_is_read_as_it_lies(toy, folder, tmp_path):
    wheel = tmp_path / "toy-2.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in FILES.items():
            archive.writestr(f"toy/{name}", text)
    report = check_rules(toy, Source(wheel, "toy"))
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
        check_rules(dataclasses.replace(toy, evidence=()), Source(folder, "toy"))


def test_every_engine_that_keeps_evidence_keeps_each_rule_once():
    for engine in ENGINES.values():
        rules = [evidence.rule for evidence in engine.evidence]
        assert len(set(rules)) == len(rules) and bool(rules) == (engine.targets.interface is not None)
