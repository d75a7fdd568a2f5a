"""Teachers of a policy: they add log-probabilities or hidden states of its tokens to a batch.

They are in the run or behind servers; `TeachersBySource` chooses the teacher of a row by the row's source.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from typing import Any, Protocol

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
from skyrl.errors import RunError
from skyrl.inference.servers.scoring_server import ScoringServer, TokenScores
from skyrl.learners.workers.group import ScorerGroup
from skyrl.training.advantage import sampler_logprobs
from skyrl.training.describe import Metrics
from skyrl.training.scorer import Scorer

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
            halves = (slice(count), slice(count, None))
            best, others = ((ids.values[:, half], logprobs.values[:, half]) for half in halves)
            ids, logprobs = (attrs.evolve(ids, values=token) for token in union_of_tokens(best, others))
        elif mode == "intersection":
            shared = tokens_of_both(ids.values[:, :count], students.values)
            ids, logprobs = attrs.evolve(ids, values=shared), attrs.evolve(ids, values=logprobs.values[:, :count])
        return batch.carrying(**{TEACHER_IDS: ids, TEACHER_LOGPROBS: logprobs})


def describe_teacher(batch: TrainingBatch) -> Metrics:
    """Estimate of the reverse KL(pi || nu) per token, from the sampled tokens."""
    if batch.teacher_logprobs is None or not batch.loss_mask.any():
        return {}
    distance = (sampler_logprobs(batch) - batch.teacher_logprobs)[batch.loss_mask]
    return {"loss/teacher_kl": distance.mean().item()}


class Scoring(Scorer, Protocol):
    """A teacher that scores the selected tokens of a batch: a `LocalTeacher` or a `ServedTeacher`."""

    async def token_logprobs(
        self, batch: TrainingBatch, count: int, temperature: float, /
    ) -> tuple[RowTensors, RowTensors]:
        """Ids and log-probabilities of likely tokens: see `ScorerGroup.token_logprobs`."""


@attrs.frozen
class ServedTeacher:
    """A teacher behind a server, at temperature 1."""

    server: ScoringServer

    async def score(self, batch: TrainingBatch) -> Tensor:
        """(B, L) float32: log-probabilities of the selected tokens, 0 elsewhere."""
        result = torch.zeros(batch.input_ids.shape)
        for row, scores in enumerate(await self._scores(batch, 0)):
            result[row, 1 : len(scores.logprobs) + 1] = torch.from_numpy(scores.logprobs)
        return result.masked_fill(~batch.loss_mask, 0.0)

    async def token_logprobs(
        self, batch: TrainingBatch, count: int, temperature: float
    ) -> tuple[RowTensors, RowTensors]:
        """Ids and log-probabilities (n, count) of the likeliest tokens, at the n selected tokens of each row."""
        assert temperature == 1, "the checks refuse others"
        ids, logprobs = [], []
        for scores, length, mask in zip(await self._scores(batch, count), batch.lengths, batch.loss_mask, strict=True):
            kept = mask[1 : int(length)]
            ids.append(torch.from_numpy(scores.ids)[kept])
            logprobs.append(torch.from_numpy(scores.top)[kept])
        return RowTensors.of(ids), RowTensors.of(logprobs)

    async def _scores(self, batch: TrainingBatch, top: int) -> list[TokenScores]:
        rows = [ids[:length].tolist() for ids, length in zip(batch.input_ids, batch.lengths.tolist(), strict=True)]
        return await asyncio.gather(*(self.server.score(row, top) for row in rows))


@attrs.frozen(kw_only=True)
class LocalTeacher:
    """A teacher in the run, which is brought onto the devices before it scores."""

    model: ScorerGroup[Any]
    ready: Callable[[], Awaitable[None]]
    hidden_name: str
    """Name of the extras with its hidden states."""

    async def score(self, batch: TrainingBatch) -> Tensor:
        """(B, L) float32: log-probabilities of the selected tokens, 0 elsewhere."""
        await self.ready()
        return await self.model.score(batch)

    async def hidden(self, batch: TrainingBatch) -> RowTensors:
        """The last hidden states of all rows at their selected tokens."""
        await self.ready()
        return await self.model.hidden(batch)

    async def token_logprobs(
        self, batch: TrainingBatch, count: int, temperature: float
    ) -> tuple[RowTensors, RowTensors]:
        """Ids and log-probabilities of likely tokens: see `ScorerGroup.token_logprobs`."""
        await self.ready()
        return await self.model.token_logprobs(batch, count, temperature)


@attrs.frozen(kw_only=True)
class TeachersBySource:
    """Scores each row by the teacher of its data source, or by the default one."""

    default: Scoring | None
    named: Mapping[str, Scoring]

    async def score(self, batch: TrainingBatch, sources: Sequence[str]) -> Tensor:
        """(B, L) float32: log-probabilities of the selected tokens."""
        result = torch.zeros(batch.input_ids.shape)
        for rows, teacher in self._teachers(sources):
            logprobs = await teacher.score(batch.select(rows))
            result[rows, : logprobs.shape[1]] = logprobs
        return result

    async def hidden(self, batch: TrainingBatch, sources: Sequence[str]) -> dict[str, RowTensors]:
        """The extras with the last hidden states of each teacher at the selected tokens of its rows. All teachers are
        local.
        """
        extras = {}
        for rows, teacher in self._teachers(sources):
            assert isinstance(teacher, LocalTeacher), "the checks refuse others"
            states = await teacher.hidden(batch.select(rows))
            counts = torch.zeros(len(batch), dtype=torch.int64).index_copy(0, rows, states.counts)
            extras[teacher.hidden_name] = RowTensors(values=states.values, counts=counts)
        return extras

    async def token_logprobs(
        self, batch: TrainingBatch, sources: Sequence[str], count: int, temperature: float
    ) -> tuple[RowTensors, RowTensors]:
        """Ids and log-probabilities of likely tokens, by row."""
        parts = self._teachers(sources)
        outputs = [await teacher.token_logprobs(batch.select(rows), count, temperature) for rows, teacher in parts]
        order = torch.cat([rows for rows, _ in parts]).argsort()
        together = (RowTensors.of([row for part in item for row in part.rows()]) for item in zip(*outputs, strict=True))
        ids, logprobs = (entry.select(order) for entry in together)
        return ids, logprobs

    def _teachers(self, sources: Sequence[str]) -> list[tuple[Tensor, Scoring]]:
        """The teachers of a batch, each with the indices of its rows. Raises `RunError` for a row without one."""
        teachers, rows_of = list[Scoring](), list[list[int]]()
        for row, source in enumerate(sources):
            teacher = self.named.get(source, self.default)
            if teacher is None:
                raise RunError(no_teacher_message({source}))
            if teacher not in teachers:  # one for several sources scores them together
                teachers.append(teacher)
                rows_of.append([])
            rows_of[teachers.index(teacher)].append(row)
        return [(torch.tensor(rows), teacher) for rows, teacher in zip(rows_of, teachers, strict=True)]


def no_row_message(unused: Set[str], sources: Set[str]) -> str:
    """The message for teachers of data sources that no row has, which would teach nothing."""
    names, known = (", ".join(map(repr, sorted(texts))) for texts in (unused, sources))
    return (
        f"no row of the training data is of the data source {names}, which trainer.teacher.sources or "
        f"trainer.teacher.endpoint.sources names; there are: {known}"
    )


def no_teacher_message(sources: set[str]) -> str:
    """The message for data sources that no teacher teaches."""
    names = ", ".join(map(repr, sorted(sources)))
    return (
        f"no teacher teaches the data source {names}: add it to trainer.teacher.sources or "
        "trainer.teacher.endpoint.sources, or give a teacher for all others in trainer.teacher.model.path or "
        "trainer.teacher.endpoint.url"
    )
