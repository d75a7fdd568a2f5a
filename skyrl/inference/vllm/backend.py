"""What vLLM's two engines, `vllm/asynchronous.py` and `vllm/stepped.py`, have in common.

Each must be called only from the event loop on which it was created; see `vllm/engine.py`. vLLM is imported by name and
only when it is used, so that importing this module costs nothing.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol

from skyrl.errors import RunError
from skyrl.inference.engine import EngineLoad, InFlight, NewTokens


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

    @abstractmethod
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


ADAPTER = 1
"""Number of the adapter that an engine adopts for its policy. Other adapters have higher numbers."""


def adapter_request(folder: str, name: str = "skyrl", number: int = ADAPTER) -> object:
    """vLLM's `LoRARequest` for the adapter in a folder."""
    kind = importlib.import_module("vllm.lora.request").LoRARequest
    return kind(lora_name=name, lora_int_id=number, lora_path=folder)


def request_maker(vllm: ModuleType) -> Callable[[Sequence[int], Mapping[str, Any], bool], tuple[Any, Any]]:
    """Returns a function that makes vLLM's prompt and sampling parameters. vLLM answers with the finished sample only
    or, if the request is `streamed`, with all tokens so far after each step.
    """
    tokens_input = importlib.import_module("vllm.inputs").tokens_input
    kinds = importlib.import_module("vllm.sampling_params").RequestOutputKind

    def make(prompt_ids: Sequence[int], sampling: Mapping[str, Any], streamed: bool) -> tuple[Any, Any]:
        kind = kinds.CUMULATIVE if streamed else kinds.FINAL_ONLY
        # nobody else has these parameters, so that vLLM need not copy them in depth
        return tokens_input(list(prompt_ids)), vllm.SamplingParams(output_kind=kind, skip_clone=True, **sampling)

    return make


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
