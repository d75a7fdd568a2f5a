"""Runs the endpoint on a separate thread, next to the event loop of the engines.

The server's own loop reads requests, renders templates and tokenizes; sampling is handed over to the loop of the run.
No signal handler is installed: the run handles signals.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.endpoint.client_access import TOKEN_VARIABLE, Address
from skyrl.endpoint.control import EngineControl
from skyrl.endpoint.http.app import endpoint_app
from skyrl.endpoint.http.control_routes import ControlRoutes
from skyrl.endpoint.policy import Generate, Policy, ServedPolicy
from skyrl.endpoint.trajectories import Trajectories
from skyrl.errors import RunError
from skyrl.processes.service import listen, server_of

T = TypeVar("T")


class Endpoint:
    """A running endpoint. Create it on the event loop that `generate` belongs to."""

    def __init__(
        self,
        served: ServedPolicy,
        tokenizer: ChatTokenizer,
        generate: Generate,
        address: Address,
        control: EngineControl | None = None,
    ) -> None:
        """Start to listen. `control` lets clients pause the engines and replace their weights.

        Raises `UserError` for an address that other machines can reach without a token, and `ProcessError` for one that
        cannot be bound.
        """
        bound = listen(address.host, address.port, address.access.token, TOKEN_VARIABLE)
        host = f"[{address.host}]" if ":" in address.host else address.host
        self.url = f"http://{host}:{bound.getsockname()[1]}"
        """Address of the server, such as `http://127.0.0.1:8000`; OpenAI's clients need `/v1` appended."""
        self.trajectories = Trajectories()
        self._engines = _HandOver(asyncio.get_running_loop())
        self._policy = Policy(served, tokenizer, lambda request: self._engines.call(lambda: generate(request)))
        more = [] if control is None else [ControlRoutes(control, self._engines.call)]
        self._server = server_of(endpoint_app(self._policy, self.trajectories, address.access, *more))
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [bound]}, name="endpoint", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Accept no more requests and cancel the running ones; call it on the loop of the engines."""
        self._server.should_exit = True
        self._engines.close()

    async def close(self) -> None:
        """Stop, and wait until the server has ended."""
        self.stop()
        await asyncio.to_thread(self._thread.join)
        self._policy.close()


@asynccontextmanager
async def serving(
    served: ServedPolicy,
    tokenizer: ChatTokenizer,
    generate: Generate,
    address: Address,
    control: EngineControl | None = None,
) -> AsyncIterator[Endpoint]:
    """An endpoint that runs for the duration of the block; see `Endpoint`."""
    endpoint = Endpoint(served, tokenizer, generate, address, control)
    try:
        yield endpoint
    finally:
        await endpoint.close()


class _HandOver:
    """Hands calls from the server's loop over to the loop of the engines."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: set[Future[Any]] = set()
        self._closed, self._changing = False, threading.Lock()

    async def call(self, call: Callable[[], Awaitable[T]]) -> T:
        """Await `call()` on the loop of the engines. Raises its exceptions, and `RunError` if the engines end before it
        does.
        """

        async def awaited() -> T:
            return await call()

        with self._changing:
            if self._closed:
                raise RunError("the engines have ended")
            future = asyncio.run_coroutine_threadsafe(awaited(), self._loop)
            self._calls.add(future)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if self._closed:
                raise RunError("the engines have ended") from None
            raise
        finally:
            with self._changing:
                self._calls.discard(future)

    def close(self) -> None:
        """Cancel everything that is being sampled; call it on the loop of the engines."""
        with self._changing:
            self._closed, calls = True, tuple(self._calls)
        for call in calls:
            call.cancel()
