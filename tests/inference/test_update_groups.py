"""Groups through which somebody else sends weights to a server of vLLM: left, or a reason to refuse the server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import ProcessGroupGloo, TCPStore

from skyrl.config import InferenceEngineConfig, SkyRLLoraConfig
from skyrl.errors import ProcessError, UserError
from skyrl.inference.pool.client import InferenceEngineClient
from skyrl.inference.servers.http_connection import Connection
from skyrl.inference.servers.http_engine import HttpEngine
from skyrl.inference.servers.server_api import ServerDeadlines
from skyrl.inference.servers.vllm_server import VLLMServer
from skyrl.processes.answers import read
from skyrl.weight_receiver.vllm_native import group_holder
from skyrl.weight_sync.canary import Canary
from skyrl.weight_sync.publish import WeightSync
from skyrl.weight_sync.transports import BroadcastTransport, TransferRendezvous
from tests.inference.nano import nano_tokenizer, prompts
from tests.inference.server_engines import DEADLINES, our_server, vllm_server
from tests.inference.vllm_models import saved, small_model
from tests.weight_sync.held import HeldModel

pytestmark = pytest.mark.xdist_group("vllm")


_PATIENCE = timedelta(seconds=60)

SHORT = ("generator.sampling_params.max_generate_length=64",)
"""Settings of a server whose model has 256 positions."""


class Routes:
    """The routes of vLLM that a run asks before its first sample, of a server with these groups."""

    url = "http://a-server"

    def __init__(self, *groups: str, has_extension: bool = True) -> None:
        self._groups, self._has_extension = groups, has_extension
        self.posted: list[str] = []

    async def get(self, path: str, *, seconds: float, attempts: int = 1) -> object:
        return {"data": [{"id": "a model", "root": "a/model"}], "weight_version": "7", "world_size": 4}

    async def wait_for_first(self, kind: type, path: str, *, seconds: float) -> object:
        return read(await self.get(path, seconds=seconds), kind)

    async def read(self, kind: type, path: str, body: Mapping[str, Any] | None = None, **_: object) -> object:
        return read(await (self.get(path, seconds=1.0) if body is None else self.post(path, body)), kind)

    def resume(self) -> None:
        """No clock has stopped."""

    async def post(self, path: str, body: Mapping[str, Any] | None = None, **_: object) -> object:
        if path == "/collective_rpc":
            assert body is not None
            path = body["method"]
            if not self._has_extension:
                raise ProcessError(f"'Worker' object has no attribute '{path}'")
        self.posted.append(path)
        return {"results": list(self._groups)} if path == "skyrl_update_group" else {}


async def connect(routes: Any, *, overrides_group: bool) -> list[str]:
    await VLLMServer(routes, routes, ServerDeadlines(), overrides_group=overrides_group).connect(claim=True)
    return list(routes.posted)


CLAIM = ["/resume", "/update_weight_version"]
EXTENDED = ["skyrl_patch_sampler"]


@pytest.mark.parametrize("groups", [("", ""), ("", "NCCLWeightTransferEngine")])
async def test_a_server_leaves_the_group_of_others_before_it_works_for_the_run(groups: tuple[str, ...]) -> None:
    posted = await connect(Routes(*groups), overrides_group=True)
    assert posted == [*EXTENDED, "/shutdown_weight_transfer_engine", *CLAIM]


async def test_a_server_in_the_group_of_others_is_refused_and_left_as_it_is() -> None:
    routes = Routes("", "NCCLWeightTransferEngine")
    with pytest.raises(UserError, match=r"\(NCCLWeightTransferEngine\).*override_existing_update_group = enable"):
        await connect(routes, overrides_group=False)
    assert routes.posted == [*EXTENDED, "skyrl_update_group"]


async def test_a_server_with_another_number_of_workers_than_will_be_waited_for_is_refused() -> None:
    connection: Any = Routes()
    await VLLMServer(connection, connection, ServerDeadlines(), workers=4).connect(claim=True)
    with pytest.raises(UserError, match=r"has 4 workers, but the sizes in generator.inference_engine require 2"):
        await VLLMServer(connection, connection, ServerDeadlines(), workers=2).connect(claim=True)


async def test_a_server_in_no_group_is_taken_without_being_asked_to_leave_one() -> None:
    assert await connect(Routes("", ""), overrides_group=False) == [*EXTENDED, "skyrl_update_group", *CLAIM]
    assert await connect(Routes("", has_extension=False), overrides_group=False) == CLAIM


def test_a_worker_tells_whether_its_transfer_engine_holds_a_group() -> None:
    class NCCL:
        model_update_group: object = None

    engine = NCCL()
    workers = [
        SimpleNamespace(weight_transfer_engine=transfer_engine) for transfer_engine in (None, SimpleNamespace(), engine)
    ]
    assert [group_holder(worker) for worker in workers] == ["", "", ""]
    engine.model_update_group = "a communicator"
    assert [group_holder(worker) for worker in workers] == ["", "", "NCCL"]


def _join(port: int) -> Any:
    """The sender's place in a group over gloo with one worker."""
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=_PATIENCE)
    return ProcessGroupGloo(store, 0, 2, _PATIENCE)


@pytest.mark.long
async def test_a_server_of_vllm_leaves_the_group_of_a_run_that_died(tmp_path: Path) -> None:
    extension = "tests.weight_sync.gloo_worker.GlooReceiver"
    more = ("--worker-extension-cls", extension, "--weight-transfer-config", '{"backend": "gloo"}')
    connection = Connection(vllm_server(saved(tmp_path / "model", small_model()), *more))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    await VLLMServer(connection, connection, DEADLINES, overrides_group=False).connect(claim=True)
    where = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    group, _ = await asyncio.gather(
        asyncio.to_thread(_join, port),
        connection.post("/init_weight_transfer_engine", {"init_info": where}, seconds=60),
    )
    del group  # its run is over
    with pytest.raises(UserError, match=r"another run sends it weights \(Receiver\)"):
        await VLLMServer(connection, connection, DEADLINES, overrides_group=False).connect(claim=True)
    await VLLMServer(connection, connection, DEADLINES).connect(claim=True)
    await VLLMServer(connection, connection, DEADLINES, overrides_group=False).connect(claim=True)
    await connection.close()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["our server", "vllm server"])
async def test_weights_reach_a_server_over_gloo(tmp_path: Path, kind: str) -> None:
    folder = saved(tmp_path / "model", small_model())
    url = vllm_server(folder) if kind == "vllm server" else our_server(folder, *SHORT)
    connection = Connection(url)
    with pytest.raises(UserError, match="has 1 workers"):
        await VLLMServer(connection, connection, DEADLINES, workers=2).connect(claim=True)
    await connection.close()
    server = VLLMServer(Connection(url), Connection(url), DEADLINES, workers=1)
    engine = HttpEngine(server, model_path=str(folder), heartbeat=120.0, tokenizer=nano_tokenizer())
    client = InferenceEngineClient(
        [engine], nano_tokenizer(), str(folder), SkyRLLoraConfig(), InferenceEngineConfig(backend="http")
    )
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_PATIENCE)
    transport = BroadcastTransport(TransferRendezvous("127.0.0.1", store.port, timeout=60), dtype="float32")
    learner = HeldModel(small_model())
    canary = Canary(prompts=tuple(prompts(40, 33)), temperature=1.0, bound=1e-4)
    sync = WeightSync(learner, client, transport, canary)
    for version in (1, 2, 3):
        learner.update_at_random()
        metrics = await sync.publish(version)
        assert 0 < metrics["weight_sync/parity_max"] < 1e-4
    await client.close()
