"""NaN and infinity are stopped where they appear: before anything is learnt from them, and before they are saved.

Rewards, log-probabilities, values and advantages are looked at here; gradients, learning rate and weights by the
learner, with each update; tensors once more when they are saved.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from skyrl.batch import TrainingBatch
from skyrl.config import FaultsConfig
from skyrl.errors import BatchError, NonFiniteError
from skyrl.training.describe import Metrics
from skyrl.training.middleware import on_result
from skyrl.training.trainer import PPOTrainer
from skyrl.trajectory import TrajectoryGroup

_TERMS = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "values", "rewards", "advantages")
"""The first that is no number is the cause of those after it; rewards may hold a KL term."""

_SHOWN = 4


def refuse_non_finite(batch: TrainingBatch, groups: Sequence[TrajectoryGroup]) -> None:
    """Raises `BatchError` that names the term and the samples. `groups` are those that the rows were made from."""
    names = [f"sample {row.sample_index} of prompt {group.prompt.id}" for group in groups for row in group.trajectories]
    for term in _TERMS:
        values: Tensor | None = getattr(batch, term)
        if values is None or torch.isfinite(values).all():
            continue
        rows = (~torch.isfinite(values)).any(1).nonzero().flatten().tolist()
        worst = values[rows[0]][~torch.isfinite(values[rows[0]])][0].item()
        shown = ", ".join(names[row] for row in rows[:_SHOWN])
        more = f", and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
        raise BatchError(f"{term.removesuffix('s')} {worst} in {shown}{more}: no weight was changed")


class FiniteNumbers:
    """Stands between a trainer and what it computes advantages with: a number that is none goes no further."""

    def __init__(self) -> None:
        self._groups: Sequence[TrajectoryGroup] = ()

    def watch(self, trainer: PPOTrainer) -> None:
        """The rewards of the environments are looked at before they are shaped, and everything before it is used."""
        shape, estimate = trainer.shape, trainer.estimate

        def shaped(batch: TrainingBatch) -> tuple[Tensor, Metrics]:
            refuse_non_finite(batch, self._groups)
            return shape(batch)

        def estimated(batch: TrainingBatch) -> Tensor:
            refuse_non_finite(batch, self._groups)
            advantages = estimate(batch)
            refuse_non_finite(batch.given(advantages=advantages), self._groups)
            return advantages

        trainer.shape, trainer.estimate = shaped, estimated
        trainer.rollouts = on_result(trainer.rollouts, next_batch=self._arrived)

    async def _arrived(self, groups: Sequence[TrajectoryGroup]) -> None:
        self._groups = groups


class Guard:
    """What to do about a number that is none, and how often."""

    def __init__(self, config: FaultsConfig) -> None:
        self._policy = config.on_non_finite
        self._most_skipped, self._most_back = config.max_skipped_steps, config.max_roll_backs
        self._skipped = self._went_back = 0

    def went_well(self) -> None:
        """A step was whole."""
        self._skipped = 0

    def leave_out(self, error: NonFiniteError) -> None:
        """The step is not to be. Raises `NonFiniteError` where that is not wanted, comes too late, or too often."""
        if self._policy != "skip" or not isinstance(error, BatchError):
            raise error
        self._skipped += 1
        if self._skipped > self._most_skipped:
            raise NonFiniteError(
                f"{error} (in {self._skipped} steps in a row; trainer.faults.max_skipped_steps = {self._most_skipped})"
            ) from error
        self.say(f"a step is left out ({self._skipped} in a row): {error}")

    def roll_back(self, error: NonFiniteError) -> None:
        """The run is to go back to its last checkpoint. Raises `NonFiniteError` where it must not."""
        if self._policy != "roll_back":
            raise error
        self._went_back += 1
        if self._went_back > self._most_back:
            raise NonFiniteError(
                f"{error} (after {self._most_back} times of going back, as many as "
                "trainer.faults.max_roll_backs allows)"
            ) from error

    @staticmethod
    def say(text: str) -> None:
        """On the console, where warnings go."""
        print(f"warning: {text}", file=sys.stderr, flush=True)
