"""Make the folders of this test with the code of an older commit, and write down the numbers that they gave.

They were made at commit 939f04f, from a clean checkout of it in OLD:

    PYTHONPATH=OLD python tests/compatibility/make.py tests/compatibility/made

The folders are data: they are never made again by newer code, whose task is to read them.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from modelopt_eagle.data import prepare_dataset
from modelopt_eagle.decoding import PseudoSpeculativeGenerator
from modelopt_eagle.export import export_checkpoint, load_draft
from modelopt_eagle.features.dump import TargetBackEnd, dump
from modelopt_eagle.features.store import StoreReader
from modelopt_eagle.recipe import load_recipe
from modelopt_eagle.target import load_target
from modelopt_eagle.target.tiny import make_tiny_target
from modelopt_eagle.training import rollout, train

LAYERS = (1, 2, 3)
WORDS = "the draft head proposes and the target accepts what it would have said itself".split()


def recipe(*options: str):
    """Four steps on the target of this folder; all paths are relative."""
    return load_recipe(
        None,
        [
            "model.base_model=target", "training.output_dir=run", "training.batch_size=2", "training.epochs=1",
            "training.learning_rate=3e-3", "training.log_steps=1", "training.save_steps=2", "training.eval_steps=null",
            "training.report_to=none", "eagle.draft_vocab_size=64", "eagle.ttt_steps=2", *options,
        ],
    )  # fmt: skip


def losses(result) -> list[float]:
    """The loss of every step."""
    return [entry["loss"] for entry in result.history]


def head_inputs(module) -> dict[str, torch.Tensor]:
    """Embeddings [1, 9, H] and features [1, 9, A·Ht] to run a head on."""
    generator = torch.Generator().manual_seed(1)
    width = module.config.target_hidden_size
    return {
        "embeddings": torch.randn(1, 9, width, generator=generator),
        "features": torch.randn(1, 9, len(LAYERS) * width, generator=generator),
    }


def main(folder: Path) -> None:
    """Write everything into ``folder``, which must not exist."""
    folder.mkdir()
    os.chdir(folder)
    make_tiny_target("target", layers=6, hidden=32, heads=2, kv_heads=1, intermediate=32, max_positions=256)
    target = load_target("target")
    with open("talks.jsonl", "w", encoding="utf-8") as stream:
        for i in range(8):
            answer = " ".join(WORDS[(i * 5 + j) % len(WORDS)] for j in range(1 + i % 3))
            talk = [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": answer}]
            stream.write(json.dumps({"id": f"row-{i}", "messages": talk}) + "\n")

    expected, tensors = {}, {}
    rows = prepare_dataset(target.tokenizer, "talks.jsonl", max_length=256).rows
    for worker in range(2):
        dump(TargetBackEnd(target, LAYERS), rows, "store", dtype="float32", worker=(worker, 2))
    reader = StoreReader("store")
    stored = [reader.row(number) for number in range(len(rows))]
    expected["rows"] = [row.row_id for row in stored]
    for name in ("aux_hidden", "final_hidden", "target_logsumexp"):
        expected[name] = [float(getattr(row, name).double().abs().sum()) for row in stored]
    parts = ("input_ids", "supervised", "aux_hidden", "final_hidden", "target_top1", "target_logsumexp")
    tensors |= {f"row0.{name}": getattr(stored[0], name).contiguous().clone() for name in parts}

    offline = ["data.offline_data_path=store", "training.output_dir=offline"]
    expected["offline_losses"] = losses(train(recipe(*offline)))
    shutil.rmtree("offline")

    result = train(recipe("data.train_path=talks.jsonl"))
    expected["losses"] = losses(result)
    head = load_draft(result.last_checkpoint)
    export_checkpoint(head, None, "export", target=target)
    exported = load_draft("export")
    tensors |= head_inputs(exported)
    for name, module in (("checkpoint", load_draft("run/checkpoint-2")), ("export", exported)):
        output = rollout(module, tensors["embeddings"], tensors["features"], steps=2)
        tensors |= {f"{name}.logits{k}": output.logits(k).detach().contiguous() for k in range(2)}
    generator = PseudoSpeculativeGenerator(target, exported, num_steps=2, fast_linear=False)
    answer = generator.generate([[50, 60, 70], [9, 8, 100, 101]], 24, eos_token_id=[])
    expected["tokens"], expected["accepted"] = answer.tokens, answer.accepted_lengths
    continued = train(recipe("data.train_path=talks.jsonl", "model.draft_init=export", "training.output_dir=continued",
                             "eagle.draft_vocab_size=null"))  # fmt: skip
    expected["continued_losses"] = losses(continued)
    shutil.rmtree("continued")

    shutil.rmtree("run/checkpoint-4")  # the run as it was when it stood at step 2
    best = Path("run/best")
    best.unlink()
    best.symlink_to("checkpoint-2", target_is_directory=True)
    save_file(tensors, "expected.safetensors")
    Path("expected.json").write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
