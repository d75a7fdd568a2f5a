"""Teachers of a policy, in the run and behind servers, and the choice of a row's teacher by its source."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

from skyrl.batch import RowTensors, TrainingBatch
from skyrl.errors import RunError
from skyrl.inference.servers.scoring_server import ScoringServer, TokenScores
from skyrl.learners.workers.group import ScorerGroup


class Scoring(Protocol):
    """A teacher that scores the selected tokens of a batch: a `LocalTeacher` or a `ServedTeacher`."""

    async def score(self, batch: TrainingBatch, /) -> Tensor:
        """(B, L) log-probabilities of the selected tokens."""

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
