"""The learner's end of vLLM's own weight transfer, with stand-ins for vLLM, for the group and for the workers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from skyrl.errors import WeightSyncError
from skyrl.weight_receiver.checksums import Digests, digest_word, in_hex
from skyrl.weight_receiver.incoming_weights import WeightInfo
from skyrl.weight_sync import senders
from skyrl.weight_sync.senders import VLLMNativeSender, _source, free_address
from skyrl.weight_sync.transports import TransferRendezvous, VLLMNativeTransport

INFOS = (WeightInfo(name="a", shape=(2,), dtype="float32"), WeightInfo(name="b", shape=(1,), dtype="bfloat16"))


def weights() -> Iterator[tuple[str, Tensor]]:
    yield "a", torch.tensor([1.0, 2.0], dtype=torch.float64)
    yield "b", torch.tensor([3.0])


class Transfer:
    """vLLM's modules, the group and the requests in one, which write down what they are asked."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.init_info: dict[str, Any] = {}
        self.broken = False
        self.size = 3
        self.timeout = 7.0
        self.host = "127.0.0.1"

    def with_rank_offset(self, offset: int) -> Transfer:
        self.calls.append(f"rank {offset}")
        return self

    @contextmanager
    def rendezvous(self) -> Iterator[None]:
        yield

    def requests(self, store: None, *, receivers: range, timeout: float) -> Transfer:
        self.calls.append(f"receivers {list(receivers)}")
        return self

    def send(self, kind: str, content: dict[str, Any]) -> None:
        self.calls.append(f"request {kind} {sorted(content.get('digests', ()))}")

    def trainer_init(self, init_info: dict[str, Any], *, client: Any, source: Any) -> Transfer:
        self.init_info, self._client, self._source = init_info, client, source
        return self

    def send_weights(self) -> None:
        if self.broken:
            raise WeightSyncError("an engine went away")
        self.calls.append(f"send {[name for name, _ in self._source]}")
        self._client.finish_weight_update()

    def shutdown(self) -> None:
        self.calls.append("shutdown")


@pytest.fixture
def transfer(monkeypatch: pytest.MonkeyPatch) -> Transfer:
    transfer = Transfer()
    modules: dict[str, dict[str, Any]] = {
        "factory": {"WeightTransferTrainerFactory": transfer},
        "ipc_engine": {"IPCTrainerInitInfo": lambda **fields: {"engine": "ipc", **fields}},
        "nccl_engine": {"NCCLTrainerInitInfo": lambda **fields: {"engine": "nccl", **fields}},
        "base": {"WeightSource": object, "ParamMeta": SimpleNamespace},
    }
    for name, members in modules.items():
        monkeypatch.setitem(sys.modules, f"vllm.distributed.weight_transfer.{name}", SimpleNamespace(**members))
    monkeypatch.setattr(senders, "RequestSender", transfer.requests)
    return transfer


def sender(transfer: Transfer, backend: str, senders: int) -> VLLMNativeSender:
    group: Any = transfer
    return VLLMNativeSender(group=group, backend=backend, senders=senders, weights=INFOS, bucket_bytes=64)


def test_the_only_sender_sends_through_nccl_and_ends_the_requests(transfer: Transfer) -> None:
    sender(transfer, "nccl", 1)(weights())
    assert transfer.calls == [
        "rank 0", "receivers [1, 2]", "send ['a', 'b']", "request compare ['a', 'b']", "request finish []",
        "request end []", "shutdown",
    ]  # fmt: skip
    port = transfer.init_info.pop("master_port")
    assert port >= 1024
    assert transfer.init_info == {"engine": "nccl", "rank": 0, "master_address": "127.0.0.1", "world_size": 3}


@pytest.mark.parametrize(("rank", "ends"), [(0, ["request end []"]), (1, [])])
def test_of_two_senders_through_cuda_ipc_the_first_ends_the_requests(
    transfer: Transfer, monkeypatch: pytest.MonkeyPatch, rank: int, ends: list[str]
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    sender(transfer, "ipc", 2)(weights())
    assert transfer.calls[:2] == [f"rank {rank}", "receivers [2]"]
    assert transfer.calls[5:] == [*ends, "shutdown"]
    assert transfer.init_info == {
        "engine": "ipc",
        "rank": rank,
        "packed": True,
        "packed_buffer_size_bytes": 10,
    }  # all bytes


def test_a_sender_that_fails_is_shut_down_and_the_requests_are_not_ended(transfer: Transfer) -> None:
    transfer.broken = True
    with pytest.raises(WeightSyncError, match="an engine went away"):
        sender(transfer, "nccl", 1)(weights())
    assert transfer.calls[2:] == ["shutdown"]


def test_weights_are_rounded_to_the_announced_type_and_digested(transfer: Transfer) -> None:
    digests = Digests()
    source: Any = _source(INFOS, weights(), digests)
    assert [(name, tensor.dtype, tensor.tolist()) for name, tensor in source] == [
        ("a", torch.float32, [1.0, 2.0]),
        ("b", torch.bfloat16, [3.0]),
    ]
    assert list(digests.in_hex()) == ["a", "b"]
    assert [(tensor.name, tensor.dtype, tensor.shape) for tensor in source.metadata()] == [
        ("a", torch.float32, (2,)),
        ("b", torch.bfloat16, (1,)),
    ]


def test_a_weight_is_digested_as_it_was_although_the_next_one_is_gathered_into_its_memory(transfer: Transfer) -> None:
    memory = torch.zeros(3)

    def gathered() -> Iterator[tuple[str, Tensor]]:
        for number in (1.0, 2.0):
            yield f"{number}", memory.fill_(number)

    infos = tuple(WeightInfo(name=f"{number}", shape=(3,), dtype="float32") for number in (1.0, 2.0))
    digests = Digests()
    source: Any = _source(infos, gathered(), digests)
    assert [tensor.tolist() for _, tensor in source] == [[1.0] * 3, [2.0] * 3]
    assert digests.in_hex() == in_hex({info.name: digest_word(torch.full((3,), float(info.name))) for info in infos})


@pytest.mark.parametrize("announced", [INFOS[:1], (*INFOS, INFOS[0])])
def test_weights_that_are_more_or_fewer_than_announced_are_refused(
    transfer: Transfer, announced: tuple[WeightInfo, ...]
) -> None:
    source: Any = _source(announced, weights(), Digests())
    with pytest.raises(ValueError, match="zip"):
        list(source)


def test_a_free_address_is_the_interface_that_reaches_the_driver_and_an_unreserved_port() -> None:
    host, port = free_address("127.0.0.1")
    assert host == "127.0.0.1"
    assert port >= 1024


class Ends:
    """A learner and the client of two engines, which write down what they are given."""

    in_service = ("first", "second")

    def __init__(self) -> None:
        self.streamed: list[tuple[Any, bool]] = []
        self.loaded: list[tuple[Any, int]] = []

    async def shapes(self, *, adapter: bool) -> list[tuple[str, tuple[int, ...]]]:
        return [("a", (2,))]

    async def export_weights(
        self, consume: Callable[..., Any], *, everywhere: bool, adapter: bool, dtype: str | None = None
    ) -> None:
        assert not adapter, "all weights are sent"
        self.streamed.append((consume, everywhere))

    async def load_weights(self, incoming: Any, version: int, abort: object) -> None:
        self.loaded.append((incoming, version))


@pytest.mark.parametrize(("senders", "everywhere"), [(1, False), (2, True)])
async def test_engines_load_while_the_first_rank_sends_or_every_one_of_several(senders: int, everywhere: bool) -> None:
    rendezvous = TransferRendezvous("here", 29, timeout=7.0)
    ends: Any = Ends()
    transport = VLLMNativeTransport(rendezvous, backend="ipc", senders=senders, dtype="float32", bucket_bytes=64)
    await transport.send(ends, ends, 5)
    [(sender, ran_everywhere)] = ends.streamed
    assert ran_everywhere == everywhere
    assert (sender.group.rank, sender.group.size, sender.senders) == (0, senders + 2, senders)
    [(incoming, version)] = ends.loaded
    assert version == 5
    assert [(end.group.rank, end.backend) for end in incoming] == [(senders, "ipc"), (senders + 1, "ipc")]
    assert sender.weights == incoming[0].weights == (INFOS[0],)
