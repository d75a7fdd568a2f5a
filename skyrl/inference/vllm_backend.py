"""One face for vLLM's two engines, `vllm_async.py` and `vllm_stepped.py`.

Either lives on the event loop that it was made on, and is called from there alone; see `vllm_engine.py`. vLLM is
imported by name, late: this module costs nothing where it is not used.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol

from skyrl.inference.engine import EngineLoad, InFlight, NewTokens


class Output(Protocol):
    """The part of vLLM's `CompletionOutput` that is read here."""

    token_ids: Sequence[int]
    logprobs: Any
    """Its flat log-probabilities, those of the drawn tokens alone."""

    finish_reason: str | None
    stop_reason: int | str | None
    weight_versions: Sequence[Any] | None
    """Spans of `version`, `start` and `end` (excluded)."""

    routed_experts: Any
    """An array (tokens, layers, experts of a token), or None."""


Heard = Callable[[Sequence[int]], None]


class Backend(Protocol):
    """One vLLM engine. After any of its calls raised `ProcessError`, it is dead, and every other call raises it too."""

    shares_memory: bool
    """Workers are this process: weights need not travel."""

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: Mapping[str, Any],
        heard: Heard | None = None,
        adapter: object = None,
    ) -> Output:
        """vLLM's finished `CompletionOutput`. Giving up the call gives up the sample. `heard` is called with all tokens
        so far whenever there are more. `adapter` is what draws it, where that is not the one that was adopted.
        """

    async def pause(self, in_flight: InFlight) -> None:
        """Stop the scheduler. No request is running, unless `in_flight` says what becomes of those that are."""

    async def resume(self) -> None:
        """Restart the scheduler."""

    def load(self) -> EngineLoad | None:
        """How busy the scheduler was after its last step; None where that is not known here."""

    async def call_workers(self, method: str, *args: object) -> list[Any]:
        """The results of calling `method` on every worker."""

    async def adopt_adapter(self, folder: str) -> None:
        """Draw samples from now on by the adapter that is stored there as PEFT stores it, in place of any before."""

    async def load_adapter(self, adapter: object) -> None:
        """Load one more adapter, by which samples are drawn that name it."""

    async def forget(self, version: int) -> bool:
        """Drops every cache of computed prompts, but for what the last pause keeps, and names the weights; False where
        a cache was still in use.
        """

    async def sleep(self) -> None:
        """Gives back the memory of weights and cache."""

    async def wake(self) -> None:
        """Takes it again."""

    def close(self) -> None:
        """Ends it, with the processes it has."""


ADAPTER = 1
"""Number of the adapter that an engine adopts, its policy's. Others have higher ones."""


def adapter_request(folder: str, name: str = "skyrl", number: int = ADAPTER) -> object:
    """vLLM's `LoRARequest` of an adapter."""
    kind = importlib.import_module("vllm.lora.request").LoRARequest
    return kind(lora_name=name, lora_int_id=number, lora_path=folder)


def request_maker(vllm: ModuleType) -> Callable[[Sequence[int], Mapping[str, Any], bool], tuple[Any, Any]]:
    """Makes vLLM's prompt and sampling parameters. Only the finished answer comes back or, where the request is
    `streamed`, all tokens so far after each step.
    """
    tokens_input = importlib.import_module("vllm.inputs").tokens_input
    kinds = importlib.import_module("vllm.sampling_params").RequestOutputKind

    def make(prompt_ids: Sequence[int], sampling: Mapping[str, Any], streamed: bool) -> tuple[Any, Any]:
        kind = kinds.CUMULATIVE if streamed else kinds.FINAL_ONLY
        return tokens_input(list(prompt_ids)), vllm.SamplingParams(output_kind=kind, **sampling)

    return make


def reporter(on_tokens: Callable[[NewTokens], None], index: int) -> Heard:
    """Reports the new ones among all tokens so far of the sample at place `index`."""
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
