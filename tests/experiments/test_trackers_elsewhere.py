"""MLflow, SwanLab and W&B with their real packages in an environment of their own, whole runs, and a cut network."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.experiments import test_secrets as secrets
from tests.experiments.cut_network import CutSession
from tests.experiments.forked import RunSession, tiny
from tests.experiments.phases import Fault
from tests.nano_run import all_metrics
from tests.tracking.elsewhere import SERVICES, python_elsewhere, read
from tests.tracking.readers import METRIC

__all__ = ["python_elsewhere"]

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("forked")]

FAKE_KEYS = {"WANDB_API_KEY": "a" * 40, "SWANLAB_API_KEY": "b" * 21}


def tracked(python: str, mode: str, **more: Any) -> dict[str, Any]:
    """Settings of a run in all three services."""
    shared = {"python": python, "finish_seconds": 240.0, **{name: {"mode": mode} for name in ("wandb", "swanlab")}}
    return {"trainer__logger": ["console", *SERVICES], "trainer__trackers": {**shared, **more}}


def test_a_run_that_is_killed_and_resumed_is_one_run_in_each_service(
    nano: Path, tmp_path: Path, python_elsewhere: str
) -> None:
    home = {"HOME": str(tmp_path)}
    values = tiny(nano, tmp_path, **tracked(python_elsewhere, "offline"), trainer__ckpt_interval=5)
    killed = RunSession(values, tmp_path, Fault(phase="optimizer", nth=15), environ=home)  # in step 8
    assert killed.ends() == -signal.SIGKILL, killed.said
    resumed = RunSession(values, tmp_path, environ=home)
    assert resumed.ends() == 0 and "warning" not in resumed.said, resumed.said
    truth = [(row["step"], row[METRIC]) for row in all_metrics(tmp_path) if row["step"]]
    assert [step for step, _ in truth] == list(range(1, 13))
    for service in SERVICES:
        points = read(python_elsewhere, service, tmp_path / "run", METRIC)
        assert [step for step, _ in points] == list(range(1, 13)), service
        assert [value for _, value in points] == pytest.approx([value for _, value in truth]), service  # some: float32


def test_a_hundred_secrets_are_nowhere_in_what_the_services_write(
    nano: Path, tmp_path: Path, python_elsewhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(secrets.IN_VARIABLES, "HOME", str(tmp_path / "out"))
    texts = {"tags": ["env:PROJECT_KEY"], "notes": "env:RUN_SECRET", "group": "env:PROJECT_KEY"}
    output = secrets.run(nano, tmp_path / "out", broken=False, **tracked(python_elsewhere, "offline", **texts))
    for kept in ("mlflow.db", "run/wandb/offline-run-*/run-*.wandb", "run/swanlog/run-*/*.swanlab"):
        assert list((tmp_path / "out").glob(kept)), output
    for file, content in secrets.written(tmp_path / "out"):
        assert [canary for canary in secrets.CANARIES if canary.encode() in content] == [], file


def test_a_run_without_a_network_ends_as_usual_and_says_once_of_each_service_that_it_failed(
    nano: Path, tmp_path: Path, python_elsewhere: str, record_property: Any
) -> None:
    nowhere = {"mlflow": {"tracking_uri": "http://192.0.2.1:5000"}, "finish_seconds": 5.0}  # RFC 5737: nobody's address
    values = tiny(nano, tmp_path, **tracked(python_elsewhere, "online", **nowhere))
    values["environment.env_class"] = "tests.experiments.cut_network:in_ascii_once_all_failed"
    session = CutSession(values, tmp_path, {**FAKE_KEYS, "HOME": str(tmp_path)}, expected=SERVICES)
    assert session.ends() == 0, session.said
    record_property("network cut", session.how)
    for service in SERVICES:
        assert session.said.count(f"warning: {service} failed, and the run continues without it") == 1, session.said
        assert f"warning: {service} lacks the last 12 steps of this run; deliver them with `skyrl track" in session.said
    assert "step 12/12" in session.said and (tmp_path / "run" / "model").is_dir()
    assert [row["step"] for row in all_metrics(tmp_path)] == list(range(13))
    assert session.packages == []  # no tracker's package was imported by the run
    assert session.calls == []  # nothing in the run's process looked up a name or opened a connection
    assert session.starters == {f"tracker {service}" for service in SERVICES}
