"""Metrics for trackers: the calls that each package gets, and what is said where it is missing."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from modelopt_eagle.errors import MissingExtraError
from modelopt_eagle.training.progress import MetricLog


@pytest.mark.parametrize("kind", ["wandb", "mlflow", "trackio"])
def test_a_missing_package_is_named(kind, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, kind, None)
    with pytest.raises(MissingExtraError, match=f"training.report_to is {kind}: pip install {kind}"):
        MetricLog(kind, tmp_path / "run", {})


def test_mlflow_and_trackio_are_fed_by_accelerates_trackers(tmp_path, monkeypatch):
    from accelerate import Accelerator

    Accelerator(cpu=True)
    calls = []

    def note(name, result=None):
        return lambda *args, **kwargs: calls.append((name, args, kwargs)) or result

    run = SimpleNamespace(log=note("log"), finish=note("finish"))
    trackio = ModuleType("trackio")
    trackio.init, trackio.config = note("init", run), SimpleNamespace(update=note("config"))
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    log = MetricLog("trackio", tmp_path / "mine", {"training": {"epochs": 2, "max_steps": None}})
    log.write(3, {"train/loss": 1.5})
    log.close()
    assert [name for name, _, _ in calls] == ["init", "config", "log", "finish"]
    assert calls[0][2] == {"project": "modelopt_eagle", "name": "mine"}
    assert calls[1][1] == ({"training.epochs": 2, "training.max_steps": "null"},)
    assert calls[2][1:] == (({"train/loss": 1.5},), {"step": 3})

    calls.clear()
    mlflow = ModuleType("mlflow")
    mlflow.search_experiments, mlflow.create_experiment = note("search", []), note("create", 1)
    mlflow.start_run, mlflow.end_run = note("start"), note("end")
    mlflow.log_params, mlflow.log_metrics = note("params"), note("metrics")
    mlflow.utils = SimpleNamespace(validation=SimpleNamespace(MAX_PARAM_VAL_LENGTH=500, MAX_PARAMS_TAGS_PER_BATCH=100))
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    log = MetricLog("mlflow", tmp_path / "mine", {"training": {"epochs": 2}})
    log.write(3, {"train/loss": 1.5})
    log.close()
    names = [name for name, _, _ in calls]
    assert names == ["search", "create", "start", "params", "metrics", "end"]
    assert calls[2][2]["run_name"] == "mine" and calls[4][1][0] == {"train/loss": 1.5}
