"""Models and engines that take turns on the same devices: whatever works next has room, the others are in host memory.

The training loop is not involved. Its collaborators are wrapped, and every call first moves what it needs to the
devices:

    engines generate     the engines alone
    a model scores       its weights alone
    a model learns       its weights and its optimizer's state
    weights are sent     the policy's weights, and the engines, awake

So `gpu_memory_utilization` has to leave room for the policy's weights, spread over its ranks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Literal, Protocol

import torch

Part = Literal["model", "optimizer"]

_WEIGHTS: tuple[Part, ...] = ("model",)


MEMORY_PER_WEIGHT = 6
"""Memory that one process holds on its GPU between passes, in multiples of its models' weights in float32: these
weights, gradients and the two moments of AdamW, and at most half as much again for copies in 16 bits and for the
engine's own weights."""


def is_room_for_all() -> bool:
    """Whether the models that this process has just loaded onto its GPU can stay there, together with their optimizers
    and an engine, in half of its memory. The other half is for activations, logits, keys and values.
    """
    if not torch.cuda.is_available():
        return False
    _, memory = torch.cuda.mem_get_info()
    return MEMORY_PER_WEIGHT * torch.cuda.memory_allocated() <= memory // 2


class Movable(Protocol):
    """A model on all its ranks."""

    async def offload(self, *, model: bool = True, optimizer: bool = True) -> int:
        """Move the given parts to host memory. Returns the number of bytes moved."""

    async def onload(self, *, model: bool = True, optimizer: bool = True) -> int:
        """Move the given parts to the device. Returns the number of bytes moved."""


class Sleeper(Protocol):
    """Engines that can pause and release their memory."""

    async def pause(self) -> None:
        """Finish running requests and accept no new ones."""

    async def resume(self) -> None:
        """Accept requests again."""

    async def sleep(self) -> None:
        """Release the memory of weights and caches."""

    async def wake(self) -> None:
        """Allocate the memory of weights and caches again."""


class TimeSharing:
    """Tracks what is on the devices, and moves only what has to be moved."""

    def __init__(
        self,
        models: Mapping[str, Movable],
        engines: Callable[[], Sleeper] | None,
        *,
        keep_optimizers: Collection[str] = (),
    ) -> None:
        """`models` are the models that share the devices, by name; they start on the devices. Others are not moved.

        `engines` starts the engines, awake, once all models have left; None if the engines have separate devices. The
        optimizer state of the models in `keep_optimizers` stays on the device.
        """
        self._models, self._make_engines = models, engines
        self._parts: dict[str, tuple[Part, ...]] = {
            name: _WEIGHTS if name in keep_optimizers else ("model", "optimizer") for name in models
        }
        self._on_device: dict[str, set[Part]] = {name: set(parts) for name, parts in self._parts.items()}
        self._engines: Sleeper | None = None
        self._awake = self._paused = False

    async def for_engines(self) -> None:
        """Make room for the engines alone, and let them work."""
        if self._make_engines is not None:
            await self._load_only({})
            await self._wake()
        if self._engines is not None and self._paused:
            await self._engines.resume()
            self._paused = False

    async def for_scoring(self, name: str) -> None:
        """Make room for the weights of this model alone."""
        await self._sleep()
        await self._load_only({name: _WEIGHTS})

    async def for_learning(self, name: str) -> None:
        """Make room for this model and its optimizer state alone."""
        await self._sleep()
        await self._load_only({name: self._parts.get(name, ())})

    async def for_transfer(self, name: str) -> None:
        """Make room for the weights of this model and for the engines, which accept no requests until the weights have
        arrived.
        """
        if self._make_engines is not None and self._engines is None:
            await self.for_engines()  # engines need room to start
        await self._load_only({name: _WEIGHTS})
        await self._wake()

    def engines_closed(self) -> None:
        """The engines have ended: they are neither put to sleep nor started again."""
        self._engines = self._make_engines = None
        self._awake = self._paused = False

    async def _load_only(self, required: Mapping[str, Collection[Part]]) -> None:
        """Move models so that only the required parts are on the devices; parts leave before others come."""
        for name, loaded in self._on_device.items():
            await self._move(name, loaded - set(required.get(name, ())), self._models[name].offload)
        for name in self._models.keys() & required.keys():
            await self._move(name, set(required[name]) - self._on_device[name], self._models[name].onload)
            self._on_device[name] |= set(required[name])

    async def _move(self, name: str, parts: set[Part], move: Callable[..., Awaitable[int]]) -> None:
        if parts:
            await move(model="model" in parts, optimizer="optimizer" in parts)
            self._on_device[name] -= parts

    async def _wake(self) -> None:
        if self._engines is None and self._make_engines is not None:
            self._engines = self._make_engines()
        elif self._engines is not None and not self._awake:
            await self._engines.wake()
        self._awake = True

    async def _sleep(self) -> None:
        if self._engines is not None and self._awake:
            await self._engines.pause()
            await self._engines.sleep()
            self._awake, self._paused = False, True
