"""Decides which engine gets a request, and when: the queue in front of the engines in service.

request --> queue, first come, first served --> engine with its prefix cached, or with the fewest samples

A request goes to the engine that drew the previous turn, or whose cache holds at least half of the prompt, unless that
engine is overloaded. Any other request goes to the engine with the fewest samples in flight relative to its limit,
which follows the engine's own reports of its load. `ConversationRoutes` remembers which engine drew the last turn of a
conversation: its cache may hold the prefix of the next turn.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from attrs import Factory, define, evolve, field

from skyrl.errors import ProcessError, WeightSyncError
from skyrl.inference.engine import Completion, EngineLoad, GenerationRequest, InferenceEngine, SampleKey

_log = logging.getLogger(__name__)

E = TypeVar("E")

_BLOCK = 16
"""Number of tokens in a block, the unit of vLLM's prefix cache on a GPU. Shorter prefixes are not found."""

MOST_BLOCKS = 200_000
"""Number of blocks of prompts that are remembered; the least recently used are forgotten."""

MOST_CONVERSATIONS = 20_000
"""Number of conversations that are remembered; the oldest are forgotten."""

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

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, dict[E, None]] = OrderedDict()

    def computed(self, prompt_ids: Sequence[int], engine: E) -> None:
        """Record that the engine computes this prompt, and then has its keys and values cached."""
        for block in _blocks(prompt_ids):
            self._blocks.setdefault(block, {})[engine] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > MOST_BLOCKS:
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


class ConversationRoutes(Generic[E]):
    """The engine of each conversation, which is identified by the key of a sample without its turn."""

    def __init__(self) -> None:
        self._engines: OrderedDict[SampleKey, E] = OrderedDict()

    def record_drawn(self, request: GenerationRequest, engine: E) -> None:
        """Record that the engine has drawn a turn of each sample of this request."""
        for key in request.keys:
            conversation = evolve(key, turn=0)
            self._engines[conversation] = engine
            self._engines.move_to_end(conversation)
        while len(self._engines) > MOST_CONVERSATIONS:
            self._engines.popitem(last=False)

    def engine_of(self, request: GenerationRequest) -> E | None:
        """The engine that drew the previous turn; None for a first turn or a forgotten conversation."""
        key = request.keys[0] if request.keys else None
        return None if key is None or key.turn == 0 else self._engines.get(evolve(key, turn=0))


@define(eq=False)
class ServingEngine:
    """An engine in service, with its concurrency limit and its current work."""

    number: int
    engine: InferenceEngine
    limit: ConcurrencyLimit
    samples: int = 0
    """Number of samples that the engine is drawing now."""

    answers: int = 0
    """Number of samples that the engine has drawn since it was last asked for its load."""

    asking: asyncio.Task[None] | None = None
    """The latest request for its load."""

    calls: set[asyncio.Future[tuple[Completion, ...]]] = Factory(set)
    """Calls in progress, which draw the engine's samples."""


class Admission:
    """Admits requests to engines in order of arrival, as far as their concurrency limits allow."""

    def __init__(self, engines: Sequence[InferenceEngine], max_num_seqs: int) -> None:
        """`max_num_seqs` bounds the samples that one engine is given at a time."""
        self._most = max_num_seqs
        self.serving: list[ServingEngine] = []
        """The engines in service, in order of their numbers."""
        self._open = True
        self._waiting: deque[tuple[GenerationRequest, asyncio.Future[ServingEngine]]] = deque()
        self._conversations: ConversationRoutes[ServingEngine] = ConversationRoutes()
        self.prefixes: PrefixRoutes[ServingEngine] = PrefixRoutes()
        for number, engine in enumerate(engines):
            self.enter(number, engine)

    @property
    def queued(self) -> int:
        """Number of samples that wait for an engine."""
        return sum(len(request.keys) for request, waiting in self._waiting if not waiting.done())

    def enter(self, number: int, engine: InferenceEngine) -> ServingEngine:
        """Take an engine into service."""
        served = ServingEngine(number, engine, ConcurrencyLimit(self._most))
        self.serving = sorted([*self.serving, served], key=lambda member: member.number)
        return served

    def leave(self, served: ServingEngine) -> None:
        """Take an engine out of service; it keeps the requests that it was given."""
        self.serving = [item for item in self.serving if item is not served]

    def close(self) -> None:
        """Admit nothing until `open`."""
        self._open = False

    def open(self) -> None:
        """Admit waiting and later requests."""
        self._open = True
        self._admit()

    async def admitted(self, request: GenerationRequest) -> ServingEngine:
        """Wait until an engine has capacity, and return it with the request counted in."""
        waiting: asyncio.Future[ServingEngine] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, waiting))
        self._admit()
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled():
                self.record_ended(request, waiting.result())
            raise

    def record_drawn(self, request: GenerationRequest, served: ServingEngine) -> None:
        """Record that the engine has drawn all samples of the request: later turns go to this engine. Asks the engine
        for its load after every `limit.floor` samples.
        """
        self._conversations.record_drawn(request, served)
        served.answers += len(request.keys)
        idle = served.asking is None or served.asking.done()
        # A single engine is not asked: its samples have nowhere else to go.
        if idle and served.answers >= served.limit.floor and len(self.serving) > 1:
            served.answers = 0
            served.asking = asyncio.create_task(self._adapt(served))

    def record_ended(self, request: GenerationRequest, served: ServingEngine) -> None:
        """Record that the engine no longer has the request, whether it was drawn or not."""
        served.samples -= len(request.keys)
        self._admit()

    def least_loaded_other(self, served: ServingEngine, request: GenerationRequest) -> ServingEngine | None:
        """The engine with the fewest samples except this one, with the request counted in, even above its limit; None
        if no other serves.
        """
        others = [item for item in self.serving if item is not served]
        least = min(others, key=lambda candidate: candidate.samples / candidate.limit.value, default=None)
        if least is not None:
            least.samples += len(request.keys)
        return least

    async def stop_asking(self) -> None:
        """Stop asking engines for their load."""
        asking = [served.asking for served in self.serving if served.asking is not None]
        for item in asking:
            item.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    def _admit(self) -> None:
        """Admit waiting requests that fit, in order of their arrival."""
        while self._open and self._waiting:
            request, waiting = self._waiting[0]
            served = self._engine_with_capacity(request)
            if served is None and not waiting.done():
                return
            self._waiting.popleft()
            if served is not None and not waiting.done():
                served.samples += len(request.keys)
                if len(self.serving) > 1:
                    self.prefixes.computed(request.prompt_ids, served)
                waiting.set_result(served)

    def _engine_with_capacity(self, request: GenerationRequest) -> ServingEngine | None:
        """An engine that has a prefix of the request cached, else the one with the fewest samples relative to its
        limit, if the request fits; an idle engine takes any request.
        """
        if not self.serving:
            return None
        least = min(self.serving, key=lambda candidate: candidate.samples / candidate.limit.value)
        mean = sum(item.samples for item in self.serving) / len(self.serving)
        for served in self._engines_with_prefix(request) if len(self.serving) > 1 else ():
            samples = served.samples + len(request.keys)
            if samples <= served.limit.value and not is_overloaded(samples, mean):
                return served
        fits = least.samples + len(request.keys) <= least.limit.value
        return least if fits or least.samples == 0 else None

    def _engines_with_prefix(self, request: GenerationRequest) -> Iterator[ServingEngine]:
        """Engines in service that have a prefix of the request cached: that of the conversation, then others."""
        before = self._conversations.engine_of(request)
        holders = sorted(self.prefixes.engines_of(request.prompt_ids), key=lambda candidate: candidate.samples)
        return (item for item in (before, *holders) if item is not None and item in self.serving)

    async def _adapt(self, served: ServingEngine) -> None:
        """Adapt the engine's concurrency limit to its load."""
        try:
            load = await served.engine.current_load()
        except (ProcessError, WeightSyncError):
            return  # its requests raise the cause
        if load is None:
            return
        before = served.limit.value
        served.limit.adapt(load, served.samples)
        if served.limit.value != before:
            _log.debug("inference engine %d is given %d samples at a time, %s", served.number, served.limit.value, load)
        self._admit()
