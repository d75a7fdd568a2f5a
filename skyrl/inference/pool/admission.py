"""Decides which engine gets a request, and when: the queue in front of the engines in service.

request --> queue, first come, first served --> engine with its prefix cached, or with the fewest samples
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterator, Sequence

from attrs import Factory, define

from skyrl.errors import ProcessError, WeightSyncError
from skyrl.inference.engine import Completion, GenerationRequest, InferenceEngine
from skyrl.inference.pool.routing import ConcurrencyLimit, ConversationRoutes, PrefixRoutes, is_overloaded

_log = logging.getLogger(__name__)


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
        self._prefixes: PrefixRoutes[ServingEngine] = PrefixRoutes()
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
        """Record that the engine has drawn all samples of the request: later turns go to this engine. May ask the
        engine for its load.
        """
        self._conversations.record_drawn(request, served)
        self._ask_for_load(served, len(request.keys))

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

    def forget_prefixes(self) -> None:
        """Forget which prefixes are cached, because the engines have dropped their caches."""
        self._prefixes.clear()

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
                    self._prefixes.computed(request.prompt_ids, served)
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
        holders = sorted(self._prefixes.engines_of(request.prompt_ids), key=lambda candidate: candidate.samples)
        return (item for item in (before, *holders) if item is not None and item in self.serving)

    def _ask_for_load(self, served: ServingEngine, answers: int) -> None:
        """Ask an engine for its load after every `limit.floor` answers. A single engine is not asked: its samples have
        nowhere else to go.
        """
        served.answers += answers
        idle = served.asking is None or served.asking.done()
        if idle and served.answers >= served.limit.floor and len(self.serving) > 1:
            served.answers = 0
            served.asking = asyncio.create_task(self._adapt(served))

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
