"""Probes of `trackers`: what tracking services are asked for, seen at stand-ins of their packages."""

from __future__ import annotations

import json
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from skyrl.config.settings.trackers import TRACKERS
from skyrl.tracking.factory import service_run
from skyrl.tracking.services.follower import command
from skyrl.tracking.services.run_files import SampleTables
from skyrl.tracking.services.service import Known, ServiceRun
from tests.effects.probe import Scene, observable

STAND_INS = {
    "tensorboard": ("tensorboard.summary.writer.event_file_writer",),
    "wandb": ("wandb",),
    "swanlab": ("swanlab",),
    "mlflow": ("mlflow", "mlflow.entities"),
}
"""Service -> modules that something else stands in for."""


@observable("what services are asked for, and the tables that they get")
def asked(scene: Scene) -> object:
    trainer = scene.run.trainer
    names = (trainer.logger,) if isinstance(trainer.logger, str) else trainer.logger
    runs = [service_run(trainer, name, Path.cwd() / "run") for name in names if not TRACKERS[name].in_run]
    return [(calls(run), command(run), tables(run)) for run in runs]


def calls(run: ServiceRun) -> list[str]:
    """Calls of the service's package when the run is opened there."""
    package = MagicMock()
    package.init.return_value.step = 0
    module, _, name = TRACKERS[run.service].tracker_class.partition(":")
    with pytest.MonkeyPatch.context() as patch:
        for inner in STAND_INS[run.service]:
            patch.setitem(sys.modules, inner, package)
        patch.setattr("secrets.token_hex", "0".zfill)
        patch.delenv("WANDB_MODE", raising=False)
        service = getattr(import_module(module), name).of_run(run, Known())
        service.describe({"config": {}})
    calls = [re.sub(r" id='\d+'", "", str(call)) for call in package.mock_calls]
    return [call.replace(str(Path.cwd()), "") for call in calls if "add_event" not in call]  # those hold the time


def tables(run: ServiceRun) -> list[Any]:
    file = Path("samples.jsonl")
    file.write_text("".join(json.dumps({"step": 1, "sample": sample}) + "\n" for sample in range(20)))
    return [len(table.rows) for table in SampleTables(file, run.settings.sample_rows).before(2)]


Values = dict[str, Any]

IN_WANDB: Values = {"logger": "wandb"}
IN_SWANLAB: Values = {"logger": "swanlab"}

PROBED: tuple[tuple[str, Any, Values], ...] = (
    ("trackers.tags", ["a"], IN_WANDB),
    ("trackers.notes", "why", IN_WANDB),
    ("trackers.group", "seeds", IN_WANDB),
    ("trackers.job_type", "train", IN_WANDB),
    ("trackers.sample_rows", 2, IN_WANDB),
    ("trackers.finish_seconds", 5.0, IN_WANDB),
    ("trackers.python", "/elsewhere/python", IN_WANDB),
    ("trackers.wandb.entity", "team", IN_WANDB),
    ("trackers.wandb.mode", "offline", IN_WANDB),
    ("trackers.wandb.id", "mine", IN_WANDB),
    ("trackers.wandb.base_url", "http://127.0.0.1:9", IN_WANDB),
    ("trackers.swanlab.workspace", "team", IN_SWANLAB),
    ("trackers.swanlab.mode", "offline", IN_SWANLAB),
    ("trackers.swanlab.id", "mine", IN_SWANLAB),
    ("trackers.swanlab.path", "elsewhere", IN_SWANLAB),
    ("trackers.mlflow.tracking_uri", "sqlite:///elsewhere.db", {"logger": "mlflow"}),
    ("trackers.tensorboard.path", "elsewhere", {"logger": "tensorboard"}),
)
"""Field of the table that trackers are chosen in, value, and where it matters."""
