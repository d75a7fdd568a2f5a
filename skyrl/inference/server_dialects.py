"""The requests of an `HttpEngine` to a server, whatever its routes are: see `vllm_server.py` and `sglang_server.py`."""

from __future__ import annotations

from typing import Protocol

from attrs import frozen

from skyrl.inference.adapters import Adapter
from skyrl.inference.engine import EngineLoad, InFlight
from skyrl.inference.incoming_weights import IncomingWeights
from skyrl.inference.server_answers import Asked, Drawn
from skyrl.inference.vllm_model import ExpectedWeights


@frozen(kw_only=True)
class ServerDeadlines:
    """How long a server may take, in seconds."""

    start: float = 600.0
    """Until it answers for the first time: it may still be loading its model."""

    call: float = 3600.0
    """One request: a sample, a pause, a transfer of weights."""

    heartbeat: float = 60.0
    """Silence while it works on requests."""


@frozen(kw_only=True)
class ServerFacts:
    """Facts that a server reports about itself."""

    models: tuple[str, ...]
    """Names of the model that it serves: the one that requests carry, a folder or hub name."""

    max_model_len: int | None
    """Longest sequence in tokens, prompt and completion together; None where it is not reported."""

    is_versioned: bool
    """Whether it can be given weights, and reports their version."""


class Dialect(Protocol):
    """The routes of one kind of server. Every call raises `ProcessError` where the server does not answer in time."""

    url: str

    async def connect(self, *, claim: bool) -> ServerFacts:
        """Wait until the server answers. With `claim` it becomes ready for a run: it is not paused, and its weights are
        of version 0. Raises `UserError` for a server that cannot be used.
        """

    async def draw(self, asked: Asked, session: str) -> Drawn:
        """One sample of the request. Raises `BadAnswer`. Giving up the call gives up the sample.

        Requests of one `session` are turns of one conversation, for a router in front of the server.
        """

    async def pause(self, in_flight: InFlight) -> None:
        """Stop drawing tokens. No request of this run is running, unless `in_flight` says what becomes of it."""

    async def resume(self) -> None:
        """Draw tokens again."""

    async def version(self) -> int:
        """Version of the weights that the server holds."""

    async def load_weights(
        self, incoming: IncomingWeights, version: int, expected: ExpectedWeights, in_flight: InFlight
    ) -> str:
        """Replace the weights, drop what was computed from the old ones, except for what a pause keeps, and name the
        version. Empty, or why that stopped halfway. Raises `WeightSyncError` where nothing was touched.
        """

    async def load_adapter(self, adapter: Adapter, version: int, in_flight: InFlight) -> str:
        """Draw samples by this adapter beside the weights; as `load_weights`."""

    async def load(self) -> EngineLoad | None:
        """How busy the server is; None where it does not tell."""

    async def sleep(self) -> bool:
        """Give back memory of the GPU. Are the weights gone with it?"""

    async def wake(self) -> None:
        """Take the memory again; the server is paused afterwards."""

    async def sign(self, seconds: float) -> object:
        """Ask for a sign of life, once."""

    async def close(self) -> None:
        """Close the connections. The server runs on."""
