"""Probes of `generator.inference_engine`: what engines are started with, and how weights reach them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stderr
from dataclasses import make_dataclass
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from attrs import define, field
from torch import Tensor

from skyrl.batch import TrainingBatch
from skyrl.config import SamplingParams
from skyrl.config.derive.sizes import starts_engines
from skyrl.endpoint.client_access import TOKEN_VARIABLE
from skyrl.errors import ModelError, ProcessError, SkyRLError
from skyrl.experiments.factories import (
    engine_changes,
    engine_makers,
    engine_restarts,
    parity_canary,
    server_engines,
    weight_transport,
)
from skyrl.experiments.policy_sampling import address_of_clients, served_policy
from skyrl.inference.engine import Completion, GenerationRequest, SampleKey
from skyrl.inference.pool.client import EngineState
from skyrl.processes.answers import read
from skyrl.processes.in_process import InProcess
from skyrl.runs.engine_changes import ask
from tests.effects.observables import placement
from tests.effects.probe import Probe, Scene, observable

E, PLACEMENT = "generator.inference_engine.", "trainer.placement."
ON_RAY: Mapping[str, Any] = {f"{PLACEMENT}executor": "ray"}
APART: Mapping[str, Any] = {**ON_RAY, f"{PLACEMENT}colocate_all": False}
VLLM: Mapping[str, Any] = {
    f"{E}backend": "vllm",
    f"{PLACEMENT}colocate_all": False,
    "trainer.device": "cuda",
    "trainer.deterministic": False,
}
SERVED: Mapping[str, Any] = {f"{E}enable_http_endpoint": True}
SHARED = {**VLLM, f"{PLACEMENT}colocate_all": True}
"""vLLM engines on the GPUs of the learner."""

SPLIT = {**VLLM, f"{E}tensor_parallel_size": 2}

VLLM_PACKAGE = SimpleNamespace(AsyncEngineArgs=make_dataclass("AsyncEngineArgs", ["max_logprobs", "seed"]))
"""Stands in for vLLM, of which the names of its arguments are read."""


class _Started(SkyRLError):
    """Ends the start of an engine where vLLM's own begins."""


@observable("what the engine is started with")
def engine(scene: Scene) -> object:
    def of(name: str) -> Callable[..., object]:
        def start(*args: object, **more: object) -> object:
            variables = {name: os.environ[name] for name in sorted(os.environ) if name.startswith("VLLM_")}
            variables.pop("VLLM_RPC_BASE_PATH", None)  # a folder of its own for each
            raise _Started(f"{name} {args} {more} {variables}")

        return start

    at = "skyrl.inference.vllm.engine"
    with (
        mock.patch.dict(os.environ),
        mock.patch(f"{at}.import_vllm", return_value=VLLM_PACKAGE),
        mock.patch(f"{at}.AsyncBackend", of("asynchronous")),
        mock.patch(f"{at}.SteppedBackend", of("stepped")),
    ):
        (make,) = engine_makers(scene.run)
        try:
            engine = make()
        except SkyRLError as error:
            return f"{type(error).__name__}: {error}"
        asyncio.run(engine.close())
        return type(engine).__name__


@observable("the pauses before an engine that does not come back is started again")
def restarts(scene: Scene) -> object:
    class NoRoom(InProcess):
        def restart(self, role: str, rank: int, maker: Callable[[], Any]) -> Any:
            raise ProcessError("no room")

    async def pauses() -> object:
        with mock.patch("skyrl.inference.pool.restarts.asyncio.sleep") as sleep:
            restarter = engine_restarts(scene.run, NoRoom())
            if restarter is None:
                return "it stays out of service"
            await restarter.restart(0)
        return [call.args for call in sleep.call_args_list]

    return asyncio.run(pauses())


class _ManyEngines:
    """A client whose engines start, and serve, at once."""

    def __init__(self, number: int) -> None:
        self.states = [EngineState(number=index, state="serving") for index in range(number)]

    def add_engine(self) -> int:
        self.states.append(EngineState(number=len(self.states), state="serving"))
        return len(self.states) - 1

    def failed_additions(self) -> list[tuple[int, str]]:
        return []

    async def drain(self, number: int) -> None:
        self.states = [state for state in self.states if state.number != number]


@observable("the numbers of engines after requests to add two and to drain three")
def engine_numbers(scene: Scene) -> object:
    async def numbers() -> object:
        client: Any = _ManyEngines(scene.run.generator.inference_engine.num_engines)
        changes = engine_changes(scene.run, client, InProcess(), Path("run"))
        if changes is None:
            return "there is no change"
        counts = []
        for action in (["add"] * 2, ["drain"] * 3):
            for request in action:
                ask(Path("run"), "add" if request == "add" else "drain")
            await changes.handle_requests()
            counts.append(len(client.states))
        return counts

    with redirect_stderr(StringIO()):
        return asyncio.run(numbers())


@observable("the log-probabilities that the embedded engine draws with")
def drawn(scene: Scene) -> object:
    return [round(logprob, 4) for logprob in _greedy(scene).logprobs]


@observable("the experts that the embedded engine names beside what it draws")
def routed(scene: Scene) -> object:
    try:
        return _greedy(scene).routed_experts
    except ModelError as error:
        return str(error)


def _greedy(scene: Scene) -> Completion:
    async def greedy() -> Completion:
        (make,) = engine_makers(scene.run)
        engine = make()
        key = SampleKey(run_seed=0, weight_version=0, prompt_id="probe", sample_index=0)
        sampling = SamplingParams(temperature=0.0, max_generate_length=4)
        (completion,) = await engine.generate(GenerationRequest(prompt_ids=(1, 2, 3), sampling=sampling, keys=(key,)))
        await engine.close()
        return completion

    return asyncio.run(greedy())


class _OneWeight:
    """A learner with one weight, which scores every token with 0.105 less than the engine said."""

    async def shapes(self, *, adapter: bool = False) -> list[tuple[str, tuple[int, ...]]]:
        return [("weight", (2,))]

    async def score(self, batch: TrainingBatch) -> Tensor:
        assert batch.rollout_logprobs is not None
        return batch.rollout_logprobs - 0.005


@define
class _Road(_OneWeight):
    """Both ends of a transport: what the learner sends with, and what the engines are given."""

    in_service: tuple[object, ...] = (object(),)
    seen: list[object] = field(factory=list)

    async def export_weights(
        self, sender: object, *, everywhere: bool = False, adapter: bool = False, dtype: str | None = None
    ) -> object:
        size = getattr(sender, "bucket_bytes", None) if getattr(sender, "backend", "") == "ipc" else None
        self.seen.append((type(sender).__name__, size, everywhere, "elsewhere" in getattr(sender, "path", "")))
        return ()

    async def load_weights(self, incoming: Iterable[object], version: int, *_: object) -> None:
        self.seen += [type(part).__name__ for part in incoming]


@observable("where the policy is served over HTTP, and under which names")
def served(scene: Scene) -> object:
    with mock.patch.dict(os.environ):
        os.environ.pop(TOKEN_VARIABLE, None)
        address = address_of_clients(scene.run)
    return None if address is None else (address, served_policy(scene.run).names)


@observable("how weights are sent to the engines")
def road(scene: Scene) -> object:
    ends: Any = _Road()
    meeting: Any = SimpleNamespace(address=("127.0.0.1", 1))
    asyncio.run(weight_transport(scene.run, meeting, Path("weights")).send(ends, ends, 1))
    return sorted(map(str, ends.seen))


@observable("which servers are asked, for what, and how", refuses=True)
def servers(scene: Scene) -> object:
    connections: list[object] = []

    def connection(url: str, *, token: str | None, most: int) -> object:
        connections.append((url, token, most))
        return SimpleNamespace(url=url)

    if starts_engines(scene.run):
        return "none: the run starts its engines"
    with (
        mock.patch.dict(os.environ, {"A_TOKEN": "a secret", "ANOTHER": "another"}),
        mock.patch("skyrl.experiments.factories.Connection", connection),
    ):
        try:
            engines = server_engines(scene.run, takes_weights=True)
        except SkyRLError as error:
            return f"{type(error).__name__}: {error}"
    return connections, len(engines)


@observable("what a server with a transfer group of others is asked, and what becomes of it")
def groups(scene: Scene) -> object:
    requests: list[str] = []

    class Server:
        def __init__(self, url: str, **_: object) -> None:
            self.url = url

        async def get(self, path: str, **_: object) -> object:
            return {"data": [{"id": "a model"}], "weight_version": "0"}

        async def wait_for_first(self, kind: type, path: str, **_: object) -> object:
            return read(await self.get(path), kind)

        async def read(self, kind: type, path: str, body: Any = None, **_: object) -> object:
            return read(await (self.get(path) if body is None else self.post(path, body)), kind)

        def resume(self) -> None:
            """No clock has stopped."""

        suspend = resume

        async def post(self, path: str, body: Mapping[str, Any] | None = None, **_: object) -> object:
            requests.append(path if body is None else body.get("method", path))
            return {"results": ["a group"] if requests[-1] == "skyrl_update_group" else []}

    async def connect() -> None:
        with mock.patch("skyrl.experiments.factories.Connection", Server):
            (engine,) = server_engines(scene.run, takes_weights=True)
        await engine.pause()

    try:
        asyncio.run(connect())
    except SkyRLError as error:
        requests.append(f"{type(error).__name__}: {error}")
    return requests


@observable("the folder through which adapters reach the engines")
def adapter_files(scene: Scene) -> object:
    paths: list[Path] = []
    meeting: Any = SimpleNamespace(address=("127.0.0.1", 1))
    with mock.patch("skyrl.experiments.factories.FolderTransport", lambda path, **_: paths.append(path)):
        weight_transport(scene.run, meeting, Path("weights"))
    return paths


@observable("whether an engine that differs from the learner by 0.005 nats ends the run")
def parity(scene: Scene) -> object:
    class Engine:
        async def generate(self, request: GenerationRequest) -> tuple[Completion, ...]:
            four = (1, 2, 3, 4)
            versions, logprobs = (1,) * 4, (-1.0,) * 4
            completion = Completion(
                token_ids=four, text="", logprobs=logprobs, weight_versions=versions, stop_reason="length"
            )
            return (completion,) * len(request.keys)

    source: Any = _OneWeight()
    engines: Any = {0: Engine()}
    torch.manual_seed(0)
    try:
        return asyncio.run(parity_canary(scene.run, [[1, 2, 3]]).compare(source, engines, 1))
    except SkyRLError as error:
        return f"{type(error).__name__}: {error}"


SERVER: Mapping[str, Any] = {
    f"{E}backend": "http",
    f"{PLACEMENT}colocate_all": False,
    "trainer.deterministic": False,
    f"{E}external_server_urls": ("http://127.0.0.1:1",),
}
"""A server that runs already."""

LORA = "trainer.policy.model.lora."
LORA_RANK = f"{LORA}rank"

VALUES: Mapping[str, Any] = {
    "model_dtype": "float16",
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 2,
    "data_parallel_size": 2,
    "async_engine": False,
    "vllm_v1_disable_multiproc": False,
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "enable_chunked_prefill": False,
    "max_num_batched_tokens": 4096,
    "gpu_memory_utilization": 0.5,
    "enable_ray_prometheus_stats": True,
    "enable_return_routed_experts": True,
    "language_model_only": True,
    "engine_init_kwargs": {"max_logprobs": 5},
}

PROBES: tuple[Probe, ...] = (
    Probe(f"{E}backend", "vllm", engine, {"trainer.deterministic": False}),
    Probe(f"{E}num_engines", 2, placement, APART),
    Probe(f"{E}min_engines", 2, engine_numbers, {**APART, f"{E}num_engines": 2}),
    Probe(f"{E}max_engines", 3, engine_numbers, {**APART, f"{E}num_engines": 2}),
    Probe(f"{E}max_engine_restarts", 1, restarts, {**APART, f"{E}num_engines": 2}),
    Probe(f"{E}engine_restart_backoff_seconds", 1.0, restarts, {**APART, f"{E}num_engines": 2}),
    Probe(f"{E}run_engines_locally", False, servers, {f"{E}backend": "vllm"}),
    Probe(f"{E}external_server_urls", ("http://127.0.0.1:2", "http://127.0.0.1:3"), servers, SERVER),
    Probe(f"{E}remote_urls", ("127.0.0.1:2",), servers, {f"{E}backend": "http", "trainer.deterministic": False}),
    Probe(f"{E}external_proxy_url", "http://127.0.0.1:4", servers, SERVER),
    Probe(f"{E}external_token", "env:A_TOKEN", servers, SERVER),
    Probe(f"{E}override_existing_update_group", "disable", groups, SERVER),
    Probe(f"{E}rollout_dtype", "bfloat16", drawn),
    Probe(f"{E}enable_return_routed_experts", True, routed, {"trainer.policy.model.path": "{nano}/mixture"}),
    *(Probe(f"{E}{name}", value, engine, VLLM) for name, value in VALUES.items()),
    Probe(f"{E}expert_parallel_size", 2, engine, SPLIT),
    Probe(f"{E}fully_sharded_loras", True, engine, {**VLLM, LORA_RANK: 4}),
    Probe(f"{LORA}lora_sync_path", "another_folder", adapter_files, {**VLLM, LORA_RANK: 4}),
    Probe(f"{E}distributed_executor_backend", "mp", engine, SPLIT),
    Probe(f"{E}weight_sync_backend", "disk", road, ON_RAY),
    Probe(f"{E}weight_sync_backend", "delta", road, ON_RAY),
    Probe(f"{E}weight_sync_path", "elsewhere", road, {**ON_RAY, f"{E}weight_sync_backend": "delta"}),
    Probe(f"{E}weight_sync_backend", "gloo", road, {**SERVER, **ON_RAY}),
    Probe(f"{E}weight_transfer_threshold_cuda_ipc_GB", 0.5, road, SHARED),
    Probe(f"{E}logprob_parity_bound", 0.1, parity),
    Probe(f"{E}enable_http_endpoint", True, served),
    Probe(f"{E}http_endpoint_host", "127.0.0.2", served, SERVED),
    Probe(f"{E}http_endpoint_port", 8001, served, SERVED),
    Probe(f"{E}served_model_name", "policy", served, SERVED),
)
