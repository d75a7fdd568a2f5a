"""The trackers whose packages do not fit beside constraints.txt, in an environment of their own."""

from __future__ import annotations

import json
import os
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.other_environments import ROOT, python_with
from tests.tracking.readers import Points

SERVICES = ("wandb", "mlflow", "swanlab")


@pytest.fixture(scope="session")
def python_elsewhere() -> str:
    """The interpreter for `trackers.python`. What pip installs is kept until the extras change."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    requirements = [extras[name] for name in SERVICES]
    return python_with("trackers", ["-e", f"{ROOT}[{','.join(SERVICES)}]"], made_for=requirements)


def read(python: str, service: str, folder: Path, metric: str) -> Points:
    """(step, value) of a metric in the service, by the reader of its package."""
    command = [python, "-m", "tests.tracking.readers", service, str(folder), metric]
    environ = {**os.environ, "HOME": str(folder.parent), "MLFLOW_DISABLE_TELEMETRY": "true"}
    result = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
    points: list[Any] = json.loads(result.stdout.splitlines()[-1])
    return [(step, value) for step, value in points]
