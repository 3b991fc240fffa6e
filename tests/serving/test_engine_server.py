"""A server that is started here: it answers or says why not, and nothing of it is left; by a stand-in engine."""

import contextlib
import json
import stat
import sys
import time
from pathlib import Path

import pytest

from modelopt_eagle.data.prompts import Prompt
from modelopt_eagle.errors import CheckpointError, ExportError
from modelopt_eagle.export import export_checkpoint
from modelopt_eagle.serving.bench import Load, bench, prepare, started
from modelopt_eagle.serving.bench_report import WITH, WITHOUT
from modelopt_eagle.serving.engine_server import serve_engine
from modelopt_eagle.serving.live import LiveServer
from modelopt_eagle.target.tiny import make_tiny_target
from tests.export.conftest import build_head
from tests.serving.fake_server import FakeServer

SERVES = """
import http.server, json, subprocess, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
job = json.load(open(sys.argv[2]))
child = subprocess.Popen(["sleep", "300"])
open({told!r}, "w").write(json.dumps({{**job, "script": sys.argv[1], "child": child.pid}}))
http.server.HTTPServer(("127.0.0.1", job["port"]), Handler).serve_forever()
"""
FAILS = """
import sys
print("\\n".join(f"line {{n}}" for n in range(40)))
print("the cache does not fit: {told}")
sys.exit(3)
"""


@pytest.fixture
def engine(tmp_path):
    """``engine(script)``: an interpreter that runs this whatever it is given, and the file where it tells its job."""

    def make(script):
        path, told = tmp_path / "engine", tmp_path / "told.json"
        path.write_text(f"#!{sys.executable}\n" + script.format(told=str(told)))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path, told

    return make


def runs(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_a_started_server_ends_with_all_of_its_processes(engine, tmp_path):
    python, told = engine(SERVES)
    target = tmp_path / "target"
    make_tiny_target(target, max_positions=512)
    head = build_head(
        hidden_size=64, target_hidden_size=64, vocab_size=256, draft_vocab_size=128, own_embedding=False,
        tokenizer_hash=None,
    )  # fmt: skip
    export_checkpoint(head, None, tmp_path / "export")
    prepared = prepare("vllm", str(target), tmp_path / "export", tmp_path, num_speculative_tokens=2)
    assert (prepared["draft"], prepared["num_speculative_tokens"]) == (str(tmp_path / "export"), 2)
    assert prepared["draft_options"] == {"method": "eagle3"}
    with started("vllm", python, prepared, drafts=False, concurrency=5) as server:
        job = json.loads(told.read_text())
        assert Path(job["script"]).name == "vllm_server.py" and server.url == f"http://127.0.0.1:{job['port']}"
        assert (job["model"], job["served_name"], job["draft"]) == (str(target), server.model, None)
        assert (job["batch_size"], job["max_model_len"], job["dtype"]) == (5, 512, "float32")
        assert runs(job["child"])
    until = time.monotonic() + 10
    while runs(job["child"]):
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_head_for_another_target_is_refused_before_a_server_starts(tmp_path):
    make_tiny_target(tmp_path / "target", max_positions=512)
    sizes = dict(hidden_size=64, target_hidden_size=64, draft_vocab_size=64, own_embedding=False)
    export_checkpoint(build_head(vocab_size=128, tokenizer_hash=None, **sizes), None, tmp_path / "small")
    with pytest.raises(CheckpointError, match="a vocabulary of 128 tokens, the target has 256"):
        prepare("vllm", str(tmp_path / "target"), tmp_path / "small", tmp_path)
    export_checkpoint(build_head(vocab_size=256, tokenizer_hash="abc", **sizes), None, tmp_path / "other")
    with pytest.raises(CheckpointError, match="trained for another tokenizer"):
        prepare("vllm", str(tmp_path / "target"), tmp_path / "other", tmp_path)


def test_one_that_ends_or_does_not_serve_in_time_says_its_last_words(engine):
    python, _ = engine(FAILS)
    ended = r"(?s)vllm ended with exit code 3 before it served.*line 39.*does not fit"
    with pytest.raises(ExportError, match=ended), serve_engine(python, "vllm", {}):
        pass
    python, _ = engine("import time\nprint('loading', flush=True)\ntime.sleep(60)\n")
    late = r"(?s)did not serve within 4 s.*loading"
    with pytest.raises(ExportError, match=late), serve_engine(python, "vllm", {}, timeout=4.0):
        pass


def test_a_second_server_that_does_not_start_leaves_what_the_first_gave(engine):
    plain = FakeServer()

    @contextlib.contextmanager
    def fails():
        with serve_engine(engine(FAILS)[0], "vllm", {}) as url:
            yield LiveServer(url)

    opens = {WITHOUT: lambda: contextlib.nullcontext(LiveServer(plain.url)), WITH: fails}
    try:
        report = bench(opens, {"a": [Prompt("p", "all", ("one",))]}, Load(warmup=0))
    finally:
        plain.close()
    assert [len(side.cells) for side in report.sides] == [1, 0] and not report.whole
    assert "with the head: stopped: vllm ended with exit code 3" in report.table()
    with pytest.raises(ExportError, match="exit code 3"):
        bench({WITH: fails}, {"a": [Prompt("p", "all", ("one",))]}, Load(warmup=0))
