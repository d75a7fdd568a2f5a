"""What a step of the trainer computes, seen from outside: the loop does not mention it.

A trace stands between the trainer and its collaborators, passes every call on, and keeps what it needs of the answers.
When new weights are about to leave for the engines the step is complete, and is handed over.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from skyrl.batch import TrainingBatch
from skyrl.inference.incoming_weights import digest
from skyrl.tracking.recording import Computed, Sampled, Update
from skyrl.tracking.timing import Clock
from skyrl.training.describe import Metrics
from skyrl.training.middleware import on_result, replacing
from skyrl.training.trainer import PPOTrainer

Digests = Callable[[], Awaitable[dict[str, str]]]
"""Name of each weight of a learner -> its digest, now."""

STAGES = (
    "input_ids",
    "loss_mask",
    "rollout_logprobs",
    "old_logprobs",
    "ref_logprobs",
    "values",
    "rewards",
    "advantages",
    "returns",
)
"""Tensors of a batch, (B, L), each after those that it is made from."""


class Sink(Protocol):
    """Who is told of steps: a recording, or whoever compares with one."""

    def write_sampled(self, step: int, sampled: Sampled) -> None:
        """The batch of a step, before anything is computed."""

    def write_computed(self, computed: Computed) -> None:
        """What was computed, before the engines get the new weights."""


class StepTrace:
    """Watches one trainer."""

    def __init__(self, sink: Sink, digests: Mapping[str, Digests], clock: Clock) -> None:
        """`digests` are asked, by learner, at the end of each step; what that takes is measured by `clock`."""
        self._sink, self._digests, self._clock = sink, digests, clock
        self._batch: TrainingBatch | None = None
        self._updates: list[Update] = []

    def watch(self, trainer: PPOTrainer) -> None:
        """Stand between `trainer` and its collaborators, those who refuse numbers among them: a step that they end,
        and that is left out, is complete with what there was of it.
        """
        self._trainer = trainer
        trainer.rollouts = on_result(trainer.rollouts, next_batch=self._sampled)
        trainer.policy = on_result(trainer.policy, update=self._learned("policy"))
        if trainer.critic is not None:
            trainer.critic = on_result(trainer.critic, update=self._learned("critic"))
        trainer.weights = replacing(trainer.weights, publish=self._publish)
        shape, estimate, targets = trainer.shape, trainer.estimate, trainer.targets

        def shaped(batch: TrainingBatch) -> tuple[Tensor, Metrics]:
            self._batch = batch
            return shape(batch)

        def estimated(batch: TrainingBatch) -> Tensor:
            self._batch = batch
            advantages = estimate(batch)
            self._batch = batch.given(advantages=advantages)
            return advantages

        def targeted(batch: TrainingBatch) -> Tensor:
            returns = targets(batch)
            self._batch = batch.given(returns=returns)
            return returns

        trainer.shape, trainer.estimate, trainer.targets = shaped, estimated, targeted

    async def _sampled(self, groups: Any) -> None:
        rollouts = self._trainer.rollouts
        self._batch, self._updates = None, []
        self._sink.write_sampled(
            self._trainer.version + 1,
            Sampled(groups=tuple(groups), metrics=rollouts.metrics(), epoch=rollouts.epoch),
        )

    def _learned(self, learner: str) -> Callable[[Any], Awaitable[None]]:
        async def learned(metrics: Mapping[str, float]) -> None:
            self._updates.append(Update(learner=learner, metrics=dict(metrics)))

        return learned

    async def _publish(self, publish: Callable[[int], Awaitable[Metrics]], version: int) -> Metrics:
        """Weights that belong to no new step, those that a session begins with, are none of it."""
        batch, self._batch = self._batch, None
        if batch is not None and version == self._trainer.version + 1:
            await self._complete(batch)
        return await publish(version)

    async def _complete(self, batch: TrainingBatch) -> None:
        with self._clock.measure("record"):
            self._sink.write_computed(
                Computed(
                    step=self._trainer.version + 1,
                    tensors=_tensors(batch),
                    updates=tuple(self._updates),
                    weights={learner: await ask() for learner, ask in self._digests.items()},
                )
            )


def weight_digests(weights: Iterator[tuple[str, Tensor]]) -> dict[str, str]:
    """xxh3-128 of every weight, a whole tensor of any shape, by name. It runs where the weights are gathered."""
    return {name: digest(tensor) for name, tensor in weights}


def _tensors(batch: TrainingBatch) -> dict[str, Tensor]:
    present = {name: getattr(batch, name) for name in STAGES if getattr(batch, name) is not None}
    present["input_ids"] = present["input_ids"].to(torch.int32)  # no vocabulary needs more
    return {name: tensor.detach().cpu() for name, tensor in present.items()}
