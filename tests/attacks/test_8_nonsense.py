"""A server whose states are well-formed, of the right tokens, rightly summed, and wrong."""

import json

import pytest
import torch

from modelopt_eagle.errors import StreamError
from modelopt_eagle.features import StreamedSource
from modelopt_eagle.features.stream import plausible
from modelopt_eagle.features.stream.mailbox import Mailbox
from modelopt_eagle.features.stream.plausible import Plausibility
from tests.attacks.wire import AUX, serving


def lying(monkeypatch, change):
    """A mailbox that changes each message before it is packed and summed."""
    put = Mailbox.put

    def changed(self, key, message):
        message.states = change(message.states.clone()).contiguous()
        put(self, key, message)

    monkeypatch.setattr(Mailbox, "put", changed)


def flip_layer(layer):
    def change(states):
        states[:, layer] = states[:, layer].flip(0)
        return states

    return change


LIES = {
    "in reversed order": lambda states: states.flip(0),
    "one layer in reversed order": flip_layer(1),
    "final states in reversed order": flip_layer(3),
}


@pytest.mark.parametrize("name", LIES)
def test_states_in_another_order_are_refused_at_the_start(tiny_target, dataset, monkeypatch, name):
    lying(monkeypatch, LIES[name])
    with serving(tiny_target) as server, pytest.raises(StreamError, match="sent states that are not those of the text"):
        StreamedSource([server.url], dataset, tiny_target, AUX, timeout=30.0)


def test_a_server_that_begins_to_lie_later_is_found(tiny_target, dataset, monkeypatch):
    monkeypatch.setattr(plausible, "EVERY_ROWS", 2)
    with serving(tiny_target) as server:
        source = StreamedSource([server.url], dataset, tiny_target, AUX, timeout=30.0)
        assert source.load([0, 1, 2]).row_ids
        lying(monkeypatch, lambda states: states.flip(0))
        with pytest.raises(StreamError, match="not those of the text"):
            for _ in range(5):
                source.load(list(range(12)))


def text_states(dtype=torch.float32):
    """A toy target that reads its text fairly well, and the states before its norm, some of which mislead it."""
    generator = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(64, 100, bias=False)
    head.weight.data = 0.2 * torch.randn(100, 64, generator=generator)
    weight = 0.2 + 2 * torch.rand(64, generator=generator)

    def norm(states):
        return weight * states / states.pow(2).mean(-1, keepdim=True).sqrt()

    ids = torch.randint(100, (200,), generator=generator)
    following = torch.where(torch.rand(200, generator=generator) < 0.9, ids.roll(-1), (ids + 1) % 100)
    raw = head.weight.data[following] + 0.1 * torch.randn(200, 64, generator=generator)
    raw = 30 * raw / weight
    embedding = torch.randn(100, 64, generator=generator)
    aux = embedding[ids] + torch.randn(200, 64, generator=generator)
    return Plausibility(embedding, norm, head), ids, aux.to(dtype), raw.to(dtype), norm


def test_a_false_word_on_the_norm():
    look, ids, aux, raw, norm = text_states()
    look.look("a", "url", "row", ids, torch.stack([aux, raw], 1), False)
    look.look("b", "url", "row", ids, torch.stack([aux, norm(raw)], 1), True)
    with pytest.raises(StreamError, match="read pre-norm, the target finds the text"):
        look.look("c", "url", "row", ids, torch.stack([aux, raw], 1), True)


@pytest.mark.parametrize("order", [lambda s: s.flip(0), lambda s: s.roll(1, 0), lambda s: s.roll(-1, 0)])
@pytest.mark.parametrize("layer", [0, 1, slice(None)])
def test_another_order(order, layer):
    look, ids, aux, raw, norm = text_states()
    states = torch.stack([aux, norm(raw)], 1)
    look.look("a", "url", "row", ids, states, True)
    states[:, layer] = order(states[:, layer])
    with pytest.raises(StreamError, match="read .*, the target finds|resembles what is below it"):
        look.look("b", "url", "row", ids, states, True)


def test_another_number_format():
    look, ids, aux, raw, norm = text_states()
    states = torch.stack([aux, norm(raw)], 1).half()
    look.look("a", "url", "row", ids, states, True)
    with pytest.raises(StreamError, match="read as float16, the target finds"):
        look.look("b", "url", "row", ids, states.view(torch.bfloat16), True)


def test_an_identity_of_another_kind_is_an_error(tiny_target, dataset, monkeypatch):
    with serving(tiny_target) as server:
        for value in (3, {"a": 1}, "1,3,4", None, [[1], 3, 4]):
            server._mailbox._identity["aux_layer_ids"] = json.loads(json.dumps(value))
            with pytest.raises(StreamError, match="aux_layer_ids"):
                StreamedSource([server.url], dataset, tiny_target, AUX, timeout=30.0)
