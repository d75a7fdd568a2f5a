from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from skyrl.config import InferenceEngineConfig, SkyRLLoraConfig
from skyrl.errors import WeightSyncError
from skyrl.inference.client import InferenceEngineClient
from skyrl.inference.engine import Completion, GenerationRequest, InferenceEngine
from tests.inference.nano import request


class SlowEngine:
    """Answers when told to, and remembers what it was asked."""

    def __init__(self, name: str, *, refuses: bool = False) -> None:
        self.name, self.refuses = name, refuses
        self.go = asyncio.Event()
        self.asked: list[str] = []
        self.weights: list[str] = []
        self.events: list[str] = []
        self.weight_version = 0

    async def generate(self, request: GenerationRequest) -> tuple[Completion, ...]:
        self.asked.append(request.keys[0].prompt_id)
        await self.go.wait()
        text = Completion(token_ids=(), text=self.name, logprobs=(), weight_versions=(), stop_reason="stop")
        return (text,) * len(request.keys)

    async def pause(self) -> None:
        self.events.append("pause")

    async def resume(self) -> None:
        self.events.append("resume")

    async def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        if self.refuses:
            raise WeightSyncError(f"{self.name} refuses")
        self.weights = [name for name, _ in weights]
        self.weight_version = version

    async def close(self) -> None:
        self.events.append("close")


def client(*engines: Any) -> InferenceEngineClient:
    contract: list[InferenceEngine] = list(engines)
    return InferenceEngineClient(contract, None, "a/model", SkyRLLoraConfig(), InferenceEngineConfig())


async def test_a_request_goes_to_the_engine_with_the_fewest_samples_in_flight() -> None:
    a, b = SlowEngine("a"), SlowEngine("b")
    door = client(a, b)
    sizes = [("big", 8), ("small", 2), ("second small", 2), ("third small", 8)]
    tasks = []
    for name, count in sizes:
        tasks.append(asyncio.create_task(door.generate(request((1,), count=count, name=name))))
        await asyncio.sleep(0)
    assert (a.asked, b.asked) == (["big"], ["small", "second small", "third small"])
    a.go.set()
    b.go.set()
    assert [answer[0].text for answer in await asyncio.gather(*tasks)] == ["a", "b", "b", "b"]
    await door.generate(request((1,), name="after"))
    assert a.asked[-1] == "after"  # what is finished no longer counts


async def test_everything_else_goes_to_all_engines() -> None:
    a, b = SlowEngine("a"), SlowEngine("b")
    door = client(a, b)
    await door.pause()
    await door.load_weights(((name, torch.zeros(1)) for name in "xyz"), version=3)
    await door.resume()
    await door.close()
    assert a.events == b.events == ["pause", "resume", "close"]
    assert a.weights == b.weights == ["x", "y", "z"]
    assert door.weight_version == 3


async def test_engines_with_different_weights_are_an_error() -> None:
    a, b, c = SlowEngine("a"), SlowEngine("b", refuses=True), SlowEngine("c")
    door = client(a, b, c)
    with pytest.raises(WeightSyncError, match="b refuses"):
        await door.load_weights([("x", torch.zeros(1))], version=1)
    assert c.weight_version == 1  # one that refuses does not leave the others half loaded
    with pytest.raises(WeightSyncError, match=r"versions \[1, 0, 1\]"):
        _ = door.weight_version
