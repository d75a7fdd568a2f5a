"""The vLLM engine: an `InferenceEngine` over `vllm.AsyncLLM` (separate processes) or `vllm.LLMEngine` (this process).

    GenerationRequest --> one vLLM request per sample --Backend--> Completion

vLLM's asynchronous engine belongs to one event loop, so each engine has its own loop on its own thread: calls may come
from any loop, which vLLM does not delay. The arguments of vLLM are in `arguments.py` and `sampling_arguments.py`, the
code that runs inside its workers is in `worker.py`.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import itertools
import logging
import shutil
import threading
from collections.abc import Coroutine, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from attrs import evolve

from skyrl.chats.tokenizer import ChatTokenizer
from skyrl.config import InferenceEngineConfig
from skyrl.errors import ModelError, ProcessError, RunError, SkyRLError, UserError, WeightSyncError
from skyrl.inference.adapter_shelf import AdapterShelf
from skyrl.inference.adapters import refuse_foreign, write_adapter
from skyrl.inference.engine import (
    Completion,
    EngineLoad,
    GenerationRequest,
    InFlight,
    completion_limit,
    empty_completions,
)
from skyrl.inference.gate import Gate
from skyrl.inference.sampling import Drawable
from skyrl.inference.vllm.arguments import engine_arguments
from skyrl.inference.vllm.backend import (
    AsyncBackend,
    Backend,
    SteppedBackend,
    adapter_request,
    first_line,
    refusals,
    reporter,
)
from skyrl.inference.vllm.environment import import_ahead, import_vllm, set_variables
from skyrl.inference.vllm.keyed_draws import keyed_arguments
from skyrl.inference.vllm.model import expected_weights, model_facts, overridden, refuse_unfit
from skyrl.inference.vllm.sampling_arguments import check_sampling, completion, prompt_scores, sampling_arguments
from skyrl.inference.weights import refuse_beside_adapters
from skyrl.models.files.loading import load_tokenizer
from skyrl.models.files.stored_adapter import stored_settings
from skyrl.processes.gather_or_cancel import gather_or_cancel
from skyrl.tree import FrozenDict
from skyrl.weight_receiver.incoming_weights import Adapter, IncomingWeights, SharedWeights, as_plain, load_failure

T = TypeVar("T")


_log = logging.getLogger(__name__)

_MESSAGE_CHARACTERS = 1000
"""Number of characters kept of vLLM's message if it does not start: it lists every wrong setting, and may print whole
configurations."""


class VLLMEngine:
    """An `InferenceEngine` that starts vLLM with `async_engine` and all other fields of its configuration.

    Example: `VLLMEngine(run.generator.inference_engine, model_path="Qwen/Qwen3-0.6B", device="cuda", seed=0)`
    """

    weight_version = 0
    """Version of the weights that the engine samples from; 0 until weights are loaded."""

    def __init__(
        self,
        config: InferenceEngineConfig,
        *,
        model_path: str,
        device: str,
        seed: int = 0,
        max_model_len: int | None = None,
        tokenizer: ChatTokenizer | None = None,
        overrides: Mapping[str, Any] = FrozenDict(),
        stored_weights: bool = True,
        tokenizer_path: str | None = None,
        lora_rank: int = 0,
        adapters: Mapping[str, str] = FrozenDict(),
        max_adapters: int = 0,
        max_adapter_rank: int = 32,
    ) -> None:
        """Returns when the model is loaded. `device` is `cpu` or `cuda`. If `tokenizer` is None, it is loaded from
        `tokenizer_path`, or from the model. `overrides` replace values of the model's own configuration. Without
        `stored_weights`, no weights are read, and the first ones come with `load_weights`. With `lora_rank`, trained
        adapters of that rank are accepted, too. `adapters` maps the names in requests to folders with adapters in
        PEFT's format; others may be published, of ranks up to `max_adapter_rank` and with `max_adapters` in memory.

        `max_model_len` is in tokens, prompt and completion together; None is the length that the model supports. Raises
        `ConfigError` for settings that vLLM does not support, `ModelError` for the model, `UserError` if vLLM is not
        installed or refuses to start.
        """
        trusted = bool(config.engine_init_kwargs.get("trust_remote_code", False))
        facts = model_facts(model_path, trust_remote_code=trusted, overrides=overrides)
        self._max_model_len = max_model_len or facts.positions or _raise_no_length(model_path)
        # a tokenizer must not serve two threads
        self._tokenizer = copy.deepcopy(tokenizer or load_tokenizer(tokenizer_path or model_path))
        self._eos_ids = {*facts.eos_ids} | {self._tokenizer.eos_token_id} - {None}
        self._expected = expected_weights(model_path, trust_remote_code=trusted, overrides=overrides)
        self._gate, self._numbers = Gate(), itertools.count()
        self._paused, self._closed, self._broken, self._device = False, False, "", device
        self._adapters, self._most_rank = self._shelf(max(max_adapters, len(adapters))), max_adapter_rank
        self._speculates = bool(config.engine_init_kwargs.get("speculative_config"))  # drafts need vLLM's generators
        self._sockets = set_variables(config, device)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-engine", daemon=True)
        self._thread.start()
        try:
            arguments = engine_arguments(
                config,
                model_path=model_path,
                model=facts,
                seed=seed,
                device=device,
                max_model_len=self._max_model_len,
                known={field.name for field in dataclasses.fields(import_vllm().AsyncEngineArgs)},
                stored_weights=stored_weights,
                lora_ranks=_ranks(adapters, lora_rank) + [max_adapter_rank] * (max_adapters - len(adapters)),
                tokenizer_path=tokenizer_path,
                overrides=overridden(model_path, overrides, trust_remote_code=trusted),
            )
            asyncio.run_coroutine_threadsafe(self._start(config, arguments, adapters), self._loop).result()
        except BaseException:
            self._end()
            raise

    @staticmethod
    def prepare(config: InferenceEngineConfig, *, device: str, **_: object) -> None:
        """Imports vLLM, as an engine with these arguments will need it, and takes no device memory."""
        import_ahead(config, device)

    async def generate(self, request: GenerationRequest) -> tuple[Completion, ...]:
        """One completion per key, in order. Raises `RunError` for a prompt that is empty or longer than the model.

        Raises `ProcessError` if vLLM is dead or dies meanwhile. A cancelled call leaves the batch.
        """
        check_sampling(request.sampling)
        limit = completion_limit(request, self._max_model_len)
        if limit == 0:
            return empty_completions(request)
        return await self._run_on_loop(self._generate(request, limit))

    async def pause(self, in_flight: InFlight = "finish") -> None:
        """Returns when nothing is running. Requests made from now on wait for `resume`."""
        await self._run_on_loop(self._pause(in_flight))

    async def resume(self) -> None:
        """Takes work again."""
        await self._run_on_loop(self._resume())

    async def load_weights(self, incoming: IncomingWeights, version: int) -> bool:
        """Replaces the weights and adopts `version`; see `InferenceEngine.load_weights`.

        Names and shapes are checked first. vLLM then replaces layer by layer, so that after any later failure this
        engine is out of service until a complete set of weights has been loaded.
        """
        if not self._paused:
            raise WeightSyncError(f"weights of version {version} came before the engine was paused and idle")
        if self._closed or isinstance(incoming, Adapter):  # an adapter does not complete the weights below it
            self._refuse_if_out_of_service()
        refuse_beside_adapters(self._adapters.by_name)
        if isinstance(incoming, Adapter):
            refuse_foreign(incoming, self._expected.matrices)
        else:
            refuse_unfit(self._expected, incoming)
        if isinstance(incoming, SharedWeights) and not self._backend.shares_memory:
            raise WeightSyncError("weights shared in memory do not reach an engine that runs in processes of its own")
        await self._run_on_loop(self._reload_weights(incoming, version))
        return not isinstance(incoming, Adapter)  # vLLM reads an adapter from files

    async def add_adapter(self, name: str, adapter: Adapter) -> None:
        """Makes an adapter one that requests may name; see `InferenceEngine.add_adapter`. vLLM reads it from files."""
        refuse_foreign(adapter, self._expected.matrices)
        if adapter.rank > self._most_rank:
            raise UserError(f"adapter {name} has rank {adapter.rank}, and this engine takes up to {self._most_rank}")
        await self._run_on_loop(self._adapters.add_adapter(name, adapter))

    async def remove_adapter(self, name: str) -> None:
        """Forgets an adapter; see `InferenceEngine.remove_adapter`."""
        await self._run_on_loop(self._adapters.remove_adapter(name))

    async def current_load(self) -> EngineLoad | None:
        """Number of requests that vLLM's scheduler does not run, and its cache use, after its last step."""
        return self._backend.load()

    async def sleep(self) -> bool:
        """Frees the GPU memory of weights and cache, which are discarded. vLLM ignores this on a CPU."""
        await self._run_on_loop(self._backend.sleep())
        return self._device == "cuda"

    async def wake(self) -> None:
        """Allocates the memory again; its content is undefined until the next `load_weights`."""
        await self._run_on_loop(self._backend.wake())

    async def close(self) -> None:
        """Finishes running requests, refuses waiting and later ones, and ends vLLM's processes. Safe to call twice."""
        if self._thread.is_alive():
            await self._run_on_loop(self._close())
            await asyncio.to_thread(self._end)

    async def _generate(self, request: GenerationRequest, limit: int) -> tuple[Completion, ...]:
        async with self._gate:
            self._refuse_if_out_of_service()
            async with nullcontext() if request.adapter is None else self._adapters.using(request.adapter) as adapter:
                samples = [self._sample(request, index, limit, adapter) for index in range(len(request.keys))]
                completions = tuple(await gather_or_cancel(samples))
            if self._broken:  # closing let kept samples go on, with incomplete weights
                raise WeightSyncError(self._broken)
            return completions

    def _refuse_if_out_of_service(self) -> None:
        if self._closed:
            raise RunError("this inference engine was closed")
        if self._broken:
            raise WeightSyncError(self._broken)

    async def _sample(self, request: GenerationRequest, index: int, limit: int, adapter: object) -> Completion:
        key, ends = request.keys[index], self._eos_ids if request.end_ids is None else request.end_ids
        arguments = sampling_arguments(request.sampling, key, limit=limit, eos_ids=ends)
        if request.top_logprobs:
            arguments["logprobs"] = request.top_logprobs
        if request.scores_prompt:
            arguments["prompt_logprobs"] = max(1, request.prompt_top_logprobs)  # of each token, and of the likeliest
        if not self._speculates:
            arguments = keyed_arguments(arguments)
        try:
            listener = None if request.on_tokens is None else reporter(request.on_tokens, index)
            answer = await self._backend.generate(
                str(next(self._numbers)), request.prompt_ids, arguments, listener, adapter
            )
        except refusals() as error:
            raise UserError(f"prompt {key.prompt_id!r}: vLLM refuses the request: {error}") from error
        drawn = completion(
            answer.outputs[0],
            key,
            request.sampling,
            self._tokenizer,
            prompt_tokens=len(request.prompt_ids),
            top=request.top_logprobs,
        )
        if not request.scores_prompt:
            return drawn
        scores = prompt_scores(request.prompt_ids, answer.prompt_logprobs or (), top=request.prompt_top_logprobs)
        return evolve(drawn, prompt_scores=scores)

    async def _pause(self, in_flight: InFlight) -> None:
        await self._gate.shut(keep=in_flight != "finish")
        await self._backend.pause(in_flight)
        self._paused = True

    async def _resume(self) -> None:
        self._paused = False
        if not self._broken:  # samples that a pause keeps do not go on with incomplete weights
            await self._backend.resume()
        self._gate.open()

    async def _reload_weights(self, incoming: IncomingWeights, version: int) -> None:
        """Replaces the weights in vLLM's workers, or adopts an adapter beside them.

        Raises `ProcessError` if vLLM is dead, and `WeightSyncError` for weights that are incomplete after any other
        error. An adapter that does not arrive whole leaves the old one in place.
        """
        with TemporaryDirectory() as folder:
            if isinstance(incoming, Adapter):
                await asyncio.to_thread(write_adapter, incoming, Path(folder))  # compared with its digests
            try:
                problem = await self._replace_in_workers(incoming, folder)
                if not problem and not await self._backend.drop_caches(version):
                    problem = "vLLM could not drop what it had computed with the old weights"
            except ProcessError:
                raise
            except Exception as error:  # noqa: BLE001 - vLLM passes on errors of its workers as `Exception`
                problem = next(iter(str(error).splitlines()), type(error).__name__)
        if problem:
            self._broken = (
                f"this engine is out of service: loading weights of version {version} stopped halfway: {problem}"
            )
            raise WeightSyncError(self._broken)
        self._broken, self.weight_version = "", version
        _log.info("weights of version %d", version)

    async def _replace_in_workers(self, incoming: IncomingWeights, adapter_folder: str) -> str:
        """Returns an empty string, or why that stopped halfway."""
        if isinstance(incoming, Adapter):
            await self._backend.adopt_adapter(adapter_folder)
            return ""
        plain = incoming if self._backend.shares_memory else as_plain(incoming)  # type: ignore[arg-type]  # shared: tensors
        outcomes = await self._backend.call_workers("skyrl_load_weights", plain, self._expected.tied)
        return load_failure(outcomes, incoming)

    async def _start(
        self, config: InferenceEngineConfig, arguments: dict[str, Any], adapters: Mapping[str, str]
    ) -> None:
        """Start vLLM, prepare it, and load the adapters in these folders. Runs on the engine's event loop."""
        drawable = Drawable.of(self._tokenizer)
        try:
            if config.async_engine:
                self._backend: Backend = AsyncBackend(arguments, ray_statistics=config.enable_ray_prometheus_stats)
            else:
                self._backend = SteppedBackend(arguments)
        except SkyRLError:
            raise
        except Exception as error:
            message = "; ".join(line.strip() for line in str(error).splitlines() if line.strip()) or "no message"
            raise UserError(f"vLLM does not start: {type(error).__name__}: {message[:_MESSAGE_CHARACTERS]}") from error
        try:
            await self._backend.call_workers("skyrl_patch_sampler", drawable.count, drawable.holes)
            if not await self._backend.drop_caches(0):
                raise ProcessError("a vLLM engine that has just started could not empty its caches")
            for name, folder in adapters.items():
                self._adapters.add_stored(name, Path(folder))
                async with self._adapters.using(name):
                    pass
        except BaseException:
            self._backend.close()
            raise

    async def _load_adapter(self, number: int, name: str, folder: Path) -> object:
        # the name is part of what vLLM knows kept prefixes by, and may have been that of another adapter before
        adapter = adapter_request(str(folder), f"{name} {number}", number)
        try:
            await self._backend.load_adapter(adapter)
        except Exception as error:
            raise ModelError(f"adapter {name}: vLLM does not accept {folder}: {first_line(error)}") from error
        return adapter

    def _shelf(self, most: int) -> AdapterShelf[object]:
        return AdapterShelf(most, self._load_adapter, lambda number: self._backend.unload_adapter(number))

    async def _close(self) -> None:
        self._closed = True
        with suppress(ProcessError):
            await self._backend.resume()  # paused samples are finished
        self._gate.open()  # waiting requests are refused
        await self._gate.shut()
        self._adapters.close()
        await asyncio.to_thread(self._backend.close)

    async def _run_on_loop(self, call: Coroutine[Any, Any, T]) -> T:
        """Await a call on the engine's own event loop; cancelling it cancels it there."""
        if not self._thread.is_alive():
            call.close()
            raise RunError("this inference engine was closed")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))

    def _end(self) -> None:
        """Release what remains when vLLM is gone: the loop's thread, and the folder of its sockets."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        if self._sockets is not None:
            shutil.rmtree(self._sockets, ignore_errors=True)


def _ranks(adapters: Mapping[str, str], trained: int) -> list[int]:
    """Ranks of the stored adapters, and `trained`, that of the trained one, if it is above 0. Raises `ModelError`."""
    stored = [stored_settings(Path(folder), f"adapter {name}").rank for name, folder in adapters.items()]
    return stored + [trained] * bool(trained)


def _raise_no_length(model_path: str) -> int:
    raise ModelError(f"the model {model_path} does not state its context length: set max_model_len")
