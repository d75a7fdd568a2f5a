"""Remembers which engine drew the last turn of a conversation: its cache may hold the prefix of the next turn."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from attrs import evolve

from skyrl.inference.engine import GenerationRequest, SampleKey

E = TypeVar("E")

MOST_CONVERSATIONS = 20_000
"""Number of conversations that are remembered; the oldest are forgotten."""


class Conversations(Generic[E]):
    """The engine of each conversation, which is identified by the key of a sample without its turn."""

    def __init__(self, most: int = MOST_CONVERSATIONS) -> None:
        self._engines: OrderedDict[SampleKey, E] = OrderedDict()
        self._most = most

    def drawn(self, request: GenerationRequest, engine: E) -> None:
        """Record that the engine has drawn a turn of each sample of this request."""
        for key in request.keys:
            conversation = evolve(key, turn=0)
            self._engines[conversation] = engine
            self._engines.move_to_end(conversation)
        while len(self._engines) > self._most:
            self._engines.popitem(last=False)

    def engine_of(self, request: GenerationRequest) -> E | None:
        """The engine that drew the previous turn; None for a first turn or a forgotten conversation."""
        key = request.keys[0] if request.keys else None
        return None if key is None or key.turn == 0 else self._engines.get(evolve(key, turn=0))
