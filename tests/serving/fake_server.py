"""A small OpenAI-compatible server in this process: it streams, fails as it is asked to, and counts as engines do."""

import http.server
import json
import socketserver
import threading
import time

TOKENS = 5
"""New tokens of an answer, if a question says nothing else."""
VERSIONS = {
    "vllm": ("/version", "version"), "sglang": ("/server_info", "version"), "llama_cpp": ("/props", "build_info"),
}  # fmt: skip
"""Page and key under which each engine says what it is."""


class FakeServer:
    """Answers with the words of the question, one a token; a question's first word says what goes wrong.

    ``refuse``: HTTP 400. ``busy``: HTTP 503. ``break``: the connection closes in the middle. ``error``: an event with
    an error. ``garbage``: an event that is no JSON. ``untold``: no usage. ``slow``: ``delay`` seconds before the first
    token. ``hang``: nothing more after the first token, until ``release`` is set. ``empty``: the end token alone.
    ``call``: ends as with a tool call.

    Args:
        counters: ``vllm``, ``sglang`` or ``llama_cpp``: of what to be told at ``/metrics``; ``None``: no such page.
        drafts: whether it counts drafts: for an answer of n tokens n // 2, of which all accept one token and one two.
        old_client: refuses ``stream_options``.
        lag: seconds between the end of an answer and its being counted.
        version: what it says it is; default: the release of that engine whose counters were read.
        port: where it listens; 0: any.
    """

    def __init__(
        self, counters="vllm", drafts=True, old_client=False, delay=0.2, lag=0.0, version=None, port=0,
    ):  # fmt: skip
        self.counters, self.drafts, self.old_client, self.delay, self.lag = counters, drafts, old_client, delay, lag
        self.version = version or {"vllm": "0.32.0", "sglang": "0.5.23", "llama_cpp": "b10894-fake"}.get(counters, "1")
        self.count = dict.fromkeys(("drafts", "drafted", "accepted", "generated", "cached", "one", "two"), 0)
        self.count["generated"] = 1000  # of others, before
        self.asked, self.now, self.most = [], 0, 0
        self.lock, self.release = threading.Lock(), threading.Event()
        self.reached = threading.Event()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments):
                pass

            def do_GET(self):
                if self.path == "/v1/models":
                    self.reply(200, json.dumps({"data": [{"id": "fake"}]}))
                elif self.path == "/health":
                    self.reply(200, "{}")
                elif self.path == VERSIONS.get(outer.counters, VERSIONS["vllm"])[0]:
                    self.reply(200, json.dumps({VERSIONS.get(outer.counters, VERSIONS["vllm"])[1]: outer.version}))
                elif self.path == "/metrics" and outer.counters:
                    self.reply(200, outer.page())
                else:
                    self.reply(404, "not here")

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    outer.asked.append(body)
                    outer.now += 1
                    outer.most = max(outer.most, outer.now)
                self.inside = True
                try:
                    self.answer(body, body["messages"][-1]["content"])
                except OSError:
                    pass
                finally:
                    self.leave()

            def leave(self):
                """Before the last bytes: who has read them may ask again at once."""
                with outer.lock:
                    outer.now -= self.inside
                    self.inside = False

            def answer(self, body, question):
                what = question.split()[0]
                if outer.old_client and "stream_options" in body:
                    return self.reply(400, "unknown field: stream_options")
                if what in ("refuse", "busy"):
                    return self.reply(400 if what == "refuse" else 503, f"{what}!")
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                self.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
                if what == "slow":
                    time.sleep(outer.delay)
                if what == "error":
                    return self.event({"error": {"message": "out of memory"}}, last=True)
                if what == "garbage":
                    return self.chunk(b"data: {half\n\n", last=True)
                words = [] if what == "empty" else (question.split() * TOKENS)[: min(TOKENS, body["max_tokens"])]
                for word in words:
                    self.event({"choices": [{"delta": {"content": word + " "}}]})
                    if what == "hang":
                        outer.reached.set()
                        outer.release.wait(20)
                    if what == "break":
                        self.close_connection = True
                        return None
                reason = "length" if body["max_tokens"] <= TOKENS else "tool_calls" if what == "call" else "stop"
                self.event({"choices": [{"delta": {}, "finish_reason": reason}]})
                tokens = len(words) or 1
                if "stream_options" in body and what != "untold":
                    self.event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": tokens}})
                threading.Timer(outer.lag, outer.counted, (tokens,)).start() if outer.lag else outer.counted(tokens)
                return self.chunk(b"data: [DONE]\n\n", last=True)

            def event(self, value, last=False):
                self.chunk(b"data: " + json.dumps(value).encode() + b"\n\n", last)

            def chunk(self, data, last=False):
                if last:
                    self.leave()
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data) + (b"0\r\n\r\n" if last else b""))

            def reply(self, code, text):
                self.send_response(code)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

        class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
            daemon_threads = True
            request_queue_size = 64

        self.http = Server(("127.0.0.1", port), Handler)
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def counted(self, tokens):
        rounds = tokens // 2
        two = min(rounds, 1)
        with self.lock:
            self.count["generated"] += tokens
            for key, number in (
                ("drafts", rounds), ("drafted", 3 * rounds), ("accepted", rounds + two), ("one", rounds), ("two", two),
            ):  # fmt: skip
                self.count[key] += number

    def page(self):
        with self.lock:
            now = dict(self.count)
        if self.counters == "sglang":
            lines = [f'sglang:generation_tokens_total{{is_streaming="true"}} {now["generated"]}.0']
            if self.drafts and now["drafts"]:
                lines.append(f"sglang:spec_verify_calls_total {now['drafts']}.0")
            return "\n".join(lines) + "\n"
        if self.counters == "llama_cpp":  # six digits of each, positions whole and only behind the first draft
            lines = [f"llamacpp:tokens_predicted_total {now['generated']:g}", "llamacpp:n_decode_total 12"]
            lines += [f"llamacpp:prompt_tokens_cached_total {now['cached']:g}"]
            lines += [
                f"llamacpp:spec_decode_num_{name}_total {now[key] if self.drafts else 0:g}"
                for name, key in (("draft_tokens", "drafted"), ("accepted_tokens", "accepted"), ("drafts", "drafts"))
            ]
            if self.drafts and now["drafts"]:
                lines += [
                    f'llamacpp:spec_decode_num_accepted_tokens_per_pos_total{{position="{k}"}} {number}'
                    for k, number in enumerate((now["one"], now["two"], 0))
                ]
            return "\n".join(lines) + "\n"
        lines = ["# HELP vllm:generation_tokens_total words", "# TYPE vllm:generation_tokens_total counter"]
        half = now["generated"] // 2  # two engines behind one address
        lines += [f'vllm:generation_tokens_total{{engine="0",model_name="a}} b"}} {half}.0']
        lines += [f'vllm:generation_tokens_total{{engine="1",model_name="a"}} {now["generated"] - half}.0']
        lines += [f"vllm:prefix_cache_hits_total {now['cached']}.0"]
        if self.drafts:
            lines += [
                f"vllm:spec_decode_num_drafts_total {now['drafts']}.0",
                f"vllm:spec_decode_num_draft_tokens_total {now['drafted']}.0",
                f"vllm:spec_decode_num_accepted_tokens_total {now['accepted']}.0",
                *(
                    f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{k}"}} {now[name]}.0'
                    for k, name in ((0, "one"), (1, "two"))
                ),
                'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="2"} 0.0',
                'vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",position="2"} 1.7e+09',
            ]
        return "\n".join(lines) + "\n"

    def close(self):
        self.release.set()
        self.http.shutdown()
        self.http.server_close()
