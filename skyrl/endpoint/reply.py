"""An answer of the endpoint: one JSON object, or the events of a stream."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from attrs import frozen

Json = Mapping[str, Any]


@frozen
class Event:
    """One server-sent event."""

    data: Json
    name: str | None = None
    """Name of the event, where the protocol has names."""


@frozen
class Reply:
    """The body of an answer, or its stream."""

    body: Json | None = None
    events: Sequence[Event] = ()
    ends_with_done: bool = False
    """Whether the stream ends with OpenAI's `[DONE]`."""

    async def stream(self) -> AsyncIterator[bytes]:
        """The events as they are sent (server-sent events, WHATWG HTML, 9.2)."""
        for event in self.events:
            name = "" if event.name is None else f"event: {event.name}\n"
            yield f"{name}data: {json.dumps(event.data)}\n\n".encode()
        if self.ends_with_done:
            yield b"data: [DONE]\n\n"


def now() -> int:
    """Seconds since 1970, by which answers say when they were made."""
    return int(time.time())


def pieces(text: str, size: int = 64) -> list[str]:
    """A text in parts of `size` characters for the events of a stream; no part for an empty text."""
    return [text[start : start + size] for start in range(0, len(text), size)]
