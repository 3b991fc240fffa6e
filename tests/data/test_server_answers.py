"""Answers by OpenAI-compatible servers: retried, spread, in order, resumed, every prompt accounted for."""

import http.server
import json
import signal
import subprocess
import sys
import threading
import time

import pytest
from data_toy import write_lines

from modelopt_eagle.cli.main import run_command
from modelopt_eagle.data import conversations_of, load_prompts
from modelopt_eagle.errors import StreamError
from modelopt_eagle.validation.server_answers import ChatServers, synthesize_by_servers
from modelopt_eagle.validation.synthesis import AnswerFile, SynthesisSettings


class FakeServer:
    """Answers each question in capitals, after the faults that ``script`` names for its tries."""

    def __init__(self, script=None, strict=False, extra=None, models=None):
        self.script, self.strict, self.extra = script or {}, strict, extra or {}
        self.asked, self.tries, self.most, self.now = [], {}, 0, 0
        self.lock = threading.Lock()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *arguments):
                pass

            def do_GET(self):
                self.reply(200, models or {"data": [{"id": "served"}]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    outer.now += 1
                    outer.most = max(outer.most, outer.now)
                try:
                    self.reply(*outer.answer(body))
                finally:
                    with outer.lock:
                        outer.now -= 1

            def reply(self, code, value):
                data = json.dumps(value).encode() if not isinstance(value, bytes) else value
                self.send_response(code)
                self.send_header("Content-Length", str(len(data) + 9 * data.endswith(b"cut off")))
                self.end_headers()
                self.wfile.write(data)

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def answer(self, body):
        question = body["messages"][-1]["content"]
        with self.lock:
            self.asked.append(body)
            self.tries[question] = self.tries.get(question, 0) + 1
            tries = self.tries[question]
        if self.strict and "return_token_ids" in body:
            return 400, {"error": {"message": "unknown field: return_token_ids"}}
        faults = self.script.get(question, [])
        if tries <= len(faults):
            fault = faults[tries - 1]
            if isinstance(fault, float):
                time.sleep(fault)
            else:
                return fault if isinstance(fault, tuple) else (fault, {"error": "no"})
        message = {"role": "assistant", "content": question.upper(), **self.extra}
        choice = {"message": message, "finish_reason": "length" if question == "cut" else "stop"}
        if "return_token_ids" in body:
            choice["token_ids"] = [5, 6, 2]
        return 200, {"choices": [choice]}

    def close(self):
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def serve():
    started = []

    def start(*arguments, **options):
        started.append(FakeServer(*arguments, **options))
        return started[-1]

    yield start
    for server in started:
        server.close()


def prompts_of(tmp_path, *questions):
    rows = [{"messages": [{"role": "user", "content": text}]} for text in questions]
    return load_prompts(write_lines(tmp_path / "prompts.jsonl", *rows))


def run(servers, prompts, output, **options):
    chat = ChatServers([server.url for server in servers], retries=4, timeout=5.0, wait=0.01)
    settings = SynthesisSettings("served", 16)
    with AnswerFile(output, settings, prompts) as answers:
        account = synthesize_by_servers(chat, answers, settings, **options)
    assert account.answered + account.failed + account.skipped == len(prompts)
    return account, [json.loads(line) for line in output.read_bytes().split(b"\n")[:-1]]


def test_answers_stand_in_order_whatever_fails_and_whichever_server_is_slow(serve, tmp_path):
    one = serve(
        {"a": [0.3], "b": [500, 503], "c": [429], "e": [(200, b'{"half": '), (200, b"[]"), (200, b'{"cut off')]}
    )
    two = serve({"b": [502], "d": [0.2]})
    questions = ["a", "b", "c", "d", "e", "f", "cut"]
    account, rows = run([one, two], prompts_of(tmp_path, *questions), tmp_path / "out.jsonl", concurrency=4)
    assert [row["messages"][-1]["content"] for row in rows] == [question.upper() for question in questions]
    assert (account.answered, account.failed, account.cut) == (7, 0, 1)
    assert rows[-1]["finish_reason"] == "length" and rows[0]["messages"][-1]["token_ids"] == [5, 6, 2]
    assert one.asked and two.asked and max(one.most, two.most) > 1


def test_what_a_server_refuses_is_kept_with_its_words_and_tried_again_by_the_next_call(serve, tmp_path):
    server = serve({"b": [(400, {"error": "too long for me"})]})
    prompts = prompts_of(tmp_path, "a", "b", "c")
    account, rows = run([server], prompts, tmp_path / "out.jsonl")
    assert (account.answered, account.failed) == (2, 1) and len(rows) == 2
    (error,) = [json.loads(line) for line in (tmp_path / "out.jsonl.errors.jsonl").read_text().splitlines()]
    assert "too long for me" in error["error"] and server.tries["b"] == 1  # not tried again
    account, rows = run([server], prompts, tmp_path / "out.jsonl")
    assert (account.answered, account.failed, account.skipped) == (1, 0, 2) and len(rows) == 3


def test_nonsense_of_a_server_costs_one_prompt_and_not_the_run(serve, tmp_path):
    half = {"choices": [{"message": {"content": "cut \ud83d"}, "finish_reason": "stop"}]}
    bad = [(200, {"choices": [3]}), (200, {"choices": {"a": 1}}), (200, half), (200, {"choices": []})]
    server = serve({f"q{i}": [fault] for i, fault in enumerate(bad)})
    account, rows = run([server], prompts_of(tmp_path, "a", *(f"q{i}" for i in range(len(bad))), "b"), tmp_path / "o")
    assert (account.answered, account.failed) == (2, len(bad)) and len(rows) == 2
    assert "one half of a surrogate pair" in (tmp_path / "o.errors.jsonl").read_text()


def test_an_answer_that_breaks_off_is_asked_for_again(serve, tmp_path):
    server, whole = serve(), FakeServer.answer
    broken = []

    def answer(body):
        code, value = whole(server, body)
        if len(broken) < 2:
            broken.append(body)
            return code, _Short(json.dumps(value).encode())
        return code, value

    server.answer = answer
    account, rows = run([server], prompts_of(tmp_path, "a"), tmp_path / "out.jsonl")
    assert account.answered == 1 and len(broken) == 2 and rows[0]["messages"][-1]["content"] == "A"


class _Short(bytes):
    """Bytes that announce more than they are."""

    def __len__(self):
        return super().__len__() + 9


def test_line_ends_within_answers_are_no_ends_of_rows(serve, tmp_path):
    questions = ["a\u2028b", "c\x85d", "e\x0cf\rg"]
    for wanted in ((3, 0), (0, 3)):
        account, _ = run([serve()], prompts_of(tmp_path, *questions), tmp_path / "out.jsonl")
        assert (account.answered, account.skipped) == wanted


def test_a_process_that_is_interrupted_waits_for_no_server(serve, tmp_path):
    server = serve({"a": [60.0]})
    prompts_of(tmp_path, "a")
    command = [sys.executable, "-m", "modelopt_eagle.cli.main", "synthesize-answers", "--server", server.url, "--input",
               str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "o.jsonl"), "--model", "m"]  # fmt: skip
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # jobs in the background ignore it, and hand that on
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, before)
    try:
        deadline = time.monotonic() + 120
        while not server.asked and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert server.asked
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130 and "the same command goes on" in said


def test_options_that_a_server_does_not_read_are_refused(serve, tmp_path, capsys):
    prompts_of(tmp_path, "a")
    arguments = ["--server", serve().url, "--input", str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "o")]
    for more in (["--chat_template", "x.jinja"], ["--dtype", "float32"]):
        assert run_command("synthesize_answers", [*arguments, *more]) == 2
        assert f"{more[0]} would load a target in this process" in capsys.readouterr().err


@pytest.mark.parametrize("models", [{"data": []}, {"data": [3]}, {"object": "list"}])
def test_a_server_that_names_no_model(serve, models):
    with pytest.raises(StreamError, match="names no model .*: give the name that it serves as --model"):
        ChatServers([serve(models=models).url]).model()


def test_a_server_without_token_ids_and_one_that_reasons(serve, tmp_path):
    server = serve(strict=True, extra={"reasoning": "hm"})
    _, rows = run([server], prompts_of(tmp_path, "a"), tmp_path / "out.jsonl")
    assert rows[0]["messages"][-1] == {"role": "assistant", "content": "A", "reasoning_content": "hm"}
    assert conversations_of(rows).rows[0].messages[-1].reasoning == "hm"


def test_requests_under_way_when_a_server_first_refuses_the_key_are_asked_again(serve, tmp_path):
    """All of the first wave are refused; only the first of them used to be asked without the key."""
    server, wave = serve(strict=True), threading.Barrier(6)
    answer = server.answer

    def together(body):
        if "return_token_ids" in body:
            wave.wait(20)
        return answer(body)

    server.answer = together
    account, rows = run([server], prompts_of(tmp_path, *"abcdef"), tmp_path / "out.jsonl", concurrency=6)
    assert (account.answered, account.failed) == (6, 0) and len(rows) == 6


def test_turns_tools_and_arguments_go_along(serve, tmp_path):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    plain, calling = serve(), serve(extra={"content": None, "tool_calls": [call]})
    tools = [{"type": "function", "function": {"name": "f"}}]
    row = {
        "id": "x",
        "system": "s",
        "turns": ["a", "b"],
        "tools": tools,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    prompts = load_prompts(write_lines(tmp_path / "p.jsonl", row))
    _, rows = run([plain], prompts, tmp_path / "plain.jsonl")
    assert [m["content"] for m in rows[0]["messages"]] == ["s", "a", "A", "b", "B"]
    assert plain.asked[1]["chat_template_kwargs"] == {"enable_thinking": False} and plain.asked[1]["tools"] == tools
    assert [m["role"] for m in plain.asked[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert "token_ids" not in plain.asked[1]["messages"][2]
    run([calling], prompts, tmp_path / "calling.jsonl")
    account, rows = run([calling], prompts, tmp_path / "calling.jsonl")
    assert account.skipped == len(rows) == 1, "it ended at the call, and is answered"
    assert rows[0]["finish_reason"] == "tool_calls" and len(rows[0]["messages"]) == 3
    assert rows[0]["messages"][-1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}


def test_the_command_says_what_became_of_all_prompts(serve, tmp_path, capsys):
    server = serve({"b": [(422, {"error": "no"})]})
    prompts_of(tmp_path, "a", "b", "c")
    arguments = [
        "--server",
        server.url,
        "--input",
        str(tmp_path / "prompts.jsonl"),
        "--output",
        str(tmp_path / "o.jsonl"),
    ]
    assert run_command("synthesize_answers", arguments) == 1
    assert "3 prompts: 2 answered, 1 failed, 0 answered before" in capsys.readouterr().out
    assert json.loads((tmp_path / "o.jsonl.settings.json").read_text())["model"] == "served"
    assert run_command("synthesize_answers", arguments) == 0
    assert "3 prompts: 1 answered, 0 failed, 2 answered before" in capsys.readouterr().out


def test_no_server_at_all_is_said_at_once(tmp_path, capsys):
    prompts_of(tmp_path, *"abcdef")
    arguments = ["--server", "http://127.0.0.1:9", "--retries", "0", "--model", "m", "--input",
                 str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "o.jsonl")]  # fmt: skip
    assert run_command("synthesize_answers", arguments) == 2
    assert "no answer in 1 tries" in capsys.readouterr().err
    assert run_command("synthesize_answers", [*arguments, "--server", "host:1"]) == 2
    assert "--server takes http://HOST:PORT" in capsys.readouterr().err
