"""Processes that stay, so that a module's tests share the seconds that starting them takes."""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import threading
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import attrs
import torch

from skyrl.learners.ranks import Ranks, Rendezvous
from skyrl.planning.replicas import Replicas
from skyrl.processes.calls import apply
from skyrl.processes.handles import Group
from tests.forkserver import CONTEXT

PATIENCE = 120.0
"""Seconds that a rank of a test waits for another."""


class PipeHandle:
    """One object in another process; see `skyrl.processes.handles.Handle`."""

    def __init__(self, name: str, pipe: Connection) -> None:
        self.name, self._pipe = name, pipe
        self._one_at_a_time = threading.Lock()

    def with_deadline(self, seconds: float) -> PipeHandle:
        return self

    async def call(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        return await asyncio.to_thread(self.ask, method, args, kwargs)

    def ask(self, method: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self._one_at_a_time:
            self.tell(method, args, kwargs)
            return self.answer()

    def tell(self, method: Any, args: Any = (), kwargs: Any = None) -> None:
        self._pipe.send_bytes(pickle.dumps((method, args, kwargs or {})))

    def answer(self) -> Any:
        assert self._pipe.poll(2 * PATIENCE), f"{self.name} does not answer"
        failed, result = pickle.loads(self._pipe.recv_bytes())
        if failed:
            raise result
        return result


class Pool:
    """Some processes. A group takes as many of them as it has ranks, from the front; one group lives at a time."""

    def __init__(self, size: int, *, stay: bool = False) -> None:
        """With `stay` they join one process group for good, as DeepSpeed expects, and all groups are of `size`."""
        self._rendezvous = Rendezvous(timeout=PATIENCE)
        self._handles, self._processes = [], []
        self._groups = 0
        for rank in range(size):
            parent_end, child_end = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_serve, args=(child_end,), daemon=True)
            process.start()
            self._processes.append(process)
            self._handles.append(PipeHandle(f"rank-{rank}", parent_end))
        self._ranks = self._rendezvous.ranks("all", size) if stay else None
        for handle, own in zip(self._handles, self._ranks or (), strict=False):
            handle.tell(_stay, (own,))
        for handle in self._handles if stay else ():
            handle.answer()

    def start(self, maker: Callable[..., Any], size: int, replicas: Replicas | None = None) -> Group[Any]:
        """`maker(ranks=...)` in each of `size` processes; what was made there before is closed."""
        self._groups += 1
        for handle in self._handles:
            handle.ask(_close)
        handles = self._handles[:size]
        ranks = self._ranks or self._rendezvous.ranks(f"group-{self._groups}", size)
        reporting = range(size) if replicas is None else replicas.reporting
        ranks = tuple(attrs.evolve(own, reports=own.rank in reporting) for own in ranks)
        for handle, own in zip(handles, ranks, strict=True):
            handle.tell(_make, (maker, own))
        failures = [failure for failure in map(_failure_of, handles) if failure]
        if failures:
            raise failures[0]
        return Group(handles)

    def close(self) -> None:
        for handle in self._handles:
            handle.ask(_close)
        for handle, own in zip(self._handles, self._ranks or (), strict=False):
            handle.tell(_go, (own,))
        for handle in self._handles if self._ranks else ():
            handle.answer()
        for handle in self._handles:
            handle.tell(None)
        for process in self._processes:
            process.join(PATIENCE)
            if process.is_alive():
                process.kill()
                process.join()
        self._rendezvous.close()


def _failure_of(handle: PipeHandle) -> BaseException | None:
    try:
        handle.answer()
    except Exception as failure:  # noqa: BLE001 - whatever it was: it is raised once all have answered
        return failure
    return None


def _make(state: dict[str, Any], maker: Callable[..., Any], ranks: Any) -> None:
    state["object"] = maker(ranks=ranks)


def _close(state: dict[str, Any]) -> None:
    instance = state.pop("object", None)
    if instance is not None:
        instance.close()


def _stay(state: dict[str, Any], ranks: Ranks) -> None:
    ranks.join(torch.device("cpu"))


def _go(state: dict[str, Any], ranks: Ranks) -> None:
    ranks.leave()


_OURS: Sequence[Any] = (_make, _close, _stay, _go)


def _serve(pipe: Connection) -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")  # OPT; nothing writes into it
    state: dict[str, Any] = {}
    while True:
        method, args, kwargs = pickle.loads(pipe.recv_bytes())
        if method is None:
            os._exit(0)  # taking apart an interpreter with torch in it takes a second
        try:
            result = method(state, *args, **kwargs) if method in _OURS else apply(state["object"], method, args, kwargs)
            result = asyncio.run(result) if inspect.iscoroutine(result) else result
            answer = pickle.dumps((False, result))
        except BaseException as failure:  # noqa: BLE001 - it is raised where the call was made
            answer = pickle.dumps((True, failure))
        pipe.send_bytes(answer)
