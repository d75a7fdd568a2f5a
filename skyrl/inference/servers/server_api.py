"""What `HttpEngine` needs of a kind of server: see `vllm_server.py` and `sglang_server.py`."""

from __future__ import annotations

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from attrs import frozen

from skyrl.config.settings.engines import InferenceEngineConfig
from skyrl.errors import ServerRefusal, WeightSyncError
from skyrl.inference.adapters import write_adapter
from skyrl.inference.engine import EngineLoad, InFlight
from skyrl.inference.servers.answers import DrawnSample, OtherWeights, RequestedSample, version_number
from skyrl.inference.servers.http_connection import ATTEMPTS, Connection, Listener
from skyrl.inference.servers.streams import Streamed
from skyrl.inference.vllm.model import ExpectedWeights
from skyrl.weight_receiver.incoming_weights import Adapter, FolderWeights, IncomingWeights


@frozen(kw_only=True)
class ServerDeadlines:
    """Time limits for a server, in seconds."""

    start: float = 600.0
    """Longest time until the first answer, in seconds: the server may still be loading its model."""

    call: float = 3600.0
    """Longest time for one request, in seconds: a sample, a pause, a weight transfer."""

    heartbeat: float = 60.0
    """Longest silence while the server works on requests, in seconds."""


@frozen(kw_only=True)
class ServerFacts:
    """Facts that a server reports about itself."""

    models: tuple[str, ...]
    """Names of the served model: the one that requests carry, and its folder or hub name."""

    max_model_len: int | None
    """Longest sequence in tokens, prompt and completion together; None if it is not reported."""

    is_versioned: bool
    """Whether the server can receive weights and reports their version."""


class ServerApi(ABC):
    """The routes of one kind of server. Every call raises `ProcessError` if the server does not answer in time, or
    answers in another form than the route has.
    """

    route: str
    """Path of the route that draws samples."""

    version_route: str
    """Path of the route that reports the version of the weights."""

    streamed: type[Streamed]
    """Class that puts a streamed answer together."""

    version_remedy: str
    """How to start a server that reports the version of its weights and receives new ones."""

    verifies_loads = False
    """Whether this library's code receives weights in the server, and verifies that its parameters hold them."""

    def __init__(
        self, samples: Connection, control: Connection, deadlines: ServerDeadlines, *, workers: int | None = None
    ) -> None:
        """`samples` may lead to a router in front of the server, `control` leads to the server; `workers` is the number
        of its workers that join a group to receive weights, None if weights come as files.
        """
        self._samples, self._control, self.deadlines, self._workers = samples, control, deadlines, workers
        self.url, self.has_answered = control.url, False
        """Whether the latest `connect` has had an answer; before that the server may still be starting."""
        self._run, self._adapter = secrets.token_hex(4), ""
        """Part of the names of this run's adapters, and the name of the adapter that draws samples. Each has a new
        name, because vLLM would read an adapter that is loaded in place of another again with every step."""

    @classmethod
    def of_engine(
        cls,
        config: InferenceEngineConfig,
        samples: Connection,
        control: Connection,
        deadlines: ServerDeadlines,
        workers: int | None,
    ) -> Self:
        """The server of a run's engine. `config` has what this kind of server reads besides the class's arguments."""
        return cls(samples, control, deadlines, workers=workers)

    @abstractmethod
    async def connect(self, *, claim: bool) -> ServerFacts:
        """Wait until the server answers, for the first time or again. With `claim`, prepare it for a run: it is not
        paused, and its weights have version 0. Raises `UserError` for a server that cannot be used.
        """

    @abstractmethod
    async def draw(self, requested: RequestedSample, session: str, seconds: float) -> DrawnSample:
        """Draw one sample of the request within `seconds`, not counting time in which the server is paused. Raises
        `BadAnswer`. Cancelling the call cancels the sample.

        Requests of one `session` are turns of one conversation, for a router in front of the server.
        """

    @abstractmethod
    async def pause(self, in_flight: InFlight) -> None:
        """Stop drawing tokens. If `in_flight` is `finish`, no request of this run is running."""

    @abstractmethod
    async def resume(self) -> None:
        """Draw tokens again."""

    @abstractmethod
    async def version(self) -> int:
        """Version of the weights that the server holds. Raises `WeightSyncError` for one that no run has set."""

    def other_weights(self, error: OtherWeights, path: str) -> WeightSyncError:
        """The error that names the server and the route that gave such an answer."""
        return WeightSyncError(f"the inference server {self.url} answers {error} at {path}")

    @abstractmethod
    async def load_weights(
        self, incoming: IncomingWeights, version: int, expected: ExpectedWeights, in_flight: InFlight
    ) -> str:
        """Replace the weights, drop what was computed from the old ones, except for what a pause keeps, and set the
        version. Returns an empty string, or the reason why that stopped halfway. Raises `WeightSyncError` if nothing
        was changed.
        """

    @abstractmethod
    async def load_adapter(self, adapter: Adapter, version: int, in_flight: InFlight) -> str:
        """Draw samples with this adapter beside the weights. Returns and raises as `load_weights`."""

    @abstractmethod
    async def load(self) -> EngineLoad | None:
        """Current load of the server; None if it does not report its load."""

    @abstractmethod
    async def sleep(self) -> bool:
        """Free memory of the GPU. Returns whether the weights were discarded."""

    @abstractmethod
    async def wake(self) -> None:
        """Allocate the memory again; the server is paused afterwards."""

    async def check_health(self, seconds: float) -> None:
        """Returns at the first sign of life. Raises `ProcessError` if there is none within `seconds`."""
        await self._control.check_health("/health", seconds=seconds)

    async def close(self) -> None:
        """Close the connections. The server keeps running."""
        await asyncio.gather(self._samples.close(), self._control.close())

    async def _fetch_sample(
        self, body: Mapping[str, object], requested: RequestedSample, session: str, seconds: float
    ) -> object:
        """The answer to a request for one sample; streamed if it has an `on_tokens` callback. Raises `BadAnswer`."""
        headers = {"X-Session-ID": session}
        if requested.request.on_tokens is None:
            return await self._samples.post(self.route, body, seconds=seconds, headers=headers)
        attempts: list[Streamed] = []

        def begin() -> Listener:
            attempts.append(self.streamed(requested))
            return attempts[-1].add

        await self._samples.hear(self.route, {**body, "stream": True}, seconds=seconds, headers=headers, begin=begin)
        return attempts[-1].answer

    async def _add_adapter(self, adapter: Adapter, version: int, path: str, *, needs: str) -> str:
        """Have the server read an adapter beside the one that draws samples; returns its name. `needs` are the options
        that the server needs beside `--enable-lora`. Raises `WeightSyncError` if it refuses the adapter.
        """
        assert isinstance(adapter.tensors, FolderWeights), "servers read adapters from files"
        name, folder = f"skyrl-{self._run}-{version}", Path(adapter.tensors.path) / "peft"
        await asyncio.to_thread(write_adapter, adapter, folder)
        try:
            await self._post(path, {"lora_name": name, "lora_path": str(folder)}, attempts=1)
        except ServerRefusal as error:
            raise WeightSyncError(
                f"the inference server {self.url} does not accept the adapter; check that it was started with "
                f"--enable-lora, {needs}: {error}"
            ) from error
        return name

    def _version_of(self, reported: object) -> int:
        try:
            return version_number(reported)
        except OtherWeights as error:
            raise self.other_weights(error, self.version_route) from error

    async def _post(
        self,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        attempts: int = ATTEMPTS,
    ) -> object:
        return await self._control.post(path, body, query=query, seconds=self.deadlines.call, attempts=attempts)
