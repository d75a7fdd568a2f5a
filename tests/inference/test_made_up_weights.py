"""Announcements of new weights, and what follows them, with anything in them: weights or `WeightSyncError`."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from skyrl.errors import WeightSyncError
from skyrl.weight_receiver.incoming_weights import (
    BroadcastWeights,
    FolderWeights,
    RemoteWeights,
    VLLMNativeWeights,
    as_plain,
    digest,
    from_plain,
    weight_info,
)
from skyrl.weight_receiver.transfer_group import TransferGroup
from tests.long_cases import long_except

ODD: tuple[Any, ...] = (None, True, -1, 1.5, 10**30, "", "x", "../x", [], [1], [-1], {}, {"x": 1}, {"": None})
"""Values that stand where something else belongs."""

WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}
INFOS = tuple(weight_info(name, tensor) for name, tensor in WEIGHTS.items())
GROUP = TransferGroup(host="127.0.0.1", port=1, name="n", rank=1, size=2, timeout=1.0)
SETS: tuple[RemoteWeights, ...] = (
    FolderWeights(path="/weights", weights=INFOS),
    BroadcastWeights(group=GROUP, weights=INFOS),
    VLLMNativeWeights(group=GROUP, backend="nccl", weights=INFOS),
)
COUNTS = long_except([200, 100_000], 200)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything inside a JSON-able value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, inner in inside:
        yield (*path, key)
        yield from places(inner, (*path, key))


def made_up(plain: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """A copy in which one or two places hold something odd, or nothing."""
    changed: dict[str, Any] = json.loads(json.dumps(plain))
    for _ in range(draw.randint(1, 2)):
        *above, key = draw.choice(list(places(changed)))
        holder = changed
        for step in above:
            holder = holder[step]
        if draw.random() < 0.3:
            del holder[key]
        else:
            holder[key] = draw.choice(ODD)
        if not changed:
            break
    return changed


@pytest.mark.parametrize("count", COUNTS)
def test_an_announcement_with_something_odd_is_read_or_refused(count: int) -> None:
    draw, ends = random.Random(0), Counter[str]()
    for _ in range(count):
        plain = made_up(as_plain(draw.choice(SETS)), draw)
        try:
            assert all(isinstance(info.name, str) for info in from_plain(plain).weights)
            ends["read"] += 1
        except WeightSyncError:
            ends["refused"] += 1
    assert min(ends["read"], ends["refused"]) > count / 20, ends


def test_an_announcement_is_read_as_it_was_sent() -> None:
    for weight_set in SETS:
        assert from_plain(json.loads(json.dumps(as_plain(weight_set)))) == weight_set


class Lines:
    """A channel on which these messages come."""

    def __init__(self, messages: Sequence[bytes]) -> None:
        self._messages = list(messages)

    def receive_bytes(self) -> Tensor:
        if not self._messages:
            raise WeightSyncError("the sender is gone")
        return torch.frombuffer(bytearray(self._messages.pop(0) or b"\0"), dtype=torch.uint8)


def spoilt(content: bytes, draw: random.Random) -> bytes:
    """A copy with a few bytes changed, cut off or put in."""
    start, length = draw.randrange(len(content)), draw.randint(0, 4)
    inserted = draw.choice([b"", bytes(draw.choices(range(256), k=length)), b"[" * 100_000, b'{"a":', b"null"])
    return content[:start] + inserted + content[start + length :]


def assert_whole_or_refused(incoming: RemoteWeights) -> str:
    try:
        with incoming.open() as arriving:
            came = {name: tensor.clone() for name, tensor in arriving}
    except WeightSyncError:
        return "refused"
    assert came.keys() == WEIGHTS.keys()
    assert all(torch.equal(came[name], WEIGHTS[name]) for name in WEIGHTS)
    return "whole"


@pytest.mark.parametrize("count", COUNTS)
def test_spoilt_messages_are_refused_or_change_nothing(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, ends = random.Random(1), Counter[str]()
    payload = b"".join(tensor.numpy().tobytes() for tensor in WEIGHTS.values())
    header = json.dumps({name: digest(tensor) for name, tensor in WEIGHTS.items()}).encode()
    for _ in range(count):
        messages = [header, payload, b"{}"]
        number = draw.randrange(3)
        messages[number] = spoilt(messages[number], draw)

        @contextmanager
        def join(group: TransferGroup, messages: Sequence[bytes] = messages) -> Iterator[Lines]:
            yield Lines(messages)

        monkeypatch.setattr(TransferGroup, "join", join)
        ends[assert_whole_or_refused(SETS[1])] += 1
    assert ends["refused"] > count / 2


@pytest.mark.parametrize("count", COUNTS)
def test_spoilt_files_are_refused_or_change_nothing(count: int, tmp_path: Path) -> None:
    draw, ends = random.Random(2), Counter[str]()
    save_file(WEIGHTS, tmp_path / "part.safetensors")
    (tmp_path / "part.json").write_text(json.dumps({name: digest(tensor) for name, tensor in WEIGHTS.items()}))
    for _ in range(count):
        file = tmp_path / draw.choice(["part.json", "part.safetensors"])
        good = file.read_bytes()
        file.write_bytes(spoilt(good, draw))
        ends[assert_whole_or_refused(FolderWeights(path=str(tmp_path), weights=INFOS))] += 1
        file.write_bytes(good)
    assert ends["refused"] > count / 2
