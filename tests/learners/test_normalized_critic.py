"""A critic whose targets are normalized: it learns returns of any size, and its values are in their units."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from skyrl.batch import TrainingBatch
from skyrl.checkpoint.shards import StoredTensors
from skyrl.config import TrainerConfig
from skyrl.learners.rank_metrics import Metrics
from skyrl.learners.workers.objectives import ReturnRegression
from skyrl.processes.handles import Group
from skyrl.processes.in_process import LocalHandle
from skyrl.storage.disk import Disk
from tests.learners.rows import batch
from tests.learners.updating import CriticWorker, LearnerGroup, NormalizedCritic


def critic(trainer: TrainerConfig, *, clip: float | None = None, kind: type = NormalizedCritic) -> NormalizedCritic:
    objective = ReturnRegression(value_clip=clip)
    ranks = Group([LocalHandle("rank-0", CriticWorker(trainer, objective))])
    group: NormalizedCritic = kind(ranks, objective)
    return group


def returns(size: float) -> TrainingBatch:
    """Eight rows whose returns are `size` and three times that in turn."""
    rows = batch(8)
    values = torch.where(torch.arange(8) % 2 == 0, size, 3 * size).unsqueeze(1)
    return rows.with_fields(returns=torch.where(rows.loss_mask, values, 0.0))


async def losses(
    learner: LearnerGroup[CriticWorker] | NormalizedCritic, rows: TrainingBatch, steps: int = 3
) -> list[float]:
    return [(await learner.update(rows))["critic_loss"] for _ in range(steps)]


async def test_the_size_of_returns_changes_nothing_but_the_size_of_values(small: TrainerConfig) -> None:
    one, thousand = critic(small), critic(small)
    assert await losses(one, returns(1.0)) == pytest.approx(await losses(thousand, returns(1000.0)), rel=1e-4)
    expected = 1000 * await one.score(returns(1.0))
    torch.testing.assert_close(await thousand.score(returns(1000.0)), expected, rtol=1e-3, atol=1.0)


async def test_a_plain_critic_is_far_from_large_returns_where_a_normalized_one_is_near(small: TrainerConfig) -> None:
    rows = returns(1000.0)
    plain, normalized = critic(small, kind=LearnerGroup), critic(small)
    for learner in (plain, normalized):
        await losses(learner, rows)
    assert rows.returns is not None

    def distance(values: torch.Tensor) -> float:
        assert rows.returns is not None
        return (values - rows.returns)[rows.loss_mask].abs().mean().item()

    assert distance(await normalized.score(rows)) < distance(await plain.score(rows)) / 2


async def test_values_of_tokens_that_are_not_selected_stay_zero(small: TrainerConfig) -> None:
    learner, rows = critic(small), returns(50.0)
    await losses(learner, rows, 1)
    values = await learner.score(rows)
    assert values[~rows.loss_mask].abs().max() == 0
    assert values[rows.loss_mask].abs().min() > 0


async def test_clipping_compares_what_the_model_predicted_however_the_moments_move(small: TrainerConfig) -> None:
    """The first update finds new moments; the model has not moved yet, so that no value is clipped."""
    learner, rows = critic(small, clip=0.2), returns(1000.0)
    rows = rows.with_fields(values=await learner.score(rows))
    metrics = await learner.update(rows)
    assert metrics["values_clipfrac"] == 0
    assert metrics["critic_loss"] == pytest.approx(0.5, abs=0.1)  # half the variance of normalized returns


async def test_metrics_of_values_are_in_the_units_of_returns(small: TrainerConfig) -> None:
    learner, rows = critic(small), returns(1000.0)
    metrics: Metrics = await learner.update(rows)
    assert rows.returns is not None
    seen = rows.returns[rows.loss_mask]
    assert metrics["return_mean"] == pytest.approx(seen.mean().item(), rel=1e-5)
    assert metrics["return_std"] == pytest.approx(seen.std(correction=0).item(), rel=1e-5)
    assert metrics["critic_values_mean"] == pytest.approx(metrics["return_mean"], rel=0.2)
    assert metrics["critic_values_min"] <= metrics["critic_values_mean"] <= metrics["critic_values_max"]
    assert 0 < metrics["critic_values_std"] < 1000


async def test_moments_resume_with_their_critic(small: TrainerConfig, tmp_path: Path) -> None:
    learner, other = critic(small), critic(small)
    await losses(learner, returns(1000.0))
    numbers, _ = await learner.stage()
    files = await learner.write_staged(Disk(tmp_path), "saved")
    stored = StoredTensors(Disk(tmp_path), "saved", tuple(file.name for file in files))
    await other.load_state(stored, numbers)
    assert other.scale == learner.scale
    assert torch.equal(await other.score(returns(1.0)), await learner.score(returns(1.0)))
    await other.load_state(stored, {name: number for name, number in numbers.items() if name != "return_scale"})
    assert other.scale.std == 1
