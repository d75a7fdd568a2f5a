"""What probes look at that several tables of the configuration share, cheapest first.

An observable of one component alone stands beside its probes.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from skyrl.cli.main import cli
from skyrl.config.loading.kinds import kind_of
from skyrl.config.settings.alarms import alarms_of
from skyrl.errors import UserError
from skyrl.experiments.experiment import experiment_class
from skyrl.experiments.factories import start_processes
from skyrl.planning.layout import layout
from skyrl.tracking.factory import trackers_of
from skyrl.tracking.jsonlines import JsonLines
from skyrl.tracking.metric_table import depends_on_machine
from skyrl.training.callbacks import callbacks_by_name
from tests.effects.probe import Scene, observable
from tests.nano_run import without_curve


def plain(value: Any) -> Any:
    """Tensors as nested lists, in which NaN equals itself."""
    match value:
        case Tensor():
            return repr(value.detach().tolist())
        case dict():
            return {name: plain(inner) for name, inner in value.items()}
        case list() | tuple():
            return [plain(inner) for inner in value]
    return value


@observable("what `skyrl config check` reports", refuses=True)
def problems(scene: Scene) -> object:
    return [(problem.severity, problem.path, problem.message) for problem in scene.problems]


@observable("the placement of processes on GPUs")
def placement(scene: Scene) -> object:
    return layout(kind_of(scene.run).sizes(scene.run))


@observable("the number of training steps that are planned")
def planned_steps(scene: Scene) -> object:
    return experiment_class(scene.run)(scene.run).total_steps


@observable("what `skyrl plan` prints")
def printed_plan(scene: Scene) -> object:
    result = CliRunner().invoke(cli, ["plan", *scene.words])
    assert result.exit_code == 0, result.output
    return result.output


@observable("the arguments that the processes on Ray are started with")
def ray_arguments(scene: Scene) -> object:
    arguments: dict[str, object] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("skyrl.processes.ray.processes.RayProcesses", lambda layout, **others: arguments.update(others))
        start_processes(scene.run)
    return {name: str(value).replace(str(Path.cwd()), "") for name, value in arguments.items()}


@observable("the trackers, or why there are none")
def trackers(scene: Scene) -> object:
    try:
        return [type(tracker).__name__ for tracker in trackers_of(scene.run.trainer, total_steps=3, first_step=0)]
    except UserError as error:
        return str(error)


@observable("the alarms of the run")
def alarms(scene: Scene) -> object:
    trainer = scene.run.trainer
    return [str(alarm) for alarm in alarms_of(trainer.alarms, defaults=trainer.default_alarms)]


@observable("the callbacks that hear the events of the loop")
def callbacks(scene: Scene) -> object:
    trainer = scene.run.trainer
    named_callbacks = callbacks_by_name(trainer.callbacks, [], field=trainer.path_of("callbacks"))
    return {name: type(callback).__name__ for name, callback in named_callbacks.items()}


@observable("a short run: its metrics, files and messages", long=True)
def run(scene: Scene) -> object:
    return what_is_left(scene)


def what_is_left(scene: Scene) -> dict[str, object]:
    """Result of running the scene in this process: how it ended, the metrics without times, every file's name."""
    torch.manual_seed(0)
    random.seed(0)
    printed = StringIO()
    with redirect_stdout(printed), redirect_stderr(printed), without_curve():
        try:
            end: object = experiment_class(scene.run)(scene.run).run()
        except UserError as error:
            end = f"{type(error).__name__}: {error}"
    cwd = Path.cwd()
    files = sorted(str(path.relative_to(cwd)) for path in cwd.rglob("*") if path.is_file())
    return {"end": end, "files": files, "metrics": metrics(Path(scene.run.trainer.run_path))}


@observable("how many samples of each step of a short run are kept")
def samples(scene: Scene) -> object:
    what_is_left(scene)
    kept = JsonLines(Path(scene.run.trainer.run_path) / "trajectories.jsonl").read()
    return Counter(line["step"] for line in kept)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics without those of the machine."""
    file = folder / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [{name: value for name, value in json.loads(line).items() if not depends_on_machine(name)} for line in lines]
