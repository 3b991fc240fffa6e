"""Kill training runs and dumps at random moments, start them again, and hold the end against an undisturbed one.

    python scripts/soak.py [--seconds 600] [--seed 0] [--folder DIR]

Every round draws a recipe (drafter, where features are kept, batch, steps between checkpoints, ...) or a dump over a
tiny target that it makes, runs it to the end undisturbed, and once more with one to three kills or Ctrl-Cs on the way.
Then weights, or the files of the store, must be the same byte for byte, and nothing temporary may be left. It prints a
line a round and the counts, and ends with 1 at a difference, whose folder stays for a look.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

WORDS = "the draft head proposes and the target accepts what it would have said itself".split()
DONE_IN = 600  # seconds; a run here takes a few


@dataclass
class Counts:
    """What a soak has done: rounds by kind, signals by name."""

    rounds: Counter = field(default_factory=Counter)
    signals: Counter = field(default_factory=Counter)

    def line(self) -> str:
        """Both in words."""
        rounds = ", ".join(f"{count} of {what}" for what, count in sorted(self.rounds.items()))
        signals = ", ".join(f"{count} {name}" for name, count in sorted(self.signals.items()))
        return f"rounds: {rounds or 'none'}; signals: {signals or 'none'}; every end as undisturbed"


class Difference(Exception):
    """A disturbed run ended otherwise than the undisturbed one, or failed."""


def conversations(path: Path, count: int = 24) -> None:
    """Write conversations of several lengths."""
    with path.open("w", encoding="utf-8") as lines:
        for number in range(count):
            said = " ".join(WORDS[(5 * number + word) % len(WORDS)] for word in range(3 + number % 7))
            turns = [{"role": "user", "content": f"say {number}"}, {"role": "assistant", "content": said}]
            lines.write(json.dumps({"id": f"row-{number}", "messages": turns}) + "\n")


def drawn(draw: random.Random, target: Path, data: Path) -> tuple[str, list[str]]:
    """A kind of round, and its command without the output folder."""
    if draw.random() < 0.35:
        dtype = draw.choice(("float32", "bfloat16", "int8"))
        arguments = ["--dtype", dtype, "--batch-tokens", str(draw.choice((60, 200))), "--shard-mib", "1"]
        return "dump", ["dump", "--model", str(target), "--input-file", str(data), *arguments]
    drafter = draw.choice(("eagle3", "eagle3", "peagle", "medusa", "dflash"))
    options = {
        "algorithm": drafter, "eagle.draft_vocab_size": draw.choice((64, "null")),
        "data.cache_features": draw.choice(("none", "memory", "disk")), "training.batch_size": draw.choice((1, 2, 4)),
        "training.gradient_accumulation_steps": draw.choice((1, 2)), "training.epochs": draw.choice((2, 3)),
        "training.save_steps": draw.choice((1, 2, 5)), "training.log_steps": 1, "training.seed": draw.randrange(99),
        "training.report_to": "none", "training.learning_rate": 3e-3, "training.time_budget_minutes": "null",
    }  # fmt: skip
    if drafter == "eagle3":
        options |= {"eagle.ttt_steps": draw.choice((2, 3)), "eagle.ttt_warmup": 0.0}
    command = ["train", "--recipe", "eagle3", "--base_model", str(target), "--data", str(data), "-q"]
    return f"train {drafter}", [*command, *(f"{key}={value}" for key, value in options.items())]


def start(command: list[str], folder: Path, log: Path) -> subprocess.Popen:
    """Begin a command that writes into a folder; its lines go to the end of a file."""
    name = "--output-dir" if command[0] == "dump" else "--output_dir"
    with log.open("ab") as lines:
        return subprocess.Popen(
            [sys.executable, "-m", "modelopt_eagle", *command, name, str(folder)], stdout=lines, stderr=lines
        )


def finish(process: subprocess.Popen, what: str, log: Path) -> None:
    """Wait for the end of a command.

    Raises:
        Difference: it fails.
    """
    if code := process.wait(DONE_IN):
        words = log.read_text(encoding="utf-8", errors="replace")[-2000:]
        raise Difference(f"{what} ended with {code}:\n{words}")


def made(folder: Path, dump: bool) -> dict[str, str]:
    """Hash of what a finished command leaves: the files of a store, or the weights of a run's last checkpoint."""
    if dump:
        files = [path for path in folder.iterdir() if path.suffix in (".safetensors", ".json")]
    else:
        files = [max(folder.glob("checkpoint-*"), key=lambda path: int(path.name[11:])) / "model.safetensors"]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def disturb(draw: random.Random, command: list[str], folder: Path, log: Path, needs: float) -> str | None:
    """Send one signal at a random moment after the folder appears; returns its name, ``None`` if it came too late."""
    process, begun = start(command, folder, log), time.monotonic()
    while not folder.exists() and process.poll() is None and time.monotonic() < begun + DONE_IN:
        time.sleep(0.01)
    try:
        process.wait(draw.uniform(0.0, 0.8 * needs))
        return None
    except subprocess.TimeoutExpired:
        sent = draw.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGINT))
        process.send_signal(sent)
        process.wait(DONE_IN)
        return sent.name


def one_round(draw: random.Random, place: Path, target: Path, data: Path, counts: Counts) -> str:
    """Run a drawn command undisturbed and disturbed; returns a line about it.

    Raises:
        Difference: they end otherwise.
    """
    what, command = drawn(draw, target, data)
    log, begun = place / "log.txt", time.monotonic()
    process = start(command, place / "whole", log)
    while not (place / "whole").exists() and process.poll() is None:
        time.sleep(0.01)
    worked = time.monotonic()
    finish(process, " ".join(command), log)
    needs = time.monotonic() - worked
    signals = [disturb(draw, command, place / "disturbed", log, needs) for _ in range(draw.randint(1, 3))]
    finish(start(command, place / "disturbed", log), f"{' '.join(command)} after {signals}", log)
    found, wanted = (made(place / name, what == "dump") for name in ("disturbed", "whole"))
    if found != wanted:
        raise Difference(f"{' '.join(command)} after {signals}: {found}, undisturbed {wanted}")
    left = [path.name for path in (place / "disturbed").rglob(".*") if "part" in path.name or "tokens" in path.name]
    if left:
        raise Difference(f"{' '.join(command)} after {signals} leaves {', '.join(left)}")
    counts.rounds[what] += 1
    counts.signals.update(name for name in signals if name)
    return f"{what}: {', '.join(map(str, signals))}; the same ({time.monotonic() - begun:.0f} s)"


def soak(seconds: float, seed: int, folder: Path, say=print) -> Counts:
    """Rounds until the time is over, one at least.

    Args:
        seconds: no round begins later.
        seed: of everything drawn; moments depend on the machine as well.
        folder: a place to work in; a round's own folder is removed when it ends well.
        say: takes a line a round.

    Raises:
        Difference: the first one, which says what was run.
    """
    from modelopt_eagle.target.tiny import make_tiny_target

    counts, until, number = Counts(), time.monotonic() + seconds, 0
    target, data = folder / "target", folder / "rows.jsonl"
    make_tiny_target(target)
    conversations(data)
    while number == 0 or time.monotonic() < until:
        place = folder / f"round-{number}"
        place.mkdir()
        line = one_round(random.Random(f"{seed}/{number}"), place, target, data, counts)
        say(f"{number}: {line}")
        shutil.rmtree(place)
        number += 1
    return counts


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="no round begins later (default 600)")
    parser.add_argument("--seed", type=int, default=0, help="another one draws other rounds (default 0)")
    parser.add_argument("--folder", type=Path, help="a new one to work in (default: a temporary folder)")
    arguments = parser.parse_args(argv)
    if arguments.folder is not None and arguments.folder.exists():
        parser.error(f"--folder {arguments.folder} is there already: name a new one")
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        counts = soak(arguments.seconds, arguments.seed, folder, lambda line: print(line, flush=True))
    except Difference as difference:
        print(f"{difference}\nseed {arguments.seed}; kept in {folder}")
        return 1
    shutil.rmtree(folder)
    print(counts.line())
    return 0


if __name__ == "__main__":
    sys.exit(main())
