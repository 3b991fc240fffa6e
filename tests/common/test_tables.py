"""Small pieces of knowledge that many rooms share: trees, layers, lists in text, dtypes."""

import pytest
import torch

from modelopt_eagle.common.dtypes import MODEL_DTYPES, STATE_DTYPES, dtype_name, logit_tolerance, parse_dtype
from modelopt_eagle.common.layers import check_layer_ids, default_layer_ids
from modelopt_eagle.common.lists import parse_ids, split_list
from modelopt_eagle.common.trees import default_tree_nodes, history_size, tree_node_bounds
from modelopt_eagle.errors import CheckpointError, FeatureError, TargetError
from modelopt_eagle.features.store import STORAGE_DTYPES


def candidates(topk, depth):
    """Flat ids of each layer, as the draft loop grows them."""
    layers, total = [], 0
    for layer in range(depth):
        size = topk if layer == 0 else topk * topk
        layers.append(range(total, total + size))
        total += size
    return layers, total


@pytest.mark.parametrize("topk, depth", [(1, 1), (1, 5), (2, 3), (4, 1), (8, 6)])
def test_sizes_of_a_tree(topk, depth):
    layers, total = candidates(topk, depth)
    assert history_size(topk, depth) == total
    assert [history_size(topk, layer) for layer in range(1, depth)] == [ids.start for ids in layers[1:]]
    least, most = tree_node_bounds(topk, depth)
    assert (least, most) == (depth + 1, 1 + total)
    assert default_tree_nodes(topk, depth) == min(1 + topk * depth, most)


def test_layers():
    assert [default_layer_ids(n) for n in (6, 8, 30, 32)] == [(1, 2, 3), (1, 3, 4), (1, 14, 26), (1, 15, 28)]
    assert check_layer_ids([5, 0], 6) == (0, 5)
    with pytest.raises(TargetError, match="at least 6 layers, found 2; set eagle.aux_layer_ids, for example .0, 1. "):
        default_layer_ids(2)
    with pytest.raises(TargetError, match=r"layers? inputs is one higher\), found \[6\] \(\[6\] lie outside"):
        check_layer_ids([6], 6)


@pytest.mark.parametrize(
    "text, ids", [(None, None), ("7", (7,)), ("1,14, 26", (1, 14, 26)), ("3 1", (3, 1)), ("-1", (-1,))]
)
def test_ids_in_text(text, ids):
    assert parse_ids(text, "--aux-layers", FeatureError) == ids


@pytest.mark.parametrize("text", ["", " , ", "1,x", "1.5", "--1x", "--1", "1-"])
def test_text_that_holds_no_ids(text):
    with pytest.raises(FeatureError, match="--aux-layers takes numbers such as 1,14,26; found"):
        parse_ids(text, "--aux-layers", FeatureError)


def test_parts_are_trimmed_and_empty_ones_are_left_to_the_caller():
    assert split_list(" q_proj,v_proj ,") == ["q_proj", "v_proj", ""]


def test_dtypes_by_name():
    assert all(dtype_name(dtype) == name for name, dtype in MODEL_DTYPES.items())
    assert parse_dtype("torch.bfloat16") == parse_dtype("bfloat16") == torch.bfloat16 and parse_dtype(None) is None
    for name in ("int8", "bf17", "Tensor"):
        with pytest.raises(CheckpointError, match=f"dtype '{name}' is unknown; use float32, bfloat16, float16"):
            parse_dtype(name)
    assert list(STORAGE_DTYPES) == ["float32", "bfloat16", "float8_e4m3", "int8"]


def test_a_narrower_dtype_excuses_more():
    order = ("float32", "bfloat16", "float8_e4m3", "int8")
    for field in ("computed", "same", "recomputed", "logsumexp"):
        values = [getattr(STATE_DTYPES[name], field) for name in order]
        assert values == sorted(values), field
    assert [STATE_DTYPES[name].top1 for name in order] == sorted((STATE_DTYPES[n].top1 for n in order), reverse=True)
    assert logit_tolerance(torch.float32) < logit_tolerance(torch.bfloat16) == logit_tolerance(torch.float16)
