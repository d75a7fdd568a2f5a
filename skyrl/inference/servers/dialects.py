"""The interface of `HttpEngine` to a kind of server: see `vllm_server.py` and `sglang_server.py`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Protocol, Self

from attrs import frozen

from skyrl.config.settings.engines import InferenceEngineConfig
from skyrl.errors import WeightSyncError
from skyrl.inference.adapters import Adapter, write_adapter
from skyrl.inference.engine import EngineLoad, InFlight
from skyrl.inference.servers.answers import Asked, Drawn
from skyrl.inference.servers.http_connection import Connection
from skyrl.inference.vllm.model import ExpectedWeights
from skyrl.weight_receiver.incoming_weights import Folder, IncomingWeights


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


class Dialect(Protocol):
    """The routes of one kind of server. Every call raises `ProcessError` if the server does not answer in time, or
    answers in another form than the route has.
    """

    url: str
    deadlines: ServerDeadlines
    has_answered: bool
    """Whether the latest `connect` has had an answer; before that the server may still be starting."""

    @classmethod
    def of_engine(
        cls,
        config: InferenceEngineConfig,
        samples: Connection,
        control: Connection,
        deadlines: ServerDeadlines,
        workers: int | None,
    ) -> Self:
        """The server of a run's engine. `samples` may lead to a router in front of it, `control` leads to the server;
        `workers` is the number of its workers that join a group to receive weights, None if weights come as files.
        """

    @property
    def route(self) -> str:
        """Path of the route that draws samples, for messages."""

    @property
    def reads_back(self) -> bool:
        """Whether this library's code receives weights in the server, and finds them in the parameters."""

    async def connect(self, *, claim: bool) -> ServerFacts:
        """Wait until the server answers, for the first time or again. With `claim`, prepare it for a run: it is not
        paused, and its weights have version 0. Raises `UserError` for a server that cannot be used.
        """

    async def draw(self, asked: Asked, session: str, seconds: float) -> Drawn:
        """Draw one sample of the request, within `seconds`, which do not pass while the server is paused. Raises
        `BadAnswer`. Cancelling the call cancels the sample.

        Requests of one `session` are turns of one conversation, for a router in front of the server.
        """

    async def pause(self, in_flight: InFlight) -> None:
        """Stop drawing tokens. If `in_flight` is `finish`, no request of this run is running."""

    async def resume(self) -> None:
        """Draw tokens again."""

    async def version(self) -> int:
        """Version of the weights that the server holds."""

    async def load_weights(
        self, incoming: IncomingWeights, version: int, expected: ExpectedWeights, in_flight: InFlight
    ) -> str:
        """Replace the weights, drop what was computed from the old ones, except for what a pause keeps, and set the
        version. Returns an empty string, or the reason why that stopped halfway. Raises `WeightSyncError` if nothing
        was changed.
        """

    async def load_adapter(self, adapter: Adapter, version: int, in_flight: InFlight) -> str:
        """Draw samples with this adapter beside the weights. Returns and raises as `load_weights`."""

    async def load(self) -> EngineLoad | None:
        """Current load of the server; None if it does not report its load."""

    async def sleep(self) -> bool:
        """Free memory of the GPU. Returns whether the weights were discarded."""

    async def wake(self) -> None:
        """Allocate the memory again; the server is paused afterwards."""

    async def sign(self, seconds: float) -> None:
        """Returns at the first sign of life. Raises `ProcessError` if there is none within `seconds`."""

    async def close(self) -> None:
        """Close the connections. The server keeps running."""


async def store_adapter(adapter: Adapter) -> Path:
    """Write an adapter in PEFT's form beside the files that carry its tensors, and return its folder."""
    assert isinstance(adapter.tensors, Folder), "servers read adapters from files"
    folder = Path(adapter.tensors.path) / "peft"
    await asyncio.to_thread(write_adapter, adapter, folder)
    return folder


def adapter_refusal(url: str, needs: str, error: Exception) -> WeightSyncError:
    """The error of a server that does not take an adapter; `needs` are the options that it needs beside
    `--enable-lora`.
    """
    return WeightSyncError(
        f"the inference server {url} does not accept the adapter; check that it was started with --enable-lora, "
        f"{needs}: {error}"
    )
