"""States read from the server's memory by NIXL; collected where it is installed (``pip install nixl-cu12``)."""

import time

import pytest
import torch

from modelopt_eagle.errors import StreamError
from modelopt_eagle.features.stream import nixl
from modelopt_eagle.features.stream.client import MailboxClient, StreamTimeout
from modelopt_eagle.features.stream.mailbox import Mailbox
from modelopt_eagle.features.stream.message import FeatureMessage


def message(tokens):
    states = torch.arange(tokens * 2 * 4, dtype=torch.float32).view(tokens, 2, 4)
    return FeatureMessage("r", list(range(tokens)), [1], False, states)


def wait_until(condition):
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.fixture
def box():
    box = Mailbox({"model": "m"}, "127.0.0.1:0")
    yield box
    box.close()


def test_states_come_over_and_the_server_lets_go_of_them(box):
    client = MailboxClient(f"127.0.0.1:{box.port}", transport="nixl", timeout=20.0)
    for tokens in (3, 20_000):
        box.put("key", message(tokens))
        assert torch.equal(client.fetch("key").states, message(tokens).states)
    wait_until(lambda: box._nixl.held == 0)
    box.put("empty", message(0))
    with pytest.raises(StreamError, match="cannot hand states out by NIXL"):
        client.fetch("empty")
    box.put("key", message(3))
    assert client.fetch("key").request == "r"  # the mailbox goes on


def test_what_nobody_reads_is_let_go_of(box, monkeypatch):
    monkeypatch.setattr(nixl, "OFFER_LIFE", 0.1)
    sender = nixl.NixlSender()
    sender.offer(b"states")
    assert sender.held == 1
    time.sleep(0.2)
    sender.release()
    assert sender.held == 0


def test_a_server_that_is_gone_and_a_malformed_offer(box):
    receiver = nixl.NixlReceiver()
    with pytest.raises(StreamError, match="nixl with metadata, descriptors and offer expected"):
        receiver.read({"metadata": "AA=="}, 4, 1.0)
    with pytest.raises(StreamError, match="nixl with metadata, descriptors and offer expected"):
        receiver.read(None, 4, 1.0)
    with pytest.raises(nixl.NixlLost):
        receiver.read({"metadata": "AAAA", "descriptors": "AAAA", "offer": "x"}, 4, 1.0)
    client = MailboxClient(f"127.0.0.1:{box.port}", transport="nixl", timeout=5.0)
    box.put("key", message(5))
    reply = box._reply
    spoilt = {"agent": "a", "metadata": "AAAA", "descriptors": "AAAA", "offer": "x"}
    box._reply = lambda sender, header, payload=None: reply(sender, header | {"nixl": spoilt}, payload)
    with pytest.raises(StreamTimeout, match="NIXL"):
        client.fetch("key")
