"""Implementation of `Processes` on Ray: every rank is an actor at its place, watched until the run ends it.

A context of a `RayProcesses` has the cluster. `handles.py` shows how its processes are started and called.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import ray
from ray import ObjectRef
from ray.exceptions import RayError

from skyrl.errors import ProcessError
from skyrl.planning.layout import Layout
from skyrl.processes.addresses import is_loopback
from skyrl.processes.calls import CallFailure, CallResult
from skyrl.processes.handles import Deadlines, ExitNotice, Group
from skyrl.processes.orphans import PRIVATE, folder_of_this_process
from skyrl.processes.progress import Progress
from skyrl.processes.ray.cluster import Device, attach, clock_difference, start
from skyrl.processes.ray.host import ActorSettings, HostActor, Introduction
from skyrl.processes.ray.placement import Placement
from skyrl.processes.ray.watch import Member, RayHandle, Watch, failed

T = TypeVar("T")

OBJECT_STORE_BYTES = 1 << 28
"""Object store of a private cluster, in bytes: results and arguments under way."""

_LOOK = 0.25


class RayProcesses:
    """Actors on a private cluster (`address` None) or on a running one; `logs` is the folder of their log files.
    Messages name the field of the address by `address_field`.

    `environment` is set in every actor before it imports anything heavy. It must not contain secrets: a private cluster
    inherits the environment of this process, and the machines of a running one have theirs. Raises `ProcessError` if
    there is no cluster or no room on it.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        deadlines: Deadlines,
        address: str | None,
        address_field: str = "trainer.placement.ray_address",
        logs: Path,
        device: Device,
        environment: Mapping[str, str] = {},
        spare: int = 0,
    ) -> None:
        """`spare` is the number of places for processes that may be added, on a private cluster without GPUs."""
        self.step = 0
        """The current step of the run, shown on the lines of the logs."""
        self.progress = Progress()
        self.exit_notice = ExitNotice()
        self._layout, self._deadlines, self._device = layout, deadlines, device
        self._logs, self._environment = logs.absolute(), dict(environment)
        self._members: list[Member] = []
        self._prepared: dict[str, list[Member]] = {}
        self._closed = False
        self._placement: Placement | None = None
        if address is None:
            slots = sum(pool.gpus_per_node for pool in layout.pools) + spare
            self._cluster = start(slots, device, OBJECT_STORE_BYTES)
        else:
            self._cluster = attach(address, deadlines.start, address_field)
        self._watch = Watch(deadlines.heartbeat, self._common_cause)
        try:
            self._placement = Placement(layout, device, deadlines.start, patience=deadlines.room)
            self.where = {(placed.role, placed.rank): self._placement.place(placed) for placed in layout.placements}
            """Location of each (role, rank)."""
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def host(self) -> str:
        return self._cluster.host

    def prepare(self, role: str, makers: Sequence[Callable[[], object]]) -> None:
        members = self._prepared[role] = self._actors(role, makers)
        for member, maker in zip(members, makers, strict=True):
            member.actor.prepare.remote([ray.put(maker)])

    def start(self, role: str, makers: Sequence[Callable[[], T]]) -> Group[T]:
        members = self._prepared.pop(role, None) or self._actors(role, makers)
        return Group(self._start_objects(members, makers))

    def _actors(self, role: str, makers: Sequence[object]) -> list[Member]:
        """The actors of a role, which start now."""
        assert len(makers) == len(self._layout.placements_of(role)), f"{len(makers)} makers for the seats of {role}"
        members = [self._start_actor(role, rank) for rank in range(len(makers))]
        self._members += members
        return members

    def restart(self, role: str, rank: int, maker: Callable[[], T]) -> RayHandle[T]:
        assert self._placement is not None, "there was such a process"
        self._end([member for member in self._members if (member.role, member.rank) == (role, rank)])
        if not self._placement.is_there(self.where[role, rank]):
            self.where[role, rank] = self._placement.moved(role, rank, self._deadlines.start)
        member = self._start_actor(role, rank)
        self._members.append(member)
        [handle] = self._start_objects([member], [maker])
        return handle

    def add(self, seat: Layout, maker: Callable[[], T]) -> RayHandle[T]:
        assert self._placement is not None, "there are processes already"
        [placed] = seat.placements
        self._placement.add(seat, self._deadlines.start)
        self.where[placed.role, placed.rank] = self._placement.place(placed)
        try:
            return self.restart(placed.role, placed.rank, maker)
        except BaseException:
            self.remove(placed.role, placed.rank)
            raise

    def remove(self, role: str, rank: int) -> None:
        self._end([member for member in self._members if (member.role, member.rank) == (role, rank)])
        if self._placement is not None and self.where.pop((role, rank), None) is not None:
            self._placement.give_back(role, rank)

    def _start_objects(self, members: Sequence[Member], makers: Sequence[Callable[[], T]]) -> list[RayHandle[T]]:
        """Handles of the objects, once every process has started and made its object. On failure, all are ended."""
        deadline = time.monotonic() + self._deadlines.start
        try:
            names = ", ".join(member.name for member in members)
            with self.progress.waiting_for(f"the start of {names}"):
                self._introduce(members, deadline)
            with self.progress.waiting_for(f"{names} to import packages and load what it needs"):
                refs = [
                    member.actor.make.remote([ray.put(maker)]) for member, maker in zip(members, makers, strict=True)
                ]
                self._wait(members, refs, "start", deadline)
                for member in members:
                    self._watch.has_started(member)
        except BaseException:
            self._end(members)
            raise
        return [
            RayHandle(member, self._watch, lambda: self.step, self._deadlines.call, self.progress) for member in members
        ]

    def dump_stacks(self) -> list[Path]:
        """Write the stacks of the processes that still answer."""
        members = list(self._members)
        self._watch.dump_stacks(members)
        return [member.log for member in members]

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._watch.close()
            if self._common_cause() is None:
                self._end(self._members)
                if self._placement is not None:
                    with contextlib.suppress(RayError):
                        self._placement.remove()
        finally:
            self._cluster.close(lost=self.exit_notice.error is not None)

    def _common_cause(self) -> str | None:
        """The cause of the end of every process, if Ray itself is gone: noticed at the first call, and told to all."""
        if self.exit_notice.error is None and (lost := self._cluster.loss_reason()):
            self.exit_notice.set(ProcessError(lost))
        return None if self.exit_notice.error is None else str(self.exit_notice.error)

    def _start_actor(self, role: str, rank: int) -> Member:
        place, log = self.where[role, rank], self._logs / f"{role}-{rank}.log"
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(place.gpus)} if self._device == "cuda" else {}
        private = {PRIVATE: str(self._cluster.folder)} if self._cluster.folder else {}
        settings = ActorSettings(
            name=f"{role}-{rank}",
            folder=Path.cwd(),
            mark=f"{folder_of_this_process(Path()).name}/{role}-{rank}",
            log=log,
            environment={**self._environment, **visible, **private},
        )
        actor = HostActor.options(num_cpus=0, scheduling_strategy=place.strategy).remote(settings)
        member = Member(role, rank, actor, log, self._common_cause)
        if not is_loopback(place.address):
            member.location, member.machine = f"not started yet on {place.address}", (place.address, place.port)
        return member

    def _introduce(self, members: Sequence[Member], deadline: float) -> None:
        """Wait until every process has started, set its clock and begin to watch it."""
        introductions = self._wait(members, [member.actor.introduce.remote() for member in members], "start", deadline)
        for member, about in zip(members, introductions, strict=True):
            assert isinstance(about, Introduction)
            where = about.host if is_loopback(about.address) else f"{about.host} ({about.address})"
            member.location = f"process {about.pid} on {where}, node {about.node[:8]}"
            self._watch.add(member)
            try:
                member.actor.adjust_clock.remote(-clock_difference(member.actor.clock.remote, tries=3))
            except RayError as error:
                raise failed(member, "start", error) from None

    def _wait(self, members: Sequence[Member], references: Sequence[Any], doing: str, deadline: float) -> list[Any]:
        """Wait for the results, in order; raises for the first process that fails, dies or is late."""
        waiting = dict(zip(references, members, strict=True))
        results: dict[Any, Any] = {}
        while waiting:
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=_LOOK)
            _heed_cancellation()
            for reference in ready:
                results[reference] = self._checked(waiting.pop(reference), reference, doing)
            for member in members:
                if member.exit_notice.error is not None:
                    raise member.exit_notice.error
            if waiting and time.monotonic() > deadline:
                late = list(waiting.values())
                self._watch.dump_stacks(late)
                names = ", ".join(str(member) for member in late)
                raise ProcessError(
                    f"After {self._deadlines.start:g} s these have not started: {names}; logs: {late[0].log.parent}"
                )
        return [results[reference] for reference in references]

    def _checked(self, member: Member, reference: ObjectRef[Any], doing: str) -> Any:
        try:
            outcome = ray.get(reference)
        except RayError as error:
            raise failed(member, doing, error) from None
        match outcome:
            case CallResult():
                return outcome.value
            case CallFailure():
                raise outcome.ours or failed(member, doing, outcome)
            case _:
                return outcome

    def _end(self, members: Iterable[Member]) -> None:
        """Kill these actors. Ray ends their processes within seconds, including stopped ones."""
        for member in members:
            self._watch.remove(member)
            with contextlib.suppress(RayError):
                ray.kill(member.actor)
        self._members = [member for member in self._members if member not in list(members)]


def _heed_cancellation() -> None:
    """Raise a pending Ctrl-C: asyncio cancels the running task, which notices only when it next awaits."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return  # no loop runs in this thread: Ctrl-C is a KeyboardInterrupt
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
