"""Layers around the calls that a trainer makes: timing, turns on shared devices, interruption, recording.

A layer is an asynchronous context around a call. `layered` wraps a method in several layers, the outermost first. The
records below have the shapes of the trainer's collaborators; the layers of each method are listed where the trainer is
assembled (`get_trainer` in `experiments/ppo.py`), and the code of a step mentions none of them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

from attrs import frozen
from torch import Tensor

from skyrl.batch import TrainingBatch
from skyrl.learners.schedule import StepSettings
from skyrl.learners.workers.learning_worker import Objective
from skyrl.training.describe import Metrics
from skyrl.trajectory import TrajectoryGroup

P = ParamSpec("P")
R = TypeVar("R")

Call = Callable[P, Coroutine[Any, Any, R]]
"""A coroutine method of a collaborator: `Call[[TrainingBatch], Tensor]`."""


def layered(
    method: Callable[P, Awaitable[R]],
    *layers: Callable[P, AbstractAsyncContextManager[object]],
    on_result: Sequence[Callable[Concatenate[R, P], None]] = (),
) -> Call[P, R]:
    """Wraps `method`: each call runs inside the contexts that `layers` make from its arguments, the outermost first.

    Each listener of `on_result` gets the result and the arguments, in order, once every context has been left. No
    listener is called if the method or a layer raises.

    Example: `layered(policy.score, in_context(shutdown.interruptible), run_before(make_room))`
    """

    async def call(*args: P.args, **kwargs: P.kwargs) -> R:
        async with AsyncExitStack() as entered:
            for layer in layers:
                await entered.enter_async_context(layer(*args, **kwargs))
            result = await method(*args, **kwargs)
        for listener in on_result:
            listener(result, *args, **kwargs)
        return result

    return call


def run_before(prepare: Callable[[], Awaitable[None]]) -> Callable[..., AbstractAsyncContextManager[None]]:
    """A layer that awaits `prepare()` before each call."""

    @asynccontextmanager
    async def prepared(*_: object, **__: object) -> AsyncIterator[None]:
        await prepare()
        yield

    return prepared


def run_after(conclude: Callable[[], Awaitable[None]]) -> Callable[..., AbstractAsyncContextManager[None]]:
    """A layer that awaits `conclude()` after each call that returned."""

    @asynccontextmanager
    async def concluded(*_: object, **__: object) -> AsyncIterator[None]:
        yield
        await conclude()

    return concluded


def in_context(enter: Callable[[], AbstractContextManager[object]]) -> Callable[..., AbstractAsyncContextManager[None]]:
    """A layer that runs each call in a new context from `enter()`."""

    @asynccontextmanager
    async def entered(*_: object, **__: object) -> AsyncIterator[None]:
        with enter():
            yield

    return entered


@frozen(kw_only=True)
class LayeredRollouts:
    """A source of batches. See `skyrl.rollout.batches.BatchSource`."""

    next_batch: Call[[int], tuple[TrajectoryGroup, ...]]
    metrics: Callable[[], Metrics]


@frozen(kw_only=True)
class LayeredScorer:
    """A model that scores. See `skyrl.training.scorer.Scorer`."""

    score: Call[[TrainingBatch], Tensor]


@frozen(kw_only=True)
class LayeredLearner(LayeredScorer):
    """A model that learns. See `skyrl.training.trainer.Learner`."""

    forward_backward: Call[[TrainingBatch, Objective], Metrics]
    optimizer_step: Call[[StepSettings], Metrics]


@frozen(kw_only=True)
class LayeredPublisher:
    """Weight transfer to the engines. See `skyrl.training.trainer.Publisher`."""

    publish: Call[[int], Metrics]
