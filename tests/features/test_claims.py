"""Which process makes which row: claims that last for one run, and are read and written by one process at a time."""

import fcntl
import threading

from modelopt_eagle.features.hybrid import MUTEX, Claims


def pair(folder):
    """The claims of two processes, as each would make them between two barriers."""
    both = [Claims(folder, rank, 2, lambda: None) for rank in (0, 1)]
    assert [claims.take([]) for claims in both] == [set(), set()]
    return both


def test_a_row_is_claimed_by_one_process(tmp_path):
    first, second = pair(tmp_path)
    assert first.take([1, 2]) == {1, 2}
    assert second.take([2, 3]) == {3}
    assert first.take([2, 3, 4]) == {2, 4}  # its own once more
    assert second.take([1, 2, 3, 4]) == {3}


def test_claims_of_a_killed_run_are_free_again(tmp_path):
    first, second = pair(tmp_path)
    first.take([1, 2])
    second.take([3])
    first, second = pair(tmp_path)
    assert second.take([1, 2]) == {1, 2} and first.take([3]) == {3}


def test_nobody_claims_while_another_does(tmp_path):
    first, _ = pair(tmp_path)
    taken = []
    with open(tmp_path / MUTEX, "a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        thread = threading.Thread(target=lambda: taken.append(first.take([5])))
        thread.start()
        thread.join(0.3)
        assert thread.is_alive() and not taken
        fcntl.flock(held, fcntl.LOCK_UN)
    thread.join(10)
    assert taken == [{5}]
