"""When weights are sent, in which order, in which parts, and which failure is raised, without a model or an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl.config import SkyRLLoraConfig
from skyrl.errors import ProcessError, SkyRLError, WeightSyncError
from skyrl.inference.engine import Completion
from skyrl.weight_receiver.checksums import digest_word, in_hex
from skyrl.weight_receiver.incoming_weights import Adapter, FolderWeights
from skyrl.weight_sync.canary import canary_prompts, rows
from skyrl.weight_sync.publish import WeightSync
from skyrl.weight_sync.senders import BroadcastSender, _Workers, buckets
from skyrl.weight_sync.transports import (
    ADAPTER_DTYPE,
    BroadcastTransport,
    FolderTransport,
    TransferRendezvous,
    _order_of_causes,
    send_both,
)


class World:
    """Client, transport and canary in one, which write down what they are asked."""

    def __init__(self, **settings: Any) -> None:
        self.calls: list[str] = []
        self.holds_weights, self.only_promised = True, False
        self.metrics = {"engines": 2.0}
        self.broken = self.has_new_engines = False
        self.in_service: tuple[str, ...] = ("a", "b")
        self.dying = 0
        world: Any = self
        self.sync = WeightSync(world, world, world, world, lambda v: self.calls.append(f"arrived {v}"), **settings)

    async def pause(self) -> None:
        self.calls.append("pause")

    async def admit_started(self) -> bool:
        return self.has_new_engines

    async def resume(self) -> None:
        self.calls.append("resume")

    async def send(self, source: object, client: object, version: int) -> None:
        self.calls.append(f"send {version}")
        self.holds_weights = True
        if self.broken:
            raise WeightSyncError("torn")
        if self.dying:
            self.dying -= 1
            self.in_service = self.in_service[1:] or self.in_service
            raise ProcessError("an engine died")

    async def inspect(self, look: Callable[[object], Awaitable[Any]]) -> Any:
        return await look(())

    async def compare(
        self, source: object, engines: object, version: int, *, promised: bool = False
    ) -> dict[str, float]:
        self.calls.append(f"compare {version}" + " with what was promised" * promised)
        return {"parity": 0.5}

    def sent(self) -> list[str]:
        return [call for call in self.calls if call.startswith("send")]


async def test_engines_are_paused_until_new_weights_are_there_and_compared() -> None:
    world = World()
    assert world.sync.is_behind
    assert await world.sync.publish(1) == {"parity": 0.5, "engines": 2.0}
    assert world.calls == ["pause", "send 1", "compare 1", "arrived 1", "resume"]
    assert not world.sync.is_behind


@pytest.mark.parametrize("hangs", ["pause", "send", "compare", "resume"])
async def test_a_run_that_is_to_stop_gives_up_a_transfer_that_hangs(hangs: str) -> None:
    began = asyncio.Event()

    async def hang(*_: object, **__: object) -> None:
        began.set()
        await asyncio.Event().wait()

    async def given_up(call: Awaitable[object]) -> bool:
        task = asyncio.ensure_future(call)
        await began.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return False

    world = World(until_stopped=given_up)
    setattr(world, hangs, hang)
    assert (await world.sync.publish(1))["engines"] == 2.0  # the step counts, and is saved
    assert (
        world.calls
        == ["pause", "send 1", "compare 1", "arrived 1"][: ("pause", "send", "compare", "", "resume").index(hangs)]
    )
    assert world.sync.is_behind == (hangs != "resume")


async def test_engines_that_kept_their_old_weights_work_on_and_stay_behind() -> None:
    world = World()
    world.broken = True
    with pytest.raises(WeightSyncError, match="torn"):
        await world.sync.publish(1)
    assert world.calls == ["pause", "send 1", "resume"]
    assert world.sync.is_behind


async def test_every_third_version_is_sent_the_first_one_and_what_is_asked_for() -> None:
    world = World(interval=3)
    results = [await world.sync.publish(version) for version in (1, 2, 3, 4, 5, 6)]
    assert world.sent() == ["send 1", "send 3", "send 6"]
    assert [len(result) for result in results] == [2, 1, 2, 1, 1, 2]  # else how many engines there are
    await world.sync.publish(7)
    assert world.sync.is_behind
    await world.sync.catch_up()
    await world.sync.catch_up()  # once
    assert world.sent()[3:] == ["send 7"]


async def test_engines_are_never_ahead_of_a_learner_that_went_back_and_never_empty() -> None:
    world = World(interval=3)
    for version in (1, 3, 3, 2):
        await world.sync.publish(version)
    assert world.sent() == ["send 1", "send 3", "send 3", "send 2"]
    world.holds_weights = False  # they slept
    assert world.sync.is_behind and world.sync.weights_discarded
    await world.sync.publish(4)
    world.holds_weights = False
    await world.sync.catch_up()
    assert world.sent()[4:] == ["send 4", "send 4"]


@pytest.mark.parametrize(
    ("versions", "sent"),
    [((0, 1), ["send 0"]), ((1, 1), ["send 1"]), ((1, 2, 3), ["send 1", "send 3"]), ((2, 1), ["send 2", "send 1"])],
)
async def test_a_version_that_is_not_the_first_nor_a_third_one_nor_older_is_not_sent(
    versions: tuple[int, ...], sent: list[str]
) -> None:
    world = World(interval=3)
    for version in versions:
        await world.sync.publish(version)
    assert world.sent() == sent


async def test_weights_of_a_learner_that_has_published_none_are_version_0() -> None:
    world = World()
    await world.sync.catch_up()
    assert world.calls == ["pause", "send 0", "compare 0", "arrived 0", "resume"]
    assert not world.sync.is_behind


@pytest.mark.parametrize(("every", "compared"), [(1, [1, 2, 3, 4, 5]), (2, [1, 3, 5]), (4, [1, 5])])
async def test_the_canary_compares_after_the_first_transfer_and_every_so_many(every: int, compared: list[int]) -> None:
    world = World(canary_interval=every)
    for version in range(1, 6):
        await world.sync.publish(version)
    assert [call for call in world.calls if call.startswith("compare")] == [
        f"compare {version}" for version in compared
    ]


async def test_weights_that_engines_only_promise_to_have_loaded_are_compared_every_time() -> None:
    world = World(canary_interval=10)
    world.only_promised = True
    for version in (1, 2, 3):
        await world.sync.publish(version)
    compared = [call for call in world.calls if call.startswith("compare")]
    assert compared == [f"compare {version} with what was promised" for version in (1, 2, 3)]


# The parts that travel


@pytest.mark.parametrize(
    ("size", "parts"),
    [(1, ["a", "b", "c", "d"]), (8, ["a", "b", "c", "d"]), (9, ["ab", "cd"]), (24, ["abc", "d"]), (99, ["abcd"])],
)
def test_weights_travel_in_parts_of_about_a_size_rounded_and_whole(size: int, parts: list[str]) -> None:
    weights = [(name, torch.full((2, 4), 1.001, dtype=torch.float64).T) for name in "abcd"]  # 8 x 1 byte each
    packed = list(buckets(iter(weights), "int8", size))
    assert ["".join(part) for part in packed] == parts
    assert {tensor.dtype for part in packed for tensor in part.values()} == {torch.int8}
    assert all(tensor.is_contiguous() and tensor.shape == (4, 2) for part in packed for tensor in part.values())
    assert list(buckets(iter([]), "int8")) == []


async def test_the_folder_for_weights_is_made_with_its_parents_and_empty_once_they_are_loaded(tmp_path: Path) -> None:
    seen: list[tuple[list[str], int]] = []

    def look(folder: Path, version: int) -> None:
        seen.append((sorted(path.name for path in folder.iterdir()), version))

    class Ends:
        in_service = ("first", "second")

        async def shapes(self, *, adapter: bool) -> list[tuple[str, tuple[int, ...]]]:
            return [("w", (2,))]

        async def export_weights(self, consume: Callable[[Any], None], *, adapter: bool, dtype: str | None) -> None:
            assert dtype == "float32"
            consume(iter([("w", torch.ones(2))]))

        async def load_weights(self, incoming: list[FolderWeights], version: int) -> None:
            assert len(incoming) == 2
            look(Path(incoming[0].path), version)

    ends: Any = Ends()
    for version in (1, 2):  # the second time the folder is there
        await FolderTransport(tmp_path / "run" / "weights", dtype="float32").send(ends, ends, version)
    assert seen == [(["00000.json", "00000.safetensors"], 1), (["00000.json", "00000.safetensors"], 2)]
    assert list((tmp_path / "run" / "weights").iterdir()) == []


class AdapterEnds:
    """A learner of an adapter and the client of two engines, which write down what they are given."""

    in_service = ("first", "second")

    def __init__(self) -> None:
        self.loaded: list[tuple[int, int, int, float, list[str]]] = []
        self.asked: list[tuple[str, bool]] = []

    async def shapes(self, *, adapter: bool) -> list[tuple[str, tuple[int, ...]]]:
        self.asked.append(("shapes", adapter))
        return [("lora_A", (2,))]

    async def export_weights(
        self, consume: Callable[[Any], None], *, everywhere: bool = False, adapter: bool, dtype: str | None
    ) -> None:
        assert not everywhere, "the first rank sends"
        assert dtype is None, "an adapter is sent as it is trained"
        self.asked.append(("stream", adapter))
        consume(iter([("lora_A", torch.ones(2))]))

    async def load_weights(self, adapters: list[Adapter], version: int, abort: object = None) -> None:
        for adapter in adapters:
            weights = [f"{info.name} {info.shape} {info.dtype}" for info in adapter.weights]
            self.loaded.append((len(adapters), version, adapter.rank, adapter.alpha, weights))
        if isinstance(adapters[0].tensors, FolderWeights):
            with adapters[0].open() as tensors:
                assert {name: tensor.tolist() for name, tensor in tensors} == {"lora_A": [1.0, 1.0]}


LOADED = [(2, 3, 4, 8.0, ["lora_A (2,) float32"])] * 2
LORA = SkyRLLoraConfig(rank=4, alpha=8)


async def test_an_adapter_in_files_is_loaded_by_every_engine_and_removed(tmp_path: Path) -> None:
    ends: Any = AdapterEnds()
    transport = FolderTransport(tmp_path / "run" / "weights", dtype=ADAPTER_DTYPE, lora=LORA)
    for _ in range(2):  # the second time the folder is there
        await transport.send(ends, ends, 3)
    assert ends.loaded == LOADED * 2
    assert ends.asked == [("shapes", True), ("stream", True)] * 2
    assert list((tmp_path / "run" / "weights").iterdir()) == []


async def test_an_adapter_that_cannot_be_written_is_refused_with_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ends: Any = AdapterEnds()
    with pytest.raises(WeightSyncError, match=f"the adapter cannot be written to {tmp_path / 'file'}"):
        await FolderTransport(tmp_path / "file", dtype=ADAPTER_DTYPE, lora=LORA).send(ends, ends, 3)


async def test_an_adapter_is_broadcast_while_every_engine_loads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, str]] = []

    def send(sender: BroadcastSender, weights: Any) -> None:
        sent.append((sender.group.rank, sender.dtype))
        assert [name for name, _ in weights] == ["lora_A"]

    monkeypatch.setattr(BroadcastSender, "__call__", send)
    ends: Any = AdapterEnds()
    rendezvous = TransferRendezvous("here", 29, timeout=7.0)
    await BroadcastTransport(rendezvous, dtype=ADAPTER_DTYPE, lora=LORA).send(ends, ends, 3)
    assert (ends.loaded, sent) == (LOADED, [(0, "float32")])
    assert ends.asked == [("shapes", True), ("stream", True)]


async def test_weights_are_sent_again_to_an_engine_that_took_the_place_of_the_last_one() -> None:
    world = World(interval=3)
    await world.sync.publish(1)
    await world.sync.send_again()
    assert world.sent() == ["send 1", "send 1"]


async def test_engines_that_kept_whole_weights_work_on_only_after_an_error_of_ours() -> None:
    """A process that died may have left others with half of the weights."""
    world = World()

    async def send(source: object, client: object, version: int) -> None:
        raise ProcessError("the learner died")

    world.send = send  # type: ignore[method-assign]  # of this world alone
    with pytest.raises(ProcessError):
        await world.sync.publish(1)
    assert "resume" not in world.calls


def test_each_meeting_has_a_name_of_its_own_and_ranks_in_turn() -> None:
    rendezvous = TransferRendezvous("here", 29, workers=2, timeout=7.0)
    first, engines = rendezvous.new_group(3, senders=4)
    assert (first.host, first.port, first.timeout, first.rank, first.size) == ("here", 29, 7.0, 0, 4 + 3 * 2)
    assert [(engine.rank, engine.size, engine.name) for engine in engines] == [
        (rank, 10, first.name) for rank in (4, 6, 8)
    ]
    second, (only,) = TransferRendezvous("here", 29, timeout=7.0).new_group(1)
    assert (second.size, only.rank) == (2, 1)
    assert rendezvous.new_group(1)[0].name != first.name != second.name


async def test_when_one_end_fails_the_other_is_told_why_and_the_cause_is_raised() -> None:
    reasons: list[str] = []
    gone = asyncio.Event()
    loop = asyncio.get_running_loop()

    def abort(reason: str) -> None:
        reasons.append(reason)
        loop.call_soon_threadsafe(gone.set)

    async def waits() -> None:
        await gone.wait()
        raise RuntimeError("connection closed by peer")

    async def fails() -> None:
        raise WeightSyncError("the engine has no room")

    for ends in ((fails(), waits()), (waits(), fails())):
        gone.clear()
        with pytest.raises(WeightSyncError, match="the engine has no room"):
            await send_both(*ends, abort)
    assert reasons == ["the engine has no room"] * 2


def test_the_end_of_a_process_is_nearer_to_the_cause_than_an_error_of_ours_and_that_than_one_of_a_library() -> None:
    errors = [RuntimeError(), WeightSyncError("w"), ProcessError("p"), SkyRLError("s")]
    assert [type(error) for error in sorted(errors, key=_order_of_causes)] == [
        ProcessError, WeightSyncError, SkyRLError, RuntimeError,
    ]  # fmt: skip


def test_workers_of_vllm_compare_digests_before_the_update_is_finished() -> None:
    calls: list[tuple[str, Any]] = []

    class Requests:
        def send(self, kind: str, content: Any) -> None:
            calls.append((kind, content))

    requests: Any = Requests()
    workers = _Workers(requests)
    workers.digests.add("w", torch.ones(3))
    workers.init_weight_transfer_engine({"rank": 1})
    workers.start_weight_update()
    workers.update_weights({"names": ["w"]})
    workers.finish_weight_update()
    workers.end()
    assert calls[:3] == [("init", {"rank": 1}), ("start", {}), ("update", {"names": ["w"]})]
    digests = in_hex({"w": digest_word(torch.ones(3))})
    assert calls[3:5] == [("compare", {"digests": digests}), ("finish", {})]
    assert len(calls) == 6


# The canary's prompts


def test_the_first_different_prompts_that_fit_are_taken_as_they_are() -> None:
    prompts = [[1, 2, 3], [4], [5, 6], [4]]
    assert canary_prompts(prompts, longest=3) == ((1, 2, 3), (4,), (5, 6))
    assert canary_prompts(prompts, longest=2) == ((4,), (5, 6))
    assert canary_prompts(prompts, longest=3, number=2) == ((1, 2, 3), (4,))
    assert canary_prompts([[1, 2, 3]], longest=2) == ((2, 3),)  # the end of one, if all are too long


def test_rows_hold_prompt_and_completion_with_the_engines_numbers() -> None:
    def answer(*logprobs: float) -> Completion:
        count = len(logprobs)
        return Completion(
            token_ids=(7, 8)[:count], text="", logprobs=logprobs, weight_versions=(3,) * count, stop_reason="length"
        )

    batch = rows([((1, 2), answer(-0.5, -0.25)), ((3,), answer(-1.0))])
    assert batch.input_ids.tolist() == [[1, 2, 7, 8], [3, 7, 0, 0]]
    assert batch.loss_mask.int().tolist() == [[0, 0, 1, 1], [0, 1, 0, 0]]
    assert batch.rollout_logprobs is not None
    assert batch.rollout_logprobs.tolist() == [[0.0, 0.0, -0.5, -0.25], [0.0, -1.0, 0.0, 0.0]]
    assert (batch.lengths.tolist(), batch.groups.tolist()) == ([4, 2], [0, 1])


async def test_new_engines_are_compared_before_they_serve_whatever_the_interval() -> None:
    world = World(canary_interval=10)
    for version in range(1, 4):
        world.has_new_engines = version == 3
        await world.sync.publish(version)
    assert [call for call in world.calls if call.startswith("compare")] == ["compare 1", "compare 3"]


async def test_a_transfer_in_which_an_engine_dies_begins_again_with_the_others_and_the_last_ends_it() -> None:
    world = World()
    world.dying = 1
    await world.sync.publish(1)
    assert world.calls == ["pause", "send 1", "send 1", "compare 1", "arrived 1", "resume"]
    world.dying = 1
    with pytest.raises(ProcessError, match="an engine died"):
        await world.sync.publish(2)
