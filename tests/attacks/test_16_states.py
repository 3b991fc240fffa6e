"""States that an engine left out, made too many of, or zeroed in part."""

from dataclasses import replace

import pytest
import torch

from modelopt_eagle.errors import FeatureError
from modelopt_eagle.features.checks import recompute
from modelopt_eagle.features.compute import finish_row
from modelopt_eagle.features.dump import EngineBackEnd
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
