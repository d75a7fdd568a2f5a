"""Actors as the driver sees them: handles that call the objects in them, and a watch over their lives.

Every actor is asked for a heartbeat every few seconds, and its death is noticed when it happens. A handle calls its
object with a deadline, and reports which process failed, how and where.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError, RayError

from skyrl.errors import ProcessError, ProcessLost, WeightSyncError
from skyrl.processes.addresses import why_unreachable
from skyrl.processes.calls import CallFailure, CallResult, name_of
from skyrl.processes.handles import ExitNotice
from skyrl.processes.logs import end_of, last_line, last_words
from skyrl.processes.progress import Progress

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")

GRACE = 10.0
"""Seconds in which a rank that does not answer may turn out to be dead, which then explains the others' errors."""

_NOTHING: Callable[[], str | None] = lambda: None  # noqa: E731 - a default
_ASK = 5.0
_DUMP = 2.0

_calls = itertools.count()


class Member:
    """One actor as the driver knows it."""

    def __init__(
        self, role: str, rank: int, actor: ActorHandle[Any], log: Path, why_all_end: Callable[[], str | None] = _NOTHING
    ) -> None:
        """`why_all_end` returns the cause of the end of all actors, if there is one."""
        self.role, self.rank, self.name = role, rank, f"{role}-{rank}"
        self.actor, self.log, self._why_all_end = actor, log, why_all_end
        self.location = "not started yet"
        self.machine: tuple[str, int] | None = None
        """Address and port of Ray on its machine, if that may be another machine; None on this one."""

        self.exit_notice = ExitNotice()
        self.busy: dict[int, str] = {}
        self.asked: Any = None
        self.seen = time.monotonic()
        self.is_starting = True

    def __str__(self) -> str:
        return f"{self.name} ({self.location})"

    def died(self, error: BaseException) -> None:
        """Record the end of a process whose actor Ray has given up."""
        cause = self._why_all_end() or last_words(self.log) or death_reason(error, self.machine)
        line = last_line(self.log)
        last = f"; last line of its log: {line}" if line and not last_words(self.log) else ""
        self.exit_notice.set(ProcessLost(f"{self} died: {cause}{last}; log: {self.log}", self.name))


class Watch:
    """Watches members, and what they all need, from a thread until it is closed; `heartbeat` is in seconds."""

    def __init__(self, heartbeat: float, why_all_end: Callable[[], str | None] = _NOTHING) -> None:
        """`why_all_end` is called with every round of heartbeats."""
        self._why_all_end = why_all_end
        self._heartbeat = heartbeat
        self._period = min(_ASK, heartbeat / 4)
        self._members: list[Member] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="skyrl-watch", daemon=True)
        self._thread.start()

    def add(self, member: Member) -> None:
        """Begin to watch a member that has introduced itself. Until it has started, only its death is noticed: imports
        and the loading of a model send no heartbeats, and the deadline of the start bounds them.
        """
        member.actor.live.remote().future().add_done_callback(lambda life: self._note_end(member, life.exception()))
        self._members.append(member)

    def has_started(self, member: Member) -> None:
        """Expect heartbeats of the member from now on."""
        member.seen, member.is_starting = time.monotonic(), False

    def remove(self, member: Member) -> None:
        """Stop watching a member, before it is ended on purpose."""
        self._members = [other for other in self._members if other is not member]

    def close(self) -> None:
        """Stop watching; processes that end from now on were ended on purpose."""
        self._closing.set()
        self._members = []
        self._thread.join(timeout=2 * _DUMP)

    def group(self, role: str) -> list[Member]:
        """Members of this role, which compute together."""
        return [member for member in self._members if member.role == role]

    def first_cause(self, member: Member, since: float) -> ProcessError | None:
        """The error of the first of the member's group to end after `since` (by `time.monotonic`); None if none did."""
        ended = [
            other.exit_notice
            for other in [member, *self.group(member.role)]
            if since <= other.exit_notice.noticed < math.inf
        ]
        return min(ended, key=lambda exit_notice: exit_notice.noticed).error if ended else None

    def dump_stacks(self, members: Sequence[Member]) -> None:
        """Write the stacks of all threads into the logs of the members that still answer."""
        dumps: list[Any] = [member.actor.dump_stacks.remote() for member in members if member.exit_notice.error is None]
        if dumps:
            with contextlib.suppress(RayError):
                ray.wait(dumps, num_returns=len(dumps), timeout=_DUMP)

    def _note_end(self, member: Member, error: BaseException | None) -> None:
        if error is not None and member in self._members and not self._closing.is_set():
            member.died(error)

    def _run(self) -> None:
        looked = time.monotonic()
        while not self._closing.wait(self._period):
            asleep = max(0.0, time.monotonic() - looked - 2 * self._period)
            for member in self._members:
                member.seen += asleep  # this process was stopped itself, and heard no heartbeats
                if member.exit_notice.error is None:
                    try:
                        self._look_at(member)
                    except RayError as error:
                        member.died(error)
            self._why_all_end()
            looked = time.monotonic()

    def _look_at(self, member: Member) -> None:
        if member.asked is None or ray.wait([member.asked], timeout=0)[0]:
            if member.asked is not None:
                member.seen = time.monotonic()
            member.asked = member.actor.ping.remote()
        silent = time.monotonic() - member.seen
        if silent > self._heartbeat and not member.is_starting:
            self.dump_stacks([other for other in self.group(member.role) if other is not member])
            busy = f" while it ran {', '.join(member.busy.values())}" if member.busy else ""
            member.exit_notice.set(
                ProcessLost(
                    f"{member} has given no sign of life for {silent:.0f} s{busy}: {_silence_reason(member)}; what the "
                    f"other ranks were doing is in their logs; log: {member.log}",
                    member.name,
                )
            )


def _silence_reason(member: Member) -> str:
    """Explanation of a member's silence: its machine cannot be reached, or its process does not answer."""
    reason = why_unreachable(*member.machine) if member.machine else None
    if reason is None or member.machine is None:
        return "it is stopped, or hangs in native code"
    address, port = member.machine
    return f"its machine {address} cannot be reached ({reason} at port {port}): it is down, or the network is cut"


def death_reason(error: BaseException, machine: tuple[str, int] | None = None) -> str:
    """Ray's reason for an actor's end, in a few words; `machine` is the address and port of Ray on its machine."""
    text = " ".join(str(error).split())
    reason = text.partition("The actor is dead because ")[2] or text
    if "node has died" in reason or "node was terminated" in reason:
        which = f"its machine {machine[0]}" if machine else "its machine"
        return f"{which} no longer answers Ray: it is down, Ray stopped there, or the network is cut"
    if isinstance(error, ActorUnavailableError):
        return (
            f"the connection to it was lost: the machine or the network failed, or it was killed ({end_of(text, 120)})"
        )
    if isinstance(error, OutOfMemoryError):
        return f"Ray killed it because the machine ran out of memory ({reason[:200]})"
    if "creation task" in reason:
        return f"it could not begin ({end_of(reason, 200)})"
    if "ray.kill" in reason:
        return "it was killed by ray.kill"
    if "connection error code 2" in reason:
        return "it was killed from outside (SIGKILL, perhaps by the kernel's out-of-memory killer)"
    return (reason.partition("Worker exit detail: ")[2] or reason)[:200]


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
