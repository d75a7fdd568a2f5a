"""Records which engines have a prompt's prefix cached, and limits the samples that an engine is given at a time.

A request goes to the engine that drew the previous turn, or whose cache holds at least half of the prompt, unless that
engine is overloaded. Any other request goes to the engine with the fewest samples in flight relative to its limit,
which follows the engine's own reports of its load. `ConversationRoutes` remembers which engine drew the last turn of a
conversation: its cache may hold the prefix of the next turn.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from attrs import define, evolve, field

from skyrl.inference.engine import EngineLoad, GenerationRequest, SampleKey

E = TypeVar("E")

_BLOCK = 16
"""Number of tokens in a block, the unit of vLLM's prefix cache on a GPU. Shorter prefixes are not found."""

MOST_BLOCKS = 200_000
"""Number of blocks of prompts that are remembered; the least recently used are forgotten."""

_LEAST_SHARE = 0.5
"""Share of a prompt that must be cached for an engine to be preferred."""

_MOST_AHEAD, _MOST_RATIO = 16, 1.25
"""An engine is overloaded if it has more samples than the first number, and more than the second times the mean."""

_FLOOR_SHARE = 16
"""The lowest limit of an engine is the highest one divided by this."""

_FULL = 0.95
"""Share of an engine's KV cache in use above which it is likely to preempt samples soon."""


class PrefixRoutes(Generic[E]):
    """The engines that have prefixes of prompts cached, under their current weights."""

    def __init__(self, most: int = MOST_BLOCKS) -> None:
        self._blocks: OrderedDict[int, dict[E, None]] = OrderedDict()
        self._most = most

    def computed(self, prompt_ids: Sequence[int], engine: E) -> None:
        """Record that the engine computes this prompt, and then has its keys and values cached."""
        for block in _blocks(prompt_ids):
            self._blocks.setdefault(block, {})[engine] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)

    def engines_of(self, prompt_ids: Sequence[int]) -> tuple[E, ...]:
        """Engines whose cache holds the longest prefix, if that is at least half of the prompt."""
        engines: tuple[E, ...] = ()
        length = 0
        for block in _blocks(prompt_ids):
            holders = self._blocks.get(block)
            if not holders:
                break
            engines, length = tuple(holders), length + _BLOCK
        return engines if length >= _LEAST_SHARE * len(prompt_ids) else ()

    def clear(self) -> None:
        """Forget all prefixes, because the engines have dropped their caches."""
        self._blocks.clear()


def _blocks(ids: Sequence[int]) -> Iterator[int]:
    """Hashes of the prefixes that end with a block, the shortest first."""
    value = 0
    for end in range(_BLOCK, len(ids) + 1, _BLOCK):
        value = hash((value, tuple(ids[end - _BLOCK : end])))
        yield value


def is_overloaded(samples: int, mean: float) -> bool:
    """Whether an engine with this many samples has too many, compared with the mean of all engines."""
    return samples > max(_MOST_AHEAD, _MOST_RATIO * mean)


@define
class ConcurrencyLimit:
    """Number of samples that an engine is given at a time: those that it runs at once, between a floor and a ceiling.

    Multiplicative decrease if the engine queues requests or its cache is nearly full, additive increase if the limit
    binds (AIMD, Chiu and Jain 1989). Other samples wait in the client for the next free engine.
    """

    ceiling: int
    value: int = field(init=False)
    """The current limit, in samples."""

    _queued: int = field(default=0, init=False)
    """Number of requests that waited at the last report. Only those that wait at two reports in a row count, because a
    request that has just arrived waits for the next engine step, too."""

    def __attrs_post_init__(self) -> None:
        self.value = self.ceiling

    @property
    def floor(self) -> int:
        """The lowest limit, in samples."""
        return max(1, self.ceiling // _FLOOR_SHARE)

    def adapt(self, load: EngineLoad, in_flight: int) -> None:
        """Adapt the limit to a report of the engine's load, taken with `in_flight` samples of this run on it."""
        waiting, self._queued = min(load.waiting, self._queued), load.waiting
        in_use = min(self.value, in_flight)
        if waiting:
            self.value = max(self.floor, in_use - waiting)
            self._queued = 0
        elif load.cache_use is not None and load.cache_use > _FULL:
            self.value = max(self.floor, int(0.9 * in_use))
        elif in_flight >= self.value:
            self.value = min(self.ceiling, self.value + self.floor)


MOST_CONVERSATIONS = 20_000
"""Number of conversations that are remembered; the oldest are forgotten."""


class ConversationRoutes(Generic[E]):
    """The engine of each conversation, which is identified by the key of a sample without its turn."""

    def __init__(self, most: int = MOST_CONVERSATIONS) -> None:
        self._engines: OrderedDict[SampleKey, E] = OrderedDict()
        self._most = most

    def record_drawn(self, request: GenerationRequest, engine: E) -> None:
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
