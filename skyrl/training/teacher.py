"""Teachers of a policy: they add log-probabilities or hidden states of its tokens to a batch."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import attrs
from torch import Tensor

from skyrl.algorithms.topk_divergence import tokens_of_both, union_of_tokens
from skyrl.batch import STUDENT_IDS, TEACHER_HIDDEN, TEACHER_IDS, TEACHER_LOGPROBS, RowTensors, TrainingBatch
from skyrl.config import DistillationConfig
from skyrl.training.advantage import sampler_logprobs
from skyrl.training.describe import Metrics

Teacher = Callable[[TrainingBatch, Sequence[str]], Awaitable[TrainingBatch]]
"""A teacher: returns the batch, whose rows have these data sources, with what the policy learns from."""


@attrs.frozen
class TeacherOfTokens:
    """Fills in log nu, the teacher's log-probability of each sampled token."""

    score: Callable[[TrainingBatch, Sequence[str]], Awaitable[Tensor]]

    async def __call__(self, batch: TrainingBatch, sources: Sequence[str]) -> TrainingBatch:
        """The batch with `teacher_logprobs`."""
        return batch.given(teacher_logprobs=await self.score(batch, sources))


@attrs.frozen
class TeacherOfDistributions:
    """Lets each row carry the teacher's last hidden states at its selected tokens."""

    hidden: Callable[[TrainingBatch], Awaitable[RowTensors]]

    async def __call__(self, batch: TrainingBatch, sources: Sequence[str]) -> TrainingBatch:
        """The batch with extras of the name `TEACHER_HIDDEN`."""
        return batch.carrying(**{TEACHER_HIDDEN: await self.hidden(batch)})


@attrs.frozen(kw_only=True)
class TeacherOfLikelyTokens:
    """Lets each row carry the tokens that are compared at its selected tokens, and the teacher's log-probabilities of
    them.
    """

    settings: DistillationConfig
    teacher: Callable[[TrainingBatch, Sequence[str], int, float], Awaitable[tuple[RowTensors, RowTensors]]]
    """Ids and log-probabilities of likely tokens: see `TeachersBySource.token_logprobs`."""

    policy: Callable[[TrainingBatch, int, float], Awaitable[tuple[RowTensors, RowTensors]]]
    """Those of the policy before the update of the batch: see `ScorerGroup.token_logprobs`."""

    async def __call__(self, batch: TrainingBatch, sources: Sequence[str]) -> TrainingBatch:
        """The batch with extras of the names `TEACHER_IDS` and `TEACHER_LOGPROBS`."""
        how, count, temperature = self.settings.top_k_of, self.settings.top_k, self.settings.temperature
        assert count is not None
        asked = batch
        if how != "teacher":
            students, _ = await self.policy(batch, count, temperature)
        if how in ("student", "union"):
            asked = batch.carrying(**{STUDENT_IDS: students})
        ids, logprobs = await self.teacher(asked, sources, 0 if how == "student" else count, temperature)
        if how == "union":
            best, others = ((ids.values[:, part], logprobs.values[:, part]) for part in _halves(count))
            ids, logprobs = (attrs.evolve(ids, values=each) for each in union_of_tokens(best, others))
        elif how == "intersection":
            shared = tokens_of_both(ids.values[:, :count], students.values)
            ids, logprobs = attrs.evolve(ids, values=shared), attrs.evolve(ids, values=logprobs.values[:, :count])
        return batch.carrying(**{TEACHER_IDS: ids, TEACHER_LOGPROBS: logprobs})


def _halves(count: int) -> tuple[slice, slice]:
    return slice(0, count), slice(count, None)


def describe_teacher(batch: TrainingBatch) -> Metrics:
    """Estimate of the reverse KL(pi || nu) per token, from the sampled tokens."""
    if batch.teacher_logprobs is None or not batch.loss_mask.any():
        return {}
    distance = (sampler_logprobs(batch) - batch.teacher_logprobs)[batch.loss_mask]
    return {"loss/teacher_kl": distance.mean().item()}
