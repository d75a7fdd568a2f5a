"""Calls environments outside the event loop, with a deadline, unless they return at once; every kind of failure becomes
an `EpisodeError`, except that of a service that is gone.

`Pace` limits how many calls begin in a second, `SamplesInFlight` counts samples and calls for the line that says what a
silent run waits for.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NoReturn, TypeVar

from attrs import define, field

from skyrl.envs.coroutines import begin, noted
from skyrl.envs.http_json import OUTAGES, Outages
from skyrl.errors import RewardError, ServiceGone, SkipSample, WorkerEnded
from skyrl.processes.redaction import redacted
from skyrl.rollout.threads import KeptThreads, Mailbox, ThreadCall, Workers
from skyrl.trajectory import Failure, Skipped
from skyrl.tree.frames import raised_at


class SamplesInFlight:
    """Samples that are not finished, and calls of environments that run."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun = self._done = 0
        self._calls: set[ThreadCall] = set()

    def begin(self, samples: int) -> None:
        """Count samples that are about to be drawn, and forget those of finished batches."""
        if self._begun == self._done:
            self._begun = self._done = 0
        self._begun += samples

    def end(self, samples: int) -> None:
        """Count samples that are finished, with any outcome."""
        self._done += samples

    @contextmanager
    def in_environment(self, call: ThreadCall) -> Iterator[None]:
        """Context of one call of an environment, which counts from when it begins to run."""
        self._calls.add(call)
        try:
            yield
        finally:
            self._calls.remove(call)

    def __str__(self) -> str:
        """`3 of 128 samples, 2 calls of environments, the oldest for 12 s`; empty while nothing is drawn."""
        left, calls = self._begun - self._done, [call.start_time for call in self._calls if call.start_time is not None]
        if not left:
            return ""
        oldest = f"{self._clock() - min(calls):.0f} s" if calls else ""
        inside = f"{len(calls)} call{'s' if len(calls) > 1 else ''} of environments, the oldest for {oldest}"
        return f"{left} of {self._begun} samples, " + (inside if calls else "all of them in the engines")


class Pace:
    """Admits callers at `per_second` on average, after an initial burst of one second's worth."""

    def __init__(self, per_second: float | None) -> None:
        """`per_second` is the rate of starts; None lets every caller through at once."""
        self._rate = per_second
        self._burst = max(1.0, per_second or 1.0)
        self._free_at = float("-inf")
        """Time by the loop's clock at which the next caller could start if no burst were allowed."""

    async def __call__(self) -> None:
        """Return when the caller may start; callers are let through in the order in which they came."""
        if self._rate is None:
            return
        now = asyncio.get_running_loop().time()
        self._free_at = max(self._free_at, now - (self._burst - 1) / self._rate)
        wait = self._free_at - now
        self._free_at += 1 / self._rate
        if wait > 0:
            await asyncio.sleep(wait)


T = TypeVar("T")

_THREADS = KeptThreads()

_KINDS: Mapping[str, Literal["raised", "timeout", "too_large"]] = {
    "exit": "raised",
    "timeout": "timeout",
    "output": "too_large",
}
"""Kind of failure for each way in which an environment's process ends."""


class EpisodeError(RewardError):
    """An episode that cannot continue because of its environment. Stays inside the rollout."""

    def __init__(self, outcome: Failure | Skipped) -> None:
        self.outcome = outcome
        super().__init__(outcome.reason)


@define(eq=False)
class _EnvCall(ThreadCall):
    """A call of an environment, whose result the event loop awaits."""

    args: tuple[object, ...]
    outcome: asyncio.Future[Any]
    """Value or exception of the function, and the seconds that it ran; None if it is late."""

    workers: Workers
    mailbox: Mailbox
    coroutines: list[Future[Any]] = field(factory=list, init=False)
    """The coroutine of the function, which its deadline cancels."""

    outages: Outages = field(factory=Outages, init=False)
    timer: asyncio.TimerHandle | None = field(default=None, init=False)

    def run(self) -> None:
        """Call the function; in a thread. If it returns a coroutine, that is awaited without a thread."""
        value, raised, start = None, None, time.perf_counter()
        outer = OUTAGES.set(self.outages)
        try:
            with noted(self.coroutines):
                value = self.function(*self.args)
            if inspect.isawaitable(value):
                self.goes_on, future = True, begin(value)
                self.coroutines.append(future)
                future.add_done_callback(partial(self._awaited, start))
                return
        except BaseException as error:  # noqa: BLE001  # any error of the user's environment goes to the caller
            raised = error
        finally:
            OUTAGES.reset(outer)
        self._report(value, raised, start)

    def _awaited(self, start: float, future: Future[tuple[object, BaseException | None]]) -> None:
        self.workers.release(self)
        if not future.cancelled():
            self._report(*future.result(), start)

    def _report(self, value: object, raised: BaseException | None, start: float) -> None:
        result = (value, raised, time.perf_counter() - start)
        self.mailbox.put(partial(_settle, self.outcome, result), self.outcome.get_loop())


class EnvCalls:
    """Runs a limited number of calls of environments at a time. Calls made in one turn of the event loop share a thread
    as long as they are quick, and coroutines need none while they wait.

    A coroutine that misses its deadline is cancelled. A thread cannot be killed: it is left behind, and delays neither
    the next call, unless all places are taken by such threads, nor the end of the program. Code that must be ended for
    certain belongs in a worker process.
    """

    def __init__(
        self,
        at_a_time: int,
        deadline: float | None,
        in_flight: SamplesInFlight | None = None,
        *,
        field: str = "environment.skyrl_gym.step_timeout_seconds",
        limit: str = "environment.skyrl_gym.max_env_workers",
        pace: Pace | None = None,
    ) -> None:
        """`deadline` is the time limit of each call in seconds, from when it begins to run, without the time for which
        it waits for a service that is away; None: no limit. Calls are counted in `in_flight`. `field` and `limit` are
        the paths of `deadline` and `at_a_time` in messages; `pace` limits how many calls begin in a second.
        """
        self._field, self._limit = field, limit
        self._in_flight = in_flight or SamplesInFlight()
        self._workers, self._mailbox = Workers(_THREADS, at_a_time), Mailbox()
        self._deadline = deadline
        self._pace, self._paced = pace, asyncio.Semaphore(at_a_time)

    async def __call__(self, subject: str, function: Callable[..., T | Awaitable[T]], *args: object) -> tuple[T, float]:
        """Call the function, and await what it returns if that is a coroutine; the result and the run time in seconds.
        Raises `EpisodeError` if it raises or is late; `subject` begins the message.
        """
        if self._pace is None:
            return await self._call_user(subject, function, args)
        async with self._paced:  # so that a place is free once the pace admits the call
            await self._pace()
            return await self._call_user(subject, function, args)

    async def _call_user(self, subject: str, function: Callable[..., Any], args: tuple[object, ...]) -> tuple[T, float]:
        value, error, seconds = await self._outcome(subject, function, args)
        if error is not None:
            _refuse(subject, error)
        return value, seconds

    async def _outcome(
        self, subject: str, function: Callable[..., Any], args: tuple[object, ...]
    ) -> tuple[Any, BaseException | None, float]:
        """Value or exception of the function, and the seconds that it ran. Raises `EpisodeError` if it is late."""
        loop = asyncio.get_running_loop()
        call, result = _EnvCall(function, args, loop.create_future(), self._workers, self._mailbox), None
        if self._deadline is not None:
            call.timer = loop.call_later(self._deadline, self._look, call)
        self._workers.run(call)
        try:
            with self._in_flight.in_environment(call):
                result = await call.outcome
        finally:
            if call.timer is not None:
                call.timer.cancel()
            if result is None:
                self._workers.give_up(call)
                for coroutine in call.coroutines:
                    coroutine.cancel()
        if result is None:
            raise EpisodeError(Failure(kind="timeout", reason=f"{subject} {self._deadline_message(call)}"))
        return result  # type: ignore[no-any-return]  # of the future, which any result can settle

    def _look(self, call: _EnvCall) -> None:
        """End a call whose deadline is over, or that waits for a place which it cannot get; else look again later."""
        loop = asyncio.get_running_loop()
        left = self._remaining_seconds(call, call.outages, loop.time())
        if left <= 0 or (call.start_time is None and self._workers.are_given_up):
            _settle(call.outcome, None)
        else:
            call.timer = loop.call_later(left, self._look, call)

    def _deadline_message(self, call: _EnvCall) -> str:
        if call.start_time is not None:
            return f"gave no answer within {self._deadline:g} s ({self._field})"
        most = self._workers.most
        return (
            f"was not called: calls that missed their deadline still run in all {most} places ({self._limit}). Raise "
            f"it, or let the environment end what takes longer than {self._deadline:g} s ({self._field})"
        )

    def _remaining_seconds(self, call: ThreadCall, outages: Outages, now: float) -> float:
        """Seconds until the deadline of a call, which does not run while a service is away; for one that does not run
        yet, until it can pass at the earliest.
        """
        assert self._deadline is not None
        return self._deadline + (0.0 if call.start_time is None else call.start_time + outages.seconds(now) - now)


def called_immediately(subject: str, function: Callable[..., T], *args: object) -> tuple[T, float]:
    """Call a function that returns within microseconds, on the event loop, where a thread would take longer than it
    does; otherwise like `EnvCalls`.
    """
    start = time.perf_counter()
    try:
        value = function(*args)
    except Exception as error:  # noqa: BLE001  # any error of an environment is an outcome of its sample
        _refuse(subject, error)
    return value, time.perf_counter() - start


def _refuse(subject: str, error: BaseException) -> NoReturn:
    """Raise what a call raised as an `EpisodeError`, unless a service is gone."""
    if isinstance(error, EpisodeError | ServiceGone):
        raise error
    raise EpisodeError(_outcome(subject, error)) from error


def _outcome(subject: str, error: BaseException) -> Failure | Skipped:
    match error:
        case SkipSample():
            return Skipped(f"{subject} skips it: {_short(str(error))}")
        case WorkerEnded():
            return Failure(kind=_KINDS[error.how], reason=f"{subject} {_short(str(error))}")
        case RewardError():
            return Failure(kind="raised", reason=f"{subject} {_short(str(error))}")
        case _:
            return Failure(kind="raised", reason=f"{subject} raised {_describe_error(error)}")


def number(value: Any, prefix: str) -> float:
    """Any kind of finite number, as a float. Raises `EpisodeError` for anything else; `prefix` begins the message."""
    try:
        real = float(value) if not isinstance(value, str | bytes) else None
    except (TypeError, ValueError, OverflowError):
        real = None
    if real is None or not math.isfinite(real):
        kind: Literal["wrong_type", "not_finite"] = "wrong_type" if real is None else "not_finite"
        is_text = "a text, " if isinstance(value, str | bytes) else ""
        reason = f"{prefix} {_short(repr(value))}, which is {is_text}not a finite number"
        raise EpisodeError(Failure(kind=kind, reason=reason))
    return real


def _describe_error(error: BaseException) -> str:
    """Type and message, shortened, and the line of the user's code that raised it."""
    location = raised_at(error)
    return f"{type(error).__name__}: {_short(str(error))}" + (f" ({location})" if location else "")


def _settle(outcome: asyncio.Future[Any], result: object) -> None:
    if not outcome.done():
        outcome.set_result(result)


def _short(text: str) -> str:
    text = redacted(text.encode(errors="backslashreplace").decode())  # first: half a secret is not recognized
    return text if len(text) <= 400 else text[:397] + "..."
