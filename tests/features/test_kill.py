"""kill -9 at fifty random moments: every row once, and the trainer reads what an undisturbed dump would give."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from modelopt_eagle.features import OfflineSource
from tests.features.rows import check_all, make_row, open_writer

ROWS = 400  # as in kill_writer.py


def test_fifty_kills_lose_nothing(tmp_path):
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": str(here.parents[1]), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, str(here / "kill_writer.py"), str(tmp_path / "killed"), "50"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    rows = [int(line) for line in run.stdout.split()]
    assert len(rows) == 50 and rows == sorted(rows)  # no kill ever takes away what was stored
    assert len(set(rows)) > 3 and rows[0] < ROWS  # the kills came while rows were being written
    check_all(tmp_path / "killed", ROWS)

    with open_writer(tmp_path / "whole", rows=ROWS, shard_bytes=4000) as writer:
        for index in range(ROWS):
            writer.add(index, make_row(index))
    sources = [OfflineSource(tmp_path / name) for name in ("killed", "whole")]
    batches = [list(source.batches(0, batch_size=7, seed=1)) for source in sources]
    for killed, whole in zip(*batches, strict=True):
        assert killed.row_ids == whole.row_ids
        for name in ("input_ids", "supervised", "aux_hidden", "final_hidden", "target_top1", "target_logsumexp"):
            assert torch.equal(getattr(killed, name), getattr(whole, name)), name
