"""Teachers of a policy: they add log-probabilities or hidden states of its tokens to a batch."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

import attrs
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from skyrl.algorithms.topk_divergence import tokens_of_both, union_of_tokens
from skyrl.batch import (
    STUDENT_IDS,
    TEACHER_IDS,
    TEACHER_LOGPROBS,
    TEACHER_PROMPT,
    RowTensors,
    TrainingBatch,
)
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
        return batch.with_fields(teacher_logprobs=await self.score(batch, sources))


@attrs.frozen
class TeacherOfDistributions:
    """Lets each row carry its teacher's last hidden states at its selected tokens."""

    hidden: Callable[[TrainingBatch, Sequence[str]], Awaitable[Mapping[str, RowTensors]]]
    """The extras with hidden states: see `TeachersBySource.hidden`."""

    async def __call__(self, batch: TrainingBatch, sources: Sequence[str]) -> TrainingBatch:
        """The batch with extras whose names begin with `TEACHER_HIDDEN`."""
        return batch.carrying(**await self.hidden(batch, sources))


@attrs.frozen
class TeacherBehindHints:
    """Lets a teacher score the tokens of each row after the prompt that the row carries for it."""

    teacher: Teacher

    async def __call__(self, batch: TrainingBatch, sources: Sequence[str]) -> TrainingBatch:
        """The batch with what the teacher adds, without the prompts for it."""
        view = teacher_view(batch)
        taught = await self.teacher(view, sources)
        rest = {name: carried for name, carried in batch.extras.items() if name != TEACHER_PROMPT}
        batch = attrs.evolve(batch, extras={**rest, **taught.extras})
        if taught.teacher_logprobs is None:
            return batch
        return batch.with_fields(teacher_logprobs=batch.scatter(view.pick(taught.teacher_logprobs)))


def teacher_view(batch: TrainingBatch) -> TrainingBatch:
    """The rows with the prompts that they carry in `TEACHER_PROMPT` in place of their own, and the same tokens selected
    after them.
    """
    assert batch.answer_lengths is not None
    prompts = batch.extras[TEACHER_PROMPT].rows()
    starts, ends = (batch.lengths - batch.answer_lengths).tolist(), batch.lengths.tolist()
    ids, masks = list[Tensor](), list[Tensor]()
    for row, (prompt, start, end) in enumerate(zip(prompts, starts, ends, strict=True)):
        ids.append(torch.cat([prompt, batch.input_ids[row, start:end]]))
        masks.append(torch.cat([torch.zeros(len(prompt), dtype=torch.bool), batch.loss_mask[row, start:end]]))
    rows, zeros = pad_sequence(ids, batch_first=True), torch.zeros(())
    return TrainingBatch(
        input_ids=rows,
        lengths=batch.extras[TEACHER_PROMPT].counts + batch.answer_lengths,
        loss_mask=pad_sequence(masks, batch_first=True),
        rollout_logprobs=None,
        rewards=zeros.expand(rows.shape),
        groups=batch.groups,
        answer_lengths=batch.answer_lengths,
    )


def hinted_share(batch: TrainingBatch) -> float:
    """Share of the rows that a teacher reads with another prompt than the policy's."""
    prompts = (batch.lengths - (0 if batch.answer_lengths is None else batch.answer_lengths)).tolist()
    teacher_prompts = batch.extras[TEACHER_PROMPT].rows()
    own = zip(teacher_prompts, batch.input_ids, prompts, strict=True)
    return sum(not torch.equal(teacher_ids, ids[:length]) for teacher_ids, ids, length in own) / len(batch)


@attrs.frozen(kw_only=True)
class TeacherOfLikelyTokens:
    """Lets each row carry the tokens that are compared at its selected tokens, and the teacher's log-probabilities of
    them.
    """

    settings: DistillationConfig
    teacher: Callable[[TrainingBatch, Sequence[str], int, float], Awaitable[tuple[RowTensors, RowTensors]]]
    """Ids and log-probabilities of likely tokens: see `TeachersBySource.token_logprobs`."""

    policy: Callable[[TrainingBatch, int, float], Awaitable[tuple[RowTensors, RowTensors]]]
    """Likely tokens of the policy before the update of the batch: see `ScorerGroup.token_logprobs`."""

    async def __call__(self, batch: TrainingBatch, sources: Sequence[str]) -> TrainingBatch:
        """The batch with extras of the names `TEACHER_IDS` and `TEACHER_LOGPROBS`."""
        mode, count, temperature = self.settings.top_k_of, self.settings.top_k, self.settings.temperature
        assert count is not None
        teacher_batch = batch
        if mode != "teacher":
            students, _ = await self.policy(batch, count, temperature)
        if mode in ("student", "union"):
            teacher_batch = batch.carrying(**{STUDENT_IDS: students})
        ids, logprobs = await self.teacher(teacher_batch, sources, 0 if mode == "student" else count, temperature)
        if mode == "union":
            best, others = ((ids.values[:, part], logprobs.values[:, part]) for part in _halves(count))
            ids, logprobs = (attrs.evolve(ids, values=token) for token in union_of_tokens(best, others))
        elif mode == "intersection":
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
