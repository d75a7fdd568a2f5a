"""Layers around the calls that a trainer makes: timing, turns on shared devices, interruption, recording, profiles.

A layer is an asynchronous context around a call. `layered` wraps a method in several layers, the outermost first. The
records below have the shapes of the trainer's collaborators; the layers of each method are listed where the trainer is
assembled (`get_trainer` in `experiments/ppo.py`), and the code of a step mentions none of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from attrs import frozen
from torch import Tensor

from skyrl.batch import TrainingBatch
from skyrl.learners.forward import PARITY
from skyrl.learners.schedule import StepSettings
from skyrl.learners.workers.learning_worker import Objective
from skyrl.training.describe import Metrics
from skyrl.trajectory import TrajectoryGroup
from skyrl.weight_sync.canary import ENOUGH_TOKENS, refuse_mean

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


def with_listeners(
    function: Callable[[TrainingBatch], R],
    *,
    before: Sequence[Callable[[TrainingBatch], None]] = (),
    after: Sequence[Callable[[TrainingBatch, R], None]] = (),
) -> Callable[[TrainingBatch], R]:
    """Wraps a computation on a batch: the listeners `before` it get the batch, those `after` it also the result."""

    def computed(batch: TrainingBatch) -> R:
        for listener in before:
            listener(batch)
        result = function(batch)
        for hear in after:
            hear(batch, result)
        return result

    return computed


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


class Profiled(Protocol):
    """A model whose ranks can trace their updates."""

    async def profile(self, folder: Path | None) -> None:
        """Make every rank trace its updates into `folder` from now on; None stops tracing."""


class ProfiledSteps:
    """Layers around updates that trace those of some steps into `folder/step_<n>`."""

    def __init__(self, steps: Collection[int], folder: Path) -> None:
        self._steps, self._folder, self._step = frozenset(steps), folder, 0

    def sampled(self, groups: Sequence[TrajectoryGroup], version: int) -> None:
        """Listener for `Rollouts.next_batch`: the step after `version` has begun."""
        self.begins(version + 1)

    def begins(self, step: int) -> None:
        """Treat updates from now on as part of `step`."""
        self._step = step

    def around(self, model: Profiled) -> Callable[[TrainingBatch, Objective], AbstractAsyncContextManager[None]]:
        """The layer around the first call of a model's update."""
        traced: set[int] = set()

        @asynccontextmanager
        async def layer(batch: TrainingBatch, objective: Objective) -> AsyncIterator[None]:
            if self._step in self._steps and self._step not in traced:
                traced.add(self._step)
                await model.profile(self._folder / f"step_{self._step}")
            elif self._step not in self._steps and traced:
                traced.clear()
                await model.profile(None)
            yield

        return layer


class RolloutParity:
    """Compares each engine's log-probabilities of its samples with the learner's, once it has enough tokens: the
    samples that a run trains on prove that each engine computes with the learner's weights.

    The first update after a batch was sampled scores every token with the weights that drew it, so that a comparison
    costs nothing. Later updates of the step score with changed weights, and rows that older weights drew cannot be
    compared.
    """

    def __init__(self, bound: float | None) -> None:
        """`bound` is the largest mean absolute difference, in nats, that is attributed to rounding; None compares
        nothing, for runs whose learner does not score samples as engines draw them.
        """
        self._bound = bound
        self._version, self._is_fresh = 0, False
        self._nats: defaultdict[int, float] = defaultdict(float)
        self._tokens: defaultdict[int, float] = defaultdict(float)

    def sampled(self, groups: object, version: int) -> None:
        """Listener for `Rollouts.next_batch`."""
        self._version, self._is_fresh = version, True

    def around(
        self, forward_backward: Call[[TrainingBatch, Objective], Metrics]
    ) -> Call[[TrainingBatch, Objective], Metrics]:
        """`forward_backward`, whose results are read and left out of its metrics. Raises `WeightSyncError`, which names
        the engine, if the mean of one exceeds the bound.
        """

        async def passed(batch: TrainingBatch, objective: Objective) -> Metrics:
            metrics = await forward_backward(batch, objective)
            sums = {name.removeprefix(PARITY): value for name, value in metrics.items() if name.startswith(PARITY)}
            if self._is_fresh and sums:
                self._is_fresh = False
                self._add(sums)
            return {name: value for name, value in metrics.items() if not name.startswith(PARITY)}

        return passed

    def _add(self, sums: Metrics) -> None:
        for name, value in sums.items():
            number, _, kind = name.partition("/")
            (self._nats if kind == "nats" else self._tokens)[int(number)] += value
        for engine, tokens in list(self._tokens.items()):
            if tokens >= ENOUGH_TOKENS:
                nats = self._nats.pop(engine) / self._tokens.pop(engine)
                if self._bound is not None:
                    refuse_mean(nats, int(tokens), f"engine {engine}", self._version, self._bound)
