"""States that an engine left out, made too many of, zeroed in part, or handed out under another row's number."""

from dataclasses import replace

import pytest
import torch

from modelopt_eagle.errors import FeatureError
from modelopt_eagle.features import FeatureContract, HybridSource, MemorySource, OfflineSource
from modelopt_eagle.features.checks import recompute
from modelopt_eagle.features.compute import compute_features, finish_row
from modelopt_eagle.features.dump import EngineBackEnd, TargetBackEnd, dump
from modelopt_eagle.features.store import StoreReader
from tests.attacks.test_9_manifests import forge
from tests.features.rows import contract, fill, make_row
from tests.features.test_recompute import AUX, problems, store


@pytest.mark.parametrize("share", [0.38, 0.02])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", ["aux_hidden", "final_hidden"])
def test_states_zeroed_in_part_are_found(tiny_target, dataset, tmp_path, share, dtype, name):
    def zeroed(rows):
        for number, row in rows.items():
            states = getattr(row, name).clone()
            places = row.supervised.nonzero().flatten()  # of those the store keeps both
            states[places[: max(1, int(share * len(places)))] - 1] = 0
            rows[number] = replace(row, **{name: states})
        return rows

    found = problems(recompute(store(tiny_target, dataset.rows, tmp_path, zeroed, dtype), tiny_target, sample=5))
    assert len(found) == 5 and all("positions, first at" in problem for problem in found)


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("which", [0, 1])
def test_too_many_or_too_few_states_are_an_error(tiny_target, dataset, change, which):
    row = dataset.rows[0]
    sizes = [len(row.input_ids)] * 2
    sizes[which] += change
    aux, final = torch.zeros(sizes[0], 3 * tiny_target.hidden_size), torch.zeros(sizes[1], tiny_target.hidden_size)
    with pytest.raises(FeatureError, match="left some out, or made more"):
        finish_row(row, aux, final, None, tiny_target.head)
    engine = EngineBackEnd(tiny_target, AUX, lambda rows: iter([(0, aux, final)]), final_is_normed=True)
    with pytest.raises(FeatureError, match="left some out, or made more"):
        list(engine.features([row]))


@pytest.mark.parametrize("which", [0, 1])
def test_states_of_an_engine_that_are_not_finite_are_refused(tiny_target, dataset, which):
    row = dataset.rows[0]
    states = [torch.zeros(len(row.input_ids), layers * tiny_target.hidden_size) for layers in (3, 1)]
    states[which][1, 2] = float("nan")
    with pytest.raises(FeatureError, match="a state that is not finite"):
        finish_row(row, *states, None, tiny_target.head)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_choices_of_another_head_are_found_though_the_states_are_right(tiny_target, dataset, tmp_path, dtype):
    """The first stored choice of each row is the least likely token."""

    def spoilt(rows):
        for number, row in rows.items():
            place = int(row.supervised.nonzero()[0]) - 1
            top1 = row.target_top1.clone()
            top1[place] = tiny_target.logits(row.final_hidden[place]).argmin()
            rows[number] = replace(row, target_top1=top1)
        return rows

    found = problems(recompute(store(tiny_target, dataset.rows, tmp_path, spoilt, dtype), tiny_target, sample=5))
    assert len(found) == 5 and all("target_top1 is another token than the target's choice at 1 of" in p for p in found)


@pytest.mark.parametrize("at_a_time", [3, 4096])
@pytest.mark.parametrize("name", ["aux_hidden", "final_hidden", "target_logsumexp"])
def test_rows_with_nan_are_named_and_counted(tmp_path, monkeypatch, name, at_a_time):
    monkeypatch.setattr("modelopt_eagle.features.store.shard._POSITIONS", at_a_time)
    fill(tmp_path, rows=6, shard_bytes=10**6)
    offsets = {"aux_hidden": "row_offsets", "final_hidden": "final_offsets", "target_logsumexp": "teacher_offsets"}

    def spoil(tensors):
        for row in (1, 4):
            tensors[name][tensors[offsets[name]][row]] = float("nan")

    forge(tmp_path, spoil)
    with pytest.raises(FeatureError, match=f"{name} holds NaN or infinity in 2 of 6 rows: 'row-1', 'row-4'"):
        StoreReader(tmp_path)
    with pytest.raises(FeatureError, match="in 2 of 6 rows"):
        OfflineSource(tmp_path, verify="read").row(0)


class Held:
    """A reader of rows in memory, as a program may bring one along."""

    def __init__(self, rows):
        self.rows, self.contract, self.lengths = rows, contract(), [len(row) for row in rows]

    def row(self, number):
        return self.rows[number]


@pytest.mark.parametrize("name", ["aux_hidden", "final_hidden"])
def test_nan_of_rows_that_no_store_holds_is_found_when_they_are_read(name):
    rows = [make_row(number) for number in range(3)]
    getattr(rows[1], name)[2, 5] = float("inf")
    words = f"row 'row-1': {name} holds NaN or infinity at 1 of 4 positions, first at 2"
    source = OfflineSource(Held(rows))
    source.load([0, 2])
    with pytest.raises(FeatureError, match=words):
        source.load([0, 1])
    with pytest.raises(FeatureError, match=words):
        MemorySource(contract(), rows)


@pytest.mark.parametrize("change", ["fewer", "more", "another order"])
def test_rows_made_while_training_must_be_those_asked_for(tiny_target, dataset, tmp_path, change):
    def make(rows):
        made = compute_features(tiny_target, rows, AUX)
        return {"fewer": made[:-1], "more": [*made, made[0]], "another order": made[::-1]}[change]

    contract = FeatureContract.from_target(tiny_target, AUX)
    words = "of other tokens came back" if change == "another order" else "2 rows were asked for, [13] came back"
    with HybridSource(tmp_path, dataset, contract, on_missing="generate", make=make) as source:
        with pytest.raises(FeatureError, match=words):
            source.load([0, 1])
        assert source.generated == 0


@pytest.mark.parametrize("number", [-1, 2])
def test_a_row_number_that_was_not_given_is_an_error(tiny_target, dataset, tmp_path, number):
    rows = dataset.rows[:2]
    made = compute_features(tiny_target, rows, AUX)

    class Engine(TargetBackEnd):
        def features(self, rows):
            yield 0, made[0]
            yield number, made[1]

    with pytest.raises(FeatureError, match=f"made row {number} of 2"):
        dump(Engine(tiny_target, AUX), rows, tmp_path)
    states = iter([(number, made[1].aux_hidden, made[1].final_hidden)])
    with pytest.raises(FeatureError, match=f"made row {number} of 2"):
        list(EngineBackEnd(tiny_target, AUX, lambda rows: states, final_is_normed=True).features(rows))
