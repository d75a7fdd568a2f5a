"""What a teacher adds to a step: advantages of the sampled tokens, or hidden states that rows carry to the learner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from skyrl.batch import TEACHER_HIDDEN, TEACHER_PROMPT, RowTensors, TrainingBatch
from skyrl.config import AlgorithmConfig, DistillationConfig, ModelConfig, TeacherConfig, TrainerConfig
from skyrl.errors import RunError
from skyrl.training.advantage import WithTeacher, advantages_of
from skyrl.training.objective import policy_objective
from skyrl.training.teacher import (
    TeacherBehindHints,
    TeacherOfDistributions,
    TeacherOfTokens,
    TeachersBySource,
    describe_teacher,
    hinted_share,
)
from tests.training.batches import batch_of

NU = torch.tensor([[9.0, -0.4, -1.8], [9.0, -0.5, -0.5]])
GAINS = torch.tensor([[0.0, 0.4, -1.0], [0.0, 0.0, 0.5]])
"""log nu - log pi, with the engine's log pi."""


def of_rewards(batch: TrainingBatch) -> Tensor:
    return torch.tensor([[0.0, 2.0, 2.0], [0.0, -2.0, -2.0]])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (DistillationConfig(), of_rewards(batch_of()) + GAINS),
        (DistillationConfig(coef=2.0, task_coef=0.0), 2 * GAINS),
        (
            DistillationConfig(task_coef=0.0, discount=0.5),
            torch.tensor([[0.0, 0.4 - 0.5, -1.0], [0.0, 0.25, 0.5]]),
        ),
        (DistillationConfig(type="loss", task_coef=0.5), 0.5 * of_rewards(batch_of())),
    ],
)
def test_a_teachers_gains_are_added_to_the_advantages_of_rewards(
    settings: DistillationConfig, expected: Tensor
) -> None:
    estimate = WithTeacher(estimate=of_rewards, settings=settings)
    torch.testing.assert_close(estimate(batch_of().with_fields(teacher_logprobs=NU)), expected)


def test_the_learners_own_scores_stand_for_the_sampler_where_there_are_any() -> None:
    teacher_only = WithTeacher(estimate=of_rewards, settings=DistillationConfig(task_coef=0.0))
    scored = batch_of().with_fields(teacher_logprobs=NU, old_logprobs=NU - 1.0)
    torch.testing.assert_close(teacher_only(scored), batch_of().loss_mask.float())
    assert describe_teacher(scored) == {"loss/teacher_kl": pytest.approx(-1.0)}
    engines = batch_of().with_fields(teacher_logprobs=NU)
    assert describe_teacher(engines) == {"loss/teacher_kl": pytest.approx(0.1 / 4)}
    assert describe_teacher(batch_of()) == {}


def test_samples_without_log_probabilities_are_refused_in_words() -> None:
    estimate = WithTeacher(estimate=of_rewards, settings=DistillationConfig())
    with pytest.raises(RunError, match=r"which these samples lack: sample them with .*logprobs = 1"):
        estimate(batch_of().with_fields(teacher_logprobs=NU, rollout_logprobs=None))


def test_only_a_run_with_a_teacher_changes_its_advantages() -> None:
    taught = TrainerConfig(teacher=TeacherConfig(model=ModelConfig(path="big")))
    assert isinstance(advantages_of(taught, 2), WithTeacher)
    assert not isinstance(advantages_of(TrainerConfig(), 2), WithTeacher)


def test_rows_without_an_advantage_are_learned_where_the_divergence_is_a_part_of_the_loss() -> None:
    silent = evolve(batch_of(), advantages=torch.tensor([[0.0, 0.0, 0.0], [0.0, -1.0, -1.0]]))
    algorithm = AlgorithmConfig(use_kl_loss=False, distillation=DistillationConfig(type="loss"))
    assert len(policy_objective(algorithm).weigh(silent)) == 1
    assert len(policy_objective(algorithm, has_teacher=True).weigh(silent)) == 2
    of_tokens = evolve(algorithm, distillation=DistillationConfig())
    assert len(policy_objective(of_tokens, has_teacher=True).weigh(silent)) == 1


async def test_a_teacher_gives_scores_or_hidden_states_of_the_batch() -> None:
    states = RowTensors.of([torch.ones(2, 5), torch.zeros(2, 5)])

    async def answer(batch: TrainingBatch, sources: Sequence[str]) -> Any:
        assert len(batch) == len(sources) == 2
        return {TEACHER_HIDDEN: states}

    async def score(batch: TrainingBatch, sources: Sequence[str]) -> Tensor:
        assert list(sources) == ["one", "two"]
        return NU

    sources = ["one", "two"]
    assert (await TeacherOfTokens(score)(batch_of(), sources)).teacher_logprobs is NU
    carried = (await TeacherOfDistributions(answer)(batch_of(), sources)).extras[TEACHER_HIDDEN]
    assert carried is states


async def test_a_teacher_behind_hints_scores_the_same_tokens_at_other_places() -> None:
    prompts = RowTensors.of([torch.tensor([8, 9, 5]), torch.tensor([5])])
    rows = batch_of().carrying(**{TEACHER_PROMPT: prompts})

    async def score(batch: TrainingBatch, sources: Sequence[str]) -> Tensor:
        assert batch.input_ids.tolist() == [[8, 9, 5, 1, 2], [5, 3, 4, 0, 0]]
        assert batch.lengths.tolist() == [5, 3] and batch.extras == {}
        assert batch.loss_mask.int().tolist() == [[0, 0, 0, 1, 1], [0, 1, 1, 0, 0]]
        return batch.loss_mask * -0.1 * batch.input_ids

    taught = await TeacherBehindHints(TeacherOfTokens(score))(rows, ())
    assert taught.teacher_logprobs is not None and taught.extras == {}
    torch.testing.assert_close(taught.teacher_logprobs, torch.tensor([[0.0, -0.1, -0.2], [0.0, -0.3, -0.4]]))
    states = RowTensors.of([torch.ones(2, 5), torch.zeros(2, 5)])

    async def hidden(batch: TrainingBatch, sources: Sequence[str]) -> dict[str, RowTensors]:
        return {TEACHER_HIDDEN: states}

    assert (await TeacherBehindHints(TeacherOfDistributions(hidden))(rows, ())).extras == {TEACHER_HIDDEN: states}
    assert hinted_share(rows) == 0.5


def test_a_policy_that_teaches_itself_changes_its_advantages() -> None:
    own = TrainerConfig(algorithm=AlgorithmConfig(distillation=DistillationConfig(self_teacher=True)))
    assert isinstance(advantages_of(own, 2), WithTeacher)


class Constant:
    """A teacher that gives every token one number, and is likeliest to say that number's tokens."""

    def __init__(self, number: int) -> None:
        self.number = number

    async def score(self, batch: TrainingBatch, /) -> Tensor:
        return torch.where(batch.loss_mask, float(self.number), 0.0)

    async def token_logprobs(
        self, batch: TrainingBatch, count: int, temperature: float, /
    ) -> tuple[RowTensors, RowTensors]:
        rows = [torch.full((tokens, count), self.number) for tokens in batch.loss_mask.sum(1).tolist()]
        return RowTensors.of(rows), RowTensors.of([-row.float() for row in rows])


async def test_each_row_is_scored_by_the_teacher_of_its_source() -> None:
    teachers = TeachersBySource(default=Constant(3), named={"two": Constant(5)})
    batch, mask = batch_of(), batch_of().loss_mask
    expected = torch.tensor([[5.0], [3.0]]) * mask
    assert torch.equal(await teachers.score(batch, ["two", "other"]), expected)
    ids, logprobs = await teachers.token_logprobs(batch, ["two", "other"], 4, 1.0)
    assert ids.counts.tolist() == mask.sum(1).tolist()
    assert [row.unique().tolist() for row in ids.rows()] == [[5], [3]]
    assert [row.unique().tolist() for row in logprobs.rows()] == [[-5], [-3]]
    named_only = TeachersBySource(default=None, named={"two": Constant(5)})
    with pytest.raises(RunError, match=r"no teacher teaches the data source 'other': add it to trainer\.teacher\."):
        await named_only.score(batch, ["two", "other"])
