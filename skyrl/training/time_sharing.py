"""Models and engines that take turns on the same devices: whoever works next finds room, the others are in host memory.

The loop does not know. Its collaborators are wrapped, and every call first makes sure of who is there:

    engines generate     the engines alone
    a model scores       its weights alone
    a model learns       its weights and its optimizer's state
    weights travel       the policy's weights, and the engines, awake

So `gpu_memory_utilization` has to leave room for the policy's weights, spread over its ranks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Literal, Protocol

Part = Literal["model", "optimizer"]

_WEIGHTS: tuple[Part, ...] = ("model",)


class Movable(Protocol):
    """A model on all its ranks."""

    async def offload(self, *, model: bool = True, optimizer: bool = True) -> int:
        """To host memory. Bytes moved."""

    async def onload(self, *, model: bool = True, optimizer: bool = True) -> int:
        """To the device. Bytes moved."""


class Sleeper(Protocol):
    """The engines."""

    async def pause(self) -> None:
        """Finish what is running, take no new work."""

    async def resume(self) -> None:
        """Take work again."""

    async def sleep(self) -> None:
        """Give up the memory of weights and caches."""

    async def wake(self) -> None:
        """Take it again."""


class TimeSharing:
    """Knows who is on the devices, and moves only what has to be moved."""

    def __init__(
        self,
        models: Mapping[str, Movable],
        engines: Callable[[], Sleeper] | None,
        *,
        keep_optimizers: Collection[str] = (),
    ) -> None:
        """`models` are those that share, by name; they are on the devices. Others are left alone.

        `engines` makes the engines, awake, once all models have left; None where the engines have devices of their own.
        The optimizer state of the models in `keep_optimizers` stays on the device.
        """
        self._models, self._make_engines = models, engines
        self._parts: dict[str, tuple[Part, ...]] = {
            name: _WEIGHTS if name in keep_optimizers else ("model", "optimizer") for name in models
        }
        self._there: dict[str, set[Part]] = {name: set(parts) for name, parts in self._parts.items()}
        self._engines: Sleeper | None = None
        self._awake = self._paused = False

    async def for_engines(self) -> None:
        """The engines alone, at work."""
        if self._make_engines is not None:
            await self._only({})
            await self._wake()
        if self._engines is not None and self._paused:
            await self._engines.resume()
            self._paused = False

    async def for_scoring(self, name: str) -> None:
        """The weights of this model alone."""
        await self._sleep()
        await self._only({name: _WEIGHTS})

    async def for_learning(self, name: str) -> None:
        """This model and its optimizer's state alone."""
        await self._sleep()
        await self._only({name: self._parts.get(name, ())})

    async def for_travel(self, name: str) -> None:
        """The weights of this model, and the engines, which take no work before the weights have come."""
        if self._make_engines is not None and self._engines is None:
            await self.for_engines()  # they need room to start
        await self._only({name: _WEIGHTS})
        await self._wake()

    async def _only(self, wanted: Mapping[str, Collection[Part]]) -> None:
        """Move models so that only the wanted parts are on the devices; parts leave before others come."""
        for name, there in self._there.items():
            await self._move(name, there - set(wanted.get(name, ())), self._models[name].offload)
        for name in self._models.keys() & wanted.keys():
            await self._move(name, set(wanted[name]) - self._there[name], self._models[name].onload)
            self._there[name] |= set(wanted[name])

    async def _move(self, name: str, parts: set[Part], move: Callable[..., Awaitable[int]]) -> None:
        if parts:
            await move(model="model" in parts, optimizer="optimizer" in parts)
            self._there[name] -= parts

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
