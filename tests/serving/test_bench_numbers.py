"""What a bench makes of what it is told: times of a stream's pieces, percentiles, speeds and counters, exactly."""

import json
import threading

import pytest

from modelopt_eagle.errors import StreamError
from modelopt_eagle.serving import live
from modelopt_eagle.serving.bench import Outcome, account_for
from modelopt_eagle.serving.bench_report import WITH, WITHOUT, BenchReport, Cell, Side, percentile, spread
from modelopt_eagle.serving.live import Acceptance, Reading, StreamedAnswer, difference, read_metrics, read_stream


class Clock:
    """Lines that come at given seconds, by a clock that they set."""

    def __init__(self, monkeypatch, *timed):
        self.now, self.timed = 0.0, timed
        monkeypatch.setattr(live.time, "perf_counter", lambda: self.now)

    def __iter__(self):
        for now, value in self.timed:
            self.now = now
            yield value if isinstance(value, bytes) else b"data: " + json.dumps(value).encode() + b"\n"


def said(text, **more):
    return {"choices": [{"delta": {"content": text}, **more}]}


DONE = b"data: [DONE]\n"


def test_times_are_those_of_the_pieces(monkeypatch):
    lines = Clock(
        monkeypatch, (10.1, b": a comment\n"), (10.2, said("")), (10.5, said("a")), (10.6, b"\n"), (11.0, said("b c")),
        (11.5, said("", finish_reason="stop")), (11.6, {"choices": [], "usage": {"prompt_tokens": 3,
        "completion_tokens": 4}}), (11.75, DONE),
    )  # fmt: skip
    found = read_stream(lines, 10.0, 60.0, threading.Event())
    assert (found.first, found.last, found.whole) == pytest.approx((0.5, 1.0, 1.75))
    assert (found.text, found.prompt_tokens, found.completion_tokens, found.finish_reason) == ("ab c", 3, 4, "stop")
    reasoned = Clock(monkeypatch, (1.0, {"choices": [{"delta": {"reasoning": "hm"}}]}), (2.0, said("x")),
                     (3.0, said("", finish_reason="length")), (3.0, DONE))  # fmt: skip
    found = read_stream(reasoned, 0.0, 60.0, threading.Event())
    assert (found.first, found.text, found.completion_tokens) == (1.0, "x", None)


@pytest.mark.parametrize(
    ("timed", "words"),
    [
        ([(1.0, said("a")), (2.0, said("", finish_reason="stop"))], "ended before the answer did"),
        ([(1.0, said("a")), (2.0, DONE)], "ended before the answer did"),
        ([(1.0, said("a")), (61.0, said("b")), (61.0, DONE)], "not whole within 60 s"),
        ([(1.0, {"error": "no"})], "the server broke off: no"),
        ([(1.0, b"data: []\n")], "no JSON object"),
    ],
)
def test_a_stream_that_is_not_whole_is_no_answer(timed, words, monkeypatch):
    with pytest.raises(StreamError, match=words):
        read_stream(Clock(monkeypatch, *timed), 0.0, 60.0, threading.Event())


def test_percentiles_are_those_of_numpy():
    assert [percentile([4.0, 1.0, 3.0, 2.0], p) for p in (0, 50, 90, 100)] == pytest.approx([1.0, 2.5, 3.7, 4.0])
    assert spread([]) is None and spread([2.0]) == {"mean": 2.0, "p50": 2.0, "p90": 2.0, "p99": 2.0}


def test_an_answer_becomes_its_numbers():
    cell = Cell("a", 1, 3)
    account_for(Outcome("p", 0, 9.0, StreamedAnswer("x", 0.5, 2.0, 2.5, 7, 4, "length")), cell)
    account_for(Outcome("q", 0, 9.5, StreamedAnswer("", 0.25, 0.25, 0.5, 3, 1, "stop")), cell)
    assert (cell.first_token, cell.per_token, cell.request) == ([0.5, 0.25], [0.5], [2.5, 0.5])
    assert (cell.answered, cell.prompt_tokens, cell.completion_tokens, cell.cut, cell.untold) == (2, 10, 5, 1, 0)


def test_speed_and_speedup_are_of_tokens_a_second():
    def cell(tokens, seconds, **more):
        return Cell("a", 1, 2, answered=2, completion_tokens=tokens, seconds=seconds, **more)

    plain, headed = cell(100, 10.0), cell(120, 4.0)
    report = BenchReport({}, [Side(WITHOUT, cells=[plain]), Side(WITH, cells=[headed])])
    assert (plain.tokens_per_second, headed.tokens_per_second, report.speedup(headed)) == (10.0, 30.0, 3.0)
    plain.planned = 3  # one was not answered: what is left is another set
    assert report.speedup(headed) is None
    two = Side(WITH, cells=[cell(100, 10.0), Cell("b", 1, 1, answered=1, completion_tokens=50, seconds=15.0)])
    assert two.rows()[-1].tokens_per_second == 6.0


def test_counters_are_summed_over_engines_and_taken_by_name():
    page = (
        'vllm:generation_tokens_total{engine="0"} 5.0\nvllm:generation_tokens_total{engine="1"} 6.0 1700000000\n'
        "vllm:spec_decode_num_drafts_total 3\nvllm:spec_decode_num_accepted_tokens_total 4\n"
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="10"} 1\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0",engine="1"} 2\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 1\nnan NaN\nbroken line here\n'
    )
    found = read_metrics(page)
    assert found.values == {"generated": 11, "drafts": 3, "accepted": 4} and found.positions == {0: 3, 10: 1}
    assert read_metrics(page, "sglang").trouble == "its metrics hold none of SGLang's counters"
    assert read_metrics("up 1\n").trouble == "its metrics hold none of vLLM's, SGLang's or llama.cpp's counters"
    nothing = Reading("vllm", {}, {})  # counters that appear with their first count
    counted = difference(found, nothing, 1)
    assert counted.acceptance == Acceptance(3, 4, None, (3, *[0] * 9, 1)) and counted.generated == 11
    assert difference(nothing, found, 1).trouble.startswith("its counters began anew")


def test_sums_of_acceptance_keep_what_both_tell():
    full, bare = Acceptance(2, 3, 6, (2, 1)), Acceptance(4, 1, None, ())
    assert full + Acceptance(1, 3, 3, (1, 1, 1)) == Acceptance(3, 6, 9, (3, 2, 1))
    assert full + bare == Acceptance(6, 4, None, ())
    assert full + Acceptance(0, 0, 0, ()) == full
