"""Decode prompts in llama.cpp's server, with or without a draft head, and write what the server itself counted.

This file runs in the engine's own interpreter, as `python llama_cpp_runner.py JOB.json RESULT.json`, and imports
nothing of this package. JOB and RESULT are those of `vllm_runner.py`, but that `model` and `draft` are GGUF files, the
only draft option is `spec_type`, `stops` are the tokens that end an answer, and requests are decoded one after another.
What was drafted and accepted is read from the server's log and held against the numbers in its answers. Near the end of
an answer the server drafts no more tokens than are asked for, so a few more are asked for than wanted, and rounds that
begin behind the last wanted token are left out.

As `python llama_cpp_runner.py JOB.json` it becomes the server, until told to end; JOB is then that of `vllm_server.py`,
again with GGUF files.
"""

import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

START_SECONDS = 600
ANSWER_SECONDS = 1800
CALLS = re.compile(r"#\d+ |\d+\s+\.\./|\[|.*draft candidate|warning: |Download failed|This GDB|Enable debuginfod")
TASK = re.compile(r"task (\d+) \| processing task")
CANDIDATE = re.compile(r"draft candidate\s+0, pos\s+(\d+):\s+(\d+) \(")
DRAFTED = re.compile(r"task (\d+) \| generate_draft: id=(-?\d+), #tokens=(\d+), #draft=(\d+),")
ACCEPTED = re.compile(r"task (\d+) \| add accepted tokens: sampled=-?\d+, ids\.size=(\d+), n_draft=(\d+)")


def server_binary():
    """The server beside this interpreter."""
    path = os.path.join(os.path.dirname(os.path.abspath(sys.executable)), "llama-server")
    if not os.path.isfile(path):
        raise SystemExit("no llama-server beside this interpreter")
    return path


def free_port():
    """A port of this machine that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def options(job, requests=1):
    """The server's options: float32 throughout, nothing kept from one request to the next.

    `requests`: that it may work on at a time, each in a window of its own.
    """
    threads = os.environ.get("OMP_NUM_THREADS")
    wide = ["--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off", "--fit", "off", "--cache-ram", "0"]
    given = ["--model", job["model"], "--ctx-size", str(requests * job["max_model_len"]), "--parallel", str(requests)]
    given += ["--no-ui", *wide, "--offline", "--log-colors", "off"]
    given += ["--threads", threads, "--threads-batch", threads] if threads else []
    if job.get("draft"):
        steps, kind = str(job["num_speculative_tokens"]), job.get("draft_options", {}).get("spec_type", "draft-eagle3")
        given += ["--model-draft", job["draft"], "--spec-type", kind, "--spec-draft-n-max", steps]
        given += ["--spec-draft-n-min", "0", "--spec-draft-p-min", "0"]
        given += ["--spec-draft-type-k", "f32", "--spec-draft-type-v", "f32"]
    return given


def ask(port, path, body=None, timeout=30):
    """One request to the server; its answer as data."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"} if data else {}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # this machine's own, whatever proxy is set
    with opener.open(request, timeout=timeout) as answer:
        return json.loads(answer.read().decode("utf-8", errors="replace"))


def last_lines(log):
    """The end of the server's log, and what made it give up, without what it prints of every token or call."""
    with open(log, encoding="utf-8", errors="replace") as stream:
        lines = [line.rstrip() for line in stream if line.strip() and not CALLS.match(line)]
    given_up = [line for line in lines[:-6] if "GGML_ASSERT" in line or "GGML_ABORT" in line]  # not in order
    return "\n".join([*given_up, *lines[-6:]])


def wait_until_ready(process, port, log):
    """Return when the server answers; end with its last words if it ends or takes too long."""
    for _ in range(START_SECONDS * 5):
        if process.poll() is not None:
            raise SystemExit(f"{last_lines(log)}\nllama-server ended with {process.returncode} when it started")
        try:
            ask(port, "/health", timeout=5)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise SystemExit(f"{last_lines(log)}\nllama-server was not ready in {START_SECONDS} s")


def complete(process, port, log, prompt, tokens):
    """The server's answer to one prompt, greedy."""
    body = {
        "prompt": prompt, "n_predict": tokens, "temperature": 0.0, "cache_prompt": False, "return_tokens": True,
        "seed": 0,
    }  # fmt: skip
    try:
        return ask(port, "/completion", body, ANSWER_SECONDS)
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")[:500]
        raise SystemExit(f"llama-server answered {error.code}: {said}") from error
    except (urllib.error.URLError, OSError) as error:
        try:
            how = f"ended with {process.wait(20)}"  # it closes the connection before it has ended
        except subprocess.TimeoutExpired:
            how = f"gave no answer ({error})"
        raise SystemExit(f"{last_lines(log)}\nllama-server {how} at a request") from error


def rounds_of(lines):
    """What the log says was drafted, by task, in order: `[tokens known, drafted tokens, how many were accepted]`."""
    tasks, drafted = {}, {}
    for line in lines:
        if found := TASK.search(line):
            tasks[found[1]] = []
        elif found := CANDIDATE.search(line):
            if found[1] == "0":
                drafted = {}
            drafted[int(found[1])] = int(found[2])
        elif found := DRAFTED.search(line):
            tokens = [drafted[place] for place in range(int(found[4]))]
            tasks[found[1]].append([int(found[3]) + 1, tokens, None])  # its count leaves the newest token out
        elif found := ACCEPTED.search(line):
            tasks[found[1]][-1][2] = int(found[2]) - 1
    return tasks


def cut(tokens, job):
    """An answer up to its first end token, which is kept, and of at most the wanted length."""
    ends = [place for place, token in enumerate(tokens) if token in job["stops"]]
    return tokens[: min([job["max_new_tokens"], *(place + 1 for place in ends)])]


def counted(answers, tasks, job):
    """Counters and proposals of the rounds that begin before an answer's last token; `answers`, `tasks` in order."""
    steps = job["num_speculative_tokens"]
    result = {"drafts": 0, "draft_tokens": 0, "accepted_per_position": [0] * steps, "proposals": []}
    for place, (answer, rounds) in enumerate(zip(answers, tasks, strict=True)):
        timings, text = answer["timings"], cut(answer["tokens"], job)
        told = (timings.get("draft_n", 0), timings.get("draft_n_accepted", 0))
        read = (sum(len(tokens) for _, tokens, _ in rounds), sum(accepted or 0 for *_, accepted in rounds))
        if told != read:
            raise SystemExit(
                f"llama-server's answer says {told[0]} drafted and {told[1]} accepted tokens, its log {read[0]} and "
                f"{read[1]}: this version writes another log than the one that was read"
            )
        for known, tokens, accepted in rounds:
            if known - len(job["prompts"][place]) < len(text):
                result["drafts"] += 1
                result["draft_tokens"] += len(tokens)
                result["proposals"].append([place, known, tokens])
                for position in range(accepted):
                    result["accepted_per_position"][position] += 1
    return result


def serve(job_path):
    """Become the server of a job."""
    with open(job_path, encoding="utf-8") as stream:
        job = json.load(stream)
    given = [*options(job, job["batch_size"]), "--alias", job["served_name"], "--metrics", "--no-cache-prompt"]
    given += ["--skip-chat-parsing"]  # an answer is measured as it is, whatever its form
    given += ["--host", "127.0.0.1", "--port", str(job["port"])]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # end with the process that started this one
    os.execv(server_binary(), [server_binary(), *given])


def main(job_path, result_path):
    """Run the job of the first file; write its result into the second."""
    with open(job_path, encoding="utf-8") as stream:
        job = json.load(stream)
    port, extra = free_port(), 0 if not job.get("draft") else job["num_speculative_tokens"] + 2
    with tempfile.TemporaryDirectory(prefix="llama-cpp-") as folder:
        log = os.path.join(folder, "server.log")
        with open(log, "w", encoding="utf-8") as stream:
            process = subprocess.Popen(
                [server_binary(), *options(job), "--verbosity", "5", "--host", "127.0.0.1", "--port", str(port)],
                stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
            )  # fmt: skip
        try:
            wait_until_ready(process, port, log)
            version = re.sub(r"^b(\d+)-.*", r"\1", ask(port, "/props")["build_info"])
            # One short request first, so that allocation is not timed.
            complete(process, port, log, job["prompts"][0], 4)
            tokens = job["max_new_tokens"] + extra
            answers = [complete(process, port, log, prompt, tokens) for prompt in job["prompts"]]
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        with open(log, encoding="utf-8", errors="replace") as stream:
            tasks = list(rounds_of(stream).values())
    seconds, texts = 0.0, [cut(answer["tokens"], job) for answer in answers]
    for answer, text in zip(answers, texts, strict=True):  # of what was decoded beyond the text, no time is counted
        share = len(text) / max(len(answer["tokens"]), 1)
        seconds += (answer["timings"]["prompt_ms"] + answer["timings"]["predicted_ms"] * share) / 1000
    result = {
        "engine_version": version,
        "token_ids": texts,
        "texts": [answer["content"] for answer in answers],
        "seconds": seconds,
        **counted(answers, tasks[1:], job),
    }
    with open(result_path + ".part", "w", encoding="utf-8") as stream:
        json.dump(result, stream)
    os.replace(result_path + ".part", result_path)


if __name__ == "__main__":
    serve(sys.argv[1]) if len(sys.argv) == 2 else main(sys.argv[1], sys.argv[2])
