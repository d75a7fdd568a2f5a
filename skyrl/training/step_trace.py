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
from skyrl.inference.arrival import digest
from skyrl.tracking.recording import Computed, Sampled, Update
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

    def __init__(self, sink: Sink, digests: Mapping[str, Digests]) -> None:
        """`digests` are asked, by learner, at the end of each step."""
        self._sink, self._digests = sink, digests
        self._batch: TrainingBatch | None = None
        self._updates: list[Update] = []

    def watch(self, trainer: PPOTrainer) -> None:
        """Stand between `trainer` and its collaborators."""
        self._trainer = trainer
        trainer.rollouts = _Watched(trainer.rollouts, next_batch=self._sampled)
        trainer.policy = _Watched(trainer.policy, update=self._learned("policy"))
        if trainer.critic is not None:
            trainer.critic = _Watched(trainer.critic, update=self._learned("critic"))
        trainer.weights = _Watched(trainer.weights, before={"publish": self._complete})
        estimate, targets = trainer.estimate, trainer.targets

        def estimated(batch: TrainingBatch) -> Tensor:
            advantages = estimate(batch)
            self._batch = batch.given(advantages=advantages)
            return advantages

        def targeted(batch: TrainingBatch) -> Tensor:
            returns = targets(batch)
            self._batch = batch.given(returns=returns)
            return returns

        trainer.estimate, trainer.targets = estimated, targeted

    async def _sampled(self, groups: Any) -> None:
        rollouts = self._trainer.rollouts
        self._updates = []
        self._sink.write_sampled(
            self._trainer.version + 1,
            Sampled(groups=tuple(groups), metrics=rollouts.metrics(), epoch=rollouts.epoch),
        )

    def _learned(self, learner: str) -> Callable[[Any], Awaitable[None]]:
        async def learned(metrics: Mapping[str, float]) -> None:
            self._updates.append(Update(learner=learner, metrics=dict(metrics)))

        return learned

    async def _complete(self) -> None:
        """Also asked before the first step: then there is nothing."""
        if self._batch is None:
            return
        batch, self._batch = self._batch, None
        with self._trainer.clock.measure("record"):
            self._sink.write_computed(
                Computed(
                    step=self._trainer.version + 1,
                    tensors=_tensors(batch),
                    updates=tuple(self._updates),
                    weights={learner: await ask() for learner, ask in self._digests.items()},
                )
            )


def weight_digests(weights: Iterator[tuple[str, Tensor]]) -> dict[str, str]:
    """xxh3-128 of every weight. It runs where the weights are gathered."""
    return {name: digest(tensor) for name, tensor in weights}


def _tensors(batch: TrainingBatch) -> dict[str, Tensor]:
    present = {name: getattr(batch, name) for name in STAGES if getattr(batch, name) is not None}
    present["input_ids"] = present["input_ids"].to(torch.int32)  # no vocabulary needs more
    return {name: tensor.detach().cpu() for name, tensor in present.items()}


class _Watched:
    """A collaborator, some of whose coroutine methods tell what they returned, or that they are about to be called."""

    def __init__(
        self,
        collaborator: Any,
        *,
        before: Mapping[str, Callable[[], Awaitable[None]]] | None = None,
        **told: Callable[[Any], Awaitable[None]],
    ) -> None:
        self._collaborator, self._before, self._told = collaborator, before or {}, told

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._collaborator, name)
        if name not in self._told and name not in self._before:
            return attribute

        async def watched(*args: Any, **kwargs: Any) -> Any:
            if name in self._before:
                await self._before[name]()
            result = await attribute(*args, **kwargs)
            if name in self._told:
                await self._told[name](result)
            return result

        return watched
