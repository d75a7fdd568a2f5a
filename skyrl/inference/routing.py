"""Where the beginning of a prompt is cached, and how many samples an engine is given at a time.

A request goes to the engine that drew the turn before, or whose cache holds at least half of the prompt, unless that
engine is overloaded; any other one goes to the engine with the fewest samples in flight for what it can take. How many
an engine can take follows its own reports.
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
"""An engine is overloaded when it has more samples than so many, and so many times the mean of all."""

_FLOOR_SHARE = 16
"""The lowest limit of an engine is the highest one divided by this."""

_FULL = 0.95
"""Share of an engine's cache in use beyond which it soon interrupts samples for lack of memory."""


class PrefixRoutes(Generic[E]):
    """The engines that have computed the beginnings of prompts since their weights changed."""

    def __init__(self, most: int = MOST_BLOCKS) -> None:
        self._blocks: OrderedDict[int, dict[E, None]] = OrderedDict()
        self._most = most

    def computed(self, prompt_ids: Sequence[int], engine: E) -> None:
        """The engine computes this prompt now, and caches its keys and values."""
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
    """Does an engine with so many samples have too many beside the mean of all engines?"""
    return samples > max(_MOST_AHEAD, _MOST_RATIO * mean)


@define
class ConcurrencyLimit:
    """Samples that an engine is given at a time: as many as it runs, between a floor and a ceiling.

    Multiplicative decrease where it queues or its cache is nearly full, additive increase where the limit binds
    (AIMD, Chiu and Jain 1989). What does not fit waits in the client, where the next free engine takes it.
    """

    ceiling: int
    value: int = field(init=False)
    """The limit now, in samples."""

    _queued: int = field(default=0, init=False)
    """Requests that waited at the last report: those that have just come wait for a step, too."""

    def __attrs_post_init__(self) -> None:
        self.value = self.ceiling

    @property
    def floor(self) -> int:
        """The lowest limit."""
        return max(1, self.ceiling // _FLOOR_SHARE)

    def heed(self, load: EngineLoad, in_flight: int) -> None:
        """Adapt to a report of the engine, which has so many samples of this run."""
        waiting, self._queued = min(load.waiting, self._queued), load.waiting
        given = min(self.value, in_flight)
        if waiting:
            self.value = max(self.floor, given - waiting)
            self._queued = 0
        elif load.cache_use is not None and load.cache_use > _FULL:
            self.value = max(self.floor, int(0.9 * given))
        elif in_flight >= self.value:
            self.value = min(self.ceiling, self.value + self.floor)
