"""From `trainer.logger` to trackers. The one place that selects."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from skyrl.config import TrainerConfig
from skyrl.config.trackers import TRACKERS
from skyrl.errors import ConfigError, Problem
from skyrl.tracking.tracker import TrackedRun, Tracker
from skyrl.tree import required


def trackers_of(trainer: TrainerConfig, *, total_steps: int, first_step: int) -> list[Tracker]:
    """The trackers that the configuration names. Raises `ConfigError` for one that this version does not have."""
    names = (trainer.logger,) if isinstance(trainer.logger, str) else trainer.logger
    run = TrackedRun(
        project=trainer.project_name,
        name=trainer.run_name,
        folder=Path(required(trainer.run_path, "trainer.run_path")).expanduser().absolute(),
        total_steps=total_steps,
        first_step=first_step,
    )
    return [_tracker(name, run) for name in dict.fromkeys(names)]


def _tracker(name: str, run: TrackedRun) -> Tracker:
    if name not in TRACKERS:
        hint = f"there are {', '.join(TRACKERS)}"
        raise ConfigError([Problem(path="trainer.logger", message=f"no tracker {name!r}", hint=hint)])
    module, _, attribute = TRACKERS[name].made_by.partition(":")
    made: Tracker = getattr(import_module(module), attribute).of_run(run)
    return made
