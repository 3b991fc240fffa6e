"""Servers that fall silent: it is said, and nothing waits for them that has been broken off."""

import gc
import logging
import random
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import zmq

from modelopt_eagle.errors import StreamError
from modelopt_eagle.features import HybridSource, StreamedSource
from modelopt_eagle.features.stream.client import MailboxClient
from modelopt_eagle.features.stream.mailbox import Mailbox
from modelopt_eagle.features.stream.pool import ServerPool
from modelopt_eagle.features.stream.received import Watched
from tests.attacks.wire import AUX, serving

SOON = 10.0
"""Seconds, on a busy machine, of what would otherwise take the patience of ten minutes."""


@pytest.fixture
def deserted(tiny_target, dataset):
    """A source whose only server has gone."""
    with serving(tiny_target) as server:
        source = StreamedSource([server.url], dataset, tiny_target, AUX, timeout=30.0)
    return source


def later(action, seconds=0.5):
    timer = threading.Timer(seconds, action)
    timer.start()
    return timer


def test_a_call_can_be_broken_off(deserted):
    begun = time.monotonic()
    later(deserted.cancel)
    with pytest.raises(StreamError, match="broken off"):
        deserted.load([0, 1, 2])
    assert time.monotonic() - begun < SOON


def test_an_epoch_that_is_left_waits_for_nobody(tiny_target, dataset):
    with serving(tiny_target) as server:
        source = StreamedSource([server.url], dataset, tiny_target, AUX, timeout=30.0, prefetch=1)
        batches = source.batches(0, batch_size=1, seed=0)
        next(batches)
    time.sleep(0.5)  # the next ones are asked of a server that has gone
    begun = time.monotonic()
    batches.close()
    assert time.monotonic() - begun < SOON
    with serving(tiny_target, address=server.url.removeprefix("http://")):
        assert source.load([0]).row_ids  # what is asked afterwards is served


def test_a_store_that_a_server_fills_is_left_too(deserted, dataset, tmp_path):
    hybrid = HybridSource(
        tmp_path, dataset, deserted.contract, on_missing="generate", make=deserted.fetch_rows, cancel=deserted.cancel
    )
    batches = hybrid.batches(0, batch_size=1, seed=0)
    end = later(hybrid._cancel)  # as leaving the epoch does
    with pytest.raises(StreamError, match="broken off"):
        next(batches)
    end.join()
    begun = time.monotonic()
    batches.close()
    hybrid.close()
    assert time.monotonic() - begun < SOON


def test_one_row_that_fails_ends_the_others(deserted, monkeypatch):
    ended = []

    def fetch(self, row_id, token_ids, stop):
        if row_id == deserted.rows[1].id:
            raise StreamError("refused")
        ended.append(stop.wait(60))

    monkeypatch.setattr(ServerPool, "fetch", fetch)
    begun = time.monotonic()
    with pytest.raises(StreamError, match="refused"):
        deserted.fetch_rows(deserted.rows[:2])
    assert time.monotonic() - begun < SOON
    while not ended and time.monotonic() - begun < 2 * SOON:
        time.sleep(0.01)
    assert ended == [True]


def test_the_end_of_a_process_waits_for_no_server():
    code = (
        "import time; from modelopt_eagle.features.stream.workers import Workers\n"
        "future = Workers(2, 'test').submit(time.sleep, 300)\n"
        "while not future.running(): time.sleep(0.01)\n"
        "raise SystemExit(7)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 7


def test_an_outage_is_told_once_and_its_end_too(tiny_target, dataset, caplog):
    with serving(tiny_target) as server:
        source = StreamedSource([server.url], dataset, tiny_target, AUX, timeout=30.0)
    with caplog.at_level(logging.WARNING):
        found = []
        thread = threading.Thread(target=lambda: found.append(source.load([0, 1, 2, 3])))
        thread.start()
        time.sleep(2.0)
        said = [record.message for record in caplog.records]
        assert len(said) == 1 and "asked for 600 s more" in said[0] and "cannot be reached" in said[0]
        with serving(tiny_target, address=server.url.removeprefix("http://")):
            thread.join(60)
    assert found and len(found[0].row_ids) == 4
    assert [text.count("answers again") for text in (record.message for record in caplog.records)] == [0, 1]


def test_clients_that_are_forgotten_stop_no_others():
    """Threads end, and their sockets with them, while their server leaves: nobody listens to what becomes of them.

    ZeroMQ then waited for ever to tell it, in the one thread that serves every socket of the process.
    """
    draw = random.Random(0)

    def work(client, go):
        client.hello()
        go.wait()

    for _ in range(60):
        box, go = Mailbox({"model": "m"}, "127.0.0.1:0"), threading.Event()
        threads = [
            threading.Thread(target=work, args=(MailboxClient(f"127.0.0.1:{box.port}", timeout=SOON), go))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.03)
        closing = threading.Thread(target=box.close)
        steps = [closing.start, go.set]
        draw.shuffle(steps)
        steps[0]()
        time.sleep(0.002 * draw.random())
        steps[1]()
        for thread in (*threads, closing):
            thread.join()
    box = Mailbox({"model": "m"}, "127.0.0.1:0")
    try:
        assert MailboxClient(f"127.0.0.1:{box.port}", timeout=SOON).hello()["model"] == "m"
    finally:
        box.close()


@pytest.mark.parametrize("left", ["closed", "forgotten", "in a circle"])
def test_events_end_before_their_end_is_closed(left):
    """However a socket is let go of: an event between the two would have nobody to go to, and all would wait."""
    order = []

    class End:
        """Closes itself when the garbage collector comes to it, as ZeroMQ's sockets do."""

        def __init__(self, name):
            self.name, self.closed = name, False

        def monitor(self, address, flags):
            order.append("off" if address is None else "on")

        def close(self):
            if not self.closed:
                self.closed = True
                order.append(self.name)

        def setsockopt(self, *_):
            pass

        connect = setsockopt
        __del__ = close

    ends = [End("socket"), End("events")]  # older than what holds them, so that the collector comes to them first
    context = SimpleNamespace(socket=lambda kind: ends.pop())
    module = SimpleNamespace(Context=SimpleNamespace(instance=lambda: context), PAIR=0, RCVHWM=0, LINGER=0)
    watched = Watched(module, ends.pop(0), 0)
    assert not ends and order == ["on"]
    if left == "closed":
        watched.close()
        watched.close()
    elif left == "in a circle":  # as an error's traceback makes one
        watched.circle = watched
    del watched
    gc.collect()
    assert order == ["on", "off", "events", "socket"]


def test_events_that_nobody_reads_stop_no_others():
    """More than ZeroMQ would queue: of a socket that asks a thousand times a second for a server that is not there."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    asking = zmq.Context.instance().socket(zmq.DEALER)
    asking.setsockopt(zmq.LINGER, 0)
    asking.setsockopt(zmq.RECONNECT_IVL, 1)
    watched = Watched(zmq, asking, zmq.EVENT_ALL)
    asking.connect(f"tcp://127.0.0.1:{port}")
    time.sleep(4.0)
    box = Mailbox({"model": "m"}, "127.0.0.1:0")
    try:
        assert MailboxClient(f"127.0.0.1:{box.port}", timeout=SOON).hello()["model"] == "m"
        assert len(list(watched.told())) > 2000
    finally:
        watched.close()
        box.close()
