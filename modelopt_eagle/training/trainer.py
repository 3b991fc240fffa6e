"""The training loop: windows of micro-batches in, optimiser steps, evaluations and checkpoints out."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelopt_eagle.common.console import clock
from modelopt_eagle.draft.documents import upload
from modelopt_eagle.errors import CheckpointError, TrainingError
from modelopt_eagle.recipe import Recipe, resolved_text
from modelopt_eagle.training.acceptance import evaluate_files
from modelopt_eagle.training.checkpoint import CheckpointFolder, set_rng_state
from modelopt_eagle.training.course import Stretch, batch_options, plan_course
from modelopt_eagle.training.metrics import Meter
from modelopt_eagle.training.optimizer import Schedule, build_optimizers, set_learning_rate
from modelopt_eagle.training.progress import MetricLog, ProgressView, StopRequest, progress_text
from modelopt_eagle.training.provenance import check_provenance
from modelopt_eagle.training.run import Run
from modelopt_eagle.training.stability import StepWatch
from modelopt_eagle.training.step import compile_layers

OnStep = Callable[[dict[str, Any]], object]
"""What is called with the metrics of each log line, an entry of :class:`TrainerState`'s ``history``."""


@dataclass
class TrainerState:
    """Where a run stands; plain values, kept in every checkpoint.

    Attributes:
        step: optimiser steps done.
        elapsed: seconds spent in the loop, over all starts of the run.
        history: one entry a log line.
        evaluations: ``step, acceptance_length, per_position, walked`` of every evaluation; with several files in
            ``data.eval_path`` also ``by_file``, the same of each.
        best_step, best_value: of the best evaluation; ``None`` before the first.
        skipped: ``step, rows`` of every step left out because its loss or gradient was not finite.
        before: stretches made by other numbers of processes, see :class:`~modelopt_eagle.training.course.Stretch`.
        window: micro-batches of a step in each process.
        finished: whether training came to its end.
        provenance: what the features were made from.
        header: lines about data, target and head, as printed at the first start.
    """

    step: int = 0
    elapsed: float = 0.0
    history: list[dict] = field(default_factory=list)
    evaluations: list[dict] = field(default_factory=list)
    best_step: int | None = None
    best_value: float | None = None
    skipped: list[dict] = field(default_factory=list)
    before: list[dict] = field(default_factory=list)
    window: int = 0
    finished: bool = False
    provenance: dict = field(default_factory=dict)
    header: list[str] = field(default_factory=list)


@dataclass
class TrainingResult:
    """What :func:`modelopt_eagle.training.train` leaves behind.

    Attributes:
        output_dir: the run's folder.
        best_checkpoint: by acceptance length of the evaluations, the newest one without any.
        last_checkpoint: the newest.
        steps: optimiser steps done.
        seconds: spent training, over all starts of the run, by ``training.time_budget_clock``.
        history, evaluations: see :class:`TrainerState`.
        acceptance_length: of the best evaluation, or ``None``.
        finished: False after Ctrl-C (the same command goes on) and after a dry run.
        header: the lines printed at the first start (data, target, head).
    """

    output_dir: Path
    best_checkpoint: Path
    last_checkpoint: Path
    steps: int
    seconds: float
    history: list[dict]
    evaluations: list[dict]
    acceptance_length: float | None
    finished: bool
    header: list[str]


def processor_seconds() -> float:
    """Seconds that the processors have worked for this process, over the threads that torch computes with."""
    return time.process_time() / torch.get_num_threads()


class Trainer:
    """One run of the loop.

    Args:
        recipe: of the run.
        run: what it trains and on what, see :class:`~modelopt_eagle.training.run.Run`.
        accelerator: of accelerate.
        on_step: called on the first process with the metrics of each log line; true asks to stop.
    """

    def __init__(self, recipe: Recipe, run: Run, accelerator, on_step: OnStep | None = None):
        self.on_step = on_step
        self.recipe, self.settings, self.run, self.accelerator = recipe, recipe.training, run, accelerator
        self.rank, self.world = accelerator.process_index, accelerator.num_processes
        self.step = run.step  # without wrappers
        if self.settings.torch_compile:
            compile_layers(self.step.module)
        self.wrapped = accelerator.prepare_model(run.step)
        self.parameters = [p for p in self.step.parameters() if p.requires_grad]
        self.head_parameters = [p for p in self.step.module.parameters() if p.requires_grad]
        adapters = () if run.adapter is None else run.adapter.parameters()
        rate = recipe.target_lora.learning_rate
        self.optimizers = build_optimizers(self.step.module, self.settings, adapters, rate)
        size = self.settings.context_parallel  # processes that see the same rows
        self.data_rank, self.data_world = self.rank // size, self.world // size
        self.course = plan_course(recipe, run.source, self.data_world)
        total = self.course.total
        self.clock = time.monotonic if self.settings.time_budget_clock == "wall" else processor_seconds
        self.schedule = Schedule(
            self.settings.lr_scheduler, total, self.settings.warmup_ratio, self.settings.min_lr_ratio,
            run.training_seconds,
        )  # fmt: skip
        self.output_dir = Path(self.settings.output_dir)
        self.view = ProgressView(total, accelerator.is_main_process)
        self.checkpoints = CheckpointFolder(
            self.output_dir, self.settings.save_total_limit, rank=self.rank, world_size=self.world,
            barrier=accelerator.wait_for_everyone, say=self.view.say,
        )  # fmt: skip
        self.state = TrainerState(
            provenance=run.provenance, header=run.header, window=self.settings.gradient_accumulation_steps
        )
        self.meter = Meter(self.step.decay, accelerator)
        self.grad_norm: Tensor | None = None
        self.learning_rate = 0.0
        self.watch = StepWatch(self.settings.nonfinite, accelerator, self.view.say, self.advice)
        self.counted = 0  # positions that this start has learned from
        self.saved_step: int | None = None

    def fit(self) -> TrainingResult:
        """Train to the end, or to the first Ctrl-C; everything is saved when this returns."""
        self.begin()
        if self.settings.dry_run:
            self.view.say(f"dry run: nothing was trained; the head is in {self.checkpoints.path(self.state.step)}")
            return self.result()
        self._since, self._before = self.clock(), self.state.elapsed
        self.log = MetricLog(
            self.settings.report_to if self.accelerator.is_main_process else "none",
            self.output_dir, self.recipe.model_dump(mode="json"), self.state.step,
        )  # fmt: skip
        try:
            with self.view, StopRequest(self.view.say) as self.request, contextlib.closing(self.windows()) as windows:
                for index, window in self.meter.waiting(windows):
                    if not self.go_on(index, window):
                        break
                    self.optimise(index, window)
                    window.clear()  # not kept beside the features of the next one
                    self.after_step()
                    if self.gains_nothing():
                        break
                self.end()
        finally:
            self.log.close()
        return self.result()

    def begin(self) -> None:
        """Go on from the newest complete checkpoint, or write the first one (it finds a full disk early)."""
        torch.manual_seed(self.settings.seed + self.rank)
        found = self.checkpoints.latest() if self.settings.resume == "auto" else None
        if found is None:
            self.checkpoints.require_room(self.step.module)
            self.save()
            return
        known = asdict(self.state)
        later = {"skipped": [], "before": [], "window": known["window"]}  # which older checkpoints do not have
        if missing := [name for name in known if name not in {**later, **found.state}]:
            raise CheckpointError(f"{found.folder}: its state has no {', '.join(missing)}; remove this checkpoint")
        check_provenance(found.folder, found.state["provenance"], self.run.provenance)
        self.step.module.load_state_dict(found.tensors)
        self.step.renew_rows()
        if self.run.adapter is not None:
            self.run.adapter.load(found.adapter)
        for optimizer, state in zip(self.optimizers, found.optimizers, strict=True):
            optimizer.load_state_dict(state)
        if found.rng is not None:
            set_rng_state(found.rng)
        self.state = TrainerState(**{name: found.state.get(name, known[name]) for name in known})
        self.go_on_with(found.state["world_size"])
        self.saved_step = self.state.step
        if self.state.step:
            self.view.say(f"going on from {found.folder} (step {self.state.step} of {self.schedule.total_steps})")

    def go_on_with(self, processes: int) -> None:
        """Plan what is left for the processes of now, where others made what is done.

        Args:
            processes: that wrote the checkpoint.
        """
        state, window = self.state, self.settings.gradient_accumulation_steps
        shares = max(1, processes // self.settings.context_parallel)
        begun = state.before[-1]["until"] if state.before else 0
        if (shares, state.window) != (self.data_world, window) and state.step > begun:
            state.before.append(asdict(Stretch(shares, state.window, state.step)))
        now, then = self.data_world * window, shares * state.window
        if now != then and state.step:
            self.view.say(
                f"processes: {self.world} in place of {processes}; from here on a step takes {now} batches, {then} "
                "before (training.gradient_accumulation_steps keeps it alike)"
            )
        state.window = window
        if state.before and not state.finished:
            before = [Stretch(**part) for part in state.before]
            self.course = plan_course(self.recipe, self.run.source, self.data_world, before)
            self.schedule = replace(self.schedule, total_steps=self.course.total)

    def windows(self) -> Iterator[tuple[int, list]]:
        """``(step, its micro-batches)`` of every step that is left; a window never reaches into the next epoch."""
        size, step = self.settings.gradient_accumulation_steps, self.state.step
        while step < self.course.total:
            epoch, done, left = self.course.place(step)
            batches = self.run.source.batches(
                epoch, seed=self.settings.seed, rank=self.data_rank, world_size=self.data_world, start=done * size,
                shuffle=self.recipe.data.shuffle, **batch_options(self.settings, size),
                **({"without": had} if (had := self.course.left_out(epoch)) else {}),
            )  # fmt: skip
            with contextlib.closing(batches):
                for _ in range(left):
                    window = map(self.step.share, itertools.islice(batches, size))
                    yield step, [self.step.place(batch, self.accelerator.device) for batch in window]
                    step += 1

    def go_on(self, index: int, window: list) -> bool:
        """Agree with all processes on what this step counts, the time, and whether to stop; False to stop."""
        counted = [
            self.step.count_positions(batch, self.generator(index, place * self.data_world + self.data_rank, "cpu"))
            for place, batch in enumerate(window)
        ]
        self.window_counts = sum(
            (count for count in counted if count is not None),
            torch.zeros(self.step.depths, dtype=torch.int64),
        )  # [K], on the CPU as everything here, but for what processes tell each other
        tokens = sum(map(self.step.num_tokens, window))
        for place, count in enumerate(counted):
            if count is None:
                window[place] = None
        self.state.elapsed = self._before + self.clock() - self._since
        agreed = torch.cat((
            self.window_counts.double(),
            torch.tensor([tokens, self.request.asked, self.state.elapsed if self.rank == 0 else 0.0],
                         dtype=torch.float64),
        ))  # fmt: skip  # [K+3]
        if self.world > 1:
            agreed = self.accelerator.reduce(upload(agreed, self.accelerator.device), "sum").cpu()
        tokens, asked, self.state.elapsed = agreed[-3:].tolist()
        self.normalizers = self.step.normalisers(agreed[:-3], int(tokens))  # [K]
        self.counted += int(agreed[:-3].sum())
        self.meter.tokens += int(tokens)
        self.interrupted = asked > 0
        budget = self.schedule.budget_seconds
        return not self.interrupted and (budget is None or self.state.elapsed < budget)

    def optimise(self, index: int, window: list) -> None:
        """Forward and backward of every micro-batch, then one optimiser step."""
        if not self.wrapped.training:
            raise TrainingError("the head is in evaluation mode inside the training loop; please report this")
        warming = self.schedule.progress(index, self.state.elapsed) < self.recipe.eagle.ttt_warmup
        steps = 1 if warming else self.step.depths
        outputs = []
        for place, batch in enumerate(window):
            last = place == len(window) - 1
            with contextlib.nullcontext() if last else self.accelerator.no_sync(self.wrapped):
                more = self.step.options(index, place, self.data_rank)
                generator = self.generator(index, place * self.world + self.rank)
                output = self.wrapped(batch, self.normalizers, generator, steps, **more)
                # data-parallel wrappers average gradients over processes, the loss is already a share of the sum
                self.accelerator.backward(output.loss * self.world)
            outputs.append(output)
        self.step.after_backward(index)
        limit = math.inf if self.settings.max_grad_norm is None else self.settings.max_grad_norm
        self.grad_norm = self.accelerator.clip_grad_norm_(self.head_parameters, limit)
        norms = [self.grad_norm]
        if self.run.adapter is not None:  # apart, so that neither shortens the other's step
            norms.append(self.accelerator.clip_grad_norm_(self.run.adapter.parameters(), limit))
        if not self.watch.sound(index, window, [output.loss for output in outputs], norms):
            self.leave_out(index)
            return
        for output in outputs:
            self.meter.add(output)
        self.learning_rate = set_learning_rate(self.optimizers, self.schedule.factor(index, self.state.elapsed))
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.meter.steps += 1
        self.state.step = index + 1

    def leave_out(self, index: int) -> None:
        """Go on without a step whose numbers are not finite."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        self.state.skipped.append({"step": index + 1, "rows": self.watch.rows})
        self.state.step = index + 1

    def gains_nothing(self) -> bool:
        """Whether the last ``training.early_stopping`` evaluations brought no longer acceptance length."""
        patience, done = self.settings.early_stopping, self.state.evaluations
        if patience is None or not done or done[-1]["step"] != self.state.step:
            return False
        since = sum(entry["step"] > (self.state.best_step or 0) for entry in done)
        if since >= patience:
            self.view.say(f"step {self.state.step}: no longer acceptance length in {since} evaluations, training ends")
        return since >= patience

    def generator(self, index: int, number: int, device: str | None = None) -> torch.Generator:
        """Randomness of a micro-batch, a function of seed, step and its number: the same after a resume.

        Args:
            number: of the micro-batch in its step, over all processes, or over their shares of the data for what those
                that share a batch draw alike; so that other numbers of processes draw the same.
            device: where it is drawn; default the head's device. Plans are drawn on the CPU.
        """
        seed = ((self.settings.seed * 1_000_003 + index) * 1_009 + number) * 1_013 % 2**63
        return torch.Generator(device or self.accelerator.device).manual_seed(seed)

    def after_step(self) -> None:
        """Log, evaluate and save where it is due."""
        step, settings = self.state.step, self.settings
        last = step == self.schedule.total_steps
        if step % settings.log_steps == 0 or last or step == 1:
            self.report()
        if settings.eval_steps is not None and step % settings.eval_steps == 0 and not last:
            if self.evaluate():
                self.save()
        if settings.save_steps is not None and step % settings.save_steps == 0 and not last:
            self.save()

    def advice(self) -> str:
        """What mends numbers that are not finite."""
        return (
            f"lower training.learning_rate or set training.precision=float32; "
            f"{self.checkpoints.path(self.saved_step or 0)} is the newest good checkpoint (name another "
            "training.output_dir for the new run)"
        )

    def report(self) -> None:
        """Metrics since the last report, to the bar, the log and the history; nothing if every step was left out."""
        if not self.meter.steps:
            return
        if not self.counted and self.state.step >= min(self.settings.log_steps, self.schedule.total_steps):
            raise TrainingError(
                f"no position was counted in {self.state.step} steps, so nothing is learned: is every answer cut off, "
                "or outside the draft vocabulary (eagle.in_vocab_only with a map of other data)?"
            )
        metrics = self.meter.take()
        step, elapsed = self.state.step, self._before + self.clock() - self._since
        metrics["learning_rate"] = self.learning_rate
        if self.grad_norm is not None:
            metrics["grad_norm"] = float(self.grad_norm)
        if self.state.skipped:
            metrics["skipped_steps"] = float(len(self.state.skipped))
        entry = {"step": step, "epoch": self.course.epochs(step), "elapsed": round(elapsed, 3), **metrics}
        self.state.history.append(entry)
        left = self.schedule.remaining_seconds(step, elapsed, metrics["seconds_per_step"])
        text = progress_text(step, self.schedule.total_steps, metrics, left)
        self.view.update(self.schedule.progress(step, elapsed), text)
        self.view.log_line(text)
        scalars = {f"train/{name}": value for name, value in entry.items() if isinstance(value, float)}
        for k, (loss, share) in enumerate(zip(metrics["per_step"], metrics["accuracy"], strict=True)):
            scalars |= {f"train/loss_step_{k}": loss, f"train/accuracy_step_{k}": share}
        self.log.write(step, scalars)
        if self.on_step is not None and self.accelerator.is_main_process:
            self.request.asked |= bool(self.on_step(copy.deepcopy(entry)))

    def evaluate(self) -> bool:
        """The acceptance walk over the held-out rows; True if it is the best so far."""
        if self.run.eval_source is None:
            return False
        begun = time.monotonic()
        walk, by_file = evaluate_files(
            self.step, self.run.eval_source, self.accelerator,
            num_steps=self.recipe.validation.num_steps, **batch_options(self.settings),
        )  # fmt: skip
        step, length = self.state.step, walk.acceptance_length
        entry = {"step": step, **walk.numbers()}
        if by_file:
            entry["by_file"] = {name: part.numbers() for name, part in by_file.items()}
        self.state.evaluations.append(entry)
        shares = " ".join(f"{share:.2f}" for share in walk.per_position)
        drawn = "" if walk.drawn_length is None else f", {walk.drawn_length:.3f} expected at temperature 1"
        self.view.say(
            f"step {step}: acceptance length {walk.text} on {len(walk.accepted)} held-out answers (per position "
            f"{shares}){drawn}, {clock(time.monotonic() - begun)}"
        )
        for name, part in by_file.items():
            self.view.say(f"  {part.text} on {len(part.accepted)} answers of {name}")
        scalars = {f"eval/acceptance_length/{name.lstrip('/')}": w.acceptance_length for name, w in by_file.items()}
        if walk.drawn_length is not None:
            scalars["eval/drawn_length"] = walk.drawn_length
        self.log.write(step, {"eval/acceptance_length": length, **scalars})
        better = self.state.best_value is None or length > self.state.best_value
        if better:
            self.state.best_step, self.state.best_value = step, length
        return better

    def save(self) -> None:
        """Write a checkpoint of this step, if there is none yet that says the same."""
        if self.saved_step == self.state.step and not self.state.finished:
            return
        if not all(bool(torch.isfinite(p).all()) for p in self.parameters):
            raise TrainingError(f"weights are not finite at step {self.state.step}: lower training.learning_rate")
        best = self.state.step if self.state.best_step is None else self.state.best_step
        self.checkpoints.save(
            self.state.step, self.step.module, self.optimizers, asdict(self.state), resolved_text(self.recipe), best,
            self.run.adapter,
        )  # fmt: skip
        self.saved_step = self.state.step

    def end(self) -> None:
        """The last evaluation and checkpoint, or the one that an interrupted run goes on from."""
        self.state.elapsed = self._before + self.clock() - self._since
        if getattr(self, "interrupted", False):
            self.save()
            self.view.say(f"stopped at step {self.state.step}; the same command goes on from there")
            return
        if self.meter.steps:
            self.report()
        evaluated = self.state.evaluations and self.state.evaluations[-1]["step"] == self.state.step
        if not evaluated:
            self.evaluate()
        self.state.finished = True
        self.save()

    def result(self) -> TrainingResult:
        """What was reached."""
        best = self.state.step if self.state.best_step is None else self.state.best_step
        return make_result(self.output_dir, asdict(self.state), self.checkpoints.path(best))


def make_result(output_dir: Path, state: dict, best: Path) -> TrainingResult:
    """A :class:`TrainingResult` from the values of a :class:`TrainerState`."""
    return TrainingResult(
        output_dir=output_dir,
        best_checkpoint=best,
        last_checkpoint=output_dir / f"checkpoint-{state['step']}",
        steps=state["step"],
        seconds=state["elapsed"],
        history=state["history"],
        evaluations=state["evaluations"],
        acceptance_length=state["best_value"],
        finished=state["finished"],
        header=state["header"],
    )
