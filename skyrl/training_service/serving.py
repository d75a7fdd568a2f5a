"""Serves a `TrainingService` over HTTP, on a thread and an event loop of its own.

The backend is called on the event loop of the caller, so that it may use what belongs to that loop, and a backend that
blocks it does not keep clients from being heard.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from socket import socket
from typing import TypeVar

from attrs import frozen

from skyrl.config import TrainingServiceConfig
from skyrl.errors import UserError
from skyrl.processes.addresses import is_loopback
from skyrl.processes.service import bound_socket, server_of
from skyrl.training_service.backend import (
    AdamSettings,
    AdapterSpec,
    Backend,
    PassRequest,
    PassResult,
    SampleRequest,
    SampleResult,
    ServedModel,
)
from skyrl.training_service.records import ServiceRecords
from skyrl.training_service.routes import training_app
from skyrl.training_service.service import ServiceStatus, TrainingService
from skyrl.training_service.store import client_names

T = TypeVar("T")


class ServedTraining:
    """A training service that answers requests."""

    def __init__(
        self, url: str, service: TrainingService, loop: asyncio.AbstractEventLoop, ended: Future[None]
    ) -> None:
        self.url = url
        """Address for clients, such as `http://127.0.0.1:8000`."""

        self._service, self._loop, self._ended = service, loop, ended

    async def status(self) -> ServiceStatus:
        """Models, queues and counts."""

        async def read() -> ServiceStatus:
            return self._service.status()

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(read(), self._loop))

    async def run(self) -> None:
        """Wait until the service fails. Raises the error that ended it, such as one of the backend."""
        await asyncio.shield(asyncio.wrap_future(self._ended))


@asynccontextmanager
async def serving_training(
    backend: Backend,
    folder: Path,
    settings: TrainingServiceConfig,
    model: ServedModel,
    records: ServiceRecords | None = None,
) -> AsyncIterator[ServedTraining]:
    """A training service that runs for the duration of the block, and continues what the folder holds. At the end, the
    turn in progress ends and the state of all models is stored.

    `records` are written on the service's thread, and closed by the caller. Raises `UserError` for an address that
    other machines can reach while no client has a token, or a folder that another service uses, `ProcessError` for an
    address that cannot be used, and at the end of the block the error that ended the service.
    """
    with_tokens = bool(client_names(folder))
    if not with_tokens and not is_loopback(settings.host):
        raise UserError(
            f"{settings.host} can be reached from other machines, and no client has a token: add a client, or listen "
            "on 127.0.0.1"
        )
    with bound_socket(settings.host, settings.port) as bound:
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        url = f"http://{host}:{bound.getsockname()[1]}"
        started: Future[ServedTraining] = Future()
        ended: Future[None] = Future()
        stopping = threading.Event()
        caller = asyncio.get_running_loop()

        async def serve() -> None:
            service = TrainingService(_LoopBackend(backend, caller), folder, settings, model, records)
            try:
                await service.start()
                started.set_result(ServedTraining(url, service, asyncio.get_running_loop(), ended))
                await _answer(service, bound, stopping, with_tokens=with_tokens)
            finally:
                await service.stop()

        def target() -> None:
            try:
                asyncio.run(serve())
                ended.set_result(None)
            except BaseException as error:  # noqa: BLE001 - it is raised to the caller
                (ended if started.done() else started).set_exception(error)

        thread = threading.Thread(target=target, name="training-service", daemon=True)
        thread.start()
        try:
            yield await asyncio.wrap_future(started)
        finally:
            stopping.set()
            await asyncio.to_thread(thread.join)
        ended.result()


async def _answer(service: TrainingService, bound: socket, stopping: threading.Event, *, with_tokens: bool) -> None:
    """Answer requests until the service is to stop, or fails, which is raised."""
    server = server_of(training_app(service, with_tokens=with_tokens))
    answering = asyncio.create_task(server.serve(sockets=[bound]))
    working = asyncio.create_task(service.run())
    watching = asyncio.create_task(asyncio.to_thread(stopping.wait))
    await asyncio.wait([answering, working, watching], return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    stopping.set()
    await answering
    if working.done():
        working.result()


@frozen
class _LoopBackend:
    """A backend whose calls run on another event loop than the caller's."""

    backend: Backend
    loop: asyncio.AbstractEventLoop

    async def _call(self, call: Awaitable[T]) -> T:
        async def awaited() -> T:
            return await call

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(awaited(), self.loop))

    async def create(self, model_id: str, spec: AdapterSpec | None) -> None:
        await self._call(self.backend.create(model_id, spec))

    async def passes(self, requests: Sequence[PassRequest]) -> Sequence[PassResult | Exception]:
        return await self._call(self.backend.passes(requests))

    async def optimizer_step(self, model_id: str, settings: AdamSettings) -> Mapping[str, float]:
        return await self._call(self.backend.optimizer_step(model_id, settings))

    async def save(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        await self._call(self.backend.save(model_id, folder, optimizer=optimizer))

    async def load(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        await self._call(self.backend.load(model_id, folder, optimizer=optimizer))

    async def unload(self, model_id: str) -> None:
        await self._call(self.backend.unload(model_id))

    async def publish(self, model_id: str, sampler: str) -> None:
        await self._call(self.backend.publish(model_id, sampler))

    async def publish_stored(self, folder: Path, sampler: str) -> None:
        await self._call(self.backend.publish_stored(folder, sampler))

    async def unpublish(self, sampler: str) -> None:
        await self._call(self.backend.unpublish(sampler))

    async def sample(self, request: SampleRequest) -> SampleResult:
        return await self._call(self.backend.sample(request))
