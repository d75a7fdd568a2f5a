"""Weights reach servers of SGLang through its own update group, led by the learner; a stand-in keeps its routes."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import TCPStore

from skyrl.config import InferenceEngineConfig, SkyRLLoraConfig
from skyrl.errors import UserError, WeightSyncError
from skyrl.inference.pool.client import InferenceEngineClient
from skyrl.inference.servers.http_connection import Connection
from skyrl.inference.servers.http_engine import HttpEngine
from skyrl.inference.servers.server_api import ServerDeadlines
from skyrl.inference.servers.sglang_server import SGLangServer
from skyrl.inference.torch.engine import TorchEngine
from skyrl.weight_sync import senders
from skyrl.weight_sync.senders import SGLangGroupSender, _run_in_background, _until
from skyrl.weight_sync.transports import SGLangGroupTransport, TransferRendezvous
from tests.inference.nano import nano_model, nano_tokenizer
from tests.inference.sglang_stand_in import SGLangStandIn
from tests.weight_sync.held import HeldModel
from tests.weight_sync.test_adapters import far_from

DEADLINES = ServerDeadlines(start=60.0, call=60.0)


def engine_at(server: SGLangStandIn, folder: Path, *, workers: int = 1) -> HttpEngine:
    dialect = SGLangServer(Connection(server.url), Connection(server.url), DEADLINES, workers=workers)
    return HttpEngine(dialect, model_path=str(folder), heartbeat=60.0, tokenizer=nano_tokenizer())


@asynccontextmanager
async def servers(
    tmp_path: Path, count: int = 2, **options: Any
) -> AsyncIterator[tuple[list[SGLangStandIn], Any, Any]]:
    """Running servers, a client of them, and a transport whose buckets hold a few tensors."""
    nano_model().save_pretrained(tmp_path / "model")
    nano_tokenizer().save_pretrained(tmp_path / "model")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    rendezvous = TransferRendezvous("127.0.0.1", store.port, timeout=60.0)
    async with AsyncExitStack() as stack:
        started = []
        for _ in range(count):
            engine = TorchEngine(nano_model(), nano_tokenizer(), max_num_seqs=16)
            started.append(stack.enter_context(SGLangStandIn(engine, tmp_path / "model", **options)))
        engines = [engine_at(server, tmp_path / "model") for server in started]
        config = InferenceEngineConfig(backend="sglang")
        client = InferenceEngineClient(engines, nano_tokenizer(), "", SkyRLLoraConfig(), config)
        yield (
            started,
            client,
            SGLangGroupTransport(rendezvous, backend="gloo", workers=1, dtype="float32", bucket_bytes=20_000),
        )
        await client.close()


@pytest.mark.long
async def test_all_servers_get_the_weights_of_each_version_and_leave_the_group(tmp_path: Path) -> None:
    learner, groups = HeldModel(nano_model(seed=5)), set(c10d._world.pg_map)
    async with servers(tmp_path) as (started, client, transport):
        for version in (1, 2):
            learner.update_at_random()
            assert await far_from(client.engines[0], learner.model) > 1e-2
            await client.pause()
            await transport.send(learner, client, version)
            await client.resume()
            for engine, server in zip(client.engines, started, strict=True):
                assert await far_from(engine, learner.model) < 1e-4
                assert server.groups == {}
            assert set(c10d._world.pg_map) == groups  # nor does the learner stay in one
        assert client.weight_version == 2
        updates = [path for path in started[0].asked if path.endswith("distributed")]
        assert len(updates) > 2 * 2  # buckets
        assert "/update_weights_from_disk" not in started[0].asked


async def test_a_server_that_does_not_join_is_named_before_the_others_are_waited_for(tmp_path: Path) -> None:
    async with servers(tmp_path, count=1, joins_groups=False) as (started, client, transport):
        await client.pause()
        with pytest.raises(WeightSyncError, match=r"/init_weights_update_group: 'Failed to initialize custom process"):
            await transport.send(HeldModel(nano_model(seed=5)), client, 1)
        assert [path for path in started[0].asked if path.endswith("distributed")] == []


def sender() -> SGLangGroupSender:
    group: Any = SimpleNamespace(host="127.0.0.1", timeout=60.0, name="a", size=2, rendezvous=nullcontext)
    return SGLangGroupSender(group=group, workers=1, backend="gloo", dtype="float32")


class Asking(ThreadPoolExecutor):
    """Knows what it was given."""

    def __init__(self) -> None:
        super().__init__(1)
        self.given: list[Future[Any]] = []

    def submit(self, *call: Any, **named: Any) -> Future[Any]:
        self.given.append(super().submit(*call, **named))
        return self.given[-1]


def test_why_a_server_does_not_join_is_told_before_the_group_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    making = threading.Event()

    def group(*_: Any) -> Any:
        making.set()
        wait(asking.given)  # what was refused is known
        raise RuntimeError("nobody came")

    def ask(*_: Any) -> None:
        making.wait(60)
        time.sleep(0.2)  # who does not wait has looked by now
        raise WeightSyncError("no such backend")

    monkeypatch.setattr(senders, "_group", group)
    requests: Any = SimpleNamespace(send=ask)
    with (
        Asking() as asking,
        pytest.raises(WeightSyncError, match="no such backend"),
        sender()._led(2, asking, requests),
    ):
        raise AssertionError("there is no group")


def test_a_bucket_that_a_server_does_not_take_after_it_came_ends_the_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, calls = threading.Event(), []

    class Requests:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def send(self, kind: str, content: Any) -> None:
            calls.append(kind)
            sent.wait(60)
            raise WeightSyncError("out of memory")

    def broadcast(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(is_completed=lambda: True, wait=sent.set)

    monkeypatch.setattr(senders, "RequestSender", Requests)
    monkeypatch.setattr(SGLangGroupSender, "_led", lambda *_: nullcontext())
    monkeypatch.setattr("torch.distributed.broadcast", broadcast)
    with pytest.raises(WeightSyncError, match="out of memory"):
        sender()(iter([("a", torch.ones(2))]))
    assert calls == ["update"]


class Sending:
    """A broadcast that is done after it was looked at so many times."""

    def __init__(self, looks: int) -> None:
        self.looks, self.waited = looks, 0

    def is_completed(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def wait(self) -> None:
        self.waited += 1


def test_a_broadcast_is_waited_for_until_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl.weight_sync.senders._POLL_SECONDS", 0.0)
    sending: Any = Sending(looks=3)
    _until(sending, Future())
    assert (sending.looks, sending.waited) == (-1, 1)


def test_a_broadcast_is_waited_for_where_all_have_taken_the_last_one() -> None:
    previous: Future[None] = Future()
    previous.set_result(None)
    sending: Any = Sending(looks=3)
    _until(sending, previous)
    assert (sending.looks, sending.waited) == (2, 1)


class Refused(Future[None]):
    """Is refused while it is waited for."""

    def result(self, timeout: float | None = None) -> None:
        raise WeightSyncError("no room")


def test_failed_receiver_ends_the_broadcast() -> None:
    taking: Future[None] = Future()
    taking.set_exception(WeightSyncError("no room"))
    for future in (taking, Refused()):
        sending: Any = Sending(looks=3)
        with pytest.raises(WeightSyncError, match="no room"):
            _until(sending, future)
        assert sending.waited == 0


def test_a_call_run_in_background_gives_its_result_or_its_error_and_holds_up_no_end() -> None:
    assert _run_in_background(threading.current_thread).result(60).daemon

    def fails() -> None:
        raise WeightSyncError("nobody came")

    with pytest.raises(WeightSyncError, match="nobody came"):
        _run_in_background(fails).result(60)


async def test_a_server_of_another_size_than_will_be_waited_for_is_refused(tmp_path: Path) -> None:
    async with servers(tmp_path, count=1) as (started, _, _transport):
        engine = engine_at(started[0], tmp_path / "model", workers=2)
        with pytest.raises(UserError, match="has tp_size = 1, but the sizes in generator.inference_engine require 2"):
            await engine.pause()
        await engine.close()
