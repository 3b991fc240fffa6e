"""What a run shows, logs and listens to: a bar, scalars for tensorboard and other trackers, Ctrl-C."""

from __future__ import annotations

import importlib
import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from modelopt_eagle.common.console import clock, say, terminal_bar
from modelopt_eagle.common.package import require_extra
from modelopt_eagle.errors import MissingExtraError


class ProgressView:
    """Shows how far training is. Every process has one; all but the first stay silent.

    Args:
        total_steps: of the run.
        visible: whether this process says anything.
    """

    LAYOUT = "{desc} |{bar:24}|{postfix}"

    def __init__(self, total_steps: int, visible: bool = True):
        self.total_steps, self.visible = total_steps, visible
        self._bar = None

    def __enter__(self) -> ProgressView:
        if self.visible:
            self._bar = terminal_bar(1.0, "train", self.LAYOUT)
        return self

    def __exit__(self, *exception) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def say(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        if self.visible:
            say(line)

    def update(self, share: float, text: str) -> None:
        """Move the bar; nothing happens without a terminal."""
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.n = share
            self._bar.refresh()

    def log_line(self, text: str) -> None:
        """A line that stays; on a terminal it stands above the bar, which shows the newest."""
        self.say(text)


def progress_text(step: int, total: int, metrics: dict, remaining: float) -> str:
    """One line: step, loss, accuracy of each rollout step, rate, remaining time."""
    accuracy = " ".join(f"{share:.2f}" for share in metrics["accuracy"])
    drift = f" | target KL {metrics['preservation_kl']:.4f}" if "preservation_kl" in metrics else ""
    return (
        f"step {step}/{total} | loss {metrics['loss']:.3f} | accuracy {accuracy}{drift} | "
        f"{metrics['tokens_per_second']:.0f} tokens/s | {clock(remaining)} left"
    )


class MetricLog:
    """Scalars for tensorboard, wandb, mlflow, trackio or nobody.

    Args:
        kind: a value of ``training.report_to``.
        folder: the run's output folder; tensorboard writes into ``logs`` below it.
        config: plain values to record once.
        step: first step of this process; what an earlier one logged beyond it is superseded.
    """

    def __init__(self, kind: str, folder: Path, config: dict, step: int = 0):
        self._writer = self._run = self._tracker = None
        if kind == "tensorboard":
            tensorboard = require_extra("torch.utils.tensorboard", "train")
            self._writer = tensorboard.SummaryWriter(str(folder / "logs"), purge_step=step)
        elif kind == "wandb":
            self._run = import_tracker(kind).init(
                project="modelopt_eagle", id=folder.resolve().name, resume="allow", dir=str(folder), config=config
            )
        elif kind in ("mlflow", "trackio"):
            import_tracker(kind)
            self._tracker = make_tracker(kind, folder)
            self._tracker.store_init_configuration(flat(config))

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Log scalars of an optimiser step."""
        if self._writer is not None:
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, step)
        if self._run is not None:
            self._run.log(scalars, step=step)
        if self._tracker is not None:
            self._tracker.log(scalars, step=step)

    def close(self) -> None:
        """Flush and end."""
        if self._writer is not None:
            self._writer.close()
        for tracker in (self._run, self._tracker):
            if tracker is not None:
                tracker.finish()


def import_tracker(name: str) -> Any:
    """The package of a tracker.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError(f"training.report_to is {name}: pip install {name}, or set tensorboard") from error


def make_tracker(name: str, folder: Path) -> Any:
    """A tracker of accelerate, started; its run is named for the output folder."""
    tracking, run = require_extra("accelerate.tracking", "train"), folder.resolve().name
    if name == "mlflow":
        tracker = tracking.MLflowTracker("modelopt_eagle", run_name=run)
    else:
        tracker = tracking.TrackioTracker("modelopt_eagle", name=run)
    tracker.start()
    return tracker


def flat(config: dict[str, Any]) -> dict[str, str | int | float | bool]:
    """Nested plain values under dotted names; trackers take numbers and texts."""
    found: dict[str, str | int | float | bool] = {}
    for section, values in config.items():
        for key, value in values.items():
            found[f"{section}.{key}"] = value if isinstance(value, (str, int, float)) else json.dumps(value)
    return found


class StopRequest:
    """A context manager that turns signals into a flag.

    Args:
        say: prints a line for the user; called once, at the first signal.

    Attributes:
        asked: whether a signal has come.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, say: Callable[[str], None] = print):
        self.asked = False
        self._say = say
        self._before: dict = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # handlers can be set nowhere else
            self._before = {number: signal.signal(number, self._handle) for number in self.SIGNALS}
        return self

    def __exit__(self, *exception) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number, frame) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._say("stopping at the next step and saving; once more to stop at once")
