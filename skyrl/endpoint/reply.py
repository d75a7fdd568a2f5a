"""An answer of the endpoint: one JSON object, or the events of a stream."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from attrs import frozen

Json = Mapping[str, Any]


@frozen
class Event:
    """One server-sent event."""

    data: Json
    name: str | None = None
    """Name of the event, where the protocol has names."""

    @property
    def line(self) -> bytes:
        """The event as it is sent (server-sent events, WHATWG HTML, 9.2)."""
        name = "" if self.name is None else f"event: {self.name}\n"
        return f"{name}data: {json.dumps(self.data)}\n\n".encode()


Events = AsyncGenerator[Event, None]


@frozen
class Reply:
    """The body of an answer, or its stream."""

    body: Json | None = None
    events: Events | None = None
    """Closing them gives up what is still being sampled."""

    ends_with_done: bool = False
    """Whether the stream ends with OpenAI's `[DONE]`."""


def now() -> int:
    """Seconds since 1970, by which answers say when they were made."""
    return int(time.time())
