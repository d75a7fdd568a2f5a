"""The actor around an object: it gives the object its environment, its log and a thread, and runs calls on it.

The object lives on one event loop, as it does in the process of the command: it is made there, and its methods run
there one at a time, with coroutines interleaved. Heartbeats come from a separate thread, so that a long computation can
be distinguished from a process that hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import inspect
import logging
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from attrs import frozen

from skyrl.errors import SkyRLError
from skyrl.processes.addresses import interface_of
from skyrl.processes.calls import CallFailure, CallResult, Name, apply, resolve_name, summary
from skyrl.processes.garbage import SELDOM, Collections
from skyrl.processes.logs import RankLog
from skyrl.processes.orphans import HOST, start_reaper


@frozen(kw_only=True)
class ActorSettings:
    """Arguments of an actor, given before it makes its object."""

    name: str
    mark: str
    folder: Path
    """Working directory of the command, so that relative paths mean the same here, if this machine has it."""

    log: Path
    environment: Mapping[str, str]
    """Environment variables. They must not contain secrets, since Ray stores the arguments of actors."""


@frozen(kw_only=True)
class Introduction:
    """An actor's description of itself."""

    pid: int
    host: str
    address: str
    """Address of its machine in the cluster."""

    node: str


class Host:
    """The actor around an object; `HostActor` is its remote class."""

    def __init__(self, settings: ActorSettings) -> None:
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command, which ends its actors itself
        self._reaper = start_reaper(HOST, settings.mark)
        os.environ.update(settings.environment)
        os.environ[HOST] = settings.mark
        # Unless one is configured, gloo uses the interface by which this machine is in the cluster. Its default is the
        # address of the host's name, which other machines often cannot reach (127.0.1.1, by Debian's /etc/hosts).
        interface = interface_of(_node_address())
        if interface is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        with contextlib.suppress(OSError):
            os.chdir(settings.folder)
        self._log = RankLog(settings.log, settings.name)
        self._object: Any = None
        self._collections = Collections()

    @ray.method(concurrency_group="life")
    async def introduce(self) -> Introduction:
        node = ray.get_runtime_context().get_node_id()
        return Introduction(pid=os.getpid(), host=socket.gethostname(), address=_node_address(), node=node)

    @ray.method(concurrency_group="life")
    async def clock(self) -> float:
        """Seconds since 1970 on this machine's clock."""
        return time.time()

    @ray.method(concurrency_group="life")
    async def adjust_clock(self, offset: float) -> None:
        """Add `offset` seconds to the times in the log."""
        self._log.offset = offset

    @ray.method(concurrency_group="life")
    async def ping(self) -> None:
        """Heartbeat: returns at once if the process is alive."""

    @ray.method(concurrency_group="life")
    async def live(self) -> None:
        """Never returns; Ray ends it when the process has ended."""
        await asyncio.Event().wait()

    @ray.method(concurrency_group="life")
    async def dump_stacks(self) -> None:
        """Write the stacks of every thread into the log."""
        self._log.dump_stacks()

    async def prepare(self, maker: Sequence[Any]) -> None:
        """Import what a maker needs. What fails here fails again, and is reported, when the object is made."""
        try:
            factory = await maker[0]
            if prepare := getattr(getattr(factory, "func", None), "prepare", None):
                prepare(*factory.args, **factory.keywords)
        except (Exception, SystemExit) as error:
            logging.getLogger(__name__).debug("preparing failed", exc_info=error)

    async def make(self, maker: Sequence[Any]) -> CallResult | CallFailure:
        """Make the object. The maker is a reference in a list, which Ray does not resolve: it is unpickled here, so
        that its imports happen after the environment and the log are set up.
        """
        try:
            self._object = (await maker[0])()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a stranger's code; the driver raises it
            return self._failure("start", error)
        gc.freeze()  # these objects last as long as the process, and need not be searched for garbage
        gc.set_threshold(*SELDOM)
        return CallResult(None)

    async def call(
        self, step: int, name: Name, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> CallResult | CallFailure:
        """Call the method of this name on the object."""
        if step != self._log.step:
            self._collections.between_steps()
            self._log.begin_step(step)
        try:
            result = apply(self._object, resolve_name(name), args, kwargs)
            return CallResult(await result if inspect.isawaitable(result) else result)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a stranger's code; the driver raises it
            return self._failure(name[1], error)

    def _failure(self, doing: str, error: BaseException) -> CallFailure:
        logging.getLogger(__name__).error("%s failed", doing, exc_info=error)
        return CallFailure(error if isinstance(error, SkyRLError) and _travels(error) else None, summary(error))


def _node_address() -> str:
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]  # Ray


def _travels(error: SkyRLError) -> bool:
    try:
        return str(copy.copy(error)) == str(error)  # rebuilt as by pickling
    except Exception:  # noqa: BLE001 - whatever a stranger's subclass raises, its message can still travel
        return False


_remote: Any = ray.remote  # its types know no concurrency groups
HostActor: Any = _remote(concurrency_groups={"life": 16}, max_restarts=0, max_task_retries=0)(Host)
