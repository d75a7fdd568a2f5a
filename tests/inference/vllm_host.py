"""A process of its own for vLLM: in the process of the tests it would leave a process group, patched torch functions
and changed logging behind.

    with Host() as host:
        host.run(scenario, argument)      # `await scenario(argument)` there, and its result or exception here
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Callable, Coroutine
from multiprocessing.connection import Connection
from typing import Any, ParamSpec, Self, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_DEADLINE = 280.0
"""Seconds for one scenario; a test ends with a message before the watch of pytest itself."""


class Host:
    """Runs coroutine functions in another process, one after the other, on one event loop."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, child_connection = context.Pipe()
        self.process = context.Process(target=_serve, args=(child_connection,), name="vllm-host")
        self.process.start()
        child_connection.close()

    def run(self, scenario: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Arguments and results are pickled; the scenario has to be importable."""
        self._connection.send((scenario, args, kwargs))
        if not self._connection.poll(_DEADLINE):
            self.process.kill()  # its answer would come in the place of the next one's
            raise TimeoutError(f"{scenario.__name__} took more than {_DEADLINE:.0f} s; nothing runs in this host again")
        error, result = self._connection.recv()
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]  # as it was sent

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self.process.join(30)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _serve(connection: Connection) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["HF_HUB_OFFLINE"] = "1"
    with asyncio.Runner() as runner:
        while True:
            try:
                scenario, args, kwargs = connection.recv()
            except EOFError:
                os._exit(0)  # no destructor of vLLM has a say
            try:
                answer: tuple[Exception | None, Any] = (None, runner.run(scenario(*args, **kwargs)))
            except Exception as error:  # noqa: BLE001 - it is raised where the scenario was asked for
                answer = (error, None)
            connection.send(answer)
