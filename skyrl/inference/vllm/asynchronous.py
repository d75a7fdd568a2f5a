"""vLLM's `AsyncLLM`: continuous batching in an engine process, which may die or hang without ending this process."""

from __future__ import annotations

import asyncio
import importlib
import multiprocessing
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from skyrl.errors import ProcessError, RunError
from skyrl.inference.engine import EngineLoad, InFlight
from skyrl.inference.vllm.backend import Backend, FinishedRequest, Heard, first_line, request_maker

T = TypeVar("T")

_ALIVE_SECONDS = 120.0
"""Number of seconds without an answer, while samples are drawn, after which an engine process counts as hung."""


class AsyncBackend(Backend):
    """`vllm.AsyncLLM`: continuous batching in an engine process."""

    shares_memory = False
    _sets_version = "update_weight_version"

    def __init__(self, arguments: Mapping[str, Any], *, ray_statistics: bool) -> None:
        before = set(multiprocessing.active_children())
        vllm = importlib.import_module("vllm")
        module = importlib.import_module("vllm.v1.engine.async_llm")
        self._statistics: dict[int, EngineLoad] = {}
        loggers: list[Any] = [lambda config, index=0: _Statistics(self._statistics, index)]
        if ray_statistics:
            loggers.append(importlib.import_module("vllm.v1.metrics.ray_wrappers").RayPrometheusStatLogger)
        self._llm = module.AsyncLLM.from_engine_args(vllm.AsyncEngineArgs(**arguments), stat_loggers=loggers)
        self._children = set(multiprocessing.active_children()) - before
        self._make = request_maker(vllm)
        self._running = 0
        self._watch: asyncio.Task[None] | None = None
        self._hung = ""

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: Mapping[str, Any],
        heard: Heard | None = None,
        adapter: object = None,
    ) -> FinishedRequest:
        prompt, params = self._make(prompt_ids, sampling, heard is not None)
        self._running += 1
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._watch_engine())
        try:
            drawing = self._llm.generate(prompt, params, request_id, lora_request=adapter or self._adapter)
            return await self._alive(self._finished_request(drawing, heard))
        finally:
            self._running -= 1

    async def pause(self, in_flight: InFlight) -> None:
        self._in_flight = in_flight
        await self._alive(self._llm.pause_generation(mode=self._mode, clear_cache=in_flight != "keep"))

    async def resume(self) -> None:
        await self._alive(self._llm.resume_generation())

    def load(self) -> EngineLoad | None:
        copies = self._statistics.values()
        if not copies:
            return None
        fullest = max(copy.cache_use or 0.0 for copy in copies)
        return EngineLoad(waiting=sum(copy.waiting for copy in copies), cache_use=fullest)

    async def _ask(self, method: str, *args: object, **kwargs: object) -> Any:
        return await self._alive(getattr(self._llm, method)(*args, **kwargs))

    async def sleep(self) -> None:
        await self._alive(self._llm.sleep(level=2, mode=self._mode))
        self._is_asleep = True

    async def wake(self) -> None:
        await self._alive(self._llm.wake_up())
        self._is_asleep = False
        await self.pause(self._in_flight)  # waking starts the scheduler

    def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        # memory that sleep has unmapped is not freed in order: vLLM's allocator would print an error for each piece
        self._llm.shutdown(timeout=0.0 if self._is_asleep else 5.0)
        for child in self._children:
            child.join(5.0)
            if child.is_alive():
                child.kill()
                child.join(5.0)

    async def _finished_request(self, outputs: AsyncIterator[Any], heard: Heard | None) -> FinishedRequest:
        last: FinishedRequest | None = None
        async for output in outputs:
            last = output
            if heard is not None:
                heard(output.outputs[0].token_ids)
        if last is None or not last.finished:
            raise RunError("vLLM ended a request without an answer")
        return last

    async def _alive(self, call: Awaitable[T]) -> T:
        """The call's result. vLLM's errors become `ProcessError` if its process is gone, `RunError` for one request."""
        kinds = importlib.import_module("vllm.v1.engine.exceptions")
        try:
            return await call
        except kinds.EngineDeadError as error:
            raise ProcessError(self._cause()) from error
        except kinds.EngineGenerateError as error:
            cause = error.__cause__ or error
            raise RunError(f"vLLM failed on a request: {type(cause).__name__}: {first_line(cause)}") from error

    async def _watch_engine(self) -> None:
        """Asks for a sign of life while samples are drawn: vLLM notices a process that ended, not one that hangs."""
        while self._running:
            await asyncio.sleep(_ALIVE_SECONDS / 4)
            try:
                await asyncio.wait_for(self._llm.get_weight_version(), _ALIVE_SECONDS)
            except TimeoutError:
                self._hung = f"vLLM's engine process gave no sign of life for {_ALIVE_SECONDS:.0f} s and was ended"
                for child in self._children:
                    child.kill()
                return

    @property
    def _mode(self) -> str:
        """vLLM's name of the policy for running requests; with `keep` it holds their tokens."""
        return "wait" if self._in_flight == "finish" else "keep"

    def _cause(self) -> str:
        codes = [
            f"process {child.pid} ended with {_exit_text(child)}" for child in self._children if not child.is_alive()
        ]
        return self._hung or f"vLLM's engine died: {', '.join(codes) or 'an exception'}; its log is above"


class _Statistics:
    """vLLM's `StatLoggerBase`: records the load of each copy of the weights after each of its steps."""

    def __init__(self, loads: dict[int, EngineLoad], index: int) -> None:
        self._loads, self._index = loads, index

    def record(self, scheduler_stats: Any, *_: object, engine_idx: int = 0, **__: object) -> None:
        if scheduler_stats is not None:
            self._loads[engine_idx] = EngineLoad(
                waiting=scheduler_stats.num_waiting_reqs, cache_use=scheduler_stats.kv_cache_usage
            )

    def log_engine_initialized(self) -> None:
        """Does nothing."""

    def log(self) -> None:
        """Does nothing."""

    def record_sleep_state(self, *_: object) -> None:
        """Does nothing: a sleeping engine gets no requests."""


def _exit_text(child: BaseProcess) -> str:
    code = child.exitcode
    return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
