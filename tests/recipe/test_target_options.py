"""How a target is loaded is said by one set of options in every command that loads one, and they reach the loading."""

from types import SimpleNamespace

import pytest
import torch

from modelopt_eagle.cli import serve_features
from modelopt_eagle.cli.main import run_command
from modelopt_eagle.errors import RecipeError, StreamError, TargetError
from modelopt_eagle.recipe import load_recipe
from modelopt_eagle.recipe.command_line import train_arguments
from modelopt_eagle.target import load_target, load_target_tables
from modelopt_eagle.training import train

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
    monkeypatch.setattr("modelopt_eagle.target.load.check_device", lambda device: None)
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


WRONG = ["bogus", "cuda:x", "cuda:300", "meta", ""]


@pytest.mark.parametrize("name", WRONG)
def test_a_recipe_refuses_what_names_no_device(name):
    with pytest.raises(RecipeError, match=r"model\.device") as refused:
        load_recipe(None, [f"model.device={name!r}"])
    assert "\n" not in str(refused.value)
    with pytest.raises(TargetError, match="expected a device of torch"):
        load_target("no/such/folder/at/all", device=name)
    for known in ("auto", "cpu", "cuda", "cuda:1", "xpu"):  # of this machine or of another one
        assert load_recipe(None, [f"model.device={known}"]).model.device == known


@pytest.mark.parametrize("command", [*RUN, "train", "train_and_export", "doctor", "estimate"])
def test_every_command_refuses_what_names_no_device(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        run_command(command, [*RUN.get(command, []), "--device", "bogus"])
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert ended.value.code == 2 and "--device" in last and "expected a device of torch" in last and "'bogus'" in last


@pytest.fixture
def no_accelerator(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("command", ["dump", "synthesize_answers", "train", "doctor", "train offline", "dump split"])
def test_a_device_that_is_not_here_is_told_in_a_line(command, no_accelerator, tiny_target_dir, tmp_path, monkeypatch,
                                                     capsys):  # fmt: skip
    (tmp_path / "rows.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "Say a."}, {"role": "assistant", "content": "a"}]}\n'
    )
    model = ["--base_model", str(tiny_target_dir), "--device", "cuda"]
    run = [*model, "--data", str(tmp_path / "rows.jsonl")]
    stored = [*model, "--offline_data", str(tmp_path), f"training.output_dir={tmp_path / 'run'}"]
    given = {
        "dump": [*model, "--input-file", str(tmp_path / "rows.jsonl"), "--output-dir", str(tmp_path / "store")],
        "synthesize_answers": [*model, "--input", "quickstart", "--output", str(tmp_path / "chats.jsonl")],
        "train": [*run, "--output_dir", str(tmp_path / "run")],
        "doctor": run,
        "train offline": stored,
    }
    if command == "dump split":
        monkeypatch.setenv("WORLD_SIZE", "2")
    options = given["dump"] + ["--parallel", "fsdp"] if command == "dump split" else given[command]
    assert run_command(command.split()[0], options) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) <= 2 and said[-1].startswith(
        "error: device cuda is not in this machine"
    )  # the first names the run
    assert "leave model.device (or --device) out" in said[-1]
    assert not (tmp_path / "run").exists() and not (tmp_path / "store").exists()


def test_loading_and_training_in_python_tell_it_too(no_accelerator, tiny_target_dir, tmp_path):
    for load in (load_target, load_target_tables):
        with pytest.raises(TargetError, match="device cuda:0 is not in this machine"):
            load(tiny_target_dir, device="cuda:0")
    recipe = load_recipe("eagle3", [f"model.base_model={tiny_target_dir}", "data.train_path=quickstart",
                                    "model.device=cuda:0", f"training.output_dir={tmp_path / 'run'}"])  # fmt: skip
    with pytest.raises(TargetError, match="device cuda:0 is not in this machine"):
        train(recipe)
    assert not (tmp_path / "run").exists()


def test_an_accelerator_has_only_so_many_devices(monkeypatch):
    from modelopt_eagle.target.load import check_device

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr("modelopt_eagle.target.load.devices", lambda: "two of them")
    for name in ("auto", "cpu", "cuda", "cuda:1"):
        check_device(name)
    for name in ("cuda:2", "xpu"):
        with pytest.raises(TargetError, match=f"device {name} is not in this machine, where torch finds: two of them"):
            check_device(name)


def test_an_estimate_may_be_of_a_device_that_is_elsewhere(no_accelerator, tiny_target_dir, capsys):
    command = ["--base_model", str(tiny_target_dir), "--tokens", "2000", "--gflops", "1", "eagle.draft_vocab_size=64"]
    assert run_command("estimate", [*command, "model.device=cuda", "--memory", "1"]) == 0
    assert run_command("estimate", [*command, "model.device=bogus", "--memory", "1"]) == 2
    assert "model.device" in capsys.readouterr().err
