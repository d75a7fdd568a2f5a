"""Learners with the objective that a test updates them by, as trainers do: one pass and one optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor

from skyrl.batch import RowTensors, TrainingBatch
from skyrl.config import PreferenceConfig, RewardModelConfig, SFTConfig, TrainerConfig
from skyrl.learners.rank_metrics import Metrics
from skyrl.learners.schedule import StepSettings
from skyrl.learners.workers import group
from skyrl.learners.workers import roles as workers
from skyrl.learners.workers.learning_worker import LearningWorker, Objective
from skyrl.processes.handles import Group
from skyrl.training.trainer import AS_CONFIGURED, Learner, update


class Updating:
    """A learner that has an objective."""

    objective: Objective

    async def update(self: Any, batch: TrainingBatch) -> Metrics:
        learner: Learner = self
        return await update(learner, batch, self.objective)


L_co = TypeVar("L_co", bound=LearningWorker, covariant=True)


class LearnerGroup(Updating, group.LearnerGroup[L_co]):
    def __init__(self, ranks: Group[L_co], objective: Objective, *args: Any, **kwargs: Any) -> None:
        super().__init__(ranks, *args, **kwargs)
        self.objective = objective


class NormalizedCritic(Updating, workers.NormalizedCritic):
    def __init__(self, ranks: Group[Any], objective: Objective, *args: Any, **kwargs: Any) -> None:
        super().__init__(ranks, *args, **kwargs)
        self.objective = objective


class PolicyWorker(Updating, workers.PolicyWorker):
    def __init__(self, trainer: TrainerConfig, objective: Objective, *args: Any, **kwargs: Any) -> None:
        super().__init__(trainer, *args, **kwargs)
        self.objective = objective


class CriticWorker(Updating, workers.CriticWorker):
    def __init__(self, trainer: TrainerConfig, objective: Objective, *args: Any, **kwargs: Any) -> None:
        super().__init__(trainer, *args, **kwargs)
        self.objective = objective


class SFTWorker(Updating, workers.SFTWorker):
    def __init__(self, run: SFTConfig, objective: Objective, *args: Any, **kwargs: Any) -> None:
        super().__init__(run, *args, **kwargs)
        self.objective = objective


class RewardModelWorker(Updating, workers.RewardModelWorker):
    def __init__(self, run: RewardModelConfig, objective: Objective, *args: Any, **kwargs: Any) -> None:
        super().__init__(run, *args, **kwargs)
        self.objective = objective


class PreferenceWorker(Updating, workers.PreferenceWorker):
    def __init__(self, run: PreferenceConfig, objective: Objective, *args: Any, **kwargs: Any) -> None:
        super().__init__(run, *args, **kwargs)
        self.objective = objective


@attrs.frozen
class Imitation(Objective):
    """Sum over tokens, not a mean, of the squared distance from the log-probability that the rows carry for each."""

    def weigh(self, batch: TrainingBatch) -> TrainingBatch:
        return batch.with_fields(loss_weights=batch.loss_mask / 40)

    def __call__(
        self, outputs: Tensor, batch: TrainingBatch, entropy: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        assert batch.loss_weights is not None
        target = batch.extras["teacher"].padded(batch.input_ids.shape[1])
        loss = ((outputs - target).square() * batch.loss_weights).sum()
        return loss, {"imitation": loss.detach()}, {}


def taught(rows: TrainingBatch) -> TrainingBatch:
    """The rows with a teacher's log-probability of each of their tokens."""
    generator = torch.Generator().manual_seed(int(rows.input_ids.sum()))
    drawn = [-5 + torch.randn(length, generator=generator) for length in rows.lengths.tolist()]
    return rows.carrying(teacher=RowTensors.of(drawn))


async def imitate(
    learner: Learner, passes: int, batches: Sequence[TrainingBatch], settings: StepSettings = AS_CONFIGURED
) -> list[float]:
    """One step for each batch, of which each of the passes gets its part of the rows. Returns the losses and the norms
    of the gradients.
    """
    values: list[float] = []
    for rows in map(taught, batches):
        losses = [
            (await learner.forward_backward(part, Imitation()))["imitation"] for part in rows.split(len(rows) // passes)
        ]
        stepped = await learner.optimizer_step(settings)
        values += [sum(losses), stepped["grad_norm"]]
    return values
