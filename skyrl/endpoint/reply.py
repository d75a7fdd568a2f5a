"""A reply of the endpoint: one JSON object, or the events of a stream."""

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
    """Name of the event, if the protocol uses names."""

    @property
    def line(self) -> bytes:
        """The event as it is sent (server-sent events, WHATWG HTML, 9.2)."""
        name = "" if self.name is None else f"event: {self.name}\n"
        return f"{name}data: {json.dumps(self.data)}\n\n".encode()


Events = AsyncGenerator[Event, None]


@frozen
class Reply:
    """The body of a reply, or its stream."""

    body: Json | None = None
    events: Events | None = None
    """Events of a stream; closing them cancels the sampling."""

    ends_with_done: bool = False
    """Whether the stream ends with OpenAI's `[DONE]`."""


def now() -> int:
    """Current time in whole seconds since 1970, for the timestamps of answers."""
    return int(time.time())
