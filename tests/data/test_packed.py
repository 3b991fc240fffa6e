"""Packed rows are the rows that went in, in memory and on disk, and reading a set never holds all of it."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool

import pytest

from modelopt_eagle.common.interrupts import uninterrupted
from modelopt_eagle.data import dataset as dataset_module
from modelopt_eagle.data import prepare_dataset
from modelopt_eagle.data.encode import TokenizedRow
from modelopt_eagle.data.images import RowImages
from modelopt_eagle.data.packed import ABOUT, FLAGS, IDS, PackedRows, RowPacker, chosen_rows, row_lengths
from modelopt_eagle.errors import DataError
from modelopt_eagle.target.tiny import make_byte_tokenizer

ROWS = [
    TokenizedRow("a", "all", [0, 2**31 - 1, 7], [False, True, True], 1),
    TokenizedRow("ü#1", "wörter", [5], [True], 0, template_arguments={"enable_thinking": False}),
    TokenizedRow("pictured", "all", list(range(300)), [n > 9 for n in range(300)], 10,
                 RowImages("<image> what?", ("/a.png", "b.png"), "0f", 4)),
]  # fmt: skip


def packed(folder=None, rows=ROWS):
    packer = RowPacker(folder)
    for row in rows:
        packer.add(row)
    return packer.finish()


@pytest.mark.parametrize("on_disk", [False, True])
def test_rows_are_those_that_went_in(tmp_path, on_disk):
    rows = packed(tmp_path / "rows" if on_disk else None)
    assert list(rows) == ROWS and rows == ROWS and rows != ROWS[:2] and rows != [*ROWS[:2], ROWS[0]]
    assert rows[-1] == ROWS[-1] and rows.lengths == row_lengths(ROWS) == [3, 1, 300]
    with pytest.raises(IndexError):
        rows[3]
    rows[0].input_ids.append(9)  # a caller's own list
    assert rows[0] == ROWS[0]
    turned = rows.select([2, 0])
    assert isinstance(turned, PackedRows) and list(turned) == [ROWS[2], ROWS[0]] and turned.lengths == [300, 3]
    assert list(turned[1:]) == list(turned.select([1])) == [ROWS[0]] and turned[-2] == ROWS[2]
    assert chosen_rows(rows, [1]) == chosen_rows(ROWS, [1]) == [ROWS[1]]
    assert list(packed(tmp_path / "none" if on_disk else None, [])) == []


def test_files_that_do_not_fit_together_are_refused(tmp_path):
    packed(tmp_path)
    kept = {name: (tmp_path / name).read_bytes() for name in (IDS, FLAGS, ABOUT)}
    for name, content in (
        (IDS, kept[IDS][:-4]),
        (FLAGS, kept[FLAGS] + b"\1"),
        (ABOUT, kept[ABOUT][:-9]),
        (IDS, b"123"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match="start the run again"):
            PackedRows.load(tmp_path)
        (tmp_path / name).write_bytes(kept[name])
    assert PackedRows.load(tmp_path) == ROWS


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="file: tokenised rows cannot be kept there"):
        RowPacker(tmp_path / "file")


@pytest.fixture
def many(tmp_path):
    """1,000 conversations, three of them unusable, two of one name."""
    path = tmp_path / "rows.jsonl"
    with path.open("w") as lines:
        for number in range(1000):
            said = "" if number in (3, 400, 999) else f"answer {number}"
            talk = [{"role": "user", "content": f"ask {number}"}, {"role": "assistant", "content": said}]
            lines.write(json.dumps({"id": 7 if number == 8 else number, "messages": talk}) + "\n")
    return path


def test_a_part_is_read_at_a_time(many, tmp_path, monkeypatch):
    """What has been read and is not tokenised yet never exceeds three parts, wherever the tokens are kept."""
    pulled, ahead, done = [0], [], [0]
    whole = dataset_module.read_rows

    def counted(*arguments):
        for row in whole(*arguments):
            pulled[0] += 1
            yield row

    original = dataset_module._tokenize_chunk

    def watched(tokenizer, conversations, options):
        ahead.append(pulled[0] - done[0])
        done[0] += len(conversations)
        return original(tokenizer, conversations, options)

    plain = prepare_dataset(make_byte_tokenizer(), many)
    monkeypatch.setattr(dataset_module, "read_rows", counted)
    monkeypatch.setattr(dataset_module, "_tokenize_chunk", watched)
    kept = prepare_dataset(make_byte_tokenizer(), many, folder=tmp_path / "rows")
    assert len(ahead) == 8 and max(ahead) <= 3 * dataset_module._CHUNK
    assert kept.rows == plain.rows and kept.report == plain.report
    assert plain.report.read == 1000 == plain.report.rows + 4 and len(plain.rows) == 996
    assert plain.report.dropped == {"empty_answer": 3, "duplicate_id": 1}


def test_processes_make_the_same(many):
    alone = prepare_dataset(make_byte_tokenizer(), many)
    together = prepare_dataset(make_byte_tokenizer(), many, workers=2)
    assert together.rows == alone.rows and together.report == alone.report


def test_this_process_tokenises_while_others_start(many, monkeypatch):
    """Others that take seconds to start leave the work to this one, up to what may be held in memory."""
    original, here = dataset_module._tokenize_chunk, []

    class Late:
        def __init__(self, *_, **__):
            self.given = []

        def submit(self, _, chunk):
            assert len(self.given) < dataset_module._AHEAD, "it has enough to do"
            self.given.append((Future(), chunk))
            return self.given[-1][0]

        def shutdown(self, cancel_futures):
            assert cancel_futures

    def late(*given, **options):
        pools.append(Late())
        return pools[0]

    def counted(tokenizer, chunk, options):
        here.append(len(chunk))
        if len(here) == 8 - dataset_module._AHEAD:  # the last one: the other process is there at last
            for future, other in pools[0].given:
                future.set_result(original(tokenizer, other, options))
        return original(tokenizer, chunk, options)

    pools: list[Late] = []
    alone = prepare_dataset(make_byte_tokenizer(), many)
    monkeypatch.setattr(dataset_module, "ProcessPoolExecutor", late)
    monkeypatch.setattr(dataset_module, "_tokenize_chunk", counted)
    shared = prepare_dataset(make_byte_tokenizer(), many, workers=2)
    assert shared.rows == alone.rows and shared.report == alone.report
    assert len(pools[0].given) == dataset_module._AHEAD and len(here) == 8 - dataset_module._AHEAD


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="a system without signal masks")
def test_a_process_started_in_the_block_never_takes_ctrl_c():
    code = "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('goes on')"
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)  # held back to the end of the block
        made = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=60)
        assert made.stdout == "goes on\n"
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_ctrl_c_while_processes_start_is_told_once(many):
    """A process that starts takes no Ctrl-C: the one that started it ends it, without a traceback of its own."""
    code = (
        "from modelopt_eagle.data import dataset, prepare_dataset\n"
        "from modelopt_eagle.target.tiny import make_byte_tokenizer\n"
        "if __name__ == '__main__':\n"
        "    begun = dataset.ProcessPoolExecutor.submit\n"
        "    def told(*given):\n"
        "        future = begun(*given)\n"
        "        print('begun', flush=True)\n"
        "        return future\n"
        "    dataset.ProcessPoolExecutor.submit = told\n"
        f"    prepare_dataset(make_byte_tokenizer(), {str(many)!r}, workers=3)\n"
    )
    script = many.parent / "reads.py"
    script.write_text(code)
    process = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout.readline() == "begun\n"
    time.sleep(1)  # the others import for some seconds
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert error.count("Traceback") == 1 and "KeyboardInterrupt" in error and "spawn" not in error


def test_a_process_that_is_killed_is_told(many, monkeypatch):
    def killed(self, *given):
        future = Future()
        future.set_exception(BrokenProcessPool("gone"))
        return future

    monkeypatch.setattr(dataset_module.ProcessPoolExecutor, "submit", killed)
    with pytest.raises(DataError, match="a process that tokenises was killed"):
        prepare_dataset(make_byte_tokenizer(), many, workers=2)
