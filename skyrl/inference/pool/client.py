"""A client of several engines: a request goes to one of them (`admission.py`), everything else to all of them.

    generate --> wait for capacity --> engine with the prefix, or with the fewest samples --> another one if it fails

An engine that dies, or that can no longer prove which weights it holds, leaves service; the run continues with the
remaining ones, and ends with the cause if there are none. If engines are restarted, a new one joins with the next
weights: it receives them by the same transport as the others, and the canary is the first to sample from it. If the
lost engine was the last one, requests wait for the new one (`wait_for_replacement`). Where weights never change, it
joins at once (`run_with_restarts`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from copy import copy
from functools import partial
from typing import Any, TypeVar

from attrs import evolve, frozen

from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.config import InferenceEngineConfig, SkyRLLoraConfig
from skyrl.errors import EngineFailed, NonFiniteError, ProcessError, RunError, WeightSyncError
from skyrl.inference.engine import Completion, GenerationRequest, InferenceEngine, InFlight
from skyrl.inference.pool.admission import Admission, ServingEngine
from skyrl.inference.pool.restarts import EngineRestarts
from skyrl.processes.gather_or_cancel import wait_all
from skyrl.processes.signals import RESUMES_FROM_LAST_CHECKPOINT
from skyrl.weight_receiver.incoming_weights import Adapter, IncomingWeights

T = TypeVar("T")

_LOST = (ProcessError, WeightSyncError)
"""Exceptions after which an engine is never used again."""

_log = logging.getLogger(__name__)


@frozen(kw_only=True)
class EngineState:
    """One engine, as `skyrl engines` lists it."""

    number: int
    state: str
    """`serving`, `starting`, `waiting for weights`, or `lost`: the engine died, and may be restarted."""

    samples: int = 0
    """Number of samples that the engine is drawing."""

    weight_version: int | None = None
    """Version of the weights that the engine samples from; None while it does not serve."""


class InferenceEngineClient:
    """The engines of a run, used as one. All of them hold the same model."""

    def __init__(
        self,
        engines: Sequence[InferenceEngine],
        tokenizer: ChatTokenizer,
        model_path: str,
        lora_cfg: SkyRLLoraConfig,
        inference_engine_config: InferenceEngineConfig,
        *,
        in_flight: InFlight = "finish",
        restarts: EngineRestarts | None = None,
    ) -> None:
        """`in_flight` is the policy of a pause for samples that are being drawn. `restarts` restarts lost engines; if
        it is None, they stay out of service.
        """
        assert engines, "an inference client needs at least one engine"
        self.tokenizer, self.model_path = tokenizer, model_path
        self.lora_cfg, self.inference_engine_config = lora_cfg, inference_engine_config
        self._admission = Admission(engines, inference_engine_config.max_num_seqs)
        self.engines = tuple(engines)
        """Every engine since the start of the run, including lost ones, without drained ones."""
        self._numbers, self._next = set(range(len(engines))), len(engines)
        self._restarts = restarts
        self._in_flight = in_flight
        self._none_left = asyncio.Event()
        self._last_loss: RunError | None = None
        self.only_promised = False
        """Whether an engine could not show that it loaded the newest weights (`InferenceEngine.load_weights`)."""
        self.holds_weights = True
        """False from the moment an engine discards its weights to sleep until weights are loaded again."""

    @property
    def _serving(self) -> list[ServingEngine]:
        return self._admission.serving

    @property
    def in_service(self) -> tuple[InferenceEngine, ...]:
        """The engines that take work, in order. Weights have to reach all of them."""
        return tuple(served.engine for served in self._serving)

    @property
    def weight_version(self) -> int:
        """The one version that every engine in service samples from. Raises `WeightSyncError` when they differ."""
        versions = [engine.weight_version for engine in self.in_service]
        if len(set(versions)) > 1:
            raise WeightSyncError(f"the engines hold different weights: versions {versions}, in order of engines")
        return versions[0]

    @property
    def running(self) -> int:
        """Number of samples that engines were given and have not returned."""
        return sum(served.samples for served in self._serving)

    async def waiting(self) -> int:
        """Number of samples that wait, here for an engine or inside one."""
        loads = await asyncio.gather(*(engine.current_load() for engine in self.in_service))
        return self._admission.queued + sum(load.waiting for load in loads if load is not None)

    @property
    def metrics(self) -> dict[str, float]:
        """Numbers of engines in service and out of service, and of restarts since the start of the run."""
        serving = len(self._serving)
        counts = {
            "inference/engines_in_service": float(serving),
            "inference/engines_lost": len(self._numbers) - serving,
        }
        return counts if self._restarts is None else counts | {"inference/engine_restarts": self._restarts.succeeded}

    @property
    def states(self) -> list[EngineState]:
        """States of the engines that exist or are being started, in order of their numbers."""
        starts = self._restarts
        starting, ready = (starts.starting, starts.waiting) if starts is not None else ((), ())
        listed = {number: EngineState(number=number, state="lost") for number in self._numbers}
        listed |= {number: EngineState(number=number, state="starting") for number in starting}
        listed |= {number: EngineState(number=number, state="waiting for weights") for number in ready}
        for served in self._serving:
            listed[served.number] = EngineState(
                number=served.number,
                state="serving",
                samples=served.samples,
                weight_version=served.engine.weight_version,
            )
        return [listed[number] for number in sorted(listed)]

    def add_engine(self) -> int:
        """Start one more engine in the background; it serves from the first weight transfer after that. Returns its
        number.
        """
        assert self._restarts is not None, "engines of this run cannot be added"
        number, self._next = self._next, self._next + 1
        self._restarts.add(number)
        return number

    def failed_additions(self) -> list[tuple[int, str]]:
        """Number and reason of each engine that could not be added since the last call."""
        return [] if self._restarts is None else self._restarts.take_not_started()

    async def drain(self, number: int) -> None:
        """Take an engine out of service for good: it finishes its samples, and is closed. The others take all requests
        from now on. An engine that is already lost is no longer counted.
        """
        self._numbers.discard(number)
        served = next((item for item in self._serving if item.number == number), None)
        if served is None:
            return
        assert len(self._serving) > 1, "the last engine is not drained"
        # First out of service, so that it gets no more requests; then its samples; its error counts no longer.
        self._admission.leave(served)
        while served.calls:
            await asyncio.wait(served.calls)
        with suppress(ProcessError):
            await served.engine.close()
        self.engines = tuple(engine for engine in self.engines if engine is not served.engine)

    async def generate(self, request: GenerationRequest) -> tuple[Completion, ...]:
        """Draw all samples of a request from one engine: the one that drew the previous turn or has a prefix of the
        prompt cached, unless it is overloaded; else the one with the fewest samples relative to its limit.

        An engine is given at most `max_num_seqs` samples at a time, and fewer while it reports that it queues them or
        that its cache is full; the rest wait here for any engine that becomes free. If an engine is lost, its requests,
        including those paused inside it, are drawn again elsewhere from the same keys, so that the draws are the same.
        An engine that takes far too long for a sample has another one draw it, too. Raises the last engine's error if
        none is left, and `NonFiniteError` if two engines compute numbers that are not finite.
        """
        while True:
            served = await self._admission.admitted(request)
            others: list[Completion] = []
            # While one engine is slow, another may draw the sample, too. Not if tokens are reported: they would come
            # from both.
            offered = request
            if len(self._serving) > 1 and request.on_tokens is None:
                offered = evolve(request, draw_elsewhere=partial(self._draw_from_other, request, served, others))
            try:
                drawn = await self._draw_from(served, offered)
            except NonFiniteError as error:
                if offered.draw_elsewhere is None:
                    raise
                drawn = tuple(await self._finite_elsewhere(request, served, others, error))
            if drawn is not None:
                return tuple(_drawn_by(served.number, sample, others) for sample in drawn)

    async def _draw_from(self, served: ServingEngine, request: GenerationRequest) -> tuple[Completion, ...] | None:
        """The answer of an engine to a request that is counted in; None if the engine was lost. Ends together with the
        engine's call, cancelled or not.
        """
        call = asyncio.ensure_future(served.engine.generate(request))
        served.calls.add(call)
        try:
            try:
                await asyncio.wait([call])
            except asyncio.CancelledError:
                call.cancel()
                await asyncio.wait([call])
                raise
            if not call.cancelled() or served in self._serving:
                self._admission.record_drawn(request, served)
                return call.result()
        except _LOST as error:
            self._lose(served, error)
        finally:
            served.calls.discard(call)
            self._admission.record_ended(request, served)
        return None

    async def _finite_elsewhere(
        self, request: GenerationRequest, served: ServingEngine, others: list[Completion], error: NonFiniteError
    ) -> list[Completion]:
        """All samples of the request from another engine, after one of them was not finite on this one, which is lost.
        They are added to `others`.

        The same weights give the same numbers, so that another engine tells an engine that computes wrongly from a
        model that has diverged: of that, it raises `NonFiniteError`, too, and no engine is lost. Raises `error` if no
        other engine answers.
        """
        try:
            drawn = [await self._draw_from_other(request, served, others, index) for index in range(len(request.keys))]
        except ProcessError:
            raise error from None
        self._lose(served, error)
        return drawn

    async def _draw_from_other(
        self, request: GenerationRequest, served: ServingEngine, others: list[Completion], index: int
    ) -> Completion:
        """One sample of the request, from another engine; it is added to `others`. Raises `ProcessError` if there is no
        other.
        """
        single_request = evolve(request, keys=(request.keys[index],))
        while (other := self._admission.least_loaded_other(served, single_request)) is not None:
            _log.info("engine %d does not answer well: engine %d draws the sample, too", served.number, other.number)
            if drawn := await self._draw_from(other, single_request):
                others.append(evolve(drawn[0], engine=other.number))
                return others[-1]
        raise ProcessError("no other inference engine is in service")

    async def pause(self, in_flight: InFlight | None = None) -> None:
        """Returns when nothing runs on any engine. Requests made from now on wait. `in_flight` replaces the policy for
        samples that are being drawn.
        """
        self._in_flight = in_flight or self._in_flight
        self._admission.close()
        await self._everywhere(lambda engine: engine.pause(self._in_flight))

    async def wait_for_replacement(self) -> None:
        """Returns when no engine is in service and a new one is ready, which needs the weights now. Raises the error
        that killed the last engine if no new one will start.
        """
        await self._none_left.wait()
        await self._wait_for_restart()

    async def _wait_for_restart(self) -> None:
        assert self._restarts is not None and self._last_loss is not None, "an engine was lost and may come again"
        if not await self._restarts.wait_until_ready():
            raise _last_engine_error(self._last_loss)

    async def admit_started(self) -> bool:
        """Take engines that have started into service. Returns whether there were any. If none serves, waits for the
        first one. Called while paused, before weights are loaded: new engines hold those that the run started from.
        """
        are_new = await self._admit_ready()
        while not self._serving:
            await self._wait_for_restart()
            are_new = await self._admit_ready() or are_new
        self._none_left.clear()
        return are_new

    async def _admit_ready(self) -> bool:
        engines = self._restarts.take() if self._restarts else []
        for number, engine in engines:
            served = self._join(number, engine)
            try:
                await engine.pause(self._in_flight)
            except ProcessError as error:
                self._lose(served, error)
        return bool(engines)

    def _join(self, number: int, engine: InferenceEngine) -> ServingEngine:
        others = (item for item in self.engines if item is not engine)
        self.engines, self._numbers = (*others, engine), self._numbers | {number}
        return self._admission.enter(number, engine)

    async def run_with_restarts(
        self, work: Coroutine[Any, Any, T], admitting: Callable[[InferenceEngine], AbstractAsyncContextManager[None]]
    ) -> T:
        """The result of `work`, during which engines that start are taken into service at once, each within its block
        of `admitting`: for engines whose weights never change. Raises the error of the last engine if it is lost for
        good.
        """
        working, restarting = asyncio.ensure_future(work), asyncio.ensure_future(self._admit_at_once(admitting))
        try:
            await asyncio.wait([working, restarting], return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                restarting.result()
            return await working
        finally:
            for task in (working, restarting):
                task.cancel()
            await wait_all([working, restarting])

    async def _admit_at_once(self, admitting: Callable[[InferenceEngine], AbstractAsyncContextManager[None]]) -> None:
        restarts = self._restarts
        while restarts is not None:
            await restarts.ended.wait()
            restarts.ended.clear()
            for number, engine in restarts.take():
                try:
                    async with admitting(engine):
                        self._join(number, engine)
                except _LOST as error:
                    restarts.died(number, error)
                    continue
                _log.warning("inference engine %d is in service again", number)
                self._admission.open()
            if not self._serving and not restarts.starting:
                assert self._last_loss is not None, "an engine was lost"
                raise _last_engine_error(self._last_loss)

    async def resume(self) -> None:
        """Lets every engine take work again."""
        await self._everywhere(lambda engine: engine.resume())
        self._admission.open()

    async def load_weights(
        self, incoming_sets: Sequence[IncomingWeights], version: int, abort: Callable[[str], None] | None = None
    ) -> None:
        """Give each engine in service its set of weights, in the order of `in_service`. If the engines receive them as
        a group, `abort` stops the others from waiting for one that died or cannot take part.

        If only some engines take the weights, the others are lost. If none does, raises the first error, preferably
        that of a process that ended, and every engine holds its old weights or samples nothing before it has taken a
        complete set.
        """
        self._refuse_where_none_serves()
        serving = list(self._serving)
        assert len(incoming_sets) == len(serving), (
            f"{len(incoming_sets)} sets of weights for {len(serving)} engines in service"
        )
        calls = [s.engine.load_weights(incoming, version) for s, incoming in zip(serving, incoming_sets, strict=True)]
        outcomes = await _outcomes(calls, abort)
        failed: list[tuple[ServingEngine, RunError]] = []
        only_promised = False
        for served, outcome in zip(serving, outcomes, strict=True):
            if isinstance(outcome, _LOST):
                failed.append((served, outcome))
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                only_promised |= not outcome
        all_failed = len(failed) == len(serving)
        for served, error in failed:
            if isinstance(error, ProcessError) or not all_failed:
                self._lose(served, error)
        if all_failed:
            raise min((error for _, error in failed), key=lambda error: not isinstance(error, ProcessError))
        self.holds_weights, self.only_promised = True, only_promised
        if self._in_flight != "keep":
            self._admission.prefixes.clear()  # the engines have dropped their caches

    async def add_adapter(self, name: str, adapter: Adapter) -> None:
        """Publishes an adapter on every engine in service, or on none; see `InferenceEngine.add_adapter`."""
        holders: list[InferenceEngine] = []

        async def publish(engine: InferenceEngine) -> None:
            await engine.add_adapter(name, adapter)
            holders.append(engine)

        try:
            await self._everywhere(publish)
        except BaseException:
            await asyncio.gather(*(engine.remove_adapter(name) for engine in holders), return_exceptions=True)
            raise

    async def remove_adapter(self, name: str) -> None:
        """Forgets a published adapter on every engine in service; see `InferenceEngine.remove_adapter`."""
        await self._everywhere(lambda engine: engine.remove_adapter(name))

    async def inspect(self, look: Callable[[Mapping[int, InferenceEngine]], Awaitable[T]]) -> T:
        """Await `look` on the engines in service by their numbers, which take its requests and no others; returns its
        result.

        Called while paused, and leaves everything paused: an error of `look` is raised before the first token is
        sampled or, if samples are in flight, before any of them is finished and returned. If an engine is lost
        meanwhile, or `look` raises `EngineFailed` for it, `look` is repeated with the others.
        """
        while True:
            await self._everywhere(lambda engine: engine.resume())
            self._refuse_where_none_serves()
            serving = {served.number: served for served in self._serving}
            engines = {number: served.engine for number, served in serving.items()}
            try:
                return await look(engines)
            except EngineFailed as error:
                failed = error.cause
                self._lose(serving[error.number], failed)
            except ProcessError as error:
                failed = error
            finally:
                await self._everywhere(lambda engine: engine.pause(self._in_flight))
            if self.in_service == tuple(engines.values()) or not self._serving:
                raise failed  # the error of another process, or of the last engine

    async def sleep(self) -> None:
        """Let every engine free the memory that it can. Called while paused."""

        async def sleep(engine: InferenceEngine) -> None:
            if await engine.sleep():
                self.holds_weights = False

        await self._everywhere(sleep)

    async def wake(self) -> None:
        """Let every engine allocate its memory again."""
        await self._everywhere(lambda engine: engine.wake())

    async def close(self, *, engines_end_otherwise: bool = False) -> None:
        """Closes every engine, including lost ones. Raises the first error of one that was in service. Engines that end
        with their processes, whatever they are doing, need not be closed.
        """
        await self._admission.stop_asking()
        if engines_end_otherwise:
            return
        # Restarts first, which would bring engines that nobody closes. Requests that still wait are admitted last:
        # closed engines refuse them.
        if self._restarts is not None:
            await self._restarts.close()
        outcomes = await asyncio.gather(*(engine.close() for engine in self.engines), return_exceptions=True)
        self._admission.open()
        serving = self.in_service
        for engine, outcome in zip(self.engines, outcomes, strict=True):
            if isinstance(outcome, BaseException) and engine in serving and not isinstance(outcome, ProcessError):
                raise outcome

    def _refuse_where_none_serves(self) -> None:
        """Raises the error that killed the last engine, if no engine is in service."""
        if not self._serving:
            assert self._last_loss is not None, "an engine was lost"
            raise self._last_loss

    async def _everywhere(self, call: Callable[[InferenceEngine], Awaitable[None]]) -> None:
        """Calls every engine in service and waits for all. A dead one is lost; of other errors the first is raised."""
        serving = list(self._serving)
        outcomes = await asyncio.gather(*(call(served.engine) for served in serving), return_exceptions=True)
        for served, outcome in zip(serving, outcomes, strict=True):
            if isinstance(outcome, ProcessError):
                self._lose(served, outcome)
            elif outcome is not None:
                raise outcome

    def _lose(self, served: ServingEngine, cause: RunError) -> None:
        """Take the engine out of service and log it once. Raises the cause if it was the last one and none can replace
        it.
        """
        if served not in self._serving:
            return
        restarts = self._restarts
        if len(self._serving) == 1 and (restarts is None or not restarts.may_replace(served.number)):
            raise _last_engine_error(cause)
        self._admission.leave(served)
        for call in served.calls:
            call.cancel()
        left = len(self._serving)
        _log.warning("inference engine %d is out of service, %d left: %s", served.number, left, cause)
        if restarts is not None:
            restarts.died(served.number, cause)
        if not left:
            self._last_loss = cause
            self._none_left.set()


def _drawn_by(number: int, drawn: Completion, others: Sequence[Completion]) -> Completion:
    """The completion with the number of the engine that drew it, unless it is one of `others`, which have theirs."""
    if drawn.engine == number or any(drawn is other for other in others):
        return drawn
    return evolve(drawn, engine=number)


def _last_engine_error(cause: RunError) -> RunError:
    """The error that killed the last engine, of the same class, with the end of the run as its consequence."""
    error = copy(cause)
    error.args = (f"{cause}. No engine is left. {RESUMES_FROM_LAST_CHECKPOINT}",)
    return error


async def _outcomes(
    calls: Sequence[Coroutine[object, object, T]], abort: Callable[[str], None] | None
) -> list[T | BaseException]:
    """Result or error of each call. If one fails, `abort` ends the other calls, which are still awaited."""
    is_aborted = abort is None

    async def outcome(call: Coroutine[object, object, T]) -> T:
        nonlocal is_aborted
        try:
            return await call
        except Exception as error:
            if not is_aborted and abort is not None:
                is_aborted = True
                await asyncio.to_thread(abort, str(error))
            raise

    return await asyncio.gather(*map(outcome, calls), return_exceptions=True)
