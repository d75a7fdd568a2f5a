"""The routes of vLLM's own server (0.32), and of any compatible server.

Samples come from `/inference/v1/generate` (`--enable-scale-out`), which reports the weights of each token, or from
`/v1/completions` if the server lacks it. Weights, pauses and versions need `VLLM_SERVER_DEV_MODE=1`. A server with

    --worker-extension-cls skyrl.inference.vllm.worker.WorkerExtension --logprobs-mode processed_logits

receives weights as vLLM engines of a run do, with each tensor compared with its digest, and reports the
log-probabilities of the tempered distribution. Any other server reloads files, and its log-probabilities are the
learner's only at temperature 1; the canary detects a difference.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self, TypeVar

from attrs import frozen

from skyrl.config.settings.engines import InferenceEngineConfig
from skyrl.errors import ProcessError, ServerRefusal, UserError, WeightSyncError
from skyrl.inference.engine import EngineLoad, InFlight
from skyrl.inference.servers.answers import (
    DrawnSample,
    ListedModels,
    RequestedSample,
    VersionSpan,
    load_of_metrics,
    numbers,
    refuse_other_prompt,
    versions_of_spans,
)
from skyrl.inference.servers.http_connection import Connection
from skyrl.inference.servers.server_api import ServerApi, ServerDeadlines, ServerFacts
from skyrl.inference.servers.streams import Parts
from skyrl.inference.vllm.model import ExpectedWeights
from skyrl.inference.vllm.sampling_arguments import check_sampling, sampling_arguments
from skyrl.processes.answers import BadAnswer, read
from skyrl.storage.modes import save_tensors
from skyrl.weight_receiver.incoming_weights import (
    Adapter,
    FolderWeights,
    IncomingWeights,
    RemoteWeights,
    as_plain,
    load_failure,
)

_GENERATE, _COMPLETIONS = "/inference/v1/generate", "/v1/completions"

_LACKING = (403, 404, 405, 501)
"""Status codes of a route that a server does not have or does not allow."""

_BY_NUMBER = "token_id:"
"""Beginning of the name of a token, in a log-probability, where servers write its number."""

_NOT_IN_COMPLETIONS = ("detokenize", "flat_logprobs")

EXTENSION = "skyrl.inference.vllm.worker.WorkerExtension"

C = TypeVar("C")


@frozen
class _WeightInfo:
    weight_version: object = None


@frozen
class _Results:
    """Outcome of a call in each worker."""

    results: tuple[str | None, ...] | None = None


@frozen
class _WorldSize:
    world_size: int


@frozen
class _Cache:
    success: object = None


@frozen
class _Logprob:
    logprob: object = None
    token_id: int | None = None
    token: object = None


@frozen
class _Content:
    content: tuple[_Logprob, ...] | None = None


@frozen
class _GeneratedChoice:
    token_ids: tuple[int, ...]
    logprobs: _Content
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: tuple[VersionSpan, ...] | None = None


@frozen
class _Generated:
    choices: tuple[_GeneratedChoice, ...]
    prompt_token_ids: tuple[int, ...] | None = None


@frozen
class _FlatLogprobs:
    token_logprobs: tuple[object, ...]
    tokens: tuple[object, ...] | None = None


@frozen
class _CompletedChoice:
    token_ids: tuple[int, ...]
    logprobs: _FlatLogprobs
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: tuple[int, ...] | None = None


@frozen
class _Completed:
    choices: tuple[_CompletedChoice, ...]


class VLLMServer(ServerApi):
    """`ServerApi` of vLLM's server."""

    route, version_route, streamed = _GENERATE, "/weight_info", Parts
    version_remedy = "start vLLM with VLLM_SERVER_DEV_MODE=1"

    def __init__(
        self,
        samples: Connection,
        control: Connection,
        deadlines: ServerDeadlines,
        *,
        model: str = "",
        workers: int | None = None,
        overrides_group: bool = True,
    ) -> None:
        """See `ServerApi` for the other arguments. `model` is the name that requests carry; empty for the first one
        that the server lists. With `overrides_group`, the server leaves a group through which others sent it weights;
        without it, such a server is refused.
        """
        super().__init__(samples, control, deadlines, workers=workers)
        self._model = self._configured_model = model
        self._overrides_group = overrides_group
        self._mode = "wait"

    @classmethod
    def of_engine(
        cls,
        config: InferenceEngineConfig,
        samples: Connection,
        control: Connection,
        deadlines: ServerDeadlines,
        workers: int | None,
    ) -> Self:
        return cls(
            samples,
            control,
            deadlines,
            model=config.served_model_name or "",
            workers=workers,
            overrides_group=config.override_existing_update_group != "disable",
        )

    async def connect(self, *, claim: bool) -> ServerFacts:
        self.has_answered, self.route, self._adapter = False, _GENERATE, ""
        models = (
            await self._control.wait_for_first(ListedModels, "/v1/models", seconds=self.deadlines.start)
        ).data or ()
        self.has_answered = True
        configured_name = self._configured_model
        if not models or (configured_name and configured_name not in [model.id for model in models]):
            called = configured_name or "anything"
            raise UserError(f"the inference server {self.url} lists no model called {called} at /v1/models")
        model = next((model for model in models if model.id == configured_name), models[0])
        self._model = model.id
        longest = model.max_model_len
        is_versioned = await self._is_versioned()
        if is_versioned and claim:
            self.verifies_loads = await self._prepared()
            await self._leave_update_group()
            if self._workers is not None:
                size = (await self._control.read(_WorldSize, "/get_world_size", seconds=self.deadlines.call)).world_size
                if size != self._workers:
                    raise UserError(
                        f"the inference server {self.url} has {size} workers, but the sizes in "
                        f"generator.inference_engine require {self._workers}: set tensor_parallel_size, "
                        "pipeline_parallel_size and data_parallel_size to the server's values"
                    )
            await self.resume()
            await self._post("/update_weight_version", {"new_version": "0"})
        return ServerFacts(
            models=(self._model, str(model.root)),
            max_model_len=longest if type(longest) is int else None,
            is_versioned=is_versioned,
        )

    async def draw(self, requested: RequestedSample, session: str, seconds: float) -> DrawnSample:
        sampling = requested.request.sampling
        check_sampling(sampling)
        arguments = sampling_arguments(sampling, requested.key, limit=requested.limit, eos_ids=requested.ends)
        prompt, body = list(requested.request.prompt_ids), {"model": self._model, "return_token_ids": True}
        if self.route == _GENERATE:
            try:
                generate = {**body, "token_ids": prompt, "sampling_params": arguments}
                return _parse_generate(await self._fetch_sample(generate, requested, session, seconds), requested)
            except ServerRefusal as error:
                if error.status not in _LACKING:
                    raise
                self.route = _COMPLETIONS
        flat = {name: value for name, value in arguments.items() if name not in _NOT_IN_COMPLETIONS}
        flat["vllm_xargs"] = flat.pop("extra_args", None)
        complete = {**body, "prompt": prompt, **flat}
        return _parse_completion(await self._fetch_sample(complete, requested, session, seconds), requested)

    async def pause(self, in_flight: InFlight) -> None:
        self._mode = "wait" if in_flight == "finish" else "keep"
        if in_flight != "finish" and self.route == _COMPLETIONS:
            raise UserError(
                f"the inference server {self.url} does not report which weights sampled a token, so samples must not "
                "be interrupted: start it with --enable-scale-out, or set "
                "trainer.fully_async.interrupt_generation = false"
            )
        await self._post("/pause", query={"mode": self._mode, "clear_cache": str(in_flight != "keep").lower()})
        self._samples.suspend()

    async def resume(self) -> None:
        await self._post("/resume")
        self._samples.resume()

    async def version(self) -> int:
        info = await self._control.read(_WeightInfo, self.version_route, seconds=self.deadlines.call)
        return self._version_of(info.weight_version)

    async def load_weights(
        self, incoming: IncomingWeights, version: int, expected: ExpectedWeights, in_flight: InFlight
    ) -> str:
        if not isinstance(incoming, RemoteWeights if self.verifies_loads else FolderWeights):
            raise WeightSyncError(
                f"the inference server {self.url} takes weights as files only: set "
                "generator.inference_engine.weight_sync_backend = disk, or start the server with "
                f"--worker-extension-cls {EXTENSION}"
            )
        if expected.has_experts and not self.verifies_loads:
            raise WeightSyncError(
                f"the inference server {self.url} would read the experts of this model under other names than the "
                f"learner's: start the server with --worker-extension-cls {EXTENSION}"
            )
        call: dict[str, object]
        if self.verifies_loads:
            call = {"method": "skyrl_load_weights", "args": [as_plain(incoming), expected.tied]}
        else:
            assert isinstance(incoming, FolderWeights)
            await asyncio.to_thread(_write_second_names, incoming, expected)
            call = {"method": "reload_weights", "kwargs": {"weights_path": incoming.path}}
        seconds = self.deadlines.call
        answer = await self._control.read(_Results, "/collective_rpc", call, seconds=seconds, attempts=1)
        outcomes = answer.results or ()
        problem = "; ".join(sorted({outcome for outcome in outcomes if outcome}))
        if self.verifies_loads:
            problem = load_failure(outcomes or ("",), incoming)
        if problem:
            return f"{problem} (/collective_rpc)"
        return await self._drop_caches(version, in_flight)

    async def load_adapter(self, adapter: Adapter, version: int, in_flight: InFlight) -> str:
        assert in_flight == "finish", "a sample keeps the adapter that it began with"
        rank = f"--max-lora-rank {adapter.rank} (or the next one that vLLM has)"
        needs, before = f"{rank} and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1", self._adapter
        self._model = self._adapter = await self._add_adapter(adapter, version, "/v1/load_lora_adapter", needs=needs)
        if before:
            await self._post("/v1/unload_lora_adapter", {"lora_name": before})
        return await self._drop_caches(version, in_flight)

    async def load(self) -> EngineLoad | None:
        metrics = await self._control.get("/metrics", seconds=self.deadlines.heartbeat, attempts=1)
        return load_of_metrics(metrics, waiting="vllm:num_requests_waiting", cache_use="vllm:kv_cache_usage_perc")

    async def sleep(self) -> bool:
        await self._post("/sleep", query={"level": "1", "mode": self._mode})
        return False

    async def wake(self) -> None:
        await self._post("/wake_up")
        await self._post("/pause", query={"mode": self._mode})  # waking starts the scheduler

    async def _is_versioned(self) -> bool:
        try:
            await self._control.get(self.version_route, seconds=self.deadlines.call)
        except ServerRefusal as error:
            if error.status not in _LACKING:
                raise
            return False
        return True

    async def _prepared(self) -> bool:
        """Prepares the workers to report tempered log-probabilities. Returns False if they lack the extension."""
        try:
            await self._post("/collective_rpc", {"method": "skyrl_patch_sampler"}, attempts=1)
        except ProcessError as error:
            if "no attribute 'skyrl_patch_sampler'" not in str(error):
                raise
            return False
        return True

    async def _leave_update_group(self) -> None:
        """Makes the server leave a group through which others send it weights. Raises `UserError` if `overrides_group`
        is off and it is in one; a server without the extension does not report that.
        """
        if self._overrides_group:
            await self._post("/shutdown_weight_transfer_engine")
        elif self.verifies_loads:
            body, seconds = {"method": "skyrl_update_group"}, self.deadlines.call
            groups = await self._control.read(_Results, "/collective_rpc", body, seconds=seconds)
            if holders := sorted({holder for holder in groups.results or () if holder}):
                raise UserError(
                    f"the inference server {self.url} is in a group through which another run sends it weights "
                    f"({', '.join(holders)}): if that run is over, set "
                    "generator.inference_engine.override_existing_update_group = enable"
                )

    async def _drop_caches(self, version: int, in_flight: InFlight) -> str:
        """Drops what was computed from the old weights, and sets the version of the new ones. Returns an empty string,
        or the reason why that stopped halfway.
        """
        if in_flight != "keep":
            running = str(in_flight == "recompute").lower()
            query, seconds = {"reset_running_requests": running}, self.deadlines.call
            cache = await self._control.read(_Cache, "/reset_prefix_cache", {}, query=query, seconds=seconds)
            if cache.success is not True:
                return "vLLM could not drop what it had computed with the old weights (/reset_prefix_cache)"
        await self._post("/update_weight_version", {"new_version": str(version)})
        return ""


def _parse_generate(answer: object, requested: RequestedSample) -> DrawnSample:
    generated = read(answer, _Generated)
    refuse_other_prompt(generated.prompt_token_ids, requested.request.prompt_ids)
    choice = _single_choice(generated.choices)
    items = choice.logprobs.content or ()
    _refuse_other_tokens([(item.token_id, item.token) for item in items], choice.token_ids)
    return DrawnSample(
        token_ids=choice.token_ids,
        logprobs=numbers(item.logprob for item in items),
        finish=str(choice.finish_reason),
        stopped_by=choice.stop_reason,
        versions=versions_of_spans(choice.weight_versions, len(choice.token_ids)),
    )


def _single_choice(choices: Sequence[C]) -> C:
    if len(choices) != 1:
        raise BadAnswer(f"with {len(choices)} choices, where one was asked for")
    return choices[0]


def _refuse_other_tokens(listed: Iterable[tuple[int | None, object]], drawn: Sequence[int]) -> None:
    """Raises `BadAnswer` if a log-probability names another token than was drawn, by its number: as `token_id`, or as
    `token` where that is `token_id:7` in place of text.
    """
    for (number, name), token in zip(listed, drawn, strict=False):
        text = str(name) if isinstance(name, str) else ""
        if number not in (None, token) or (text.startswith(_BY_NUMBER) and text != f"{_BY_NUMBER}{token}"):
            raise BadAnswer("with the log-probabilities of other tokens than it drew")


def _parse_completion(answer: object, requested: RequestedSample) -> DrawnSample:
    choice = _single_choice(read(answer, _Completed).choices)
    refuse_other_prompt(choice.prompt_token_ids, requested.request.prompt_ids)
    _refuse_other_tokens([(None, name) for name in choice.logprobs.tokens or ()], choice.token_ids)
    return DrawnSample(
        token_ids=choice.token_ids,
        logprobs=numbers(choice.logprobs.token_logprobs),
        finish=str(choice.finish_reason),
        stopped_by=choice.stop_reason,
        versions=None,
    )


def _write_second_names(incoming: FolderWeights, expected: ExpectedWeights) -> None:
    """Adds a file with the second names of tied weights: on a CPU, vLLM would compute a head that is not among the
    files with the packed copy of the old one.
    """
    second_names: dict[str, list[str]] = {}
    for second, name in expected.tied.items():
        second_names.setdefault(name, []).append(second)
    if not second_names:
        return
    with incoming.open() as weights:
        copies = {second: tensor.clone() for name, tensor in weights for second in second_names.get(name, ())}
    target = Path(incoming.path) / "second-names.safetensors"
    part = target.with_suffix(f".{id(incoming)}.part")
    save_tensors(copies, part)
    part.replace(target)
