"""Starting a run again when it fails, as often as its configuration allows."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from skyrl.errors import RunError
from skyrl.runs.experiment import Experiment
from skyrl.runs.preflight import say
from skyrl.runs.run_tree import AnyRun
from skyrl.runs.session import RunSession

C = TypeVar("C", bound=AnyRun)
E = TypeVar("E", bound=Experiment)

PAUSE = 10.0
"""Seconds before a failed run starts again, as in AReaL: what caused the failure may need a moment, too."""


def run_with_recovery(make: Callable[[C], E], cfg: C, *, pause: float = PAUSE) -> tuple[E, bool]:
    """The experiment that succeeded, and whether it trained (False: it was finished already).

    A failure of the run itself (`RunError`) is followed by another try under `trainer.recover_mode` auto and fault; a
    mistake in what it was given never is. Raises the last failure.
    """
    retries = cfg.trainer.recover_retries if cfg.trainer.recover_mode in ("auto", "fault") else 0
    for failures in range(retries + 1):
        experiment = make(cfg)
        experiment.is_another_try = failures > 0
        try:
            return experiment, RunSession(experiment).run()
        except RunError as error:
            if failures == retries:
                raise
            say(f"The run failed: {error}\nIt begins again in {pause:g} s (try {failures + 1} of {retries})")
            time.sleep(pause)
    raise AssertionError("the last try returns or raises")
