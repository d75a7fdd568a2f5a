"""The native routes of SGLang's server (0.5), as documented. Not tested on a GPU.

SGLang reports the log-probabilities of the tempered distribution before any cut, as the learner computes them, and the
version of its weights in `meta_info`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from attrs import frozen

from skyrl.config.derive.engine_backends import BACKENDS
from skyrl.errors import ServerRefusal, UserError, WeightSyncError
from skyrl.inference.draws import sample_seed
from skyrl.inference.engine import EngineLoad, InFlight, temperature_of
from skyrl.inference.servers.answers import (
    DrawnSample,
    RequestedSample,
    VersionSpan,
    ids,
    load_of_metrics,
    numbers,
    versions_of_spans,
)
from skyrl.inference.servers.server_api import ServerApi, ServerFacts
from skyrl.inference.servers.streams import Growing
from skyrl.inference.vllm.model import ExpectedWeights
from skyrl.processes.answers import BadAnswer, display_value, read
from skyrl.weight_receiver.incoming_weights import Adapter, FolderWeights, IncomingWeights, SGLangGroupWeights
from skyrl.weight_receiver.transfer_group import received_requests

ADDITIONAL = BACKENDS["sglang"].sampling_arguments

_PAUSE_MODES: dict[InFlight, str] = {"finish": "in_place", "recompute": "retract", "keep": "in_place"}


T = TypeVar("T")


@frozen
class _ModelInfo:
    model_path: str | None = None
    is_generation: bool | None = None
    weight_version: str | int | None = None
    context_length: object = None


@frozen
class _ServerInfo:
    tp_size: int


@frozen
class _UpdateOutcome:
    success: object = None
    message: object = None


@frozen
class _Reason:
    type: str
    matched: int | str | None = None


@frozen
class _Meta:
    output_token_logprobs: tuple[tuple[object, ...], ...]
    """Log-probability, token id and text of each token."""

    finish_reason: _Reason
    weight_versions: tuple[VersionSpan, ...] | None = None
    weight_version: str | int | None = None


@frozen
class _Sample:
    meta_info: _Meta
    output_ids: tuple[int, ...] | None = None


class SGLangServer(ServerApi):
    """`ServerApi` of SGLang."""

    route, version_route, streamed = "/generate", "/model_info", Growing
    version_remedy = "start a newer SGLang, which reports weight_version there"

    async def connect(self, *, claim: bool) -> ServerFacts:
        self.has_answered, self._adapter = False, ""
        info = await self._either(
            lambda path: self._control.wait_for_first(_ModelInfo, path, seconds=self.deadlines.start), "model_info"
        )
        self.has_answered = True
        if info.is_generation is False:
            raise UserError(f"the model of the inference server {self.url} does not generate (/model_info)")
        if claim:
            if self._workers is not None:
                size = (await self._info(_ServerInfo, "server_info")).tp_size
                if size != self._workers:
                    raise UserError(
                        f"the inference server {self.url} has tp_size = {size}, but the sizes in "
                        f"generator.inference_engine require {self._workers}: set tensor_parallel_size to the server's "
                        "value"
                    )
            await self.resume()
            await self._post("/update_weight_version", {"new_version": "0", "abort_all_requests": False})
        length = info.context_length
        return ServerFacts(
            models=(str(info.model_path),),
            max_model_len=length if type(length) is int else None,
            is_versioned=info.weight_version is not None,
        )

    async def draw(self, requested: RequestedSample, session: str, seconds: float) -> DrawnSample:
        body: dict[str, Any] = {
            "input_ids": list(requested.request.prompt_ids),
            "sampling_params": _sampling(requested),
            "return_logprob": True,
            "logprob_start_len": -1,
        }
        if self._adapter:
            body["lora_path"] = self._adapter
        return _parse_sample(await self._fetch_sample(body, requested, session, seconds), requested)

    async def pause(self, in_flight: InFlight) -> None:
        await self._post("/pause_generation", {"mode": _PAUSE_MODES[in_flight]})
        self._samples.suspend()

    async def resume(self) -> None:
        await self._post("/continue_generation")
        self._samples.resume()

    async def version(self) -> int:
        return self._version_of((await self._info(_ModelInfo, "model_info")).weight_version)

    async def load_weights(
        self, incoming: IncomingWeights, version: int, expected: ExpectedWeights, in_flight: InFlight
    ) -> str:
        if not isinstance(incoming, FolderWeights | SGLangGroupWeights):
            raise WeightSyncError(
                f"the inference server {self.url} takes weights as files, or through a group: set "
                "generator.inference_engine.weight_sync_backend = disk, nccl or gloo"
            )
        if expected.has_experts:
            raise WeightSyncError(
                f"the inference server {self.url} would read the experts of this model under other names than the "
                "learner's: use vLLM"
            )
        try:
            if isinstance(incoming, SGLangGroupWeights):
                await asyncio.to_thread(self._relay_requests, incoming, in_flight, asyncio.get_running_loop())
                await self._post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
                return ""
            body = {
                "model_path": incoming.path,
                "weight_version": str(version),
                "flush_cache": in_flight != "keep",
                "abort_all_requests": False,
                "keep_pause": True,
            }
            answer = await self._request_update("/update_weights_from_disk", body)
        except (ServerRefusal, WeightSyncError) as error:
            return str(error)
        return "" if answer.success is True else f"{display_value(answer.message)} (/update_weights_from_disk)"

    def _relay_requests(
        self, incoming: SGLangGroupWeights, in_flight: InFlight, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Has the server's workers join the learner's group and receive its weights: forwards the learner's requests to
        the server. Runs on a thread, because the learner's store has no asynchronous calls.
        """
        name, meeting = incoming.group.name, incoming.group

        def post(path: str, body: Mapping[str, object]) -> None:
            posting = self._request_update(path, {"group_name": name, **body})
            answer = asyncio.run_coroutine_threadsafe(posting, loop).result()
            if answer.success is not True:
                raise WeightSyncError(
                    f"the inference server {self.url} answers {path}: {display_value(answer.message)}"
                )

        with meeting.rendezvous() as members:
            for kind, content in received_requests(members, rank=meeting.rank, timeout=meeting.timeout):
                match kind:
                    case "init":
                        offset = 1 + (meeting.rank - 1) * incoming.workers
                        post("/init_weights_update_group", {**content, "rank_offset": offset})
                    case "update":
                        flush = {"flush_cache": in_flight != "keep", "abort_all_requests": False}
                        post("/update_weights_from_distributed", {**content, **flush})
                    case _:
                        post("/destroy_weights_update_group", {})

    async def load_adapter(self, adapter: Adapter, version: int, in_flight: InFlight) -> str:
        assert in_flight == "finish", "a sample keeps the adapter that it began with"
        before, needs = self._adapter, f"--max-lora-rank {adapter.rank} and --lora-target-modules all"
        self._adapter = await self._add_adapter(adapter, version, "/load_lora_adapter", needs=needs)
        try:
            if before:
                await self._post("/unload_lora_adapter", {"lora_name": before})
            await self._post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        except ServerRefusal as error:
            return str(error)
        return ""

    async def load(self) -> EngineLoad | None:
        metrics = await self._control.get("/metrics", seconds=self.deadlines.heartbeat, attempts=1)
        return load_of_metrics(metrics, waiting="sglang:num_queue_reqs", cache_use="sglang:token_usage")

    async def sleep(self) -> bool:
        await self._post("/release_memory_occupation")
        return True

    async def wake(self) -> None:
        await self._post("/resume_memory_occupation")

    async def _info(self, kind: type[T], name: str) -> T:
        return await self._either(lambda path: self._control.read(kind, path, seconds=self.deadlines.call), name)

    async def _either(self, request: Callable[[str], Awaitable[T]], name: str) -> T:
        """The answer of the route of this name, or of its older one if the server does not have it."""
        try:
            return await request(f"/{name}")
        except ServerRefusal as error:
            if error.status != 404:
                raise
            return await request(f"/get_{name}")

    async def _request_update(self, path: str, body: Mapping[str, object]) -> _UpdateOutcome:
        """The outcome of a request that changes weights, and is not repeated."""
        return await self._control.read(_UpdateOutcome, path, body, seconds=self.deadlines.call, attempts=1)


def _sampling(requested: RequestedSample) -> dict[str, Any]:
    """SGLang's sampling parameters. End-of-sequence ids are passed as stop tokens; SGLang adds its own."""
    sampling = requested.request.sampling
    more: dict[str, Any] = dict(sampling.additional_kwargs or {})
    for name in more:
        if name not in ADDITIONAL:
            raise UserError(
                f"sampling_params.additional_kwargs: the sglang engine has no setting called {name}; it takes "
                f"{', '.join(ADDITIONAL)}"
            )
    ends = sorted({*requested.ends, *(sampling.stop_token_ids or ())})
    return {
        "temperature": temperature_of(sampling),
        "top_p": sampling.top_p,
        "top_k": sampling.top_k if sampling.top_k > 0 else -1,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "min_new_tokens": min(sampling.min_new_tokens, requested.limit),
        "max_new_tokens": requested.limit,
        "stop": list(sampling.stop or ()),
        "stop_token_ids": ends,
        "sampling_seed": sample_seed(requested.key) & (2**31 - 1),
        "skip_special_tokens": False,  # `<|im_end|>` can be a stop text
        "no_stop_trim": True,
        **more,
    }


def _parse_sample(answer: object, requested: RequestedSample) -> DrawnSample:
    sample = read(answer, _Sample)
    meta = sample.meta_info
    items = meta.output_token_logprobs
    if any(len(item) < 2 for item in items):
        raise BadAnswer("without a token for each of output_token_logprobs")
    token_ids = ids([item[1] for item in items])
    if sample.output_ids is not None and sample.output_ids != token_ids:
        raise BadAnswer("with the log-probabilities of other tokens than it drew")
    # Newer servers report spans of tokens, older ones the version at the end, which is that of all tokens if the
    # weights have not changed.
    versions = versions_of_spans(meta.weight_versions, len(token_ids))
    if versions is None and meta.weight_version is not None and len(requested.versions) <= 1:
        versions = (str(meta.weight_version),) * len(token_ids)
    return DrawnSample(
        token_ids=token_ids,
        logprobs=numbers(item[0] for item in items),
        finish=meta.finish_reason.type,
        stopped_by=meta.finish_reason.matched,
        versions=versions,
    )
