"""Weights over every road that a CPU has, into the embedded engine: right after every update, or refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from skyrl.config import InferenceEngineConfig, SkyRLLoraConfig
from skyrl.errors import ProcessError, WeightSyncError
from skyrl.inference.engine import Completion, GenerationRequest
from skyrl.inference.pool.client import InferenceEngineClient
from skyrl.inference.torch.engine import TorchEngine
from skyrl.weight_receiver import incoming_weights, transfer_group
from skyrl.weight_receiver.transfer_group import MemoryOffer, TransferGroup
from skyrl.weight_sync import senders
from skyrl.weight_sync.canary import Canary
from skyrl.weight_sync.publish import WeightSync
from skyrl.weight_sync.transports import (
    BroadcastTransport,
    DeltaTransport,
    FolderTransport,
    SharedTransport,
    TransferRendezvous,
    WeightTransport,
)
from tests.inference.nano import nano_model, nano_tokenizer, prompts, request
from tests.weight_sync.held import HeldModel, Weights

CANARY = Canary(prompts=tuple(prompts(40, 7)), temperature=1.0, bound=1e-4)
R = TypeVar("R")
FOUND = MemoryOffer.found
TRANSPORTS = ("shared", "broadcast", "gloo", "folder", "delta")


@pytest.fixture(scope="module")
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


@pytest.fixture
def transport(
    request: pytest.FixtureRequest, store: TCPStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> WeightTransport:
    monkeypatch.setattr(MemoryOffer, "found", lambda text: None if request.param == "gloo" else FOUND(text))
    match request.param:
        case "broadcast" | "gloo":
            return BroadcastTransport(TransferRendezvous("127.0.0.1", store.port, timeout=20), dtype="float32")
        case "folder":
            return FolderTransport(tmp_path / "weights", dtype="float32")
        case "delta":
            return DeltaTransport(tmp_path / "weights", dtype="float32")
        case _:
            return SharedTransport()


def client(*engines: Any) -> InferenceEngineClient:
    config = InferenceEngineConfig(backend="torch", num_engines=len(engines))
    return InferenceEngineClient(list(engines), nano_tokenizer(), "a/model", SkyRLLoraConfig(), config)


def engine(kind: str = "qwen2, tied") -> TorchEngine:
    return TorchEngine(nano_model(kind), nano_tokenizer(), max_num_seqs=8)


KINDS = ("qwen2", "qwen2, tied", "qwen3", "llama")
ROADS = [
    pytest.param(transport, kind, marks=[pytest.mark.long] * (number != TRANSPORTS.index(transport) % len(KINDS)))
    for transport in TRANSPORTS
    for number, kind in enumerate(KINDS)
]
"""Every transport with every kind of model; by default each with one, and each kind once."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("updates", [5, pytest.param(20, marks=pytest.mark.long)])
@pytest.mark.parametrize(("transport", "kind"), ROADS, indirect=["transport"])
async def test_engines_agree_with_the_learner_after_every_update(
    transport: WeightTransport, kind: str, updates: int
) -> None:
    learner, engine_client = HeldModel(nano_model(kind, seed=1)), client(engine(kind), engine(kind))
    sync = WeightSync(learner, engine_client, transport, CANARY)
    for version in range(1, updates + 1):
        learner.update_at_random()
        metrics = await sync.publish(version)
        assert 0 < metrics["weight_sync/parity_max"] < 1e-4
        assert engine_client.weight_version == version
    (answer,) = await engine_client.generate(request((1, 2, 3)))
    assert set(answer.weight_versions) == {updates}
    await engine_client.close()


async def test_the_canary_compares_after_the_first_transfer_and_every_third_one() -> None:
    learner, engine_client = HeldModel(nano_model("qwen2, tied", seed=1)), client(engine())
    sync = WeightSync(learner, engine_client, SharedTransport(), CANARY, canary_interval=3)
    compared = ["weight_sync/parity_max" in await sync.publish(version) for version in range(4, 9)]
    assert compared == [True, False, False, True, False]
    await engine_client.close()


def without(name: str) -> Callable[[Weights], Weights]:
    return lambda weights: ((key, tensor) for key, tensor in weights if key != name)


@pytest.mark.parametrize("transport", TRANSPORTS, indirect=True)
@pytest.mark.parametrize(
    ("kind", "name"), [("qwen2", "model.layers.1.mlp.up_proj.weight"), ("qwen2", "lm_head.weight")]
)
async def test_a_missing_tensor_is_refused_and_the_old_weights_serve_on(
    transport: WeightTransport, kind: str, name: str
) -> None:
    engine_client = client(engine(kind))
    before = await engine_client.generate(request((1, 2, 3)))
    with pytest.raises(WeightSyncError, match=f"{name} is missing"):
        await WeightSync(HeldModel(nano_model(kind, seed=1), without(name)), engine_client, transport, CANARY).publish(
            1
        )
    assert await engine_client.generate(request((1, 2, 3))) == before
    await engine_client.close()


@pytest.mark.parametrize("transport", ["broadcast", "folder", "delta"], indirect=True)
async def test_a_flipped_byte_is_refused_and_the_old_weights_serve_on(
    transport: WeightTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_client = client(engine())
    before = await engine_client.generate(request((1, 2, 3)))
    original = incoming_weights.digest

    def one_byte_is_another(tensor: Tensor) -> str:
        changed = incoming_weights.as_bytes(tensor).clone()
        if tensor.shape == (32,):
            changed[5] ^= 1
        return original(changed)

    monkeypatch.setattr(incoming_weights, "digest", one_byte_is_another)  # the receiver's view of what came
    with pytest.raises(WeightSyncError, match="was changed in transit"):
        await WeightSync(HeldModel(nano_model("qwen2, tied", seed=1)), engine_client, transport, CANARY).publish(1)
    assert await engine_client.generate(request((1, 2, 3))) == before
    await engine_client.close()


class Deceived(TorchEngine):
    """Takes new weights and computes with something else."""

    def __init__(self, model: Any, tokenizer: Any, spoil: Callable[[Any, dict[str, Tensor]], None]) -> None:
        super().__init__(model, tokenizer, max_num_seqs=8)
        self._held, self._spoil = model, spoil

    async def load_weights(self, incoming: Any, version: int) -> bool:
        old = {name: tensor.clone() for name, tensor in self._held.state_dict().items()}
        is_there = await super().load_weights(incoming, version)
        self._spoil(self._held, old)
        self._causal_lm.invalidate()  # what it computes with is what the model holds now
        return is_there


def keep_old_head(model: Any, old: dict[str, Tensor]) -> None:
    """What a packed copy of a tied embedding does."""
    model.lm_head.weight = torch.nn.Parameter(old["lm_head.weight"])


def keep_old_projection(model: Any, old: dict[str, Tensor]) -> None:
    """What a fused module does that was sent one of its parts only."""
    name = "model.layers.0.self_attn.q_proj.weight"
    with torch.no_grad():
        model.state_dict(keep_vars=True)[name].copy_(old[name])


@pytest.mark.parametrize("spoil", [keep_old_head, keep_old_projection])
async def test_an_engine_that_does_not_compute_with_what_came_is_caught_before_the_first_token(spoil: Any) -> None:
    engine_client = client(Deceived(nano_model("qwen2, tied"), nano_tokenizer(), spoil))
    with pytest.raises(WeightSyncError, match=r"engine 0 does not compute with the weights of version 1"):
        await WeightSync(
            HeldModel(nano_model("qwen2, tied", seed=1)), engine_client, SharedTransport(), CANARY
        ).publish(1)
    answers = asyncio.create_task(engine_client.generate(request((1, 2, 3))))
    await asyncio.sleep(0)
    await engine_client.pause()  # returns when nothing is running: a request that was let in would be finished
    assert not answers.done()
    answers.cancel()
    await engine_client.close()


class CutByAnEngine(SharedTransport):
    """Its first transfer fails at the learner's end, since an engine died after the others had all weights."""

    def __init__(self, dying: TorchEngine) -> None:
        super().__init__()
        self.dying, self.sent_to = dying, list[int]()

    async def send(self, source: Any, client: InferenceEngineClient, version: int) -> None:
        self.sent_to.append(len(client.in_service))
        await super().send(source, client, version)
        if len(self.sent_to) == 1:
            self.dying.pause = self.die  # type: ignore[method-assign]  # the client notices it there
            await client.pause()
            raise WeightSyncError("the weight transfer failed: connection reset by peer")

    async def die(self, in_flight: Any = None) -> None:
        raise ProcessError("engine-1 died")


async def test_a_transfer_that_an_engine_s_death_cut_at_the_learner_begins_again_with_the_others() -> None:
    left, dying = engine(), engine()
    learner, engine_client = HeldModel(nano_model("qwen2, tied", seed=1)), client(left, dying)
    transport = CutByAnEngine(dying)
    await WeightSync(learner, engine_client, transport, CANARY).publish(1)
    assert (transport.sent_to, engine_client.in_service, engine_client.weight_version) == ([2, 1], (left,), 1)
    (answer,) = await engine_client.generate(request((1, 2, 3)))
    assert set(answer.weight_versions) == {1}
    await engine_client.close()


class Dies(TorchEngine):
    """Is killed while it receives its second weights."""

    async def load_weights(self, incoming: Any, version: int) -> bool:
        if version == 1:
            return await super().load_weights(incoming, version)
        opened = incoming.open()  # never closed: a process that is killed says nothing to the group
        await asyncio.to_thread(lambda: next(opened.__enter__()))
        raise ProcessError("engine-0 died")


class InPlace(TorchEngine):
    """Has the rule of the vLLM engine: it copies each weight as it comes, and after an error it samples nothing until a
    complete set has come.
    """

    broken, cut = "", 0

    async def generate(self, request: GenerationRequest) -> tuple[Completion, ...]:
        if self.broken:
            raise WeightSyncError(self.broken)
        return await super().generate(request)

    async def load_weights(self, incoming: Any, version: int) -> bool:
        try:
            await asyncio.to_thread(self.copy, incoming)
        except WeightSyncError as error:
            self.broken, self.cut = str(error), self.cut + 1
            raise
        self.broken, self.weight_version = "", version
        self._causal_lm.invalidate()
        self._scheduler.set_weights_version(version)
        return True

    def copy(self, incoming: Any) -> None:
        state = self._causal_lm.hf_model.state_dict()
        with incoming.open() as weights:
            for name, tensor in weights:
                state[name].copy_(tensor)


@pytest.mark.parametrize("transport", ["broadcast"], indirect=True)
async def test_an_engine_that_was_halfway_when_another_died_takes_the_repeated_transfer(
    transport: WeightTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(senders, "buckets", partial(senders.buckets, bucket_bytes=2000))
    dying = Dies(nano_model("qwen2, tied"), nano_tokenizer(), max_num_seqs=8)
    left = InPlace(nano_model("qwen2, tied"), nano_tokenizer(), max_num_seqs=8)
    learner, engine_client = HeldModel(nano_model("qwen2, tied", seed=1)), client(dying, left)
    sync = WeightSync(learner, engine_client, transport, CANARY, canary_interval=100)
    await sync.publish(1)
    learner.update_at_random()
    metrics = await sync.publish(2)
    assert 0 < metrics["weight_sync/parity_max"] < 1e-4  # compared although it was not due
    assert (engine_client.in_service, engine_client.weight_version, left.cut) == ((left,), 2, 1)
    assert "weight_sync/parity_max" not in await sync.publish(3)
    await engine_client.close()


async def test_members_stay_connected_between_meetings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another connection would look names up again, which takes five seconds where the resolver loses a packet."""
    store, calls = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20)), []

    def counted(*args: Any, **settings: Any) -> TCPStore:
        calls.append(args)
        return TCPStore(*args, **settings)

    monkeypatch.setattr(transfer_group, "TCPStore", counted)
    learner, engine_client = HeldModel(nano_model("qwen2, tied", seed=1)), client(engine())
    transport = BroadcastTransport(TransferRendezvous("127.0.0.1", store.port, timeout=20), dtype="float32")
    sync = WeightSync(learner, engine_client, transport, CANARY)
    for version in (1, 2, 3):
        await sync.publish(version)
    assert calls == [("127.0.0.1", store.port)] * 2
    await engine_client.close()


def test_a_connection_that_was_cut_is_made_again() -> None:
    meeting_store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    port = meeting_store.port
    group = TransferGroup(host="127.0.0.1", port=port, name="one", rank=0, size=1, timeout=20)
    with group.rendezvous():
        pass
    del meeting_store
    meeting_store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    with group.rendezvous() as members:
        members.store.set("key", "value")
    assert meeting_store.num_keys() > 0


def test_a_member_that_ends_after_it_has_signed_in_is_not_waited_for_as_long_as_for_weights(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_group, "_CONNECT_SECONDS", 0.5)
    learner_end, engine_ends = TransferRendezvous("127.0.0.1", store.port, timeout=1000).new_group(1)
    engine_ends[0].store().set(transfer_group.presence_key(1), "")  # and that was all
    with (
        pytest.raises(
            WeightSyncError, match=r"after 0.5 s, members \[1\] ended after they had joined the weight transfer"
        ),
        learner_end.join(),
    ):
        pass


@pytest.mark.parametrize(
    ("fault", "raised"),
    [
        (RuntimeError("the learner broke"), (WeightSyncError, "not sent: the learner broke")),
        (ProcessError("policy-1 died"), (ProcessError, "^policy-1 died$")),
    ],
)
async def test_a_learner_that_never_comes_ends_the_waiting_of_the_engines_at_once(
    store: TCPStore, fault: Exception, raised: tuple[type[Exception], str]
) -> None:
    class Breaks(HeldModel):
        async def export_weights(
            self,
            consume: Callable[[Iterator[tuple[str, Tensor]]], R],
            *,
            everywhere: bool = False,
            adapter: bool = False,
            dtype: str | None = None,
        ) -> R:
            raise fault

    learner = Breaks(nano_model("qwen2, tied", seed=1))
    engine_client = client(engine())
    transport = BroadcastTransport(TransferRendezvous("127.0.0.1", store.port, timeout=1000), dtype="float32")
    with pytest.raises(raised[0], match=raised[1]):
        await WeightSync(learner, engine_client, transport, CANARY).publish(1)
    await engine_client.close()
