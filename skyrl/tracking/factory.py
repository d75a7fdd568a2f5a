"""Creates the trackers that `trainer.logger` names; no other module does.

One of the user's own is named by import path:

    class MyTracker:
        def __init__(self, run): ...             # a `TrackedRun`: project, name, folder, total_steps, first_step
        def log(self, step, metrics): ...        # once for each step, in the order of the steps
        def close(self): ...                     # when the session ends

An exception of its `log` or `close` is reported once, and the run goes on without it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import attrs

from skyrl.config.foundation.import_paths import load_builtin
from skyrl.config.settings.run_basics import RunBasics
from skyrl.config.settings.trackers import TRACKERS, names_of
from skyrl.errors import ConfigError, Problem, UserError
from skyrl.processes.redaction import redacted
from skyrl.tracking.services.follower import Follower
from skyrl.tracking.services.service import ServiceRun
from skyrl.tracking.tracker import TrackedRun, Tracker
from skyrl.tree.frames import described
from skyrl.tree.imports import import_object


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
            trackers.append(load_builtin(TRACKERS[name].tracker_class).of_run(run))
        else:
            trackers.append(Follower(service_run(trainer, name, folder, first_step=first_step), say))
    return trackers


def service_run(trainer: RunBasics, name: str, folder: Path, *, first_step: int | None = None) -> ServiceRun:
    """The run in `folder`, for the service `name`. `first_step` is where a live session starts; None for a replay.

    Secrets are masked in the texts that services show. Addresses are kept: they are needed to reach the services.
    """
    settings = trainer.trackers
    return ServiceRun(
        service=name,
        project=redacted(trainer.project_name),
        name=redacted(trainer.run_name),
        folder=folder,
        evaluations=_absolute(trainer.folder("export_path")) / "dumped_evals",
        settings=attrs.evolve(
            settings,
            tags=tuple(map(redacted, settings.tags)),
            notes=_redacted(settings.notes),
            group=_redacted(settings.group),
            job_type=_redacted(settings.job_type),
        ),
        first_step=first_step,
    )


def _redacted(text: str | None) -> str | None:
    return None if text is None else redacted(text)


def _absolute(path: str) -> Path:
    return Path(path).expanduser().absolute()


class CustomTracker:
    """A user's tracker that never ends the run: after an exception, which is reported, it gets no more metrics."""

    def __init__(self, name: str, tracker: Tracker, say: Callable[[str], None]) -> None:
        """`name` is its import path; `say` prints a line about the run."""
        self._name, self._say = name, say
        self._tracker: Tracker | None = tracker

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._call("log", lambda tracker: tracker.log(step, dict(metrics)), f" step {step}")

    def close(self) -> None:
        self._call("close", lambda tracker: tracker.close())
        self._tracker = None

    def _call(self, method: str, call: Callable[[Tracker], None], where: str = "") -> None:
        if self._tracker is None:
            return
        try:
            call(self._tracker)
        except Exception as error:  # noqa: BLE001  # a tracker may raise anything, and the run goes on
            self._tracker = None
            self._say(
                f"warning: the tracker {self._name} failed in {method}{where}: {described(error)}. The run continues "
                "without it; metrics.jsonl in the run's folder has every step"
            )


def load_tracker(name: str, field: str) -> object:
    """The class, function or object that an import path names. Raises `ConfigError` if it cannot be a tracker."""
    try:
        target: object = import_object(name)
    except UserError as error:
        raise ConfigError([Problem(path=field, message=str(error))]) from error
    if isinstance(target, type) or not callable(target):
        _refuse_unusable(target, name, field)
    return target


def custom_tracker(name: str, run: TrackedRun, field: str) -> Tracker:
    """The tracker that an import path names: an object, or what a class or function makes of the run.

    Raises `ConfigError` if it cannot be made, or lacks a method; `field` is the place of the import path.
    """
    target = load_tracker(name, field)
    if not callable(target):
        instance = target
    else:
        try:
            instance = target(run)
        except Exception as error:
            message = f"{name} cannot be created from the run: {described(error)}"
            raise ConfigError([Problem(path=field, message=message, hint=_HINT)]) from error
    _refuse_unusable(instance, name, field)
    tracker: Tracker = instance  # type: ignore[assignment]  # it has both methods
    return tracker


_HINT = "a tracker is made from a TrackedRun, and has log(step, metrics) and close(): see docs/tracking.md"


def _refuse_unusable(candidate: object, name: str, field: str) -> None:
    lacking = [method for method in ("log", "close") if not callable(getattr(candidate, method, None))]
    if lacking:
        message = f"{name} is not a tracker: it has no {' and no '.join(lacking)}"
        raise ConfigError([Problem(path=field, message=message, hint=_HINT)])
