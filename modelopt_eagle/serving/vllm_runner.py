"""Decode prompts in vLLM, with or without a draft head, and write what the engine itself counted.

This file runs in the engine's own interpreter, as `python vllm_runner.py JOB.json RESULT.json`, and imports nothing of
this package. JOB: `model`, `draft` (folder or null), `draft_options` (what speculative decoding takes beside it),
`record_drafts`, `prompts` (lists of token ids), `max_new_tokens`, `num_speculative_tokens`, `dtype`, `max_model_len`
(or null), `revision` and `trust_remote_code` (of the target, or absent), `logprobs` (null, or how many of the best
tokens to report for the first new token), `mend` (norm the context keys of DFlash heads layer by layer, see
`vllm_context_norms.py`; absent: as the engine does). RESULT:
`engine_version`, `token_ids`, `texts`, `seconds`, `drafts`, `draft_tokens`, `accepted_per_position`, `proposals`
(with `record_drafts`: `[prompt, tokens known, drafted tokens]` of each draft), `mended` (whether something was) and,
with `logprobs`, `first_token_logprobs`.

A JOB with `runs`, a list of jobs that each lack what the others share, makes one engine after another in this process,
which saves loading vLLM anew; RESULT is then `{"runs": [RESULT, ...]}`.
"""

import sys

sys.path.pop(0)  # this folder, whose files must not stand in for the engine's modules of the same name

import gc
import importlib.util
import json
import os
import time


def counters(llm):
    """The engine's counters of speculative decoding, summed over engines: name -> int or list of ints."""
    found = {"drafts": 0, "draft_tokens": 0, "accepted_per_position": []}
    names = {
        "vllm:spec_decode_num_drafts": "drafts",
        "vllm:spec_decode_num_draft_tokens": "draft_tokens",
        "vllm:spec_decode_num_accepted_tokens_per_pos": "accepted_per_position",
    }
    for metric in llm.get_metrics():
        key = names.get(metric.name)
        if key == "accepted_per_position":
            old = found[key] or [0] * len(metric.values)
            found[key] = [a + b for a, b in zip(old, metric.values, strict=True)]
        elif key is not None:
            found[key] += metric.value
    return found


def record_drafts(prompts):
    """A list that fills with `[prompt, tokens known, drafted tokens]` of every draft that reaches the scheduler.

    Returns:
        the list, and a function that ends the recording.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    places = {tuple(ids): place for place, ids in enumerate(prompts)}
    found, original = [], Scheduler.update_draft_token_ids

    def update_draft_token_ids(self, drafts):
        for request_id, tokens in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
            request = self.requests.get(request_id)
            if request is not None and not request.is_finished() and not request.is_prefill_chunk:
                found.append([places[tuple(request.prompt_token_ids)], request.num_tokens, list(tokens)])
        return original(self, drafts)

    def end():
        Scheduler.update_draft_token_ids = original

    Scheduler.update_draft_token_ids = update_draft_token_ids
    return found, end


def mend_norms():
    """Apply the plugin that lies beside this file; what it returns."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "vllm_context_norms.py")
    spec = importlib.util.spec_from_file_location("vllm_context_norms", path)
    plugin = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plugin)
    return plugin.register()


def difference(after, before):
    """What was counted between two readings."""
    start = before["accepted_per_position"] or [0] * len(after["accepted_per_position"])
    return {
        "drafts": after["drafts"] - before["drafts"],
        "draft_tokens": after["draft_tokens"] - before["draft_tokens"],
        "accepted_per_position": [a - b for a, b in zip(after["accepted_per_position"], start, strict=True)],
    }


def end_engine(llm):
    """Give an engine's memory back, so that the next one of this process finds it."""
    from vllm.distributed import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()


def run(job, last=True):
    """One engine, one job; the engine is ended unless it is the last of this process."""
    import vllm
    from vllm import LLM, SamplingParams

    options = {
        "model": job["model"],
        "dtype": job["dtype"],
        "enforce_eager": True,
        "disable_log_stats": False,
        "enable_prefix_caching": False,
        "max_num_seqs": job["batch_size"],
    }
    options |= {name: job[name] for name in ("revision", "trust_remote_code") if job.get(name)}
    if job.get("max_model_len"):
        options["max_model_len"] = job["max_model_len"]
    if job.get("draft"):
        options["speculative_config"] = {
            **job.get("draft_options", {"method": "eagle3"}),
            "model": job["draft"],
            "num_speculative_tokens": job["num_speculative_tokens"],
        }
    drafts, undo = [], []
    if job.get("record_drafts"):
        options["async_scheduling"] = False  # drafts then pass through the scheduler, where they are written down
        drafts, end = record_drafts(job["prompts"])
        undo.append(end)
    mended = mend_norms() if job.get("mend") else None
    if mended is not None:
        undo.append(mended)
    llm = LLM(**options)
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    # One short request first, so that compilation and allocation are not timed.
    llm.generate(prompts[:1], SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False)
    before = counters(llm)
    drafts.clear()
    sampling = SamplingParams(temperature=0.0, max_tokens=job["max_new_tokens"], logprobs=job.get("logprobs"))
    begun = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - begun
    result = {
        "engine_version": vllm.__version__,
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
        "texts": [output.outputs[0].text for output in outputs],
        "seconds": seconds,
        "proposals": drafts,
        "mended": mended is not None,
        **difference(counters(llm), before),
    }
    if job.get("logprobs"):
        result["first_token_logprobs"] = [
            {str(token): entry.logprob for token, entry in output.outputs[0].logprobs[0].items()} for output in outputs
        ]
    for each in undo:
        each()
    if not last:
        end_engine(llm)
    return result


def main(job_path, result_path):
    """Run the job of the first file; write its result into the second."""
    with open(job_path, encoding="utf-8") as stream:
        job = json.load(stream)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import vllm  # before anything else is done, so that its absence is the first thing that is told

    if "runs" in job:
        import vllm.entrypoints.llm  # noqa: F401  what all of them load

        gc.collect()
        gc.freeze()  # an engine's start and end look through all objects several times, a second each on a busy CPU
        jobs = [{**job, **each} for each in job.pop("runs")]
        result = {"runs": [run(each, last=each is jobs[-1]) for each in jobs]}
    else:
        result = run(job)
    with open(result_path + ".part", "w", encoding="utf-8") as stream:
        json.dump(result, stream)
    os.replace(result_path + ".part", result_path)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
