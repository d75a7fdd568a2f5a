"""Creates the trackers that `trainer.logger` names; no other module does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import attrs

from skyrl.config import TrackersConfig
from skyrl.config.foundation.import_paths import load_builtin
from skyrl.config.settings.run_basics import RunBasics
from skyrl.config.settings.trackers import TRACKERS, names_of
from skyrl.processes.redaction import redacted
from skyrl.tracking.custom_tracker import CustomTracker, custom_tracker
from skyrl.tracking.services.follower import Follower
from skyrl.tracking.services.service import ServiceRun
from skyrl.tracking.tracker import TrackedRun, Tracker


def _print(text: str) -> None:
    print(text, file=sys.stderr)


def trackers_of(
    trainer: RunBasics, *, total_steps: int, first_step: int, say: Callable[[str], None] = _print
) -> list[Tracker]:
    """The trackers that the configuration names; `say` prints messages about them. Raises `ConfigError` for one of the
    user's own that cannot be made.
    """
    folder = _absolute(trainer.folder("run_path"))
    run = TrackedRun(
        project=trainer.project_name,
        name=trainer.run_name,
        folder=folder,
        total_steps=total_steps,
        first_step=first_step,
    )
    trackers: list[Tracker] = []
    for name in dict.fromkeys(names_of(trainer.logger)):
        if name not in TRACKERS:
            trackers.append(CustomTracker(name, custom_tracker(name, run, trainer.path_of("logger")), say))
        elif TRACKERS[name].in_run:
            trackers.append(_make_tracker(name, run))
        else:
            trackers.append(Follower(service_run(trainer, name, folder, first_step=first_step), say))
    return trackers


def service_run(trainer: RunBasics, name: str, folder: Path, *, first_step: int | None = None) -> ServiceRun:
    """The run in `folder`, for the service `name`. `first_step` is where a live session starts; None for a replay."""
    return ServiceRun(
        service=name,
        project=redacted(trainer.project_name),
        name=redacted(trainer.run_name),
        folder=folder,
        evaluations=_absolute(trainer.folder("export_path")) / "dumped_evals",
        settings=_mask_settings(trainer.trackers),
        first_step=first_step,
    )


def _mask_settings(settings: TrackersConfig) -> TrackersConfig:
    """The settings with secrets masked in the texts that services show. Addresses are kept: they are needed to reach
    the services.
    """
    return attrs.evolve(
        settings,
        tags=tuple(map(redacted, settings.tags)),
        notes=_redacted(settings.notes),
        group=_redacted(settings.group),
        job_type=_redacted(settings.job_type),
    )


def _redacted(text: str | None) -> str | None:
    return None if text is None else redacted(text)


def _make_tracker(name: str, run: TrackedRun) -> Tracker:
    tracker: Tracker = load_builtin(TRACKERS[name].tracker_class).of_run(run)
    return tracker


def _absolute(path: str) -> Path:
    return Path(path).expanduser().absolute()
