"""Two processes of tests: what shares fixtures stays with one, each file is named, nothing is run twice."""

import os
import subprocess
import sys
from types import SimpleNamespace

from tests.conftest import HERE, VLLM, pytest_collection_modifyitems, pytest_xdist_make_scheduler

CONFTEST = """
import pytest
from tests.side_by_side import ByFile, sendable

@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable():
    return sendable((yield))

def pytest_xdist_make_scheduler(config, log):
    return ByFile(config, log, "shared")
"""
FILE = """
import logging, os, pytest

@pytest.mark.parametrize("number", range(4))
def test(number):
    logging.warning("half a character: \\ud83d")
    with open({log!r}, "a") as log:
        log.write(f"{{__file__}} {{os.environ['PYTEST_XDIST_WORKER']}}\\n")
"""
FILES = ("shared/test_one.py", "shared/test_two.py", "test_a.py", "test_b.py", "test_c.py")


def test_files_and_the_folder_that_shares_stay_whole(tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "conftest.py").write_text(CONFTEST)
    log = tmp_path / "log"
    for name in FILES:
        (tmp_path / name).write_text(FILE.format(log=str(log)))
    command = [sys.executable, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider", f"--rootdir={tmp_path}"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "20 passed" in done.stdout, done.stdout + done.stderr
    ran = [line.split() for line in log.read_text().splitlines()]
    assert len(ran) == 20
    workers = {name: {worker for path, worker in ran if path == str(tmp_path / name)} for name in FILES}
    assert all(len(found) == 1 for found in workers.values()), workers
    assert workers["shared/test_one.py"] == workers["shared/test_two.py"] != workers["test_a.py"]
    named = [line.split(": ")[1] for line in done.stdout.splitlines() if line.startswith(("gw0: ", "gw1: "))]
    assert named == ["shared", "test_a.py", "test_b.py", "test_c.py"]


def test_the_tests_that_share_trained_heads_begin_and_stay_together():
    items = [SimpleNamespace(path=HERE / name) for name in ("a/test_1.py", "engine/test_2.py", "z/test_3.py")]
    kept = list(items)
    pytest_collection_modifyitems(SimpleNamespace(), items)
    assert items == kept  # one process: in the order of the folders
    pytest_collection_modifyitems(SimpleNamespace(workerinput={}), items)
    assert items == [kept[1], kept[0], kept[2]]
    config = SimpleNamespace(option=SimpleNamespace(tx=["2*popen"]), getvalue=lambda name: ["2*popen"])
    scheduler = pytest_xdist_make_scheduler(config, None)
    found = [scheduler._split_scope(f"tests/{name}::test[a::b]") for name in ("engine/test_2.py", "engineer/test_4.py")]
    assert found == ["tests/engine", "tests/engineer/test_4.py"] and VLLM.tests[0] == HERE / "engine"
