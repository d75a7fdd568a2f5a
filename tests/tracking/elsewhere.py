"""An environment with the trackers whose packages do not fit beside constraints.txt: it is made once, by pip."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.tracking.readers import Points

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".venv-trackers"
SERVICES = ("wandb", "mlflow", "swanlab")


@pytest.fixture(scope="session")
def python_elsewhere() -> str:
    """The interpreter for `trackers.python`. What pip installs is kept until the extras change."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    wanted = json.dumps([extras[name] for name in SERVICES])
    stamp, python = FOLDER / "made", FOLDER / "bin" / "python"
    with FileLock(f"{FOLDER}.lock"):
        if not stamp.is_file() or stamp.read_text(encoding="utf-8") != wanted:
            subprocess.run([sys.executable, "-m", "venv", "--clear", FOLDER], check=True)
            packages = f"{ROOT}[{','.join(SERVICES)}]"
            subprocess.run([python, "-m", "pip", "install", "--quiet", "-e", packages], check=True)
            stamp.write_text(wanted, encoding="utf-8")
    return str(python)


def read(python: str, service: str, folder: Path, metric: str) -> Points:
    """(step, value) of a metric in the service, by the reader of its package."""
    command = [python, "-m", "tests.tracking.readers", service, str(folder), metric]
    environ = {**os.environ, "HOME": str(folder.parent), "MLFLOW_DISABLE_TELEMETRY": "true"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return [(step, value) for step, value in found]
