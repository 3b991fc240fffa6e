"""A prefix that all rows begin with is run once; every value stays what an undisturbed forward gives."""

import random
from dataclasses import dataclass

import pytest
import torch
import transformers

from modelopt_eagle.features import compute
from modelopt_eagle.features.compute import compute_features, compute_rows
from modelopt_eagle.features.dump import TargetBackEnd, dump
from modelopt_eagle.features.prefix_cache import CommonPrefix, common_length, find_common_prefix
from modelopt_eagle.features.store import maintenance
from modelopt_eagle.target import Target
from tests.target.target_families import CONFIGS, SIZES, make_family, spread

AUX = (1, 2, 4)


@dataclass
class Row:
    id: str
    input_ids: list
    supervised: list
    category: str = ""
    images: object = None


def make_rows(prefix=17, count=9, vocab=96, seed=0):
    draw = random.Random(seed)
    system = [draw.randrange(3, vocab) for _ in range(prefix)]
    rows = []
    for number in range(count):
        rest = [draw.randrange(3, vocab) for _ in range(draw.randint(1, 40))]
        supervised = [False] * prefix + [draw.random() < 0.5 for _ in rest]
        rows.append(Row(f"row-{number}", system + rest, supervised))
    return rows


def assert_as_alone(target, rows, made):
    for index, row in enumerate(rows):
        alone = compute_features(target, [row], AUX)[0]
        for name in ("aux_hidden", "final_hidden", "target_logsumexp"):
            torch.testing.assert_close(getattr(made[index], name), getattr(alone, name), rtol=2e-4, atol=2e-4)
        assert torch.equal(made[index].target_top1, alone.target_top1)
        assert made[index].input_ids.tolist() == row.input_ids


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_values_are_those_of_an_undisturbed_forward(family):
    target, rows = Target(make_family(family), None, name=family), make_rows()
    prefix = find_common_prefix(target, rows, AUX)
    assert prefix is not None and len(prefix) == 17
    for batch_tokens in (10_000, 60):  # all rows padded in one batch, and few at a time
        assert_as_alone(target, rows, dict(compute_rows(target, rows, AUX, batch_tokens)))


def sliding(window):
    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention"] * 3
    config = transformers.Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=window, layer_types=kinds)
    return Target(spread(transformers.AutoModelForCausalLM.from_config(config).float().eval()), None, name="sliding")


@pytest.mark.parametrize("window", [6, 17, 18, 19, 30])
def test_sliding_windows_shorter_and_longer_than_the_prefix(window):
    target, rows = sliding(window), make_rows()
    assert max(len(row.input_ids) for row in rows) > 30
    prefix = find_common_prefix(target, rows, AUX)
    assert (prefix is not None) == (window > 17)  # a window of 17 keeps 16 tokens of the prefix
    assert_as_alone(target, rows, dict(compute_rows(target, rows, AUX, 10_000)))


def test_frequencies_that_follow_the_length_are_found():
    """Past its original length dynamic rotary scaling turns the prefix of long rows by other angles."""
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    sizes = SIZES | {"max_position_embeddings": 32}
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**sizes, rope_parameters=rope))
    target, rows = Target(spread(model.float().eval()), None, name="dynamic"), make_rows()
    assert max(len(row.input_ids) for row in rows) > 40
    assert find_common_prefix(target, rows, AUX) is None


def test_recurrent_targets_are_left_alone():
    config = transformers.MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=6, state_size=4)
    model = transformers.AutoModelForCausalLM.from_config(config)
    prefix = CommonPrefix(Target(model.float().eval(), None, name="mamba"), list(range(3, 20)), AUX)
    assert not prefix.sound


def test_a_wrong_cache_is_found(monkeypatch):
    target, rows = Target(make_family("llama"), None, name="llama"), make_rows()
    original = CommonPrefix.features

    def spoiled(self, *arguments):
        self._cache.layers[2].keys.mul_(1.5)
        return original(self, *arguments)

    monkeypatch.setattr(CommonPrefix, "features", spoiled)
    assert find_common_prefix(target, rows, AUX) is None


def test_common_length_leaves_every_row_a_token():
    rows = make_rows(prefix=12)
    assert common_length(rows) == 12
    assert common_length([*rows, Row("short", rows[0].input_ids[:12], [True] * 12)]) == 11
    assert common_length([Row("a", [1, 2], []), Row("b", [3, 2], [])]) == 0
    assert find_common_prefix(None, make_rows(prefix=7), AUX) is None  # not worth it, the target is not asked
    assert find_common_prefix(None, make_rows(prefix=12)[:2], AUX) is None
    rows[3].images = object()
    assert find_common_prefix(None, rows, AUX) is None


def test_a_dump_stores_the_prefix_once_and_computes_it_once(tmp_path, tiny_target, monkeypatch):
    rows = make_rows(prefix=24, count=12)
    seen = []
    original = CommonPrefix.features
    monkeypatch.setattr(CommonPrefix, "features", lambda self, ids, mask: seen.append(ids) or original(self, ids, mask))
    dump(TargetBackEnd(tiny_target), rows, tmp_path, dtype="float32")
    summary = maintenance.summarise(tmp_path)
    assert summary.shared == 24 * 11
    rest = sum(len(row.input_ids) - 24 for row in rows)
    assert sum(ids.numel() for ids in seen) < 3 * rest and all(ids.shape[1] <= 40 for ids in seen)
    monkeypatch.setattr(compute, "find_common_prefix", lambda *arguments: None)
    dump(TargetBackEnd(tiny_target), rows, tmp_path / "plain", dtype="float32")
    assert maintenance.summarise(tmp_path / "plain").shared >= 24 * 11
