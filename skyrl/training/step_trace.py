"""Traces of a step's computations, taken from outside: the code of the step does not mention them.

A trace provides layers for the trainer's collaborators (`middleware.py`), which forward every call and keep the results
they need. A step is complete, and is written, just before its weights are sent to the engines.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import torch
from torch import Tensor

from skyrl.batch import TrainingBatch
from skyrl.learners.schedule import StepSettings
from skyrl.learners.workers.learning_worker import Objective
from skyrl.rollout.batches import Rollouts
from skyrl.tracking.recording import Computed, SampledBatch, Update
from skyrl.tracking.timing import Clock
from skyrl.training.describe import Metrics
from skyrl.trajectory import TrajectoryGroup
from skyrl.weight_receiver.incoming_weights import digest

Digests = Callable[[], Awaitable[dict[str, str]]]
"""Function that returns the current digest of each weight of a learner, by name."""

STAGES = (
    "input_ids",
    "loss_mask",
    "rollout_logprobs",
    "old_logprobs",
    "ref_logprobs",
    "teacher_logprobs",
    "values",
    "rewards",
    "advantages",
    "returns",
)
"""Tensors of a batch, (B, L), each after those that it is computed from."""


class Sink(Protocol):
    """Receiver of traced steps: a recording, or a comparison with one."""

    def write_sampled(self, step: int, sampled: SampledBatch) -> None:
        """Write the sampled batch of a step, before anything is computed from it."""

    def write_computed(self, computed: Computed) -> None:
        """Write the computations of a step, before the engines get the new weights."""


class StepTrace:
    """The computations of one trainer's step, collected by the layers that it offers and written to sinks."""

    def __init__(self, sinks: Sequence[Sink], rollouts: Rollouts, digests: Mapping[str, Digests], clock: Clock) -> None:
        """`digests` are computed for each learner at the end of each step; `clock` measures the time.

        Without `sinks` the layers only pass calls on.
        """
        self._sinks, self._rollouts, self._digests, self._clock = sinks, rollouts, digests, clock
        self._step = 0
        self._batch: TrainingBatch | None = None
        self._updates: list[Update] = []
        self._passes: dict[str, Metrics] = {}

    def sampled(self, groups: tuple[TrajectoryGroup, ...], version: int) -> None:
        """Listener for `Rollouts.next_batch`."""
        self._step, self._batch, self._updates, self._passes = version + 1, None, [], {}
        if not self._sinks:
            return
        sampled = SampledBatch(groups=groups, metrics=self._rollouts.metrics(), epoch=self._rollouts.epoch)
        for sink in self._sinks:
            sink.write_sampled(self._step, sampled)

    def on_forward_backward(self, learner: str) -> Callable[[Metrics, TrainingBatch, Objective], None]:
        """Listener for the passes of a learner: their metrics are kept for its optimizer step."""

        def keep(metrics: Metrics, batch: TrainingBatch, objective: Objective) -> None:
            self._passes[learner] = self._passes.get(learner, {}) | metrics

        return keep

    def on_optimizer_step(self, learner: str) -> Callable[[Metrics, StepSettings], None]:
        """Listener for the optimizer steps of a learner."""

        def append(metrics: Metrics, settings: StepSettings) -> None:
            self._updates.append(Update(learner=learner, metrics=self._passes.pop(learner, {}) | metrics))

        return append

    @asynccontextmanager
    async def before_publishing(self, version: int) -> AsyncIterator[None]:
        """A layer around `Publisher.publish`: the step is complete when its new weights are about to be sent.

        The weights that a session starts with do not belong to a step.
        """
        batch, self._batch = self._batch, None
        if self._sinks and batch is not None and version == self._step:
            with self._clock.measure("record"):
                present = {name: getattr(batch, name) for name in STAGES if getattr(batch, name) is not None}
                present["input_ids"] = present["input_ids"].to(torch.int32)  # no vocabulary needs more bits
                computed = Computed(
                    step=self._step,
                    tensors={name: tensor.detach().cpu() for name, tensor in present.items()},
                    updates=tuple(self._updates),
                    weights={learner: await digest() for learner, digest in self._digests.items()},
                )
                for sink in self._sinks:
                    sink.write_computed(computed)
        yield

    def keep(self, batch: TrainingBatch) -> None:
        """Listener before reward shaping and advantage estimation: the trace keeps the batch."""
        self._batch = batch

    def keep_advantages(self, batch: TrainingBatch, advantages: Tensor) -> None:
        """Listener after advantage estimation."""
        self._batch = batch.with_fields(advantages=advantages)

    def keep_returns(self, batch: TrainingBatch, returns: Tensor) -> None:
        """Listener after the targets of a critic are known."""
        self._batch = batch.with_fields(returns=returns)


def weight_digests(weights: Iterator[tuple[str, Tensor]]) -> dict[str, str]:
    """xxh3-128 digest of every weight by name, each a whole tensor of any shape. Runs in the process that gathers the
    weights.
    """
    return {name: digest(tensor) for name, tensor in weights}
