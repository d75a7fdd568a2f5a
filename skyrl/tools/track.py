"""Delivers a finished run to a tracking service."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from skyrl.config.loading.load import load
from skyrl.config.loading.resolve import resolve
from skyrl.config.settings.run_basics import RunBasics
from skyrl.config.settings.trackers import lacks_of
from skyrl.errors import ConfigError, Problem, RunError
from skyrl.runs.stored_runs import place_of, stored_run
from skyrl.tracking.factory import service_run
from skyrl.tracking.services.follow import IN_USE
from skyrl.tracking.services.follower import command, environment
from skyrl.tracking.services.service import Known


def deliver(folder: Path, service: str, overrides: Sequence[str] = (), *, new: bool = False) -> int:
    """Deliver the part of the run in `folder` that the service does not have yet. Returns the last step that it has.

    `overrides` change the run's settings; `new` ignores previous deliveries. Raises `UserError` for a folder that is
    not a run's, `ConfigError` for an unavailable service, and `RunError` if the service fails.
    """
    stored = stored_run(folder)
    changed: Any = load([str(folder)], overrides, type(stored)).config
    trainer: RunBasics = resolve(changed).trainer
    settings = getattr(trainer.trackers, service, None)
    lacks = lacks_of(service, mode=getattr(settings, "mode", None), elsewhere=trainer.trackers.python is not None)
    if problems := [Problem(path="--to", message=lack, hint=remedy) for lack, remedy in lacks]:
        raise ConfigError(problems, title=f"{service} is not available")
    run = service_run(trainer, service, folder)
    run = attrs.evolve(run, evaluations=Path(place_of(str(run.evaluations), folder, stored)))
    if new:
        run.state_file.unlink(missing_ok=True)
    ended = subprocess.run([*command(run), "--replay"], input=run.to_line(), env=environment(run), check=False)
    if ended.returncode:
        reason = "another process is delivering to it" if ended.returncode == IN_USE else "see its output above"
        raise RunError(f"the steps of {folder} were not delivered to {service}: {reason}")
    return Known.read(run.state_file).step
