"""Starting a run again when it fails, as often as its configuration allows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import TracebackType

from skyrl.config import TrainerConfig
from skyrl.errors import RunError
from skyrl.runs.inputs import notice

PAUSE = 10.0
"""Seconds before a failed run starts again, as in AReaL: what caused the failure may need a moment, too."""


class Attempt:
    """One attempt at a run; a context manager that suppresses a failure of the run while another attempt is left.

    Only a failure of the run itself (`RunError`) is suppressed; a mistake in its configuration or data never is.
    """

    def __init__(self, number: int, *, is_last: bool) -> None:
        """`number` counts from 0."""
        self.number, self.is_last = number, is_last
        self.failure: RunError | None = None

    @property
    def is_another_try(self) -> bool:
        """Whether an attempt before this one failed."""
        return self.number > 0

    def __enter__(self) -> None:
        """Does nothing."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self.is_last or not isinstance(error, RunError):
            return False
        self.failure = error
        return True


def attempts(cfg: TrainerConfig) -> Iterator[Attempt]:
    """Attempts at a run until one does not fail, at most `recover_retries` more than one, `PAUSE` seconds apart.

    There is one alone unless `recover_mode` is auto or fault. The body of the loop belongs into the attempt's context;
    the failure of the last one is raised there.

    Example:
        for attempt in attempts(cfg.trainer):
            experiment = BasePPOExp(cfg)
            experiment.is_another_try = attempt.is_another_try
            with attempt:
                experiment.run()
    """
    retries = cfg.recover_retries if cfg.recover_mode in ("auto", "fault") else 0
    for number in range(retries + 1):
        attempt = Attempt(number, is_last=number == retries)
        yield attempt
        if attempt.failure is None:
            return
        notice(f"The run failed: {attempt.failure}\nIt begins again in {PAUSE:g} s (try {number + 1} of {retries})")
        time.sleep(PAUSE)
