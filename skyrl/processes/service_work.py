"""Threads on which a service works for its clients, and how the work learns that its client is gone."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from attrs import frozen

T = TypeVar("T")


@frozen
class HangUp:
    """The end of a client. It has happened once the other end of `line` is closed."""

    line: socket.socket

    def fileno(self) -> int:
        """A descriptor that is readable once the client is gone."""
        return self.line.fileno()

    def has_happened(self) -> bool:
        """Whether the client is gone."""
        watch = select.poll()
        watch.register(self.line, select.POLLIN)
        return bool(watch.poll(0))


class ServiceThreads:
    """The threads of one service."""

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def run(self, work: Callable[[HangUp], T]) -> T:
        """The result of `work` on one of the threads. If this call is cancelled, work that has not begun never does,
        and work that has begun learns from its argument that nobody waits for it any more.
        """
        caller_socket, worker_socket = socket.socketpair()
        with caller_socket:  # closes, and so tells the thread, also if this call is cancelled
            future = self._pool.submit(work, HangUp(worker_socket))
            future.add_done_callback(lambda _: worker_socket.close())
            return await asyncio.wrap_future(future)
