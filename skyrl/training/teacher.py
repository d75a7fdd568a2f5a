"""Teachers of a policy: they add log-probabilities or hidden states of its tokens to a batch."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import attrs
from torch import Tensor

from skyrl.batch import TEACHER_HIDDEN, RowTensors, TrainingBatch
from skyrl.training.advantage import sampler_logprobs
from skyrl.training.describe import Metrics

Teacher = Callable[[TrainingBatch], Awaitable[TrainingBatch]]
"""A teacher: returns the batch with what the policy learns from."""


@attrs.frozen
class TeacherOfTokens:
    """Fills in log nu, the teacher's log-probability of each sampled token."""

    score: Callable[[TrainingBatch], Awaitable[Tensor]]

    async def __call__(self, batch: TrainingBatch) -> TrainingBatch:
        """The batch with `teacher_logprobs`."""
        return batch.given(teacher_logprobs=await self.score(batch))


@attrs.frozen
class TeacherOfDistributions:
    """Lets each row carry the teacher's last hidden states at its selected tokens."""

    hidden: Callable[[TrainingBatch], Awaitable[RowTensors]]

    async def __call__(self, batch: TrainingBatch) -> TrainingBatch:
        """The batch with extras of the name `TEACHER_HIDDEN`."""
        return batch.carrying(**{TEACHER_HIDDEN: await self.hidden(batch)})


def describe_teacher(batch: TrainingBatch) -> Metrics:
    """Estimate of the reverse KL(pi || nu) per token, from the sampled tokens."""
    if batch.teacher_logprobs is None or not batch.loss_mask.any():
        return {}
    distance = (sampler_logprobs(batch) - batch.teacher_logprobs)[batch.loss_mask]
    return {"loss/teacher_kl": distance.mean().item()}
