"""Asks math-verify whether two answers are equal, in worker processes that are reused, and ended when they are late.

An answer that exhausts a worker's time or memory is not equal, if the next worker can then compare the ground truth
with 1. If it cannot, the answer is not to blame: that is a `WorkerEnded`, which the run counts as a failure.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from threading import BoundedSemaphore, Lock
from typing import Literal

from skyrl.errors import TaskError, WorkerEnded
from skyrl.installation import install_command
from skyrl.sandbox.sandbox import ResourceLimits, Sandbox
from skyrl.sandbox.tiers import Tier
from skyrl.sandbox.worker import Worker

SECONDS = 2.0
"""Deadline in seconds for one pair: a comparison that takes longer is an attack, or useless to a grader."""

LONGEST = 2_000
"""Largest number of characters of an answer that is compared; longer ones are never equal."""

_CONTROL = "1"
"""The answer that a worker is asked about after one that has ended a worker."""

_HOST = "skyrl.envs.builtin.math_host"


class MathEqual:
    """Equality of short answers. Thread-safe; there is at most one worker per core, and further callers wait.

    Raises `TaskError` if math-verify is not installed.
    """

    def __init__(self, tier: Tier | Literal["auto"] = "auto") -> None:
        if find_spec("math_verify") is None:
            raise TaskError(f"environment.skyrl_gym.math_equivalence needs math-verify: {install_command('math')}")
        self._sandbox = Sandbox(tier, modules=(_HOST,))
        self._limits = ResourceLimits(cpu_seconds=24 * 3600, memory_bytes=2 << 30, open_files=256)
        self._turns = BoundedSemaphore(os.cpu_count() or 1)
        self._idle: list[Worker] = []
        self._lock = Lock()

    def __call__(self, answer: str, truth: str, seconds: float = SECONDS) -> bool:
        """Whether `answer` equals `truth`. Raises `WorkerEnded` if there is no result within `seconds`, nor one for
        `truth` and a plain number.
        """
        if len(answer) > LONGEST or len(truth) > LONGEST:
            return False
        with self._turns:
            try:
                return self._ask(answer, truth, seconds)
            except WorkerEnded as error:
                try:
                    self._ask(_CONTROL, truth, seconds)
                except WorkerEnded:
                    raise WorkerEnded(error.how, f"math-verify, on {answer[:80]!r}, {error}") from None
                return False

    def _ask(self, answer: str, truth: str, seconds: float) -> bool:
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        worker = worker or Worker(self._sandbox, _HOST, self._limits)
        same = bool(worker.ask([answer, truth], seconds))
        with self._lock:
            self._idle.append(worker)
        return same

    def close(self) -> None:
        """End the workers; the next call starts new ones."""
        with self._lock:
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.close()
        self._sandbox.close()


@cache
def math_equal(tier: Tier | Literal["auto"]) -> MathEqual:
    """The shared instance of this process."""
    return MathEqual(tier)
