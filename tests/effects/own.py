"""A loss and an estimator with settings, as a user would write them, and a filter of groups, and a sampler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from skyrl.algorithms.losses import LossInputs
from skyrl.batch import TrainingBatch
from skyrl.data.samplers import Sampler
from skyrl.training.callbacks import Callback
from skyrl.trajectory import TrajectoryGroup
from skyrl.tree import frozen


@frozen
class ScaledLoss:
    """The importance-weighted loss, times a factor."""

    factor: float = 1.0
    """Factor of every token's loss."""

    def __call__(self, inputs: LossInputs) -> Tensor:
        return -self.factor * torch.exp(inputs.logprobs - inputs.old_logprobs) * inputs.advantages


@frozen
class ScaledReturns:
    """The return of the row, times a factor, at each of its tokens."""

    factor: float = 1.0
    """Factor of every return."""

    def __call__(self, batch: TrainingBatch) -> Tensor:
        return self.factor * batch.scores.unsqueeze(1) * batch.loss_mask


class Window(Sampler):
    """The last rows of a window, again and again."""

    def __init__(self, rows: Sequence[Any], window: int = 2) -> None:
        self.size, self.window = len(rows), window

    def draw(self, count: int, step: int) -> list[int]:
        return [self.size - 1 - index % self.window for index in range(count)]


def every_second(group: TrajectoryGroup) -> bool:
    """Accepts the groups of prompts with an even number."""
    return group.prompt.token_ids[0] % 2 == 0


class Heard(Callback):
    """Hears every event, and does nothing."""
