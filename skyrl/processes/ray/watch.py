"""Liveness: every actor is asked for a heartbeat every few seconds, and its death is noticed when it happens."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayError

from skyrl.errors import ProcessError, ProcessLost
from skyrl.processes.addresses import why_unreachable
from skyrl.processes.handles import ExitNotice
from skyrl.processes.logs import end_of, last_line, last_words

GRACE = 10.0
"""Seconds in which a rank that does not answer may turn out to be dead, which then explains the others' errors."""

_NOTHING: Callable[[], str | None] = lambda: None  # noqa: E731 - a default
_ASK = 5.0
_DUMP = 2.0


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
