"""What two ranks stored is resumed by one or by four: the same losses, to 1e-6."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from skyrl.checkpoint.shards import StoredTensors
from skyrl.config import TrainerConfig
from skyrl.planning.replicas import replicas
from skyrl.storage.disk import Disk
from skyrl.training.objective import policy_objective
from tests.learners.pool import Pool
from tests.learners.spreading import DEEPSPEED, SHARING, ZERO, changed, mini_batch
from tests.learners.updating import LearnerGroup, PolicyWorker
from tests.long_cases import long_except

pytestmark = pytest.mark.xdist_group("ranks")

FSDP2: dict[str, Any] = {"strategy": "fsdp2"}
TWO_GROUPS: dict[str, Any] = {
    "policy.optimizer_config.weight_decay": 0.1,
    "policy.optimizer_config.weight_decay_on": "matrices",
}
"""Weights that decay and weights that do not, each with optimizer state of its own."""


def policy(pool: Pool, small: TrainerConfig, changes: dict[str, Any], ranks: int) -> LearnerGroup[PolicyWorker]:
    trainer = changed(small, changes)
    objective = policy_objective(trainer.algorithm)
    together = replicas(ranks, inner=trainer.policy.sequence_parallel_size)
    group = pool.start(partial(PolicyWorker, trainer, objective), ranks, together)
    return LearnerGroup(group, objective, replicas=together)


async def assert_resumes(
    first: LearnerGroup[PolicyWorker], start: Callable[[], LearnerGroup[PolicyWorker]], folder: Path
) -> None:
    """Three steps by the first, stored, and two more by it and by the one that is started then."""
    for step in range(3):
        await first.update(mini_batch(step))
    numbers, _ = await first.stage()
    files = await first.write_staged(Disk(folder), "saved")
    assert [file.name for file in files] == ["policy/rank_0_of_2.safetensors", "policy/rank_1_of_2.safetensors"]
    expected = [(await first.update(mini_batch(step)))["final_loss"] for step in (3, 4)]
    then = start()
    await then.load_state(StoredTensors(Disk(folder), "saved", tuple(file.name for file in files)), numbers)
    losses = [(await then.update(mini_batch(step)))["final_loss"] for step in (3, 4)]
    assert losses == [pytest.approx(loss, rel=1e-6, abs=1e-6) for loss in expected]


@pytest.mark.parametrize("ranks", long_except([1, 4], 1))
async def test_fsdp2_goes_on_with_other_ranks(ranks: int, pool: Pool, small: TrainerConfig, tmp_path: Path) -> None:
    await assert_resumes(policy(pool, small, FSDP2, 2), lambda: policy(pool, small, FSDP2, ranks), tmp_path)


@pytest.mark.long
async def test_ranks_that_shared_sequences_go_on_as_one(pool: Pool, small: TrainerConfig, tmp_path: Path) -> None:
    strategy = FSDP2 | {SHARING: 2}
    await assert_resumes(policy(pool, small, strategy, 2), lambda: policy(pool, small, FSDP2, 1), tmp_path)


async def test_fsdp2_resumes_both_groups_of_weights(pool: Pool, small: TrainerConfig, tmp_path: Path) -> None:
    strategy = FSDP2 | TWO_GROUPS
    await assert_resumes(policy(pool, small, strategy, 2), lambda: policy(pool, small, strategy, 2), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("stage", long_except([1, 2, 3], 3))
async def test_deepspeed_resumes_both_groups_of_weights(
    stage: int, zero_pool: Pool, small: TrainerConfig, tmp_path: Path
) -> None:
    strategy = {**DEEPSPEED, ZERO + "stage": stage} | TWO_GROUPS
    await assert_resumes(policy(zero_pool, small, strategy, 2), lambda: policy(zero_pool, small, strategy, 2), tmp_path)


async def losses(learners: LearnerGroup[PolicyWorker]) -> list[float]:
    return [(await learners.update(mini_batch(step)))["final_loss"] for step in range(5)]


async def test_both_groups_of_weights_learn_on_two_ranks_as_on_one(pool: Pool, small: TrainerConfig) -> None:
    expected = await losses(policy(pool, small, TWO_GROUPS, 1))
    assert await losses(policy(pool, small, FSDP2 | TWO_GROUPS, 2)) == pytest.approx(expected, abs=1e-5)


@pytest.fixture(scope="module", params=[1, 4])
def zero_ranks(request: pytest.FixtureRequest) -> Iterator[tuple[Pool, int]]:
    """DeepSpeed's processes stay together for good, so their number is fixed."""
    started = Pool(request.param, stay=True)
    yield started, request.param
    started.close()


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
async def test_deepspeed_goes_on_with_other_ranks(
    stage: int, zero_pool: Pool, zero_ranks: tuple[Pool, int], small: TrainerConfig, tmp_path: Path
) -> None:
    strategy = {**DEEPSPEED, ZERO + "stage": stage}
    pool, ranks = zero_ranks
    await assert_resumes(policy(zero_pool, small, strategy, 2), lambda: policy(pool, small, strategy, ranks), tmp_path)
