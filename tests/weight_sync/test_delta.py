"""Weights of which only those that changed travel: which ones are written, read, held and refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors import safe_open

from skyrl.errors import WeightSyncError
from skyrl.storage.places import storage_at
from skyrl.weight_receiver import incoming_weights
from skyrl.weight_receiver.incoming_weights import DeltaWeights, as_plain, from_plain, weight_info
from skyrl.weight_sync.senders import DeltaSender
from skyrl.weight_sync.transports import DeltaTransport
from tests.checkpoint.object_store import BUCKET, ObjectStore
from tests.weight_sync.held import Weights

R = TypeVar("R")
Values = dict[str, float]

SIZE = 1024
"""Numbers of a weight: 4 KiB, beside which the header of a file is small."""


class Numbers:
    """A learner of named vectors, each of `SIZE` equal numbers."""

    def __init__(self, **values: float) -> None:
        self.values: Values = values

    def weights(self) -> Weights:
        return ((name, torch.full((SIZE,), value)) for name, value in self.values.items())

    async def export_weights(self, consume: Callable[[Weights], R], **settings: Any) -> R:
        return consume(self.weights())

    async def shapes(self, **settings: Any) -> list[tuple[str, tuple[int, ...]]]:
        return [(name, (SIZE,)) for name in self.values]


class Receiver:
    """An engine in service that notes what it is given, and which files it opened for it."""

    in_service = (None,)

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.received: Values = {}
        self.read: list[str] = []
        self.fails = False
        original = DeltaWeights._read_tensors

        def noted(delta: DeltaWeights, file: str, names: Any) -> Any:
            self.read += names
            return original(delta, file, names)

        monkeypatch.setattr(DeltaWeights, "_read_tensors", noted)

    async def load_weights(self, incoming_sets: list[DeltaWeights], version: int) -> None:
        if self.fails:
            raise WeightSyncError("not now")
        self.read = []
        (incoming,) = incoming_sets
        with incoming.open() as weights:
            self.received = {name: tensor[0].item() for name, tensor in weights}

    def restart(self) -> None:
        incoming_weights._HELD.clear()


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Receiver:
    monkeypatch.setattr(incoming_weights, "_HELD", {})
    return Receiver(monkeypatch)


async def send(transport: DeltaTransport, learner: Any, receiver: Any) -> None:
    await transport.send(learner, receiver, 1)


def stored(folder: Path) -> list[list[str]]:
    """Names in each file, in the order in which the files were written."""
    names = []
    for path in sorted((folder / "delta").iterdir()):
        with safe_open(path, framework="pt") as file:
            names.append(sorted(file.keys()))
    return names


async def test_only_the_weights_that_changed_are_written_and_read(tmp_path: Path, receiver: Receiver) -> None:
    learner, transport = Numbers(a=1.0, b=2.0, c=3.0), DeltaTransport(tmp_path, dtype="float32")
    await send(transport, learner, receiver)
    assert sorted(receiver.read) == ["a", "b", "c"]
    learner.values["b"] = 5.0
    await send(transport, learner, receiver)
    assert receiver.read == ["b"]
    assert receiver.received == {"a": 1.0, "b": 5.0, "c": 3.0}
    assert stored(tmp_path) == [["a", "b", "c"], ["b"]]


async def test_a_change_that_rounding_removes_does_not_travel(tmp_path: Path, receiver: Receiver) -> None:
    learner, transport = Numbers(a=1.0, b=1.0), DeltaTransport(tmp_path, dtype="bfloat16")
    await send(transport, learner, receiver)
    learner.values = {"a": 1.0 + 2**-10, "b": 1.0 + 2**-7}  # bfloat16 has 7 bits after the point
    await send(transport, learner, receiver)
    assert receiver.read == ["b"]
    assert receiver.received == {"a": 1.0, "b": 1.0 + 2**-7}


async def test_a_receiver_that_does_not_hold_the_base_gets_whole_weights(tmp_path: Path, receiver: Receiver) -> None:
    learner, transport = Numbers(a=1.0, b=2.0), DeltaTransport(tmp_path, dtype="float32")
    await send(transport, learner, receiver)
    learner.values["b"] = 5.0
    receiver.restart()
    await send(transport, learner, receiver)
    assert sorted(receiver.read) == ["a", "b"]
    assert receiver.received == {"a": 1.0, "b": 5.0}


async def test_a_receiver_that_missed_a_version_reads_what_it_lacks(tmp_path: Path, receiver: Receiver) -> None:
    learner, transport = Numbers(a=1.0, b=2.0, c=3.0), DeltaTransport(tmp_path, dtype="float32")
    await send(transport, learner, receiver)
    learner.values["a"], receiver.fails = 4.0, True
    with pytest.raises(WeightSyncError, match="not now"):
        await send(transport, learner, receiver)
    learner.values["b"], receiver.fails = 5.0, False
    await send(transport, learner, receiver)
    assert sorted(receiver.read) == ["a", "b"]
    assert receiver.received == {"a": 4.0, "b": 5.0, "c": 3.0}


async def test_a_weight_that_was_damaged_in_memory_is_refused_and_then_read_again(
    tmp_path: Path, receiver: Receiver
) -> None:
    learner, transport = Numbers(a=1.0, b=2.0), DeltaTransport(tmp_path, dtype="float32")
    await send(transport, learner, receiver)
    incoming_weights._HELD[str(tmp_path / "delta")]["a"][1][2] = 7.0
    with pytest.raises(WeightSyncError, match="a was changed in transit"):
        await send(transport, learner, receiver)
    await send(transport, learner, receiver)
    assert receiver.read == ["a"]
    assert receiver.received == {"a": 1.0, "b": 2.0}


async def test_files_go_when_no_weight_is_current_in_them(tmp_path: Path, receiver: Receiver) -> None:
    learner, transport = Numbers(a=1.0, b=2.0), DeltaTransport(tmp_path, dtype="float32")
    for value in (5.0, 6.0, 7.0):
        learner.values["b"] = value
        await send(transport, learner, receiver)
    assert stored(tmp_path) == [["a", "b"], ["b"]]


async def test_all_weights_are_written_anew_when_the_files_have_grown_to_twice_their_size(
    tmp_path: Path, receiver: Receiver
) -> None:
    learner, transport = Numbers(**dict.fromkeys("abcdefgh", 0.0)), DeltaTransport(tmp_path, dtype="float32")
    for version, changed in enumerate(("abcdefgh", "bcdefgh", "cdefgh")):
        learner.values |= dict.fromkeys(changed, version + 1.0)
        await send(transport, learner, receiver)
    assert [len(names) for names in stored(tmp_path)] == [8, 7, 6]  # 21 weights, and 8 are current
    learner.values["h"] = 9.0
    await send(transport, learner, receiver)
    assert stored(tmp_path) == [list("abcdefgh")]
    assert receiver.read == ["h"]
    assert receiver.received == learner.values


async def test_what_a_run_that_was_killed_left_behind_is_removed(tmp_path: Path, receiver: Receiver) -> None:
    learner = Numbers(a=1.0)
    await send(DeltaTransport(tmp_path, dtype="float32"), learner, receiver)
    (tmp_path / "delta" / "000007-00000.safetensors").write_bytes(b"half a file")
    await send(DeltaTransport(tmp_path, dtype="float32"), learner, receiver)
    assert stored(tmp_path) == [["a"]]


async def test_a_file_that_was_changed_is_refused(tmp_path: Path, receiver: Receiver) -> None:
    files = DeltaSender(path=str(tmp_path), dtype="float32", prefix="0", base={})(Numbers(a=1.0).weights())
    path = tmp_path / "0-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    infos = (weight_info("a", torch.zeros(SIZE)),)
    with (
        pytest.raises(WeightSyncError, match="a was changed in transit"),
        DeltaWeights(path=str(tmp_path), files=files, weights=infos).open() as weights,
    ):
        list(weights)


def test_a_delta_travels_as_plain_data() -> None:
    delta = DeltaWeights(
        path="/a", files={"0.safetensors": {"a": "12"}}, weights=(weight_info("a", torch.zeros(SIZE)),)
    )
    assert from_plain(as_plain(delta)) == delta


@pytest.mark.parametrize("files", [{"../0": {}}, {"": {"a": "1"}}, {"0": 3}, ["0"], {"0": {"a": 3}}])
def test_files_of_another_folder_or_form_are_refused(files: object) -> None:
    with pytest.raises(WeightSyncError, match="not in skyrl's format"):
        from_plain({"kind": "delta", "path": "/a", "files": files, "weights": ()})


async def test_weights_travel_through_an_object_store(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    with ObjectStore(failures=0.05) as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        url = f"s3://{BUCKET}/run"
        storage_at(url).write("delta/of an earlier run", [b"old"])
        learner, transport = Numbers(a=1.0, b=2.0), DeltaTransport(url, dtype="float32")
        await send(transport, learner, receiver)
        learner.values["b"] = 5.0
        await send(transport, learner, receiver)
        assert receiver.read == ["b"]
        assert receiver.received == {"a": 1.0, "b": 5.0}
        learner.values = {"a": 3.0, "b": 4.0}
        await send(transport, learner, receiver)
        assert receiver.received == {"a": 3.0, "b": 4.0}
        assert storage_at(url).names("delta") == ["000002-00000.safetensors"]  # what nothing is current in is removed
