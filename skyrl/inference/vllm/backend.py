"""vLLM's two engines: `AsyncLLM` in a process of its own, and `LLMEngine`, stepped on an event loop.

With both, requests join and leave at any step. Each must be called only from the event loop on which it was created;
see `vllm/engine.py`. vLLM is imported by name and only when it is used, so that importing this module costs nothing.
"""

from __future__ import annotations

import asyncio
import importlib
import multiprocessing
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, TypeVar

from skyrl.errors import ProcessError, RunError
from skyrl.inference.engine import EngineLoad, InFlight, NewTokens

T = TypeVar("T")

_LOOK_SECONDS = 1.0
"""Number of seconds between two looks whether the engine process that has to answer still runs."""

_ALIVE_SECONDS = 120.0
"""Number of seconds without an answer, while samples are drawn, after which an engine process counts as hung."""


class Output(Protocol):
    """The part of vLLM's `CompletionOutput` that is read here."""

    token_ids: Sequence[int]
    logprobs: Any
    """vLLM's flat log-probabilities, of the drawn tokens only."""

    finish_reason: str | None
    stop_reason: int | str | None
    weight_versions: Sequence[Any] | None
    """Spans of `version`, `start` and `end` (excluded)."""

    routed_experts: Any
    """An array (tokens, layers, experts of a token), or None."""


class FinishedRequest(Protocol):
    """The part of vLLM's `RequestOutput` that is read here."""

    outputs: Sequence[Output]
    """One, since each sample is a request."""

    finished: bool
    prompt_logprobs: Sequence[Mapping[int, Any] | None] | None
    """Log-probabilities of each token of the prompt and of the likeliest ones, by token; the first token has none."""


Heard = Callable[[Sequence[int]], None]


class Backend(ABC):
    """One vLLM engine. After any of its calls raised `ProcessError`, it is dead, and every other call raises it too."""

    shares_memory: bool
    """Whether the workers run in this process, so that weights need not be sent."""

    _sets_version: str
    """Name of vLLM's method that sets the version of the weights."""

    _adapter: Any = None
    _in_flight: InFlight = "finish"
    _is_asleep = False

    @abstractmethod
    async def _ask(self, method: str, *args: object, **kwargs: object) -> Any:
        """The result of a method of vLLM's engine. Raises `ProcessError` if the engine is dead."""

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: Mapping[str, Any],
        heard: Heard | None = None,
        adapter: object = None,
    ) -> FinishedRequest:
        """vLLM's finished `RequestOutput`. Cancelling the call cancels the sample. `heard` is called with all tokens
        so far whenever there are more. `adapter` draws the sample instead of the adopted one.
        """
        kinds = importlib.import_module("vllm.sampling_params")
        # vLLM answers with the finished sample only or, if somebody listens, with all tokens so far after each step.
        kind = kinds.RequestOutputKind.FINAL_ONLY if heard is None else kinds.RequestOutputKind.CUMULATIVE
        prompt = importlib.import_module("vllm.inputs").tokens_input(list(prompt_ids))
        # nobody else has these parameters, so that vLLM need not copy them in depth
        params = kinds.SamplingParams(output_kind=kind, skip_clone=True, **sampling)
        return await self._draw(request_id, prompt, params, heard, adapter or self._adapter)

    @abstractmethod
    async def _draw(
        self, request_id: str, prompt: object, params: object, heard: Heard | None, adapter: object
    ) -> FinishedRequest:
        """The answer to a request of `generate`."""

    @abstractmethod
    async def pause(self, in_flight: InFlight) -> None:
        """Stop the scheduler. If `in_flight` is `finish`, no request is running."""

    @abstractmethod
    async def resume(self) -> None:
        """Restart the scheduler."""

    @abstractmethod
    def load(self) -> EngineLoad | None:
        """Load of the scheduler after its last step; None if it is unknown in this process."""

    async def call_workers(self, method: str, *args: object) -> list[Any]:
        """The results of calling `method` on every worker."""
        results: list[Any] = await self._ask("collective_rpc", method, args=args)
        return results

    async def adopt_adapter(self, folder: str) -> None:
        """Draw samples from now on with the adapter in `folder`, in PEFT's format, which replaces any earlier one."""
        self._adapter = adapter_request(folder)
        await self._ask("remove_lora", ADAPTER)
        await self.load_adapter(self._adapter)

    async def load_adapter(self, adapter: object) -> None:
        """Load one more adapter, for requests that name it."""
        if not await self._ask("add_lora", adapter):
            raise RunError("vLLM does not accept the adapter")

    async def unload_adapter(self, number: int) -> None:
        """Unload the adapter of this number, which no running request names."""
        await self._ask("remove_lora", number)

    async def drop_caches(self, version: int) -> bool:
        """Drop every cache of computed prompts, except for what the last pause keeps, and set the version of the
        weights. Returns False if a cache was still in use.
        """
        await self._ask("reset_mm_cache")
        await self._ask("reset_encoder_cache")
        reset_running = self._in_flight == "recompute"
        if self._in_flight != "keep" and not await self._ask("reset_prefix_cache", reset_running):
            return False
        await self._ask(self._sets_version, str(version))
        return True

    @abstractmethod
    async def sleep(self) -> None:
        """Free the memory of weights and cache."""

    @abstractmethod
    async def wake(self) -> None:
        """Allocate the memory of weights and cache again."""

    @abstractmethod
    def close(self) -> None:
        """End the engine and its processes."""


class AsyncBackend(Backend):
    """`vllm.AsyncLLM`: continuous batching in an engine process, which may die or hang without ending this process."""

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
        self._running = 0
        self._watch: asyncio.Task[None] | None = None
        self._hung = ""

    async def _draw(
        self, request_id: str, prompt: object, params: object, heard: Heard | None, adapter: object
    ) -> FinishedRequest:
        self._running += 1
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._watch_engine())
        try:
            drawing = self._llm.generate(prompt, params, request_id, lora_request=adapter)
            return await self._alive(self._finished_request(drawing, heard))
        finally:
            self._running -= 1

    async def pause(self, in_flight: InFlight) -> None:
        self._in_flight = in_flight
        await self._answer(self._llm.pause_generation(mode=self._mode, clear_cache=in_flight != "keep"))

    async def resume(self) -> None:
        await self._answer(self._llm.resume_generation())

    def load(self) -> EngineLoad | None:
        copies = self._statistics.values()
        if not copies:
            return None
        fullest = max(copy.cache_use or 0.0 for copy in copies)
        return EngineLoad(waiting=sum(copy.waiting for copy in copies), cache_use=fullest)

    async def _ask(self, method: str, *args: object, **kwargs: object) -> Any:
        return await self._answer(getattr(self._llm, method)(*args, **kwargs))

    async def sleep(self) -> None:
        await self._answer(self._llm.sleep(level=2, mode=self._mode))
        self._is_asleep = True

    async def wake(self) -> None:
        await self._answer(self._llm.wake_up())
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

    async def _answer(self, call: Awaitable[T]) -> T:
        """The result of any call but a draw, of which alone vLLM says when its process ends. Raises as `_alive`."""
        answer = asyncio.ensure_future(self._alive(call))
        try:
            while not answer.done():
                await asyncio.wait([answer], timeout=_LOOK_SECONDS)
                if not answer.done() and not all(child.is_alive() for child in self._children):
                    raise ProcessError(self._cause())
            return answer.result()
        finally:
            answer.cancel()

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


_ENDED_ASLEEP: list[Any] = []
"""Engines of this process that were closed asleep. They hold no device memory, and are kept because freeing what sleep
has unmapped makes vLLM's allocator print an error for each piece."""


class SteppedBackend(Backend):
    """vLLM stepped in this process, unless its configuration gives its scheduler a process of its own."""

    _sets_version = "set_weight_version"

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        vllm = importlib.import_module("vllm")
        # By default, vLLM imports a model's class in a process of its own, for 10 s and more at the first start on a
        # machine, so that CUDA is not used before vLLM forks. Here nothing is forked: it is examined in this process.
        registry: Any = importlib.import_module("vllm.model_executor.models.registry")
        if hasattr(registry, "_run_in_subprocess"):
            registry._run_in_subprocess = lambda call: call()
        self._engine = vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**arguments))
        self.shares_memory = hasattr(self._engine, "model_executor") and not hasattr(
            self._engine.model_executor, "workers"
        )
        self._futures: dict[str, asyncio.Future[FinishedRequest]] = {}
        self._heard: dict[str, Heard] = {}
        self._stepping: asyncio.Task[None] | None = None
        self._dead = ""
        self._resting = False

    async def _draw(
        self, request_id: str, prompt: object, params: object, heard: Heard | None, adapter: object
    ) -> FinishedRequest:
        if self._dead:
            raise ProcessError(self._dead)
        # not by `_call`: a refused request does not change the engine
        self._engine.add_request(request_id, prompt, params, lora_request=adapter)
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
    def _core(self) -> Any | None:
        """vLLM's engine core, if it is in this process; else None."""
        return getattr(self._engine.engine_core, "engine_core", None)

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


ADAPTER = 1
"""Number of the adapter that an engine adopts for its policy. Other adapters have higher numbers."""


def adapter_request(folder: str, name: str = "skyrl", number: int = ADAPTER) -> object:
    """vLLM's `LoRARequest` for the adapter in a folder."""
    kind = importlib.import_module("vllm.lora.request").LoRARequest
    return kind(lora_name=name, lora_int_id=number, lora_path=folder)


def reporter(on_tokens: Callable[[NewTokens], None], index: int) -> Heard:
    """Returns a callback that takes all tokens so far of the sample at `index`, and reports the new ones."""
    count = 0

    def heard(token_ids: Sequence[int]) -> None:
        nonlocal count
        if len(token_ids) > count:
            on_tokens(NewTokens(index=index, start=count, token_ids=tuple(token_ids[count:])))
            count = len(token_ids)

    return heard


def refusals() -> tuple[type[Exception], ...]:
    """Exceptions that vLLM raises for a request that it refuses."""
    return (ValueError, TypeError, importlib.import_module("vllm.exceptions").VLLMClientError)


def first_line(error: BaseException) -> str:
    """First line of the exception's message."""
    return next(iter(str(error).splitlines()), "no message")
