"""Non-finite values are stopped where they appear: before anything is learned from them, and before they are saved.

Rewards, log-probabilities, values and advantages are checked here; gradients, learning rate and weights by the learner,
with each update; tensors once more when they are saved.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from skyrl.batch import TrainingBatch
from skyrl.config import FaultsConfig
from skyrl.errors import BatchError, NonFiniteError
from skyrl.training.describe import Metrics
from skyrl.training.trainer import PPOTrainer
from skyrl.trajectory import TrajectoryGroup

_TERMS = (
    "rollout_logprobs",
    "old_logprobs",
    "ref_logprobs",
    "teacher_logprobs",
    "values",
    "rewards",
    "advantages",
)
"""Checked in this order: the first with a non-finite value is the cause of those after it. Rewards may include a KL
term."""

_SHOWN = 4


def refuse_non_finite(batch: TrainingBatch, groups: Sequence[TrajectoryGroup]) -> None:
    """Raises `BatchError`, which names the term and the samples. `groups` are those that the rows were made from."""
    names = [f"sample {row.sample_index} of prompt {group.prompt.id}" for group in groups for row in group.trajectories]
    for term in _TERMS:
        values: Tensor | None = getattr(batch, term)
        if values is None or torch.isfinite(values).all():
            continue
        rows = (~torch.isfinite(values)).any(1).nonzero().flatten().tolist()
        worst = values[rows[0]][~torch.isfinite(values[rows[0]])][0].item()
        examples = ", ".join(names[row] for row in rows[:_SHOWN])
        more = f", and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
        raise BatchError(f"{term.removesuffix('s')} {worst} in {examples}{more}: no weight was changed")


class FiniteNumbers:
    """Checks around reward shaping and advantage estimation, before anything is learned.

    It has to see each batch of groups first (`remember_groups`), to name the samples that a value belongs to.
    """

    def __init__(self) -> None:
        self._groups: Sequence[TrajectoryGroup] = ()

    def remember_groups(self, groups: Sequence[TrajectoryGroup], version: int) -> None:
        """Remember the groups that the next batch is made from."""
        self._groups = groups

    def refuse(self, batch: TrainingBatch) -> None:
        """Listener before reward shaping and advantage estimation. Raises `BatchError` for a non-finite value."""
        refuse_non_finite(batch, self._groups)

    def refuse_advantages(self, batch: TrainingBatch, advantages: Tensor) -> None:
        """Listener after advantage estimation. Raises `BatchError` for a non-finite advantage."""
        refuse_non_finite(batch.with_fields(advantages=advantages), self._groups)


class NonFiniteGuard:
    """Policy for non-finite values: skip the step, roll back to the last checkpoint or raise, with limits on each."""

    def __init__(self, config: FaultsConfig, trainer: PPOTrainer) -> None:
        self._trainer = trainer
        self._policy = config.on_non_finite
        self._most_skipped, self._most_back = config.max_skipped_steps, config.max_roll_backs
        self._skipped = self._went_back = 0

    def step_succeeded(self) -> None:
        """Record a step without non-finite values."""
        self._skipped = 0

    async def skip_step(self, error: NonFiniteError, before: Mapping[str, Any]) -> Metrics:
        """The step that raised `error` is skipped; `before` is the state of the trainer's position at its beginning.

        The engines get the unchanged weights as the next version. Raises `NonFiniteError` if steps may not be skipped,
        if an update was already made, or if too many steps in a row were skipped.
        """
        if self._policy != "skip" or not isinstance(error, BatchError):
            raise error
        self._skipped += 1
        if self._skipped > self._most_skipped:
            raise NonFiniteError(
                f"{error} (in {self._skipped} steps in a row; trainer.faults.max_skipped_steps = {self._most_skipped})"
            ) from error
        _warn(f"a step is left out ({self._skipped} in a row): {error}")
        self._trainer.position.take_back_shaping(before)
        return await self._trainer.weights.publish(self._trainer.version + 1) | {"trainer/skipped_steps": 1}

    def roll_back(self, error: NonFiniteError) -> None:
        """The run returns to its last checkpoint. Raises `NonFiniteError` if it may not."""
        if self._policy != "roll_back":
            raise error
        self._went_back += 1
        if self._went_back > self._most_back:
            raise NonFiniteError(
                f"{error} (after {self._most_back} rollbacks, the limit of trainer.faults.max_roll_backs)"
            ) from error

    def rolled_back(self, error: NonFiniteError) -> None:
        """The run has returned to the trainer's version."""
        _warn(f"rolling back to step {self._trainer.version} and continuing with other prompts: {error}")


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
