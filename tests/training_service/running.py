"""Runs a training service for a test: in a thread, or in a process of its own that can be killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import httpx
import tinker
from attrs import evolve

from skyrl.config import TrainingServiceConfig
from skyrl.training_service.backend import ServedModel
from skyrl.training_service.records import ServiceRecords
from skyrl.training_service.service import TrainingService
from skyrl.training_service.serving import ServedTraining, serving_training
from tests.training_service.bigrams import SERVED, BigramBackend

T = TypeVar("T")

KEY = "tml-" + "k" * 30
"""A key that the client accepts; a service without tokens admits it."""

SETTINGS = TrainingServiceConfig(port=0)


@contextmanager
def running(
    folder: Path,
    settings: TrainingServiceConfig = SETTINGS,
    backend: BigramBackend | None = None,
    served: ServedModel = SERVED,
    records: ServiceRecords | None = None,
    port: int | None = None,
) -> Iterator[ServedTraining]:
    """A service on a thread of its own, stopped at the end of the block."""
    settings = settings if port is None else evolve(settings, port=port)
    started, stop = threading.Event(), threading.Event()
    servers: list[ServedTraining] = []

    async def serve() -> None:
        async with serving_training(backend or BigramBackend(), folder, settings, served, records) as server:
            servers.append(server)
            started.set()
            await asyncio.to_thread(stop.wait)

    failed: list[BaseException] = []

    def target() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:  # noqa: BLE001  # raised again in the thread of the test
            failed.append(error)
            started.set()

    thread = threading.Thread(target=target)
    thread.start()
    started.wait()
    try:
        if failed:
            raise failed[0]
        yield servers[0]
    finally:
        stop.set()
        thread.join()


@contextmanager
def client_of(url: str, key: str = KEY) -> Iterator[tinker.ServiceClient]:
    """The real client."""
    client = tinker.ServiceClient(base_url=url, api_key=key)
    yield client
    client.close("success").result()


def direct(url: str, key: str = KEY) -> httpx.Client:
    """A client that sends what a test writes."""
    return httpx.Client(base_url=url + "/api/v1", headers={"x-api-key": key}, timeout=60, verify=False)


def on_service(served: ServedTraining, call: Callable[[TrainingService], T]) -> T:
    """The value of `call` for the service behind a server, on the service's own loop."""

    async def called() -> T:
        return call(served._service)

    return asyncio.run_coroutine_threadsafe(called(), served._loop).result()


class KilledService:
    """A service in a process that a test kills and starts again, at the same address."""

    def __init__(self, folder: Path, settings: TrainingServiceConfig = SETTINGS) -> None:
        self._folder, self._settings = folder, settings
        self._process: subprocess.Popen[str] | None = None
        self.url = self._start()

    def kill(self) -> None:
        """Kill the process, which cannot do anything about it, and start another one."""
        self._stop(signal.SIGKILL)
        self._start()

    def close(self) -> None:
        self._stop(signal.SIGKILL)

    def _stop(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        self._process.wait()

    def _start(self) -> str:
        command = [sys.executable, "-m", "tests.training_service.killable", str(self._folder)]
        numbers = (self._settings.port, self._settings.state_steps)
        self._process = subprocess.Popen(
            [*command, *map(str, numbers)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
        )
        assert self._process.stdout is not None
        url = self._process.stdout.readline().strip()
        assert url, "the service did not start"
        self._settings = evolve(self._settings, port=int(url.rpartition(":")[2]))
        return url
