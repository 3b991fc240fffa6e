"""Captures are named by a boundary: the output of layer k, whole, and nothing that happens after it."""

import threading

import pytest
import torch
from torch import nn

from modelopt_eagle.common.layers import check_layer_ids, default_layer_ids
from modelopt_eagle.errors import TargetError
from modelopt_eagle.target import LayerCapture

WIDTH = 4


class AddingLayer(nn.Module):
    """Adds 2^k to its input, so that a value after layer k is the sum 2^0 + ... + 2^k."""

    def __init__(self, k, wrap=lambda hidden: hidden):
        super().__init__()
        self.k, self.wrap = k, wrap

    def forward(self, hidden):
        return self.wrap(hidden + 2**self.k)


class ToyBackbone(nn.Module):
    """Six adding layers; after layer 1 it adds 1000 from the side, in place."""

    def __init__(self, wrap=lambda hidden: hidden, side_input=False):
        super().__init__()
        self.layers = nn.ModuleList(AddingLayer(k, wrap) for k in range(6))
        self.side_input = side_input

    def forward(self, hidden, run=6):
        for k, layer in enumerate(self.layers[:run]):
            out = layer(hidden)
            hidden = out[0] if isinstance(out, tuple) else out
            if self.side_input and k == 1:
                hidden += 1000
        return hidden


def capture(backbone, layer_ids):
    return LayerCapture(backbone, backbone.layers, layer_ids, WIDTH)


@pytest.mark.parametrize(
    "wrap", [lambda h: h, lambda h: (h,), lambda h: (h, None), lambda h: (h, torch.ones(2, 1, 3, 3))]
)
def test_the_value_tells_the_layer(wrap):
    toy = ToyBackbone(wrap)
    with capture(toy, (0, 3, 5)) as captured:
        toy(torch.zeros(2, 3, WIDTH))
    assert captured.aux_hidden.shape == (2, 3, 3 * WIDTH)
    by_layer = captured.aux_hidden.view(2, 3, 3, WIDTH)  # [B,S,A,Ht]
    for slot, k in enumerate((0, 3, 5)):
        assert torch.all(by_layer[:, :, slot] == 2 ** (k + 1) - 1)


def test_a_side_input_after_the_layer_is_not_part_of_its_output():
    toy = ToyBackbone(side_input=True)
    with capture(toy, (1, 2)) as captured:
        toy(torch.zeros(1, 1, WIDTH))
    assert captured.aux_hidden[0, 0].view(2, WIDTH)[:, 0].tolist() == [3, 1007]


def test_a_residual_pair_gives_its_sum():
    toy = ToyBackbone(lambda hidden: (hidden, torch.full_like(hidden, 100.0)))
    with capture(toy, (2,)) as captured:
        toy(torch.zeros(1, 1, WIDTH))
    assert captured.aux_hidden.flatten().tolist() == [107.0] * WIDTH


def test_each_forward_replaces_the_last_one():
    toy = ToyBackbone()
    with capture(toy, (0, 5)) as captured:
        toy(torch.zeros(1, 7, WIDTH))
        first = captured.aux_hidden
        toy(torch.ones(1, 2, WIDTH))
        assert captured.aux_hidden.shape == (1, 2, 2 * WIDTH) and captured.aux_hidden[0, 0, 0] == 2
        assert first.shape == (1, 7, 2 * WIDTH) and first[0, 0, 0] == 1
        toy(torch.ones(1, 2, WIDTH), run=3)
        with pytest.raises(TargetError, match=r"did not run layers \[5\]"):
            _ = captured.aux_hidden


def test_hooks_are_removed_on_exit_and_after_an_exception():
    toy = ToyBackbone()
    for error in (None, KeyError):
        try:
            with capture(toy, (0, 5)):
                assert toy.layers[0]._forward_hooks and toy._forward_pre_hooks
                if error:
                    raise error
        except KeyError:
            pass
        assert not any(layer._forward_hooks for layer in toy.layers) and not toy._forward_pre_hooks


def test_a_pass_of_another_thread_is_not_captured():
    backbone = ToyBackbone()
    with LayerCapture(backbone, backbone.layers, (0, 2), WIDTH) as captured:
        backbone(torch.zeros(1, 3, WIDTH))
        other = threading.Thread(target=backbone, args=(torch.ones(2, 5, WIDTH),))
        other.start()
        other.join()
        assert captured.aux_hidden.shape == (1, 3, 2 * WIDTH) and captured.aux_hidden[0, 0, 0] == 1


def test_an_output_of_another_width_is_refused():
    toy = ToyBackbone()
    with (
        LayerCapture(toy, toy.layers, (2,), WIDTH + 1),
        pytest.raises(TargetError, match="layer 2 .*expected an output"),
    ):
        toy(torch.zeros(1, 1, WIDTH))


def test_capture_with_a_cache_equals_the_whole_pass(tiny_target):
    x = torch.randint(3, 247, (2, 9))
    whole = tiny_target.features(x, None, (1, 3, 7)).aux_hidden  # [B,9,3*Ht]
    with tiny_target.capture((1, 3, 7)) as captured:
        cache = tiny_target.model(x[:, :6], use_cache=True).past_key_values
        head = captured.aux_hidden
        tiny_target.model(x[:, 6:], past_key_values=cache)
        tail = captured.aux_hidden
    torch.testing.assert_close(torch.cat([head, tail], 1), whole, rtol=1e-4, atol=1e-4)


def test_layer_ids_are_sorted_and_checked():
    assert check_layer_ids([5, 0, 3], 6) == (0, 3, 5)
    for bad in ([], [1, 1], [6], [-1]):
        with pytest.raises(TargetError, match="distinct layer ids from 0 to 5"):
            check_layer_ids(bad, 6)


@pytest.mark.parametrize(("layers", "expected"), [(6, (1, 2, 3)), (7, (1, 2, 3)), (8, (1, 3, 4)), (30, (1, 14, 26))])
def test_default_layer_ids(layers, expected):
    assert default_layer_ids(layers) == expected


def test_no_default_below_six_layers():
    with pytest.raises(TargetError, match="at least 6 layers, found 5; set eagle.aux_layer_ids"):
        default_layer_ids(5)
