"""Where the beginning of a prompt is cached, and how many samples an engine is given at a time.

A request goes to the engine that drew the turn before, or whose cache holds at least half of the prompt, unless that
engine is overloaded. Any other request goes to the engine with the fewest samples in flight for its limit, which
follows the engine's own reports of its load.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from attrs import define, field

from skyrl.inference.engine import EngineLoad

E = TypeVar("E")

_BLOCK = 16
"""Tokens of a block, which is the unit of vLLM's prefix cache on a GPU. Shorter beginnings are not looked for."""

MOST_BLOCKS = 200_000
"""Blocks of prompts that are remembered; the least recently used are forgotten."""

_LEAST_SHARE = 0.5
"""Share of a prompt that has to be cached for its place to matter."""

_MOST_AHEAD, _MOST_RATIO = 16, 1.25
"""An engine is overloaded when it has more samples than the first number, and than the second times the mean."""

_FLOOR_SHARE = 16
"""The lowest limit of an engine is the highest one divided by this."""

_FULL = 0.95
"""Share of an engine's KV cache in use above which it is likely to preempt samples soon."""


class PrefixRoutes(Generic[E]):
    """The engines that have the beginnings of prompts cached, under their present weights."""

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
        """Engines whose cache holds the longest beginning, where that is at least half of the prompt."""
        found: tuple[E, ...] = ()
        length = 0
        for block in _blocks(prompt_ids):
            holders = self._blocks.get(block)
            if not holders:
                break
            found, length = tuple(holders), length + _BLOCK
        return found if length >= _LEAST_SHARE * len(prompt_ids) else ()

    def clear(self) -> None:
        """The engines have dropped what they cached."""
        self._blocks.clear()


def _blocks(ids: Sequence[int]) -> Iterator[int]:
    """Hashes of the beginnings that end with a block, the shortest first."""
    value = 0
    for end in range(_BLOCK, len(ids) + 1, _BLOCK):
        value = hash((value, tuple(ids[end - _BLOCK : end])))
        yield value


def is_overloaded(samples: int, mean: float) -> bool:
    """Whether an engine with this many samples has too many, compared with the mean of all engines."""
    return samples > max(_MOST_AHEAD, _MOST_RATIO * mean)


@define
class ConcurrencyLimit:
    """Samples that an engine is given at a time: as many as it runs at once, between a floor and a ceiling.

    Multiplicative decrease where the engine queues requests or its cache is nearly full, additive increase where the
    limit binds (AIMD, Chiu and Jain 1989). The rest waits in the client for the next free engine.
    """

    ceiling: int
    value: int = field(init=False)
    """The limit now, in samples."""

    _queued: int = field(default=0, init=False)
    """Requests that waited at the last report. Only those that wait at two reports in a row count: a request that has
    just arrived waits for the next engine step, too."""

    def __attrs_post_init__(self) -> None:
        self.value = self.ceiling

    @property
    def floor(self) -> int:
        """The lowest limit."""
        return max(1, self.ceiling // _FLOOR_SHARE)

    def adapt(self, load: EngineLoad, in_flight: int) -> None:
        """Adapt the limit to a report of the engine's load, taken with `in_flight` samples of this run on it."""
        waiting, self._queued = min(load.waiting, self._queued), load.waiting
        given = min(self.value, in_flight)
        if waiting:
            self.value = max(self.floor, given - waiting)
            self._queued = 0
        elif load.cache_use is not None and load.cache_use > _FULL:
            self.value = max(self.floor, int(0.9 * given))
        elif in_flight >= self.value:
            self.value = min(self.ceiling, self.value + self.floor)
