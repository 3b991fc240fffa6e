"""How a target is loaded is said by one set of options in every command that loads one, and they reach the loading."""

from types import SimpleNamespace

import pytest

from modelopt_eagle.cli import serve_features
from modelopt_eagle.cli.main import run_command
from modelopt_eagle.errors import StreamError, TargetError
from modelopt_eagle.recipe.command_line import train_arguments

NAME = "owner/name"
TABLES = {"revision": "v1", "trust_remote_code": True}
WEIGHTS = {**TABLES, "dtype": "bfloat16", "device": "cuda:1", "attn_implementation": "eager"}
RUN = {
    "ar_validate": ["--model_path", "head", "--base_model", NAME],
    "diagnose": ["--model_path", "head", "--base_model", NAME],
    "quantize_drafter": ["--model_path", "h", "--base_model", NAME, "--format", "fp8", "--calib_data", "quickstart",
                         "--export_path", "e"],
    "synthesize_answers": ["--model", NAME, "--input", "quickstart", "--output", "chats.jsonl"],
    "serve_features": ["--model", NAME, "--engine", "hf", "--port", "18123", "--feature-port", "18124"],
    "dump": ["--model", NAME, "--input-file", "quickstart", "--output-dir", "store"],
    "features": ["verify", "nothing", "--model", NAME],
}  # fmt: skip
READ = {
    "features": ["import", "dump", "--model", NAME, "--output-dir", "store"],
    "convert_checkpoint": ["--input", "head", "--base_model", NAME, "--output", "o"],
    "inspect_checkpoint": ["head", "--base_model", NAME],
    "export_hf_checkpoint": ["--model_path", "head", "--base_model", NAME, "--export_path", "e"],
    "dump_vllm": ["--model", NAME, "--input-file", "quickstart", "--output-dir", "store"],
    "dump_tensorrt_llm": ["--model", NAME, "--input-file", "quickstart", "--output-dir", "store"],
}


@pytest.fixture
def loaded(monkeypatch, tmp_path):
    """What loading was asked for; nothing is loaded."""
    asked = []

    def load(**arguments):
        asked.append(arguments)
        raise TargetError("seen")

    monkeypatch.chdir(tmp_path)
    for head in (tmp_path / "head", tmp_path / "h"):  # what holds no head is told before a target is loaded
        head.mkdir()
        (head / "config.json").write_text("{}")
    for name in ("load_target", "load_target_tables"):
        monkeypatch.setattr(f"modelopt_eagle.target.{name}", load)
    return asked


def options(values, dtype_option="--dtype"):
    names = {"dtype": dtype_option}
    given = [[names.get(key, f"--{key}"), str(value)] for key, value in values.items() if value is not True]
    return [*(word for pair in given for word in pair), "--trust_remote_code"]


@pytest.mark.parametrize("command", RUN)
def test_options_reach_the_loading_of_a_target(command, loaded):
    dtype_option = "--target-dtype" if command == "dump" else "--dtype"
    assert run_command(command, [*RUN[command], *options(WEIGHTS, dtype_option)]) == 2
    (asked,) = loaded
    assert {**WEIGHTS, "name": NAME}.items() <= asked.items()
    assert run_command(command, [*RUN[command], dtype_option, "float16", "--device", "cuda"]) == 2
    assert loaded[1]["dtype"] == "float16" and loaded[1]["device"] == "cuda"


@pytest.mark.parametrize("command", READ)
def test_options_reach_the_reading_of_tables(command, loaded):
    assert run_command(command, [*READ[command], *options(TABLES)]) == 2
    (asked,) = loaded
    assert {**TABLES, "name": NAME}.items() <= asked.items()


def test_check_serving_loads_the_same_target_here_and_in_the_engine(monkeypatch):
    asked = {}
    monkeypatch.setattr("modelopt_eagle.serving.check.find_engine_python", lambda *given: "python")
    monkeypatch.setattr("modelopt_eagle.target.load.resolve", lambda name: name)
    head = SimpleNamespace(config=SimpleNamespace(extra={}))
    monkeypatch.setattr("modelopt_eagle.serving.check.load_draft", lambda *given, **named: head)

    def load(name, **arguments):
        asked.update(arguments, name=name)
        raise TargetError("seen")

    monkeypatch.setattr("modelopt_eagle.target.load_target", load)
    assert run_command("check_serving", ["--export_path", "e", "--base_model", NAME, *options(TABLES)]) == 2
    assert {**TABLES, "name": NAME, "dtype": "float32"}.items() <= asked.items()


def test_a_run_takes_them_as_keys_of_its_recipe():
    recipe, _ = train_arguments(["--base_model", NAME, *options(WEIGHTS), "--chat_template", "{{ x }}"])
    assert {key: getattr(recipe.model, key) for key in WEIGHTS} == WEIGHTS
    assert recipe.model.chat_template == "{{ x }}" and recipe.origin["model.revision"] == "override"
    assert train_arguments(["--revision", "a", "model.revision=b"])[0].model.revision == "b"  # overrides win
    assert train_arguments(["--recipe", "eagle3"])[0].origin["model.device"] != "override"
    with pytest.raises(SystemExit):
        train_arguments(["--dtype", "float16"])


def test_options_of_the_other_engine_are_refused():
    for option in (["--device", "cpu"], ["--attn-implementation", "eager"]):
        with pytest.raises(StreamError, match="are of the hf engine"):
            serve_features.main(["--model", NAME, "--print", *option])


def test_vllm_serves_code_of_the_repository_if_asked(tiny_target_dir, capsys):
    assert serve_features.main(["--model", str(tiny_target_dir), "--print", "--trust-remote-code"]) == 0
    assert capsys.readouterr().out.count("--trust-remote-code") == 1
