"""vLLM's `LLMEngine`, stepped on an event loop: requests join and leave between steps, as with the asynchronous one."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from skyrl.errors import ProcessError
from skyrl.inference.engine import EngineLoad, InFlight
from skyrl.inference.vllm.backend import Backend, FinishedRequest, Heard, first_line, request_maker


class Core(Protocol):
    """The part of vLLM's engine core that is used here."""

    scheduler: Any
    batch_queue: Any


_ENDED_ASLEEP: list[Any] = []
"""Engines of this process that were closed asleep. They hold no device memory, and are kept because freeing what sleep
has unmapped makes vLLM's allocator print an error for each piece."""


class SteppedBackend(Backend):
    """vLLM stepped in this process, unless its configuration gives its scheduler a process of its own."""

    _sets_version = "set_weight_version"

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        vllm = importlib.import_module("vllm")
        _examine_models_here()
        self._engine = vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**arguments))
        self.shares_memory = hasattr(self._engine, "model_executor") and not hasattr(
            self._engine.model_executor, "workers"
        )
        self._make = request_maker(vllm)
        self._futures: dict[str, asyncio.Future[FinishedRequest]] = {}
        self._heard: dict[str, Heard] = {}
        self._stepping: asyncio.Task[None] | None = None
        self._dead = ""
        self._resting = False

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: Mapping[str, Any],
        heard: Heard | None = None,
        adapter: object = None,
    ) -> FinishedRequest:
        prompt, params = self._make(prompt_ids, sampling, heard is not None)
        if self._dead:
            raise ProcessError(self._dead)
        self._engine.add_request(
            request_id, prompt, params, lora_request=adapter or self._adapter
        )  # a refused request does not change the engine
        future: asyncio.Future[FinishedRequest] = asyncio.get_running_loop().create_future()
        self._futures[request_id] = future
        if heard is not None:
            self._heard[request_id] = heard
        self._step()
        try:
            return await future
        except asyncio.CancelledError:
            self._call(self._engine.abort_request, [request_id])
            raise
        finally:
            del self._futures[request_id]
            self._heard.pop(request_id, None)

    async def pause(self, in_flight: InFlight) -> None:
        self._in_flight, self._resting = in_flight, True  # the engine is paused when it is not stepped
        # A step may have been begun ahead of time, for samples that have ended meanwhile: on CUDA, vLLM schedules one
        # while the last one computes.
        while in_flight == "finish" and getattr(self._core, "batch_queue", None):
            self._call(self._engine.step)

    async def resume(self) -> None:
        self._resting = False
        self._step()

    @property
    def _core(self) -> Core | None:
        """vLLM's engine core, if it is in this process; else None."""
        core: Core | None = getattr(self._engine.engine_core, "engine_core", None)
        return core

    def load(self) -> EngineLoad | None:
        core = self._core
        if core is None or self._dead:
            return None
        _, waiting = core.scheduler.get_request_counts()
        return EngineLoad(waiting=waiting, cache_use=core.scheduler.kv_cache_manager.usage)

    async def _ask(self, method: str, *args: object, **kwargs: object) -> Any:
        return self._call(getattr(self._engine, method), *args, **kwargs)

    async def sleep(self) -> None:
        self._call(self._engine.sleep, level=2, mode="abort" if self._in_flight == "finish" else "keep")
        self._is_asleep = True

    async def wake(self) -> None:
        self._call(self._engine.wake_up)
        self._is_asleep = False

    def close(self) -> None:
        client = self._engine.engine_core
        if self._is_asleep and self._core is not None:
            client._finalizer.detach()
            _ENDED_ASLEEP.append(self._engine)
        else:
            client.shutdown(timeout=0.0 if self._is_asleep else None)

    def _step(self) -> None:
        """Makes sure that the engine is being stepped, unless it is paused or has nothing to do."""
        if not self._resting and (self._stepping is None or self._stepping.done()):
            self._stepping = asyncio.create_task(self._step_until_idle())

    async def _step_until_idle(self) -> None:
        while not self._resting and not self._dead and self._engine.has_unfinished_requests():
            await asyncio.sleep(0)  # ready requests join, cancelled ones leave
            if self._resting:
                return
            try:
                outputs = self._call(self._engine.step)
            except ProcessError:
                return
            for output in outputs:
                if listener := self._heard.get(output.request_id):
                    listener(output.outputs[0].token_ids)
                future = self._futures.get(output.request_id)
                if output.finished and future is not None and not future.done():
                    future.set_result(output)

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a call on the engine. After an exception its state is unknown: it counts as dead, and every waiting
        caller gets the error.
        """
        if self._dead:
            raise ProcessError(self._dead)
        try:
            return function(*args, **kwargs)
        except Exception as error:
            self._dead = f"vLLM's engine failed: {type(error).__name__}: {first_line(error)}"
            for future in self._futures.values():
                if not future.done():
                    future.set_exception(ProcessError(self._dead))
            raise ProcessError(self._dead) from error


def _examine_models_here() -> None:
    """Makes vLLM examine a model's class in this process. By default, it imports the class in a process of its own, for
    10 s and more at the first start on a machine, so that CUDA is not used before vLLM forks: here nothing is forked.
    """
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    if hasattr(registry, "_run_in_subprocess"):
        registry._run_in_subprocess = lambda call: call()
