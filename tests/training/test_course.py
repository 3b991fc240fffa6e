"""Where a run stands in its data, when the number of its processes changes."""

from types import SimpleNamespace

import pytest

from modelopt_eagle.data import plan_batches
from modelopt_eagle.recipe import load_recipe
from modelopt_eagle.training.course import Stretch, plan_course, plan_options

ROWS = SimpleNamespace(lengths=[10 + 7 * (n % 5) for n in range(53)], supervised_counts=lambda: [5] * 53)


def recipe(*more):
    return load_recipe(None, ["training.epochs=3", "training.gradient_accumulation_steps=2", *more])


def rows_of(recipe, course, processes, window, first, last):
    """``(epoch, row)`` of all rows that the steps ``first`` to ``last`` of a course read, over all processes."""
    found = []
    for step in range(first, last):
        epoch, done, _ = course.place(step)
        options = plan_options(recipe, ROWS, processes, window) | {"without": course.left_out(epoch)}
        for rank in range(processes):
            for batch in plan_batches(ROWS.lengths, epoch=epoch, rank=rank, **options)[done * window :][:window]:
                found += [(epoch, row) for row in batch]
    return found


@pytest.mark.parametrize("size", ["training.batch_size=3", "training.max_tokens_per_batch=2048"])
@pytest.mark.parametrize("stops", [(3, 4), (1, 2), (5, 7)])
def test_every_row_comes_once_an_epoch_whatever_processes_read_it(size, stops):
    """Three processes, then two, then five; the middle ones with another window."""
    given = recipe(size, "data.max_length=40", "training.max_tokens_per_batch=60") if "tokens" in size else recipe(size)
    before, found, begun = [], [], 0
    for processes, window, until in ((3, 2, stops[0]), (2, 3, stops[1]), (5, 2, None)):
        given.training.gradient_accumulation_steps = window
        course = plan_course(given, ROWS, processes, before)
        found += rows_of(given, course, processes, window, begun, until or course.total)
        assert until is None or until < course.total
        if until is not None:
            before, begun = [*before, Stretch(processes, window, until)], until
    assert sorted(found) == [(epoch, row) for epoch in range(3) for row in range(53)]
    assert course.epochs(course.total) == 3 and course.epochs(begun) < course.epochs(begun + 1)


def test_an_unchanged_number_goes_on_as_if_nothing_had_been():
    given = recipe("training.batch_size=3")
    whole = plan_course(given, ROWS, 3)
    again = plan_course(given, ROWS, 3, [Stretch(3, 2, 4)])
    assert again.total == whole.total
    assert rows_of(given, again, 3, 2, 4, whole.total) == rows_of(given, whole, 3, 2, 4, whole.total)


def test_most_steps_hold_after_a_change():
    given = recipe("training.batch_size=3", "training.max_steps=7")
    assert plan_course(given, ROWS, 1, [Stretch(3, 2, 4)]).total == 7
