"""A head keeps its names, shapes and numbers in the engine's own environment, whose transformers is another release."""

import json
import os
import subprocess

import torch
import transformers

from modelopt_eagle.export import export_checkpoint, load_draft
from tests.conftest import HERE
from tests.export.conftest import build_head

THERE = """
import json, sys, transformers
from modelopt_eagle.export import export_checkpoint, load_draft
head = load_draft(sys.argv[1])
export_checkpoint(head, head.config, sys.argv[2])
again = load_draft(sys.argv[2])
shapes = {name: list(tensor.shape) for name, tensor in head.state_dict().items()}
same = all(list(tensor.shape) == shapes[name] for name, tensor in again.state_dict().items())
print(json.dumps({"version": transformers.__version__, "shapes": shapes, "same": same}))
"""


def test_a_head_is_built_saved_and_loaded_alike(engine_python, tmp_path):
    head = build_head(num_hidden_layers=2, attention_bias=True, fc_norm=True)
    export_checkpoint(head, head.config, tmp_path / "here")
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    command = [str(engine_python), "-c", THERE, str(tmp_path / "here"), str(tmp_path / "there")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["version"] != transformers.__version__, "the two environments are alike: this tests nothing"
    assert said["same"] and said["shapes"] == {name: list(t.shape) for name, t in head.state_dict().items()}
    back = load_draft(tmp_path / "there").state_dict()
    assert all(torch.equal(back[name], tensor) for name, tensor in head.state_dict().items())
