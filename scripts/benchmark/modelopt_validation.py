"""nvidia-modelopt's own acceptance validation, timed; ``validation.py`` starts it in an environment that can run it.

    PYTHON scripts/benchmark/modelopt_validation.py TARGET_FOLDER HEAD_FOLDER REQUEST.json

Needs transformers, nvidia-modelopt and safetensors, not this package. The target is converted by modelopt, its EAGLE
module takes the weights of the exported head, and ``HFARValidation.validate`` runs as it is: the target's text token by
token, then a draft and a check a round, all without a cache. The only change: that code asks for the current CUDA
device, which is answered with the CPU where there is none. The last line of output is JSON, wall and processor seconds
by prompt.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch


def convert(folder: str, head: Path):
    """The target with modelopt's EAGLE-3 module, the head's weights in it."""
    import modelopt.torch.speculative as mtsp
    from modelopt.torch.speculative.config import eagle3_default_config
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = json.loads((head / "config.json").read_text(encoding="utf-8"))
    architecture = {key: config[key] for key in eagle3_default_config if key in config and key != "rope_scaling"}
    architecture = {
        **eagle3_default_config,
        **architecture,
        "draft_vocab_size": config["draft_vocab_size"],
        "rope_scaling": {"rope_type": "default", "rope_theta": config["rope_theta"]},
        "eagle_aux_hidden_state_layer_ids": config["eagle_config"]["eagle_aux_hidden_state_layer_ids"],
        "has_lm_head": True,
        "torch_dtype": "float32",
    }
    options = {"eagle_decoder_type": "llama", "eagle_architecture_config": architecture}
    mtsp.convert(model, [("eagle", {**options, "eagle_use_torch_compile": False})])
    weights = {
        name.replace("midlayer.", "layers.0."): tensor
        for name, tensor in load_file(head / "model.safetensors").items()
        if name != "t2d"
    }
    model.eagle_module.load_state_dict(weights)
    return model.eval()


def clocks() -> tuple[float, float]:
    """Seconds of the wall clock and of this process on its processors."""
    return time.perf_counter(), time.process_time()


def main() -> None:
    """Validate every prompt and print the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="folder of the target")
    parser.add_argument("head", type=Path, help="folder of an exported head")
    parser.add_argument("request", type=Path, help="JSON: prompts (token ids), max_new_tokens, steps, threads")
    arguments = parser.parse_args()
    request = json.loads(arguments.request.read_text(encoding="utf-8"))
    torch.set_num_threads(request["threads"])

    import transformers
    from modelopt import __version__ as version
    from modelopt.torch.speculative.plugins.hf_eagle import HFARValidation
    from transformers import AutoTokenizer

    if not torch.cuda.is_available():
        torch.cuda.current_device = lambda: "cpu"
    model = convert(arguments.target, arguments.head)
    validation = HFARValidation(model, AutoTokenizer.from_pretrained(arguments.target))
    rows = []
    for prompt in request["prompts"]:
        ids = torch.tensor([prompt])  # [1,S]
        model.pseudo_speculative_generate(ids, steps=1)  # warm
        begun = clocks()
        truth = validation.get_ground_truth(ids, request["max_new_tokens"])  # [1,S+n]
        written = clocks()
        _, length = validation.validate(
            request["max_new_tokens"], input_ids=ids, ground_truth=truth, steps=request["steps"]
        )
        ended, tokens = clocks(), truth[0, len(prompt) :].tolist()
        rows.append(
            {
                "tokens": tokens,
                "rounds": round(len(tokens) / length),
                "text": [b - a for a, b in zip(begun, written, strict=True)],
                "rounds_alone": [b - a for a, b in zip(written, ended, strict=True)],
            }
        )
    print(json.dumps({"modelopt": version, "transformers": transformers.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
