"""Lines go through the package's logger and are printed inside ``shown`` only; one bar serves terminals and logs."""

import io
import logging

import pytest

from modelopt_eagle.common import console
from modelopt_eagle.common.console import ProgressBar, say, shown, warn
from modelopt_eagle.training.progress import ProgressView


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_library_says_nothing_until_it_is_shown(capsys):
    say("hidden")
    with shown(visible=False):
        say("hidden too")
    with shown():
        say("seen")
        with shown():
            say("seen once")
        warn("look")
    say("hidden again")
    captured = capsys.readouterr()
    assert captured.err == "seen\nseen once\nwarning: look\n" and captured.out == ""
    assert console.line_handler() is None and not console.LOGGER.isEnabledFor(logging.INFO)


def test_another_programs_logging_gets_the_lines(caplog, capsys):
    with caplog.at_level(logging.INFO, logger="modelopt_eagle"):
        say("50 % of {rows}")
        warn("odd")
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [("INFO", "50 % of {rows}"), ("WARNING", "odd")]
    assert capsys.readouterr().err == ""


def test_an_error_ends_the_showing():
    with pytest.raises(KeyboardInterrupt), shown():
        raise KeyboardInterrupt
    assert console.line_handler() is None


def test_a_log_gets_a_line_at_most_every_few_seconds_and_one_at_the_end(monkeypatch):
    now, log = [100.0], io.StringIO()
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    with shown(stream=log):
        bar = ProgressBar(8, "dump", unit="rows", log_every=10.0)
        for _ in range(8):
            now[0] += 4.0
            bar.advance(note="(1 cut)")
    assert log.getvalue().splitlines() == [
        "dump 3/8 0.25 rows/s, 0:20 left (1 cut)",
        "dump 6/8 0.25 rows/s, 0:08 left (1 cut)",
        "dump 8/8 0.25 rows/s, 0:00 left (1 cut)",
    ]


def test_a_terminal_gets_a_bar_with_lines_above_it():
    terminal = Terminal()
    with shown(stream=terminal), ProgressBar(4, "dump") as bar:
        bar.resize(2)
        bar.advance()
        say("a line")
        bar.reach(2)
        say("after")
    text = terminal.getvalue()
    assert "a line\n" in text and text.endswith("after\n")
    assert "dump |" in text and " 2/2 " in text and "dump 1/2" not in text


def test_a_bar_of_a_quiet_library_is_silent(capsys):
    with ProgressBar(2, "dump", log_every=0.0) as bar:
        bar.advance(2)
    assert capsys.readouterr().err == "" and bar.done == 2


@pytest.mark.parametrize("seconds, text", [(59.9, "0:59"), (61, "1:01"), (3599, "59:59"), (3600, "1:00:00")])
def test_clock(seconds, text):
    assert console.clock(seconds) == text


def test_the_view_of_a_training_is_a_bar_or_lines():
    terminal, log = Terminal(), io.StringIO()
    for stream in (terminal, log):
        with shown(stream=stream), ProgressView(10) as view, ProgressView(10, visible=False) as silent:
            for each in (view, silent):
                each.say("begun")
                each.update(0.5, "step 5/10")
                each.log_line("step 5/10")
    assert log.getvalue() == "begun\nstep 5/10\n"
    assert "begun\n" in terminal.getvalue() and "train |" in terminal.getvalue() and "step 5/10" in terminal.getvalue()
