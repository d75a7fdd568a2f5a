"""MLflow: one run of an experiment, on a server or in an SQLite file."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, Self

import attrs

from skyrl.tracking.services.run_files import derived_values, flat
from skyrl.tracking.services.service import Known, Service, ServiceRun, ServiceTable

_STEP = "skyrl.step"
"""Tag with the last step that was logged."""

_AT_ONCE = 100
"""Number of parameters per request, the limit of MLflow; for metrics it is 1,000."""

_LONGEST = 500
"""Length in characters of a parameter's value that every store of MLflow accepts."""


class MlflowRun(Service):
    """One run in MLflow. Metrics cannot be deleted there, so delivered steps stay as they are."""

    def __init__(self, run: ServiceRun, known: Known) -> None:
        """Raises `MlflowException` if the store cannot be reached, or has no run with the known id."""
        import mlflow

        address = run.settings.mlflow.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        address = address or f"sqlite:///{run.folder.parent / 'mlflow.db'}"
        mlflow.set_tracking_uri(address)  # log_table uses the global one
        self._client = mlflow.MlflowClient(tracking_uri=address)
        self._id = known.id or self._new_run(run, address)
        self._client.update_run(self._id, status="RUNNING")
        data = self._client.get_run(self._id).data
        self._has = set(data.params)
        self.known = attrs.evolve(known, id=self._id, step=int(data.tags.get(_STEP, -1)))

    @classmethod
    def of_run(cls, run: ServiceRun, known: Known) -> Self:
        return cls(run, known)

    def describe(self, stored: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        leaves = {_name(path): str(value)[:_LONGEST] for path, value in flat(stored["config"])}
        params = [Param(path, value) for path, value in leaves.items() if path not in self._has]  # they cannot change
        for start in range(0, len(params), _AT_ONCE):
            self._client.log_batch(self._id, params=params[start : start + _AT_ONCE])
        self._client.log_dict(self._id, dict(stored), "config.json")
        self._client.log_dict(self._id, derived_values(stored), "derived.json")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric, RunTag

        now = int(time.time() * 1000)
        values = [Metric(_name(name), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=values, tags=[RunTag(_STEP, str(step))])

    def table(self, table: ServiceTable) -> None:
        columns = {name: [row[index] for row in table.rows] for index, name in enumerate(table.columns)}
        self._client.log_table(self._id, columns, f"{_name(table.name)}/step_{table.step:06}.json")

    def close(self) -> None:
        self._client.set_terminated(self._id)

    def _new_run(self, run: ServiceRun, address: str) -> str:
        settings, client = run.settings, self._client
        existing = client.get_experiment_by_name(run.project)
        files = str(run.folder.parent / "mlflow-artifacts") if address.startswith("sqlite:") else None
        experiment = (
            existing.experiment_id if existing else client.create_experiment(run.project, artifact_location=files)
        )
        about = {
            "mlflow.note.content": settings.notes,
            "skyrl.group": settings.group,
            "skyrl.job_type": settings.job_type,
            "skyrl.tags": ", ".join(settings.tags),
        }
        tags = {name: value for name, value in about.items() if value}
        run_id: str = client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
        return run_id


def _name(name: str) -> str:
    """The name restricted to what MLflow allows: letters, digits, spaces and `_ - . : /`. A changed name gets a digest,
    so that names remain distinct.
    """
    allowed = re.sub(r"[^\w\-.: /]", "_", name, flags=re.ASCII)
    return allowed if allowed == name else f"{allowed}-{sha256(name.encode()).hexdigest()[:8]}"
