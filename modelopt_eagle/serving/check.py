"""The serving check: an engine decodes with and without the head, and its own counters are held against ours."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from modelopt_eagle.common.acceptance import length_of_shares, shares_of_counts
from modelopt_eagle.common.console import say
from modelopt_eagle.errors import ExportError
from modelopt_eagle.export.engines import ENGINES, engine_of
from modelopt_eagle.export.load import load_draft
from modelopt_eagle.export.tensors import read_json
from modelopt_eagle.serving.engine_server import engine_environment
from modelopt_eagle.serving.gguf_files import TargetSizes, head_file, holds_file
from modelopt_eagle.serving.proposals import ProposalCount, compare_proposals
from modelopt_eagle.serving.report import Divergence, ServingReport, left_out_line
from modelopt_eagle.target.to_gguf import float32_gguf

RUNNERS = {key: Path(__file__).with_name(engine.runner.script) for key, engine in ENGINES.items() if engine.runner}
"""Of the engines that can be run here, the script that runs inside the engine's own environment."""
TIE = 5e-3
"""Two tokens whose target logits lie closer than this may be chosen either way by two correct implementations."""


def find_engine_python(given: str | Path | None, engine: str = "vllm") -> Path:
    """The interpreter that has the engine: the one given, or that of its set-up script, here or in the repository.

    Raises:
        ExportError: there is none, or the set-up was not finished.
    """
    folder, setup = ENGINES[engine].runner.folder, ENGINES[engine].runner.setup
    homes = [Path(folder), Path(__file__).parents[2] / folder]
    python = Path(given) if given else next((h for h in homes if h.is_dir()), homes[0]) / "bin" / "python"
    if (python.parent.parent / ".modelopt_eagle_begun").exists():
        raise ExportError(f"{python.parent.parent} is half-made: run `{setup}` again")
    if not python.is_file():
        raise ExportError(
            f"{python} is no interpreter: make the engine's with `{setup}`, or name one that "
            "has the engine with --engine-python"
        )
    return python.absolute()


def run_engine(python: Path, engine: str, job: dict[str, Any], timeout: float = 3600) -> dict[str, Any]:
    """Run one job in the engine's interpreter; see its script for the two dictionaries.

    Returns:
        the script's result.

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
            raise ExportError(
                f"{engine} did not finish in {timeout:.0f} s: ask for less with --num_samples or --max_new_tokens"
            ) from error
        if done.returncode or not paths[1].is_file():
            lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
            if ENGINES[engine].runner.lacks in lines:
                raise ExportError(
                    f"{python} has no {engine}: make its environment with `{ENGINES[engine].runner.setup}`, or name "
                    "another interpreter with --engine-python"
                )
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


def up_to_end(text: list[int], ends: Collection[int]) -> list[int]:
    """A text up to its first end token, which is kept."""
    return text[: next((place + 1 for place, token in enumerate(text) if token in ends), len(text))]


def per_position(counts: list[int], drafts: int, steps: int) -> list[float]:
    """``[steps]`` shares of drafts that accepted at least 1, 2, … tokens."""
    counts = list(counts)[:steps] + [0] * (steps - len(counts))
    return shares_of_counts(counts, drafts)


def encode_prompts(
    target, source: str | Path, limit: int | None, longest: int
) -> tuple[list[str], list[list[int]], list[str]]:
    """First turns, rendered as a validation does: names and token ids of those that fit, names of the others.

    Raises:
        ExportError: none fits.
    """
    from modelopt_eagle.data.prompts import load_prompts
    from modelopt_eagle.validation.dialogues import first_turn

    names, encoded, left_out = [], [], []
    for prompt in load_prompts(source, limit):
        ids = first_turn(target, prompt)
        if len(ids) <= longest:
            names.append(prompt.id)
            encoded.append(ids)
        else:
            left_out.append(prompt.id)
    if not encoded:
        raise ExportError(f"no prompt of {source} is at most {longest} tokens long, which the target's window leaves")
    return names, encoded, left_out


@dataclass(frozen=True)
class HeadToServe:
    """A head for :meth:`ServingCheck.check_all`.

    Attributes:
        export: the exported folder, which the engine loads.
        checkpoint: the head as it was trained, which our generator runs; ``None``: the exported folder.
        steps: drafted tokens; ``None``: those of the check, which are the most.
        mend: run the engine with its known faults mended, see :attr:`ServingReport.mended`.
    """

    export: str | Path
    checkpoint: str | Path | None = None
    steps: int | None = None
    mend: bool = True


class ServingCheck:
    """A target, prompts and an engine to judge heads with; the engine runs once without a head, for all of them.

    Args:
        base_model: the target, as in ``load_target``.
        engine: by any spelling of its name: one that runs on a CPU, ``vllm`` or ``llama.cpp``.
        engine_python: its interpreter; default that of its set-up script.
        target_gguf: for llama.cpp, the target as a float32 GGUF file, where this toolkit writes none of it.
        chat_template: Jinja text or a file with it, in place of the target's own.
        chat_record: arguments and date that the template is given, as a head's config holds them under ``extra``.
        revision, trust_remote_code: of the target, here and in the engine.
        prompts, num_samples: what to decode, as in ``load_prompts``.
        max_new_tokens, num_speculative_tokens: lengths of an answer and of a draft.
        batch_size: requests decoded together, here and in the engine (llama.cpp decodes one after another).
        say: takes a line for each thing that begins.

    Raises:
        ExportError: an unknown engine, no interpreter for it, no prompt that fits the target.
    """

    def __init__(
        self,
        base_model: str,
        *,
        engine: str = "vllm",
        engine_python: str | Path | None = None,
        target_gguf: str | Path | None = None,
        chat_template: str | Path | None = None,
        chat_record: Mapping[str, Any] | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        prompts: str | Path = "quickstart",
        num_samples: int | None = 24,
        max_new_tokens: int = 96,
        num_speculative_tokens: int = 3,
        batch_size: int = 8,
        say: Callable[[str], None] = say,
    ):
        from modelopt_eagle.target import load_target
        from modelopt_eagle.target.chat import use_chat_record
        from modelopt_eagle.target.load import resolve

        engine = engine_of(engine).key
        if engine not in RUNNERS:
            raise ExportError(f"engine {engine!r} cannot be run here; {', '.join(RUNNERS)} can")
        self._gguf = ENGINES[engine].runner.gguf
        if target_gguf is not None and not (self._gguf and Path(target_gguf).is_file()):
            raise ExportError(
                f"{target_gguf} is no file" if self._gguf else f"a GGUF file of the target is nothing {engine} reads"
            )
        self.engine, self.python, self.say = engine, find_engine_python(engine_python, engine), say
        self.steps, self.batch_size, self.max_new_tokens = num_speculative_tokens, batch_size, max_new_tokens
        place = resolve(base_model)
        loading = {"revision": revision, "trust_remote_code": trust_remote_code}
        self.target = load_target(base_model, dtype="float32", chat_template=chat_template, **loading)
        use_chat_record(self.target.tokenizer, chat_record or {})
        window = int(getattr(self.target.config, "max_position_embeddings", 4096))
        # An engine that is within two drafts of the window drafts no more, for the whole batch.
        room = max_new_tokens + (4 if self._gguf else 2) * num_speculative_tokens + (8 if self._gguf else 1)
        self.names, self.prompts, self.left_out = encode_prompts(
            self.target, prompts, num_samples, min(window, 4096) - room
        )
        if self.left_out:
            say(f"note: {left_out_line(self.left_out)}")
        self._job = {
            "model": str(place), "prompts": self.prompts, "max_new_tokens": max_new_tokens, "dtype": "float32",
            "num_speculative_tokens": num_speculative_tokens, "batch_size": batch_size,
            "max_model_len": min(window, max(map(len, self.prompts)) + room), **loading,
        }  # fmt: skip
        if self._gguf:
            self._files = tempfile.TemporaryDirectory(prefix="serving-check-gguf-")
            self._job |= {"stops": list(self.target.end_token_ids), "model": str(target_gguf or "")}
        self._base_model = base_model
        self._plain: dict[str, Any] | None = None

    def gguf_head(self, export_path: Path) -> Path:
        """The file that llama.cpp is given: that of the folder, or one written from the export there.

        Raises:
            ExportError: a head that it would compute otherwise, or one for another target.
        """
        sizes = TargetSizes(self._base_model, self.target.vocab_size, self.target.hidden_size, self.target.num_layers)
        head = None if holds_file(export_path) else load_draft(export_path)
        return head_file(export_path, head, sizes, Path(tempfile.mkdtemp(dir=self._files.name)))

    def with_target_file(self) -> None:
        """Have the target as a float32 file, for an engine that reads such; written at the first call."""
        if self._gguf and not self._job["model"]:
            path = Path(self._files.name) / "target.gguf"
            self.say("the target as a float32 GGUF file")
            float32_gguf(self.target, self._base_model, path)
            self._job["model"] = str(path)

    def plain(self) -> dict[str, Any]:
        """The engine's answers without a head; run at the first call."""
        if self._plain is None:
            self.with_target_file()
            self.say(f"{ENGINES[self.engine].name} without the head")
            self._plain = run_engine(self.python, self.engine, {**self._job, "draft": None})
        return self._plain

    def ours(self, head, steps: int) -> tuple[list[list[int]], list[int], int]:
        """This toolkit's answers with a head, the drafts that accepted at least 1, 2, … tokens, and all drafts.

        Engines count all accepted tokens of a draft, also those behind a token that ends the answer, which our
        generator leaves out. So it decodes on here, and answers and rounds end afterwards.
        """
        from modelopt_eagle.decoding.generator import PseudoSpeculativeGenerator

        self.say(f"our generator: {len(self.prompts)} prompts")
        generator = PseudoSpeculativeGenerator(self.target, head.float(), num_steps=steps)
        tokens: list[list[int]] = []
        counts, drafts = [0] * steps, 0
        for start in range(0, len(self.prompts), self.batch_size):
            output = generator.generate(
                self.prompts[start : start + self.batch_size], max_new_tokens=self.max_new_tokens, eos_token_id=[]
            )
            for text, accepted in zip(output.tokens, output.accepted_lengths, strict=True):
                answer = up_to_end(text, self.target.end_token_ids)
                tokens.append(answer)
                known = 1  # the prompt's own pass gives the first token
                for count in accepted:
                    if known >= len(answer):
                        break
                    drafts, known = drafts + 1, known + count + 1
                    counts = [number + (place < count) for place, number in enumerate(counts)]
        return tokens, counts, drafts

    def check(
        self,
        export_path: str | Path,
        *,
        checkpoint: str | Path | None = None,
        tolerance: float = 0.01,
        mend: bool = True,
    ) -> ServingReport:
        """Decode greedily in the engine, float32, with and without the head, and judge.

        It passes when the engine's text with the head is the target's own (ties apart), its acceptance at every
        position is within ``tolerance`` of ours on the same prompts, and all but that share of the tokens that it
        drafted are those that the head drafts here from the same text. An engine that shows none of them one by one is
        judged by the rest, and the table says so.

        Args:
            export_path: the exported folder, which the engine loads.
            checkpoint: the head as it was trained, which our generator runs; default the exported folder. With it
                the export is given to the engine unread, so that a fault of the export is seen in what is served.
            mend: run the engine with those of its faults mended that this toolkit has a plugin for; otherwise as it
                was released.

        Returns:
            the comparison, and whether it passes.

        Raises:
            ExportError: the engine fails to start or to load the head; a tolerance that is no share.
            CheckpointError: no head is there, or it is one for another target.
        """
        return self.check_all([HeadToServe(export_path, checkpoint, mend=mend)], tolerance=tolerance)[0]

    def check_all(self, heads: Sequence[HeadToServe], *, tolerance: float = 0.01) -> list[ServingReport]:
        """Judge several heads as :meth:`check` does, in one process of the engine if it makes several there.

        Raises:
            ExportError, CheckpointError: as for :meth:`check`; more drafted tokens than the check was made for.
        """
        if not 0 <= tolerance < 1:  # also of nan, within which everything would be
            raise ExportError(f"expected a tolerance of at least 0 and below 1, found {tolerance}")
        if most := max((each.steps or 0 for each in heads if (each.steps or 0) > self.steps), default=0):
            raise ExportError(f"{most} drafted tokens are asked for, the check was made for up to {self.steps}")
        loaded = [(each, *self.load(each)) for each in heads]
        ours = [self.ours(head, each.steps or self.steps) for each, head, _ in loaded]
        jobs, runner = [], ENGINES[self.engine].runner
        for each, head, served in loaded:
            job = {"draft": str(served), "draft_options": runner.options(head.config), "record_drafts": True}
            job |= {"mend": each.mend and runner.mends(head.config), "num_speculative_tokens": each.steps or self.steps}
            jobs.append(job)
        if len(jobs) > 1 and runner.several:
            self.say(f"{ENGINES[self.engine].name} with {len(jobs)} heads, one after another")
            first = [] if self._plain is not None else [{"draft": None}]
            found = run_engine(self.python, self.engine, {**self._job, "runs": [*first, *jobs]})["runs"]
            if first:
                self._plain = found.pop(0)
        else:
            self.plain()
            found = []
            for job in jobs:
                self.say(f"{ENGINES[self.engine].name} with the head")
                found.append(run_engine(self.python, self.engine, {**self._job, **job}))
        return [
            self.compare(head, served, each.steps or self.steps, own, drafted, tolerance)
            for (each, head, served), own, drafted in zip(loaded, ours, found, strict=True)
        ]

    def load(self, one: HeadToServe) -> tuple[Any, Path]:
        """The head that our generator runs, and what the engine is given.

        Raises:
            ExportError, CheckpointError: see :meth:`check`.
        """
        identity = self.target.identity()
        head = load_draft(
            one.checkpoint or one.export,
            vocab_size=identity["vocab_size"],
            tokenizer_hash=identity["tokenizer_hash"],
            quantised=True,
        )
        served = Path(one.export).absolute()
        if self._gguf:
            served = self.gguf_head(served)
        elif not (served / "config.json").is_file():
            raise ExportError(f"{one.export} holds no config.json: name the exported folder")
        return head, served

    def compare(
        self, head, served: Path, steps: int, ours_run: tuple[list[list[int]], list[int], int],
        drafted: dict[str, Any], tolerance: float,
    ) -> ServingReport:  # fmt: skip
        """The engine's run with a head, held against ours and against its run without one.

        Args:
            head: the one that our generator ran.
            served: what the engine was given.
            steps: drafted tokens.
            ours_run: of :meth:`ours`.
            drafted: the engine's result.
            tolerance: see :meth:`check`.
        """
        our_tokens, our_counts, our_drafts = ours_run
        plain = self.plain()
        theirs = per_position(drafted["accepted_per_position"], drafted["drafts"], steps)
        ours = per_position(our_counts, our_drafts, steps)
        texts = drafted["token_ids"]
        divergences = []
        for other, between in (
            (plain["token_ids"], "engine without or with the head"),
            (our_tokens, "the target or the engine with the head"),
        ):
            divergences += compare_texts(self.target, self.names, self.prompts, other, texts, between)
        whole = [prompt + text for prompt, text in zip(self.prompts, texts, strict=True)]
        proposals = compare_proposals(self.target, head.float(), whole, drafted.get("proposals", []), steps)
        # an engine rounds the numbers of a quantised head in an order of its own: there the tokens are told, not judged
        quantised = not self._gguf and "quantization_config" in read_json(served / "config.json")
        judged = None if quantised else proposals
        failures = judge(theirs, ours, drafted["drafts"], divergences, tolerance, judged)
        return ServingReport(
            passed=not failures,
            engine=self.engine,
            engine_version=drafted["engine_version"],
            prompts=len(self.prompts),
            new_tokens=sum(map(len, texts)),
            drafts=drafted["drafts"],
            acceptance_length=length_of_shares(theirs, drafted["drafts"]),
            per_position=theirs,
            our_acceptance_length=length_of_shares(ours, our_drafts),
            our_per_position=ours,
            our_drafts=our_drafts,
            seconds_plain=plain["seconds"],
            seconds_drafted=drafted["seconds"],
            speedup=plain["seconds"] / drafted["seconds"],
            divergences=divergences,
            failures=failures,
            proposals=proposals.compared,
            proposals_equal=proposals.equal,
            left_out=self.left_out,
            mended=drafted.get("mended", False),
        )


def check_serving(
    export_path: str | Path,
    base_model: str,
    *,
    checkpoint: str | Path | None = None,
    tolerance: float = 0.01,
    mend: bool = True,
    **options: Any,
) -> ServingReport:
    """One head, judged: :meth:`ServingCheck.check` of a :class:`ServingCheck` made with ``options``.

    Prompts are rendered as the head's training rows were, by the arguments and the date in its config.
    """
    if "chat_record" not in options:
        options["chat_record"] = load_draft(checkpoint or export_path, quantised=True).config.extra
    return ServingCheck(base_model, **options).check(export_path, checkpoint=checkpoint, tolerance=tolerance, mend=mend)


def judge(
    theirs: list[float],
    ours: list[float],
    drafts: int,
    divergences: list[Divergence],
    tolerance: float,
    proposals: ProposalCount | None = None,
) -> list[str]:
    """What speaks against the head being served as it was trained; empty if nothing."""
    failures = []
    if not drafts:
        failures.append("the engine counted no draft: it did not use the head")
    for position, (a, b) in enumerate(zip(theirs, ours, strict=True), start=1):
        if abs(a - b) > tolerance:
            failures.append(f"acceptance at position {position} is {a:.4f} in the engine and {b:.4f} here")
    if proposals is not None and 1 - proposals.share > tolerance:
        failures.append(
            f"{proposals.compared - proposals.equal} of {proposals.compared} drafted tokens are not the head's"
        )
    wrong = [place for place in divergences if not place.is_tie]
    if wrong:
        failures.append(f"{len(wrong)} texts differ from the target's own and are no ties")
    return failures
