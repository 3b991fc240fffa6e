"""``serve-features`` and the vLLM dump from the user's side: what is wrong is said in one line, with exit code 2."""

import os
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from modelopt_eagle.cli import serve_features
from modelopt_eagle.cli.main import run_command
from modelopt_eagle.features.engines.vllm import context_length, free_port
from tests.features.serving import ROOT, SETTINGS, command


def serve(*options):
    return run_command("serve_features", ["--port", str(free_port()), "--feature-port", str(free_port()), *options])


def test_the_printed_command(tiny_target_dir, capsys):
    assert serve("--model", str(tiny_target_dir), "--print", "--max-length", "4096", "--", "--max-num-seqs", "4") == 0
    printed = capsys.readouterr().out.rstrip()
    assert printed.startswith("PYTHONPATH=") and printed.endswith("--max-num-seqs 4")
    assert f"-m modelopt_eagle.features.engines.vllm_serve {tiny_target_dir} --host 127.0.0.1" in printed
    assert '"eagle_aux_hidden_state_layer_ids": [2, 4, 5, 8]' in printed  # inputs of layers, then the final state
    assert "--max-model-len 2048" in printed  # the target's own limit
    assert serve("--model", str(tiny_target_dir), "--print", "--max-length", "100", "--aux-layers", "5,0,2") == 0
    printed = capsys.readouterr().out
    assert "--max-model-len 102" in printed and '"eagle_aux_hidden_state_layer_ids": [1, 3, 6, 8]' in printed


def test_context_length_of_other_targets():
    assert context_length(SimpleNamespace(), 5000) == 5002
    scaled = SimpleNamespace(max_position_embeddings=2048, rope_parameters={"rope_type": "yarn", "factor": 4.0})
    assert context_length(scaled, 5000) == 5002  # vLLM knows how far the scaling reaches
    assert context_length(SimpleNamespace(max_position_embeddings=2048, rope_parameters=None), 5000) == 2048


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "no/such/folder/here"], "no such folder"),
        (["--model", "nobody/nothing"], "neither a local folder nor a model that could be fetched"),
        (["--model", "TARGET", "--aux-layers", "1,x"], "takes numbers such as"),
        (["--model", "TARGET", "--aux-layers", "1,3,99"], "99"),
        (["--model", "TARGET", "--max-length", "0"], "--max-length must be above 0"),
        (["--model", "TARGET", "--max-gib", "-1"], "--max-gib must be above 0"),
        (["--model", "TARGET", "--port", "70000"], "--port takes a port, 1 to 65535"),
        (["--model", "TARGET", "--port", "900", "--feature-port", "900"], "must be two ports"),
        (["--model", "TARGET", "--host", "0.0.0.0"], "there is no token"),
        (["--model", "TARGET", "--engine-python", "/no/such/python"], "cannot start /no/such/python"),
        (["--model", "TARGET", "--engine-python", "false"], "does not run as a Python"),
        (["--model", "TARGET", "--host", "203.0.113.7"], "cannot listen on 203.0.113.7"),
        (["--model", "TARGET", "--engine", "hf", "--print"], "are of the vllm engine"),
    ],
)
def test_bad_input(tiny_target_dir, capsys, monkeypatch, options, words):
    monkeypatch.delenv(serve_features.TOKEN_VARIABLE, raising=False)
    if "203.0.113.7" in options:
        monkeypatch.setenv(serve_features.TOKEN_VARIABLE, "secret")
    assert serve(*[str(tiny_target_dir) if option == "TARGET" else option for option in options]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and words in said and "Traceback" not in said


def test_an_engine_python_without_vllm_is_named(tiny_target_dir, capsys, monkeypatch):
    monkeypatch.setattr(serve_features, "_NEEDED", ("json", "no_such_vllm"))
    assert serve("--model", str(tiny_target_dir)) == 2
    assert f"{sys.executable} lacks 'no_such_vllm'; --engine-python names" in capsys.readouterr().err


@pytest.mark.parametrize("engine", ["vllm", "hf"])
@pytest.mark.parametrize("option", ["--port", "--feature-port"])
def test_a_port_that_is_taken(tiny_target_dir, capsys, monkeypatch, engine, option):
    monkeypatch.setattr("modelopt_eagle.features.stream.mailbox.BIND_PATIENCE", 0.1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert serve("--model", str(tiny_target_dir), "--engine", engine, option, port) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in (said := capsys.readouterr().err)
    assert said.rstrip().endswith(f"choose another by {option}")


def test_ctrl_c(tiny_target_dir):
    line = command("serve-features", "--model", tiny_target_dir, "--engine", "hf", "--device", "cpu")
    line += ["--port", str(free_port()), "--feature-port", str(free_port())]
    with subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | SETTINGS
    ) as server:
        assert "serving features of" in server.stdout.readline()
        server.send_signal(signal.SIGINT)
        said = server.communicate(timeout=30)[1]
    assert server.returncode == 130 and "Traceback" not in said


def test_a_dump_by_a_python_without_vllm_writes_nothing_and_says_so(tiny_target_dir, conversations, tmp_path):
    (tmp_path / "vllm.py").write_text("raise ImportError('not here')")  # also where the tests' Python has one
    environment = os.environ | SETTINGS
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environment["PYTHONPATH"]])
    line = [sys.executable, str(ROOT / "collect_hidden_states" / "compute_hidden_states_vllm.py")]
    line += ["--model", str(tiny_target_dir), "--input-file", str(conversations), "--output-dir", str(tmp_path / "s")]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "cannot load vLLM (not here): run the script by the one that has it" in done.stderr
    assert not list((tmp_path / "s").glob("*.safetensors"))


def test_a_vllm_that_dies_at_its_start_shows_its_words(request, server_kind, served_dir, tmp_path):
    """A weight file cut short; the in-repo server reads it by transformers."""
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in served_dir.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    if server_kind == "vllm":
        engine = ["--engine-python", str(request.getfixturevalue("engine_python"))]
    else:
        engine = ["--engine", "hf", "--device", "cpu"]
    line = command("serve-features", "--model", broken, *engine, "--port", free_port(), "--feature-port", free_port())
    done = subprocess.run(line, capture_output=True, text=True, env=os.environ | SETTINGS, timeout=240, check=False)
    assert done.returncode in (1, 2)
    said = done.stdout + done.stderr
    assert "MetadataIncompleteBuffer" in said or "incomplete metadata" in said.lower()
    assert said.rstrip().splitlines()[-1].startswith("error: ")
