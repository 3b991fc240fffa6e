"""Small runs on the tiny target, for the trainer's tests."""

import json
import os
import signal

from modelopt_eagle.recipe import load_recipe
from modelopt_eagle.training.trainer import Trainer

WORDS = "the draft head proposes and the target accepts what it would have said itself".split()


def write_conversations(path, count=24):
    """Conversations of different lengths, one or two turns."""
    with open(path, "w", encoding="utf-8") as stream:
        for i in range(count):
            answer = " ".join(WORDS[(i * 5 + j) % len(WORDS)] for j in range(3 + i % 6))
            messages = [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": answer}]
            if i % 4 == 0:
                messages += [{"role": "user", "content": "again"}, {"role": "assistant", "content": answer[::-1]}]
            stream.write(json.dumps({"id": f"row-{i}", "messages": messages}) + "\n")
    return path


def small_recipe(target, data, output, *overrides):
    """Two epochs of six steps on the tiny target; ``data`` is not named where a store holds the rows."""
    stored = any("offline_data_path" in text for text in overrides)
    stored = stored and not any("on_missing" in text for text in overrides)
    return load_recipe(
        None,
        [
            f"model.base_model={target}",
            *([] if stored else [f"data.train_path={data}"]),
            f"training.output_dir={output}",
            *([] if any("max_tokens_per_batch" in text for text in overrides) else ["training.batch_size=4"]),
            "training.epochs=2",
            "training.learning_rate=3e-3",
            "training.log_steps=2",
            "training.report_to=none",
            "eagle.draft_vocab_size=64",
            *overrides,
        ],
    )


def interrupt_at(monkeypatch, step, number=signal.SIGINT):
    """Send this process a signal when the loop has done so many steps."""
    original = Trainer.optimise

    def optimise(self, index, window):
        original(self, index, window)
        if self.state.step == step:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Trainer, "optimise", optimise)
