"""A run that is begun again when it fails, as often as its configuration allows."""

from __future__ import annotations

import time
from typing import TypeVar

from skyrl.config import SkyRLTrainConfig
from skyrl.errors import RunError
from skyrl.experiments.ppo import BasePPOExp
from skyrl.runs.preflight import say

E = TypeVar("E", bound=BasePPOExp)

PAUSE = 10.0
"""Seconds before a failed run begins again, as in AReaL: what went wrong beside it may need a moment, too."""


def run_with_recovery(kind: type[E], cfg: SkyRLTrainConfig, *, pause: float = PAUSE) -> tuple[E, bool]:
    """The experiment that ended well, and what its `run` said.

    A failure of the run itself (`RunError`) is followed by another try under `trainer.recover_mode` auto and fault; a
    mistake in what it was given never is. Raises the last failure.
    """
    retries = cfg.trainer.recover_retries if cfg.trainer.recover_mode in ("auto", "fault") else 0
    for failures in range(retries + 1):
        experiment = kind(cfg)
        experiment.is_another_try = failures > 0
        try:
            return experiment, experiment.run()
        except RunError as error:
            if failures == retries:
                raise
            say(f"The run failed: {error}\nIt begins again in {pause:g} s (try {failures + 1} of {retries})")
            time.sleep(pause)
    raise AssertionError("the last try returns or raises")
