"""A head in a live engine: every request accounted for, and servers that fail, lag or count nothing."""

import _thread
import contextlib
import json
import threading
import time

import pytest

from modelopt_eagle.cli.main import run_command
from modelopt_eagle.data.prompts import Prompt
from modelopt_eagle.errors import StreamError
from modelopt_eagle.serving import bench as bench_module
from modelopt_eagle.serving import live
from modelopt_eagle.serving.bench import Load, bench
from modelopt_eagle.serving.bench_report import WITH, WITHOUT
from modelopt_eagle.serving.live import Acceptance, LiveServer
from tests.serving.fake_server import TOKENS, FakeServer


@pytest.fixture
def serve():
    """``serve(**options)``: a fake server, closed at the end."""
    made = []

    def start(**options):
        made.append(FakeServer(**options))
        return made[-1]

    yield start
    for server in made:
        server.close()


def prompts_of(*questions):
    return [Prompt(f"p{n}", "all", tuple(q) if isinstance(q, list) else (q,)) for n, q in enumerate(questions)]


def measure(servers, sets, timeout=5.0, on_cell=lambda report: None, **load):
    def opened(server):
        return lambda: contextlib.nullcontext(LiveServer(server.url, timeout=timeout))

    if isinstance(servers, FakeServer):
        servers = {WITH: servers}
    opens = {name: opened(server) for name, server in servers.items()}
    report = bench(opens, sets, Load(**{"warmup": 0, "max_new_tokens": 16, **load}), on_cell)
    for side in report.sides:
        for cell in side.rows():
            assert cell.planned == cell.answered + len(cell.failures) + sum(cell.not_asked.values())
            assert cell.asked == cell.answered + len(cell.failures)
    json.dumps(report.to_dict())
    return report


def test_counts_and_acceptance_are_exact_by_set_and_level(serve):
    """Of 5 tokens: 2 drafts, 3 of their 6 tokens accepted, two drafts at position 1 and one at position 2."""
    server = serve(lag=0.15)
    sets = {"a": prompts_of("one", "two", "three"), "b": prompts_of("four", "five")}
    report = measure(server, sets, concurrency=(1, 4), warmup=3)
    rows = [(row.prompts, row.concurrency) for row in report.sides[0].rows()]
    assert rows == [("a", 1), ("b", 1), ("all sets", 1), ("a", 4), ("b", 4), ("all sets", 4)]
    for row in report.sides[0].rows():
        n = {"a": 3, "b": 2, "all sets": 5}[row.prompts]
        assert (row.planned, row.answered, row.failures, row.untold, row.cut) == (n, n, [], 0, 0)
        assert (row.completion_tokens, row.prompt_tokens, row.generated) == (TOKENS * n, 7 * n, TOKENS * n)
        assert row.acceptance == Acceptance(2 * n, 3 * n, 6 * n, (2 * n, n, 0))  # the warm-up is not in it
        assert len(row.first_token) == len(row.request) == len(row.per_token) == n
        found = row.to_dict()["acceptance"]
        assert found["acceptance_length"] == 2.5 and found["per_position"] == [1.0, 0.5, 0.0]
    assert len(server.asked) == 2 * (5 + 3) and report.whole and report.notes() == []
    assert (report.sides[0].engine, report.sides[0].version, report.sides[0].model) == ("vllm", "0.32.0", "fake")
    assert all(body["stream"] and body["stream_options"] == {"include_usage": True} for body in server.asked)
    assert all((body["max_tokens"], body["temperature"]) == (16, 0.0) for body in server.asked)


def test_categories_are_told_apart_and_together(serve):
    def asked(*pairs):
        return [Prompt(f"p{n}", category, (text,)) for n, (category, text) in enumerate(pairs)]

    mixed = asked(("maths", "one"), ("code", "two"), ("maths", "three"))
    sets = {"mixed": mixed, "plain": prompts_of("four")}
    servers = {WITHOUT: serve(drafts=False), WITH: serve()}
    report = measure(servers, sets, by_category=True)
    for side in report.sides:
        assert [(row.title, row.planned) for row in side.rows()] == [
            ("mixed: maths", 2), ("mixed: code", 1), ("mixed", 3), ("plain", 1), ("all sets", 4),
        ]  # fmt: skip
    rows = report.sides[1].rows()
    assert [row.acceptance for row in rows] == [Acceptance(2 * n, 3 * n, 6 * n, (2 * n, n, 0)) for n in (2, 1, 3, 1, 4)]
    assert all(report.speedup(row) for row in rows) and report.whole
    for row, told in zip(rows, report.to_dict()["sides"][1]["rows"], strict=True):
        assert (told["prompts"], told["category"]) == (row.prompts, row.category)
        assert ("failures" in told) == (row.title not in ("mixed", "all sets"))
    assert "mixed: code" in report.table() and report.settings["by_category"]
    assert [body["messages"][-1]["content"] for body in servers[WITH].asked] == ["one", "three", "two", "four"]
    together = measure(servers, sets).sides[1].rows()
    assert [row.title for row in together] == ["mixed", "plain", "all sets"] and together[0].planned == 3


def test_the_command_tells_categories_where_one_is_asked_at_a_time(serve, tmp_path):
    rows = [{"id": n, "category": category, "turns": [text]} for n, (category, text) in
            enumerate((("a", "one"), ("b", "two"), ("a", "three")))]  # fmt: skip
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for given, titles in (
        ((), ["a", "b", None]),
        (("--no-by_category",), [None]),
        (("--concurrency", "1", "2"), [None, None]),
        (("--concurrency", "2", "--by_category", "--html", str(tmp_path / "b.html")), ["a", "b", None]),
    ):
        words = ["--url", serve().url, "--prompts", str(tmp_path / "q.jsonl"), "--warmup", "0"]
        assert run_command("bench", [*words, "--output", str(tmp_path / "b.json"), *given]) == 0
        found = json.loads((tmp_path / "b.json").read_text())
        assert [row["category"] for row in found["sides"][0]["rows"]] == titles, given
    page = (tmp_path / "b.html").read_text()
    assert page.count("<svg") == 3 and "q.jsonl: b" in page


def test_every_failure_is_counted_and_named(serve):
    server = serve()
    bad = ["refuse me", "busy now", "break here", "error there", "garbage in", "slow one"]
    report = measure(server, {"bad": prompts_of("fine", *bad, "good")}, concurrency=(3,))
    cell = report.sides[0].cells[0]
    assert (cell.answered, cell.asked, cell.planned) == (3, 8, 8) and not report.whole
    reasons = {failure.prompt: failure.reason for failure in cell.failures}
    assert set(reasons) == {"p1", "p2", "p3", "p4", "p5"}
    assert reasons["p1"] == "HTTP 400: refuse!" and reasons["p2"] == "HTTP 503: busy!"
    assert "the server broke off: out of memory" in reasons["p4"] and "no JSON" in reasons["p5"]
    assert reasons["p3"] == "the stream ended before the answer did"
    table = report.table()
    assert (
        "with the head, bad, 3 at a time: 1 failed: HTTP 503: busy!" in table and "1 more failed for 1 other" in table
    )
    assert cell.completion_tokens == 3 * TOKENS  # of those answered
    assert len(report.to_dict()["sides"][0]["rows"][0]["failures"]) == 5


def test_an_answer_that_takes_too_long_is_a_failure(serve):
    server = serve()
    report = measure(server, {"a": prompts_of("hang on", "fine")}, timeout=1.5, concurrency=(2,))
    cell = report.sides[0].cells[0]
    assert cell.answered == 1 and [f.reason for f in cell.failures] == ["no answer within 1.5 s"]


def test_a_turn_behind_a_failed_one_is_not_asked_and_named(serve):
    server = serve()
    sets = {"mt": prompts_of(["first", "second"], ["busy", "never", "never"], ["alone"])}
    report = measure(server, sets, turns=2, concurrency=(1,))
    cell = report.sides[0].cells[0]
    assert (cell.planned, cell.answered, len(cell.failures)) == (5, 3, 1)
    assert cell.not_asked == {"the turn before it failed": 1}
    called = measure(server, {"a": prompts_of(["call me", "never"])}, turns=2).sides[0].cells[0]
    assert (called.answered, called.not_asked, called.whole) == (1, {"the model called a tool": 1}, False)
    second = server.asked[1]["messages"]
    assert [m["role"] for m in second] == ["user", "assistant", "user"] and second[1]["content"].startswith("first ")
    assert "1 not asked: the turn before it failed" in report.table()


def test_so_many_at_a_time_and_no_more(serve):
    server = serve(delay=0.15)
    measure(server, {"a": prompts_of(*["slow"] * 12)}, concurrency=(4,))
    assert server.most == 4


def test_a_server_without_counters_is_still_timed(serve):
    for options, words in (
        ({"counters": None}, "no metrics at /metrics: HTTP 404"),
        ({"drafts": False}, "it counts no drafts"),
    ):
        report = measure(serve(**options), {"a": prompts_of("one", "two")})
        cell = report.sides[0].cells[0]
        assert cell.acceptance is None and cell.tokens_per_second > 0 and report.whole
        assert f"acceptance: not told by this server ({words}" in report.table()
        assert report.acceptance_rows() == [] and report.to_dict()["sides"][0]["rows"][0]["acceptance"] is None


def test_llama_cpp_tells_as_much_as_vllm(serve):
    server = serve(counters="llama_cpp", lag=0.15)
    report = measure({WITHOUT: serve(counters="llama_cpp", drafts=False), WITH: server},
                     {"a": prompts_of("one", "two"), "b": prompts_of("three")}, warmup=2)  # fmt: skip
    side = report.sides[1]
    assert (side.engine, side.version) == ("llama_cpp", "b10894-fake") and report.notes() == []
    assert [cell.acceptance for cell in side.rows()] == [
        Acceptance(2 * n, 3 * n, 6 * n, (2 * n, n, 0)) for n in (2, 1, 3)
    ]  # fmt: skip
    assert [cell.acceptance for cell in report.sides[0].cells] == [Acceptance(0, 0, 0, ())] * 2
    assert "llama.cpp b10894-fake" in report.table()


def test_numbers_that_llama_cpp_rounds_are_not_taken_for_counts(serve):
    server = serve(counters="llama_cpp")
    server.count["generated"] = 1_234_567
    report = measure(server, {"a": prompts_of("one")})
    assert report.whole and report.sides[0].cells[0].acceptance is None
    assert "llama.cpp rounds counters above 1,000,000, and these are: start the server anew" in report.table()


def test_another_release_than_the_one_that_was_read_is_told(serve):
    report = measure(serve(version="0.99.1rc2"), {"a": prompts_of("one")})
    assert "its counters are read as those of vLLM 0.32.0, and it is 0.99.1rc2" in report.table() and report.whole
    assert report.sides[0].cells[0].acceptance == Acceptance(2, 3, 6, (2, 1, 0))


def test_sglang_tells_the_length_and_no_positions(serve):
    """5 tokens of 2 rounds: one from the prompt, two of the target's own, two accepted."""
    report = measure(serve(counters="sglang"), {"a": prompts_of("one", "two"), "b": prompts_of("three")})
    cells = report.sides[0].rows()
    assert report.sides[0].engine == "sglang"
    assert [cell.acceptance for cell in cells] == [
        Acceptance(4, 4, None, ()), Acceptance(2, 2, None, ()), Acceptance(6, 6, None, ()),
    ]  # fmt: skip
    assert "2.000" in report.table() and "position 1" not in report.table()


def test_usage_that_is_not_told_gives_no_speed(serve):
    report = measure(serve(), {"a": prompts_of("untold story", "fine")})
    cell = report.sides[0].cells[0]
    assert (cell.answered, cell.untold, cell.tokens_per_second) == (2, 1, None) and report.whole
    assert "tokens not told by this server for 1 of 2 answers" in report.table()
    assert report.to_dict()["sides"][0]["rows"][0]["completion_tokens"] is None
    old = serve(old_client=True)
    report = measure(old, {"a": prompts_of("one", "two", "three")})
    assert report.sides[0].cells[0].untold == report.sides[0].cells[0].answered == 3
    assert sum("stream_options" in body for body in old.asked) == 1  # it is asked so once


def test_an_empty_answer_is_an_answer(serve):
    cell = measure(serve(), {"a": prompts_of("empty")}).sides[0].cells[0]
    assert (cell.answered, cell.completion_tokens, cell.per_token) == (1, 1, []) and len(cell.first_token) == 1


def test_what_others_ask_is_noticed_in_the_counters(serve):
    server = serve()
    server.counted_before = server.counted
    server.counted = lambda tokens: server.counted_before(tokens + 2)
    report = measure(server, {"a": prompts_of("one")})
    assert "the server counted 7 new tokens, these answers have 5" in report.table()


def test_cached_prompts_and_sides_that_are_not_what_they_are_said_to_be(serve):
    servers = {WITHOUT: serve(), WITH: serve()}

    servers[WITH].counted = lambda tokens: servers[WITH].count.update(generated=1000 + tokens, cached=40)
    table = measure(servers, {"a": prompts_of("one")}).table()
    assert "said to be without a head, counted 2 drafts" in table
    assert "the server counted no draft: it does not use a head" in table
    assert "40 tokens of prompts came from the server's cache" in table


def test_a_server_that_was_started_again_in_between_tells_no_acceptance(serve, monkeypatch):
    monkeypatch.setattr(live, "SETTLE_SECONDS", 0.2)
    server = serve()
    server.counted = lambda tokens: server.count.__setitem__("generated", 3)
    report = measure(server, {"a": prompts_of("one")})
    assert report.sides[0].cells[0].acceptance is None and "began anew" in report.table()


def test_a_server_that_dies_is_given_up_and_what_was_measured_stays(serve):
    plain, headed = serve(), serve()
    before = headed.counted

    def dying(tokens):
        before(tokens)
        if len(headed.asked) == 5:
            headed.http.shutdown()
            headed.http.server_close()

    headed.counted = dying
    seen = []
    sets = {"a": prompts_of("one", "two", "three"), "b": prompts_of(*["more"] * 40)}
    report = measure(
        {WITHOUT: plain, WITH: headed}, sets, concurrency=(1, 2), on_cell=lambda r: seen.append(len(r.sides[-1].cells))
    )
    side = report.sides[1]
    assert report.sides[0].stopped == "" and len(report.sides[0].cells) == 4
    assert [cell.answered for cell in side.cells] == [3, 2] and side.stopped == "the server answered no more"
    assert len(side.cells[1].failures) == 10 and side.cells[1].not_asked == {"the server answered no more": 28}
    assert side.cells[1].acceptance is None and report.speedup(side.cells[1]) is None
    assert not report.whole and not report.interrupted and report.speedup(side.cells[0]) > 0
    assert seen[:4] == [1, 2, 3, 4] and "with the head: stopped: the server answered no more" in report.table()


def test_refused_requests_do_not_give_up_a_server(serve):
    report = measure(serve(), {"a": prompts_of(*["refuse"] * 14, "fine")})
    cell = report.sides[0].cells[0]
    assert (len(cell.failures), cell.answered, report.sides[0].stopped) == (14, 1, "")


def test_nothing_at_all_is_an_error(serve):
    with pytest.raises(StreamError, match=r"answers no request: HTTP 503: busy!"):
        measure(serve(), {"a": prompts_of("busy")}, warmup=2)


def test_a_warm_up_that_fails_once_is_asked_again(serve, monkeypatch):
    """One failure among many must not end a measurement."""
    asked = []

    def ask_all(server, prompts, settings, turns, cell, bar):
        asked.append(cell)
        if len(asked) < 4:
            cell.failures.append(bench_module.Failure("one", 0, "HTTP 500"))
        else:
            cell.answered, cell.completion_tokens = 1, 7

    monkeypatch.setattr(bench_module, "ask_all", ask_all)
    assert bench_module.warm_up(serve(), prompts_of("one"), None, 1, 1) == 7 and len(asked) == 4


def test_ctrl_c_keeps_what_was_measured(serve, tmp_path, capsys):
    server, file, page = serve(), tmp_path / "out" / "bench.json", tmp_path / "bench.html"
    rows = [{"question": text, "answer": "#### 1"} for text in ("one", "hang", "three")]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def interrupt():
        server.reached.wait(10)
        time.sleep(0.1)
        _thread.interrupt_main()

    threading.Thread(target=interrupt, daemon=True).start()
    code = run_command(
        "bench", ["--url", server.url, "--prompts", str(tmp_path / "q.jsonl"), "--output", str(file), "--warmup", "0",
                  "--html", str(page)],
    )  # fmt: skip
    found = json.loads(file.read_text())
    row = found["sides"][0]["rows"][0]
    assert code == 130 and found["interrupted"] and not found["whole"]
    assert (row["planned"], row["asked"], row["answered"], row["not_asked"]) == (3, 1, 1, {"interrupted": 2})
    assert row["acceptance"]["drafts"] == 2 and "interrupted: this is what was" in capsys.readouterr().out
    assert "Interrupted: this is what was measured until then." in page.read_text()


def test_the_command_measures_both_and_writes_all(serve, tmp_path, capsys):
    plain, headed = serve(drafts=False, delay=0.1), serve(delay=0.03)
    file, page = tmp_path / "b.json", tmp_path / "b.html"
    gsm, human = tmp_path / "gsm" / "test.jsonl", tmp_path / "human" / "test.jsonl"
    for path, rows in (
        (gsm, [{"question": "slow <b>sum</b>", "answer": "#### 3"}, {"question": "slow next", "answer": "#### 4"}]),
        (human, [{"task_id": "HumanEval/0", "prompt": "slow def f():\n", "canonical_solution": "pass"}]),
    ):
        path.parent.mkdir()
        path.write_text("\n".join(map(json.dumps, rows)))
    code = run_command(
        "bench", ["--url", headed.url + "/v1/", "--plain_url", plain.url, "--prompts", str(gsm), str(human),
                  "--concurrency", "1", "2", "--max_new_tokens", "4", "--temperature", "0.5", "--output", str(file),
                  "--html", str(page)],
    )  # fmt: skip
    out = capsys.readouterr().out
    found = json.loads(file.read_text())
    assert code == 0 and found["whole"] and [side["name"] for side in found["sides"]] == ["without", "with"]
    assert found["settings"]["sets"] == {"gsm/test.jsonl": 2, "human/test.jsonl": 1}
    rows = found["sides"][1]["rows"]
    assert len(rows) == 6 and all(row["completion_tokens"] == 4 * row["planned"] == 4 * row["cut"] for row in rows)
    for row, without in zip(rows, found["sides"][0]["rows"], strict=True):
        assert row["speedup"] == pytest.approx(row["tokens_per_second"] / without["tokens_per_second"])
    assert found["sides"][0]["rows"][0]["first_token"]["p50"] >= 0.1
    assert "human/test.jsonl" in out and "acceptance length" in out and f"wrote {page}" in out
    assert {body["temperature"] for body in plain.asked} == {0.5}
    assert sorted(b["seed"] for b in plain.asked) == sorted(b["seed"] for b in headed.asked)
    assert len({b["seed"] for b in plain.asked}) == 3  # a prompt's own, at every level and on both servers
    html = page.read_text()
    assert html.count("<svg") == 3 and "human/test.jsonl" in html and "<script" not in html and "Speed-up" in html


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--url", "host:8000"], "--url takes http://HOST:PORT"),
        (["--url", "http://127.0.0.1:9", "--timeout", "1"], "no answer in 2 tries"),
        (["--url", "started"], "needs --base_model and --export_path"),
        (
            ["--url", "started", "--base_model", "x", "--export_path", "y", "--engine", "sglang"],
            "cannot be started here",
        ),
        (["--url", "http://h", "--export_path", "y"], "are for --url started"),
        (["--url", "http://h", "--concurrency", "0"], "at least 1, found 0"),
        (["--url", "http://h", "--concurrency", "2", "2"], "names a level twice"),
        (["--url", "http://h", "--engine", "mine"], "its counters are not known, those of vLLM, SGLang, llama.cpp are"),
        (["--url", "http://h", "--temperature", "nan"], "--temperature must be at least 0"),
        (["--url", "http://h", "--prompts", "missing.jsonl"], "missing.jsonl"),
    ],
)
def test_bad_input_ends_before_anything_is_asked(options, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_command("bench", options) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "bench.json").exists()


def test_seconds_are_from_the_first_request_to_the_last_end(serve):
    begun = time.perf_counter()
    cell = measure(serve(delay=0.15), {"a": prompts_of("slow", "slow")}).sides[0].cells[0]
    assert 0.3 <= cell.seconds < time.perf_counter() - begun
    assert sum(cell.request) <= cell.seconds and cell.tokens_per_second == 2 * TOKENS / cell.seconds
