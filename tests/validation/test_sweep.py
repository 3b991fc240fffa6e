"""What a sweep advises."""

import pytest

from modelopt_eagle.decoding import DraftPlan, SamplingOptions
from modelopt_eagle.draft import DraftConfig, DraftVocab
from modelopt_eagle.draft.algorithm import random_module
from modelopt_eagle.draft.dflash.config import DFlashConfig
from modelopt_eagle.draft.medusa.config import MedusaConfig
from modelopt_eagle.draft.peagle.config import PEagleConfig
from modelopt_eagle.validation import speed
from modelopt_eagle.validation.report import best_setting, speed_line
from modelopt_eagle.validation.speed import Speed
from modelopt_eagle.validation.sweep import advice, sweep, sweep_plans, sweep_table


def measured(steps, accepted, draft, verify, plain=1.0):
    """A row of a sweep by a model of costs: seconds of a step over those of plain decoding."""
    cost = Speed(accepted * plain / (draft + verify), accepted, plain, draft, verify, 0.0, 100)
    return {
        "mode": "chain", "num_steps": steps, "acceptance_length": accepted, "speedup": cost.speedup,
        "break_even": cost.break_even,
    }  # fmt: skip


def test_drafting_nothing_is_advised_where_verification_costs_too_much():
    """B140: the target's pass costs as much again with every token (experts), and acceptance grows by less."""
    dear = [measured(k, 1 + 0.5 * k, 0.1 * k, 1.0 + k) for k in (1, 3, 5)]
    dear.sort(key=lambda row: -row["speedup"])
    assert all(row["break_even"] > row["acceptance_length"] for row in dear)
    assert "draft nothing" in sweep_table(dear)
    cheap = [measured(k, 1 + 0.5 * k, 0.1 * k, 1.0) for k in (1, 3)]
    cheap.sort(key=lambda row: -row["speedup"])
    assert "best on this machine: chain, steps 3" in sweep_table(cheap)
    assert best_setting(dear) == {"mode": "plain"} and best_setting(cheap) == {"mode": "chain", "num_steps": 3}


def test_a_busy_machine_is_said():
    quiet = Speed(1.2, 2.0, 1.0, 0.2, 1.4, 0.0, 100, processor_share=1.9)
    busy = Speed(4.5, 2.0, 1.0, 0.2, 0.2, 0.0, 100, processor_share=0.31)
    assert "quiet machine" not in speed_line(quiet)
    assert "31 % of the time on a processor" in speed_line(busy)
    row = {"mode": "chain", "num_steps": 3, "acceptance_length": 2.0, "speedup": 4.5, "break_even": 0.4}
    assert "doubtful: other work held this one up, 31 %" in advice([row | {"processor_share": 0.31}])
    assert "doubtful" not in advice([row | {"processor_share": None}])


def test_what_cannot_be_is_measured_again_or_marked(monkeypatch):
    """A step cheaper than a plain step, or more speed-up than acceptance: seen once as 1.82x, 128 % of the length."""
    wrong = Speed(1.82, 1.42, 1.0, 0.1, 0.68, 0.0, 100)
    right = Speed(1.25, 1.42, 1.0, 0.1, 1.04, 0.0, 100)
    assert wrong.implausible and not right.implausible
    assert "unreliable" in speed_line(wrong) and "unreliable" not in speed_line(right)
    row = {"mode": "chain", "num_steps": 1, "acceptance_length": 1.42, "speedup": 1.82, "break_even": 0.78}
    assert "unreliable" in sweep_table([row | {"unreliable": True}])
    results = [[wrong], [right], [wrong], [wrong]]
    monkeypatch.setattr(speed, "_time", lambda *arguments: results.pop(0))
    assert speed.measure_speed([], [[1]], 4) == [right] and len(results) == 2
    assert speed.measure_speed([], [[1]], 4) == [wrong] and not results


def test_requests_at_a_time(target, good_head, prompts):
    plans = [DraftPlan.chain(2), DraftPlan.tree(2, 2)]
    rows = sweep(target, good_head, prompts, plans=plans, num_prompts=2, max_new_tokens=12, concurrent=(2,))
    assert all(row["concurrent"][2] > 0 for row in rows)
    assert "by requests at a time" in sweep_table(rows)
    drawn = sweep(
        target, good_head, prompts, plans=[*plans, DraftPlan.tree(2, 2, 6)], num_prompts=1, max_new_tokens=8,
        sampling=SamplingOptions(0.8), sample_drafts=True,
    )  # fmt: skip
    assert len(drawn) == 2  # a tree whose nodes are ranked cannot be drawn


SIZES = dict(
    hidden_size=32, target_hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=2,
    head_dim=16, vocab_size=64, draft_vocab_size=64,
)  # fmt: skip
LAYERS = (1, 3, 4)
DRAFTERS = {
    "eagle3": (DraftConfig(**SIZES, aux_layer_ids=LAYERS), [1, 2, 3, 4, 5, 7]),
    "P-EAGLE beyond its depth": (PEagleConfig(**SIZES, aux_layer_ids=LAYERS, mask_token_id=63, trained_depth=6),
                                 [1, 2, 3, 4, 5, 6, 7]),
    "a block": (DFlashConfig(**SIZES, aux_layer_ids=LAYERS, mask_token_id=63, block_size=4), [1, 2, 3]),
    "a long block": (DFlashConfig(**SIZES, aux_layer_ids=LAYERS, mask_token_id=63, block_size=16),
                     [1, 2, 3, 4, 5, 7, 15]),
    "a causal block": (DFlashConfig(**SIZES, aux_layer_ids=LAYERS, mask_token_id=63, block_size=4, causal=True),
                       [1, 2, 3, 4, 5, 7]),
    "Medusa": (MedusaConfig(**SIZES, aux_layer_ids=(7,), heads=6), [1, 2, 3, 4, 5, 6]),
}  # fmt: skip


@pytest.mark.parametrize("name", DRAFTERS)
def test_lengths_that_each_drafter_can_draft_are_tried_its_own_among_them(name):
    config, lengths = DRAFTERS[name]
    plans = sweep_plans(config)
    assert [plan.depth for plan in plans if not plan.is_tree] == lengths
    assert all(plan.depth <= max(lengths) for plan in plans) and any(plan.is_tree for plan in plans)


def test_a_sweep_of_a_block_head(target, prompts):
    """Its lengths up to the block's, side by side with plain decoding, and the table that names the best."""
    config = DFlashConfig.from_target(target.config, None, mask_token_id=250, block_size=4)
    rows = sweep(target, random_module(config, DraftVocab.identity(256), 0).eval(), prompts, num_prompts=1,
                 max_new_tokens=6)  # fmt: skip
    chains = sorted(row["num_steps"] for row in rows if row["mode"] == "chain")
    assert chains == [1, 2, 3] and all(row["speedup"] > 0 for row in rows) and "chain, steps 3" in sweep_table(rows)
