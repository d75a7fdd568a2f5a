"""NaN and infinity are stopped where they appear: before anything is learnt from them, and before they are saved.

Rewards, log-probabilities, values and advantages are looked at here; gradients, learning rate and weights by the
learner, with each update; tensors once more when they are saved.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from skyrl.batch import TrainingBatch
from skyrl.config import FaultsConfig
from skyrl.errors import BatchError, NonFiniteError
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


class Guard:
    """What to do about a number that is none, and how often."""

    def __init__(self, config: FaultsConfig) -> None:
        self._policy = config.on_non_finite
        self._most_skipped, self._most_back = config.max_skipped_steps, config.max_roll_backs
        self._skipped = self._went_back = 0

    def went_well(self) -> None:
        """A step was whole."""
        self._skipped = 0

    def decide(self, error: NonFiniteError) -> Literal["skip", "roll_back"]:
        """Go on without the step, or go back. Raises `NonFiniteError` where the run has to end."""
        match self._policy:
            case "skip" if isinstance(error, BatchError):
                self._skipped += 1
                if self._skipped <= self._most_skipped:
                    self.say(f"a step is left out ({self._skipped} in a row): {error}")
                    return "skip"
                raise NonFiniteError(
                    f"{error} (in {self._skipped} steps in a row; "
                    f"trainer.faults.max_skipped_steps = {self._most_skipped})"
                ) from error
            case "roll_back":
                self._went_back += 1
                if self._went_back <= self._most_back:
                    return "roll_back"
                raise NonFiniteError(
                    f"{error} (after {self._went_back - 1} times of going back, as many as "
                    "trainer.faults.max_roll_backs allows)"
                ) from error
        raise error

    @staticmethod
    def say(text: str) -> None:
        """On the console, where warnings go."""
        print(f"warning: {text}", file=sys.stderr, flush=True)
