"""Restarts a run that fails or loses a rank, as often as its configuration allows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Generic, TypeVar

from skyrl.errors import NoRoomError, ProcessLost, RunError
from skyrl.runs.inputs import notice
from skyrl.runs.run_tree import AnyRun
from skyrl.runs.shrinking import shrunk
from skyrl.tree import get_at

R = TypeVar("R", bound=AnyRun)

PAUSE = 10.0
"""Seconds before a failed run restarts, as in AReaL: the cause of the failure may need time to go away."""


class Attempt(Generic[R]):
    """One attempt at a run; a context manager that suppresses a failure of the run if another attempt follows.

    Only a failure of the run itself (`RunError`) is suppressed, never a mistake in its configuration or data.
    """

    def __init__(self, run: R, follows: Callable[[RunError], bool], *, is_another_try: bool) -> None:
        """`run` is the resolved run of this attempt, possibly with fewer ranks than configured. `follows` decides
        whether another attempt follows a failure; `is_another_try` says whether an attempt before this one failed.
        """
        self.run, self.is_another_try, self._follows = run, is_another_try, follows
        self.failed = False

    def __enter__(self) -> None:
        """Does nothing."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.failed = isinstance(error, RunError) and self._follows(error)
        return self.failed


class Recovery(Generic[R]):
    """Decides whether and how a run restarts after a failure, within one command."""

    def __init__(self, run: R) -> None:
        self.run = run
        """The run of the next attempt."""
        trainer = run.trainer
        is_retried = trainer.recover_mode in ("auto", "fault") and not trainer.num_dummy_steps
        self._retries = trainer.recover_retries if is_retried else 0
        self._retried = self._lost = 0

    def follows(self, failure: RunError) -> bool:
        """Whether the run restarts after this failure; if so, the reason and the changes are printed."""
        if self._follows_a_lost_rank(failure):
            return True
        if self._retried == self._retries:
            return False
        self._retried += 1
        return _say(failure, f"retry {self._retried} of {self._retries}")

    def _follows_a_lost_rank(self, failure: RunError) -> bool:
        """Whether the run restarts after a lost rank, or after the cluster then turned out to have even fewer GPUs."""
        faults = self.run.trainer.faults
        shrinks = faults.on_lost_rank == "shrink"
        if faults.on_lost_rank == "stop":
            return False
        if isinstance(failure, ProcessLost) and self._lost < faults.max_lost_ranks:
            self._lost += 1
            reason = f"lost rank {self._lost} of {faults.max_lost_ranks}"
            if shrinks and failure.role != "engine":
                return self._smaller(failure, failure.role, reason)
            return _say(failure, reason)
        if isinstance(failure, NoRoomError) and self._lost and shrinks:
            role = "engine" if failure.pool.startswith("engine") else failure.pool.split("+")[0]
            return self._smaller(failure, role, "fewer machines", by_machine=True)
        return False

    def _smaller(self, failure: RunError, role: str, reason: str, *, by_machine: bool = False) -> bool:
        smaller = shrunk(self.run, role, by_machine=by_machine)
        if smaller is None:
            field = self.run.trainer.path_of("faults.on_lost_rank")
            notice(f"{field} = shrink: no smaller number of ranks passes every check")
            return False
        before, (self.run, changes) = self.run, smaller
        listed = "".join(
            f"\n  {path}: {get_at(before, path)} -> {value}"
            for path, value in changes.items()
            if get_at(before, path) != value
        )
        return _say(failure, f"{reason}), with:{listed}", end="")


def _say(failure: RunError, which: str, end: str = ")") -> bool:
    notice(f"The run failed: {failure}\nIt restarts in {PAUSE:g} s ({which}{end}")
    return True


def attempts(run: R) -> Iterator[Attempt[R]]:
    """Attempts at a resolved run until one succeeds, `PAUSE` seconds apart: one, up to `recover_retries` more if
    `recover_mode` is auto or fault, and up to `max_lost_ranks` more if `on_lost_rank` is wait or shrink.

    Run the body of the loop inside the attempt's context, which raises the failure of the last attempt.

    Example:
        for attempt in attempts(cfg):
            experiment = BasePPOExp(attempt.run)
            experiment.is_another_try = attempt.is_another_try
            with attempt:
                experiment.run()
    """
    recovery, has_failed = Recovery(run), False
    while True:
        attempt = Attempt(recovery.run, recovery.follows, is_another_try=has_failed)
        yield attempt
        if not attempt.failed:
            return
        has_failed = True
        time.sleep(PAUSE)
