"""A handle of an object in an actor: calls it with a deadline, and reports which process failed, how and where."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import ray
from ray import ObjectRef
from ray.exceptions import RayActorError

from skyrl.errors import ProcessError, WeightSyncError
from skyrl.processes.calls import CallFailure, CallResult, name_of
from skyrl.processes.logs import end_of
from skyrl.processes.progress import Progress
from skyrl.processes.ray.watch import GRACE, Member, Watch

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")

_calls = itertools.count()


class RayHandle(Generic[T]):
    """Implementation of `Handle` for an object in an actor. `step` is called at every call, to mark the lines of the
    log.
    """

    def __init__(
        self, member: Member, watch: Watch, step: Callable[[], int], seconds: float, progress: Progress
    ) -> None:
        self._member, self._watch, self._step, self._seconds = member, watch, step, seconds
        self._progress = progress

    @property
    def name(self) -> str:
        return self._member.name

    def with_deadline(self, seconds: float) -> RayHandle[T]:
        return RayHandle(self._member, self._watch, self._step, seconds, self._progress)

    @overload
    async def call(self, method: Callable[Concatenate[T, P], Awaitable[R]], *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    async def call(self, method: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs) -> R: ...
    async def call(self, method: Callable[..., object], *args: object, **kwargs: object) -> object:
        name = name_of(method)
        if self._member.exit_notice.error is not None:
            raise self._member.exit_notice.error
        number = next(_calls)
        self._member.busy[number] = name[1]
        try:
            with self._progress.waiting_for(f"{self._member} in {name[1]}"):
                return await self._outcome(self._member.actor.call.remote(self._step(), name, args, kwargs), name[1])
        finally:
            self._member.busy.pop(number, None)

    async def _outcome(self, reference: ObjectRef[Any], method: str) -> object:
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._seconds):
                outcome = await _answer_or_end(reference.future(), self._member)
        except TimeoutError:
            raise await self._deadline_error(method, began) from None
        except asyncio.CancelledError:
            ray.cancel(reference)
            raise
        if isinstance(outcome, CallResult):
            return outcome.value
        ours = outcome.ours if isinstance(outcome, CallFailure) else None
        if ours is not None and not isinstance(ours, WeightSyncError):  # another rank's end may cause such an error
            raise ours
        raise await self._wait_for_cause(outcome, began) or ours or failed(self._member, method, outcome)

    async def _wait_for_cause(self, outcome: object, began: float) -> ProcessError | None:
        """The end of another rank that explains this rank's error, if any. Waits until every other rank has answered or
        is dead.
        """
        if isinstance(outcome, RayActorError):
            self._member.died(outcome)
        group = self._watch.group(self._member.role)
        others = [other for other in group if other is not self._member and other.exit_notice.error is None]
        pings: list[Future[Any]] = [other.actor.ping.remote().future() for other in others]
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline and not all(ping.done() and ping.exception() is None for ping in pings):
            if any(other.exit_notice.error is not None for other in others):
                break
            await asyncio.sleep(0.02)
        return self._watch.first_cause(self._member, began)

    async def _deadline_error(self, method: str, began: float) -> ProcessError:
        member, group = self._member, self._watch.group(self._member.role)
        await asyncio.to_thread(self._watch.dump_stacks, group)
        if (cause := self._watch.first_cause(member, began)) is not None:
            return cause
        others = [f"{other.name} in {'/'.join(other.busy.values())}" for other in group if other.busy]
        others = [text for text in others if not text.startswith(f"{member.name} ")]
        busy = f"; also busy: {', '.join(others)}" if others else ""
        return ProcessError(
            f"{member} did not return from {method} within {self._seconds:g} s{busy}; what it was doing is at the end "
            f"of its log: {member.log}"
        )


async def _answer_or_end(answer: Future[Any], member: Member) -> Any:
    """The actor's answer, the exception that Ray has instead, or the cause of the actor's end."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Any] = loop.create_future()

    def settle(answer: object) -> None:
        if not outcome.done():
            outcome.set_result(answer)

    def tell(read: Callable[[], Any]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(lambda: settle(read()))

    answer.add_done_callback(lambda future: tell(lambda: future.exception() or future.result()))
    forget = member.exit_notice.listen(lambda: tell(lambda: member.exit_notice.error))
    try:
        return await outcome
    finally:
        forget()


def failed(member: Member, doing: str, outcome: object) -> ProcessError:
    """The exception for an outcome that is not a result."""
    match outcome:
        case CallFailure():
            return ProcessError(f"{member} failed in {doing}: {outcome.summary}; log: {member.log}")
        case RayActorError():
            member.died(outcome)
            assert member.exit_notice.error is not None
            return member.exit_notice.error
        case ProcessError():
            return outcome
        case _:
            return ProcessError(f"{member} failed in {doing}: {end_of(str(outcome), 300)}; log: {member.log}")
