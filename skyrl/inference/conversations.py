"""Which engine drew the last turn of a conversation: its cache may hold the keys and values of the prefix."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from attrs import evolve

from skyrl.inference.engine import GenerationRequest, SampleKey

E = TypeVar("E")

MOST_CONVERSATIONS = 20_000
"""Conversations that are remembered; the oldest are forgotten."""


class Conversations(Generic[E]):
    """The engine of each conversation. A conversation is a sample: a key without its turn."""

    def __init__(self, most: int = MOST_CONVERSATIONS) -> None:
        self._engines: OrderedDict[SampleKey, E] = OrderedDict()
        self._most = most

    def drawn(self, request: GenerationRequest, engine: E) -> None:
        """The engine has drawn a turn of each sample of this request."""
        for key in request.keys:
            conversation = evolve(key, turn=0)
            self._engines[conversation] = engine
            self._engines.move_to_end(conversation)
        while len(self._engines) > self._most:
            self._engines.popitem(last=False)

    def engine_of(self, request: GenerationRequest) -> E | None:
        """The engine that drew the turn before; None for a first turn, or where it is not remembered."""
        key = request.keys[0] if request.keys else None
        return None if key is None or key.turn == 0 else self._engines.get(evolve(key, turn=0))
