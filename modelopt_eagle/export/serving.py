"""The serving check: an engine decodes with and without the head, and its own counters are held against ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from modelopt_eagle.errors import ExportError

from .engines import PROFILES
from .loader import load_draft

RUNNERS = {"vllm": Path(__file__).with_name("vllm_runner.py")}
TIE = 5e-3
"""Two tokens whose target logits lie closer than this may be chosen either way by two correct implementations."""


@dataclass
class Divergence:
    """A place where two greedy texts part.

    Attributes:
        prompt: which one; ``position``: of the first token that differs.
        tokens: the two tokens, in the order of ``between``.
        gap: how far apart the target's logits for them are; a tie if below :data:`TIE`.
    """

    prompt: str
    between: str
    position: int
    tokens: tuple[int | None, int | None]
    gap: float
    is_tie: bool


@dataclass
class ServingReport:
    """The verdict of a serving check.

    Attributes:
        passed: no ``failures``.
        engine, engine_version, prompts, new_tokens: what was run.
        drafts: verification steps that the engine counted.
        acceptance_length, per_position: the engine's (accepted at least that many drafted tokens, per draft).
        our_acceptance_length, our_per_position, our_drafts: of this toolkit's generator on the same prompts.
        divergences: where texts part, ties among them.
        seconds_plain, seconds_drafted, speedup: the engine's decoding time without and with the head.
    """

    passed: bool
    engine: str
    engine_version: str
    prompts: int
    new_tokens: int
    drafts: int
    acceptance_length: float
    per_position: list[float]
    our_acceptance_length: float
    our_per_position: list[float]
    our_drafts: int
    seconds_plain: float
    seconds_drafted: float
    speedup: float
    divergences: list[Divergence] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return asdict(self)

    def table(self) -> str:
        """The result as text, verdict last."""
        positions = range(1, len(self.our_per_position) + 1)
        rows = [
            ["", "acceptance length", *(f"position {p}" for p in positions), "drafts"],
            [f"{self.engine} {self.engine_version}", f"{self.acceptance_length:.3f}",
             *(f"{p:.3f}" for p in self.per_position), str(self.drafts)],
            ["this toolkit", f"{self.our_acceptance_length:.3f}", *(f"{p:.3f}" for p in self.our_per_position),
             str(self.our_drafts)],
        ]  # fmt: skip
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        lines.append(
            f"{self.prompts} prompts, {self.new_tokens} new tokens: {self.seconds_plain:.1f} s without the head, "
            f"{self.seconds_drafted:.1f} s with it ({self.speedup:.2f} times as fast)"
        )
        read = PROFILES[self.engine].version
        if self.engine_version != read:
            lines.append(
                f"note: this toolkit's rules for {self.engine} are those of {read}, not of {self.engine_version}"
            )
        for place in self.divergences:
            kind = "tie" if place.is_tie else "DIFFERENCE"
            lines.append(
                f"{kind}: prompt {place.prompt}, token {place.position}, {place.between}: {place.tokens[0]} or "
                f"{place.tokens[1]}, logits {place.gap:.1e} apart"
            )
        lines += [f"failed: {failure}" for failure in self.failures]
        lines.append(
            "verdict: " + ("the engine serves this head as it was trained" if self.passed else "NOT SERVED RIGHT")
        )
        return "\n".join(lines)


def engine_environment(python: Path) -> dict[str, str]:
    """Environment of the engine's process; what the user has set stays.

    Speculative decoding on a CPU is many times slower without Intel's OpenMP, which its package puts beside the
    interpreter and which must be loaded first.
    """
    environment = dict(os.environ)
    library = python.parent.parent / "lib" / "libiomp5.so"
    if library.is_file() and "LD_PRELOAD" not in environment:
        environment["LD_PRELOAD"] = str(library)
        environment.setdefault("KMP_BLOCKTIME", "1")
    if "OMP_NUM_THREADS" in environment:
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    environment.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    environment.pop("PYTHONPATH", None)
    return environment


def find_engine_python(given: str | Path | None) -> Path:
    """The interpreter that has the engine.

    Raises:
        ExportError: none where it was named or where ``setup_vllm_cpu.sh`` makes it.
    """
    python = Path(given) if given else Path(".venv-vllm/bin/python")
    if not python.is_file():
        raise ExportError(f"{python} is no interpreter: make the engine's with `bash scripts/setup_vllm_cpu.sh`")
    return python.absolute()


def run_engine(python: Path, engine: str, job: dict[str, Any], timeout: float = 3600) -> dict[str, Any]:
    """Run one job in the engine's interpreter; see ``vllm_runner.py`` for the two dictionaries.

    Raises:
        ExportError: the engine failed (the end of its output is in the message), or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="serving-check-") as folder:
        paths = [Path(folder) / "job.json", Path(folder) / "result.json"]
        paths[0].write_text(json.dumps(job), encoding="utf-8")
        try:
            done = subprocess.run(
                [str(python), str(RUNNERS[engine]), *map(str, paths)],
                env=engine_environment(python), cwd=folder, capture_output=True, text=True, timeout=timeout,
                check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise ExportError(f"{engine} did not finish in {timeout:.0f} s") from error
        if done.returncode or not paths[1].is_file():
            lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
            shown = "\n  ".join(lines[-12:])
            raise ExportError(f"{engine} failed with exit code {done.returncode}; the end of its output:\n  {shown}")
        return json.loads(paths[1].read_text(encoding="utf-8"))


def first_difference(a: list[int], b: list[int]) -> int | None:
    """The first position where two texts differ; one that ends earlier differs there."""
    for position, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return position
    return None if len(a) == len(b) else min(len(a), len(b))


@torch.inference_mode()
def logit_gap(target, ids: list[int], tokens: tuple[int | None, int | None]) -> float:
    """How far apart the target's logits of two tokens are after ``ids``; infinite if one text just ended."""
    if None in tokens:
        return float("inf")
    output = target.features(torch.tensor([ids], device=target.device), None, target.default_aux_layer_ids()[:1])
    logits = target.logits(output.final_hidden[:, -1])[0]  # [V]
    return float((logits[tokens[0]] - logits[tokens[1]]).abs())


def compare_texts(
    target, names: list[str], prompts: list[list[int]], one: list[list[int]], two: list[list[int]], between: str
) -> list[Divergence]:
    """Where the texts of two runs part, with the target's own opinion on the two tokens."""
    found = []
    for name, prompt, a, b in zip(names, prompts, one, two, strict=True):
        position = first_difference(a, b)
        if position is not None:
            tokens = tuple(text[position] if position < len(text) else None for text in (a, b))
            gap = logit_gap(target, prompt + a[:position], tokens)
            found.append(Divergence(name, between, position, tokens, gap, gap < TIE))
    return found


def per_position(counts: list[int], drafts: int, steps: int) -> list[float]:
    """``[steps]`` shares of drafts that accepted at least 1, 2, … tokens."""
    counts = list(counts)[:steps] + [0] * (steps - len(counts))
    return [count / drafts if drafts else 0.0 for count in counts]


def encode_prompts(target, source: str | Path, limit: int | None, longest: int) -> tuple[list[str], list[list[int]]]:
    """Names and token ids of the first turns, rendered by the target's chat template, those that fit.

    Raises:
        ExportError: none fits.
    """
    from modelopt_eagle.data.prompts import load_prompts

    names, encoded = [], []
    for prompt in load_prompts(source, limit):
        messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
        messages.append({"role": "user", "content": prompt.turns[0]})
        text = target.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = list(target.tokenizer(text, add_special_tokens=False)["input_ids"])
        if len(ids) <= longest:
            names.append(prompt.id)
            encoded.append(ids)
    if not encoded:
        raise ExportError(f"no prompt of {source} is at most {longest} tokens long, which the target's window leaves")
    return names, encoded


def check_serving(
    export_path: str | Path,
    base_model: str,
    *,
    engine: str = "vllm",
    engine_python: str | Path | None = None,
    prompts: str | Path = "quickstart",
    num_samples: int | None = 24,
    max_new_tokens: int = 96,
    num_speculative_tokens: int = 3,
    batch_size: int = 8,
    tolerance: float = 0.01,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> ServingReport:
    """Decode greedily in an engine, float32, with and without the head, and judge.

    It passes when the engine's text with the head is the target's own (ties apart) and its acceptance at every
    position is within ``tolerance`` of ours on the same prompts.

    Args:
        export_path: the exported folder.
        base_model: the target, as in ``load_target``.
        engine: ``vllm``, the one that runs on a CPU.
        engine_python: its interpreter; default ``.venv-vllm/bin/python``.
        prompts, num_samples: what to decode, as in ``load_prompts``.
        batch_size: requests decoded together, here and in the engine.

    Raises:
        ExportError: the engine fails to start or to load the head; the folder does not fit the target.
    """
    from modelopt_eagle.decoding.generator import PseudoSpeculativeGenerator
    from modelopt_eagle.target import load_target
    from modelopt_eagle.target.load import resolve

    if engine not in RUNNERS:
        raise ExportError(f"engine {engine!r} cannot be run here; {', '.join(RUNNERS)} can")
    python = find_engine_python(engine_python)
    place = resolve(base_model)
    target = load_target(base_model, dtype="float32")
    identity = target.identity()
    head = load_draft(export_path, vocab_size=identity["vocab_size"], tokenizer_hash=identity["tokenizer_hash"])
    window = int(getattr(target.config, "max_position_embeddings", 4096))
    longest = min(window, 4096) - max_new_tokens - num_speculative_tokens - 1
    names, encoded = encode_prompts(target, prompts, num_samples, longest)

    say(f"our generator: {len(encoded)} prompts")
    generator = PseudoSpeculativeGenerator(target, head.float(), num_steps=num_speculative_tokens)
    our_tokens: list[list[int]] = []
    our_counts, our_drafts = [0] * num_speculative_tokens, 0
    for start in range(0, len(encoded), batch_size):
        output = generator.generate(encoded[start : start + batch_size], max_new_tokens=max_new_tokens)
        our_tokens += output.tokens
        our_drafts += output.steps
        our_counts = [a + b for a, b in zip(our_counts, output.accepted_per_position, strict=True)]

    job = {
        "model": str(place), "prompts": encoded, "max_new_tokens": max_new_tokens, "dtype": "float32",
        "num_speculative_tokens": num_speculative_tokens, "batch_size": batch_size,
        "max_model_len": min(window, max(map(len, encoded)) + max_new_tokens + num_speculative_tokens + 1),
    }  # fmt: skip
    say(f"{engine} without the head")
    plain = run_engine(python, engine, {**job, "draft": None})
    say(f"{engine} with the head")
    drafted = run_engine(python, engine, {**job, "draft": str(Path(export_path).absolute())})

    theirs = per_position(drafted["accepted_per_position"], drafted["drafts"], num_speculative_tokens)
    ours = per_position(our_counts, our_drafts, num_speculative_tokens)
    theirs_text = drafted["token_ids"]
    divergences = compare_texts(
        target, names, encoded, plain["token_ids"], theirs_text, "engine without or with the head"
    ) + compare_texts(target, names, encoded, our_tokens, theirs_text, "the target or the engine with the head")
    failures = judge(theirs, ours, drafted["drafts"], divergences, tolerance)
    return ServingReport(
        passed=not failures,
        engine=engine,
        engine_version=drafted["engine_version"],
        prompts=len(encoded),
        new_tokens=sum(map(len, drafted["token_ids"])),
        drafts=drafted["drafts"],
        acceptance_length=1.0 + sum(theirs),
        per_position=theirs,
        our_acceptance_length=1.0 + sum(ours),
        our_per_position=ours,
        our_drafts=our_drafts,
        seconds_plain=plain["seconds"],
        seconds_drafted=drafted["seconds"],
        speedup=plain["seconds"] / drafted["seconds"],
        divergences=divergences,
        failures=failures,
    )


def judge(
    theirs: list[float], ours: list[float], drafts: int, divergences: list[Divergence], tolerance: float
) -> list[str]:
    """What speaks against the head being served as it was trained; empty if nothing."""
    failures = []
    if not drafts:
        failures.append("the engine counted no draft: it did not use the head")
    for position, (a, b) in enumerate(zip(theirs, ours, strict=True), start=1):
        if abs(a - b) > tolerance:
            failures.append(f"acceptance at position {position} is {a:.4f} in the engine and {b:.4f} here")
    wrong = [place for place in divergences if not place.is_tie]
    if wrong:
        failures.append(f"{len(wrong)} texts differ from the target's own and are no ties")
    return failures
