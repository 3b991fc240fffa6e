"""A run's output folder as train-and-export leaves it, made without training: for tests of its page."""

import json
import random

from modelopt_eagle.common.acceptance import acceptance_length, bootstrap_interval, prefix_shares
from modelopt_eagle.recipe import dump_resolved, load_recipe

HOSTILE = "<script>alert('x')</script> & \"quotes\" $x^2$ \x00 {{ 7 * 7 }}"
"""What data may hold, and no page may run, lose or choke on."""

WORDS = "the draft head proposes a few tokens and the target checks all of them in one pass".split()


def make_dialogues(count=16, rate=0.6, seed=0, categories=("writing", "math", HOSTILE)):
    """Rows of ``dialogues.jsonl`` whose drafts are accepted with this chance each."""
    chance, rows = random.Random(seed), []
    for number in range(count):
        pieces, accepted = [("", "The")], []
        for start in range(0, 60, 4):
            depth = 0
            while depth < 3 and chance.random() < rate:
                depth += 1
            text = [" " + WORDS[(start + place) % len(WORDS)] for place in range(depth + 1)]
            pieces.append(("".join(text[:-1]), text[-1]))
            accepted.append(depth)
        turn = {"question": HOSTILE, "context": 30 + 40 * number, "pieces": pieces, "accepted": accepted}
        rows.append({"id": f"p{number}", "category": categories[number % len(categories)], "turns": [turn]})
    return rows


def make_acceptance(dialogues, **more):
    """What ``acceptance.json`` says of them."""
    rows = [row["turns"][0]["accepted"] for row in dialogues]
    by_category = {}
    for row in dialogues:
        by_category.setdefault(row["category"], []).append(row["turns"][0]["accepted"])
    costs = {"plain_step": 0.02, "draft_step": 0.004, "verify_step": 0.022, "other_step": 0.001, "break_even": 1.35,
             "efficiency": 0.7, "processor_share": 0.5, "machine": "one <b>processor</b>, 2 cores"}  # fmt: skip
    return {
        "acceptance_length": acceptance_length(rows), "ci95": list(bootstrap_interval(rows)),
        "per_position": prefix_shares(rows, 3),
        "per_category": {k: acceptance_length(v) for k, v in by_category.items()},
        "per_category_ci95": {k: list(bootstrap_interval(v)) for k, v in by_category.items()}, "speedup": 1.4,
        "steps": sum(map(len, rows)), "prompts": len(rows), "target": "a/target", "commit": "0123456789abcdef+changes",
        "draft": {"mode": "chain", "num_steps": 3}, "costs": costs, **more,
    }  # fmt: skip


def make_history(steps=40):
    """Log lines whose loss falls."""
    return [
        {
            "step": step, "epoch": step / 20, "elapsed": 2.0 * step, "loss": 9 / (1 + step / 10), "learning_rate": 1e-3,
            "per_step": [3 / (1 + step / 10) + k / 10 for k in range(3)],
            "accuracy": [0.01 * step / (k + 1) for k in range(3)],
            "grad_norm": 1.0, "tokens_per_second": 900.0, "seconds_per_step": 2.0, "waiting": 0.1,
        }
        for step in range(1, steps + 1, 3)
    ]  # fmt: skip


def make_run(folder, *, rate=0.6, seed=0, overrides=(), acceptance=None, dialogues=None, finished=True):
    """Write the folder of a run; returns it."""
    recipe = load_recipe("eagle3", ["training.seed=7", f"training.output_dir={folder}", *overrides])
    dump_resolved(recipe, folder / "recipe.yaml")
    checkpoint, report = folder / "checkpoint-40", folder / "report"
    checkpoint.mkdir(parents=True)
    report.mkdir()
    evaluations = [
        {"step": step, "acceptance_length": 1 + step / 50, "per_position": [0.5, 0.2, 0.1], "walked": 90}
        for step in (20, 40)
    ]
    state = {"step": 40, "elapsed": 81.0, "history": make_history(), "evaluations": evaluations, "finished": finished,
             "header": ["data: 120 conversations read"], "best_step": 40, "best_value": 1.8}  # fmt: skip
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    (checkpoint / "complete.json").write_text("{}")
    rows = make_dialogues(rate=rate, seed=seed) if dialogues is None else dialogues
    (report / "dialogues.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (report / "acceptance.json").write_text(json.dumps(make_acceptance(rows) if acceptance is None else acceptance))
    lengths = {"quantiles": [10, 20, 40, 70, 99, 150, 200], "edges": [10, 110, 210], "counts": [90, 30]}
    data = {"read": 122, "dropped": {"no_messages": 1, "too_long": 1}, "notes": {"trailing_turns_cut": 4}, "rows": 120,
            "fanned_out": 0, "tokens": 9000, "supervised": 4000, "truncated": 3, "max_length": 2048,
            "lengths": lengths}  # fmt: skip
    (folder / "data.json").write_text(json.dumps(data))
    (folder / "environment.json").write_text(json.dumps({"python": "3.11", "cpu": "two <i>cores</i>"}))
    return folder
