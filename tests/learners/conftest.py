"""What the learners' tests share: processes that are started once, and a configuration of the nano model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl.config import (
    AlgorithmConfig,
    CriticConfig,
    ModelConfig,
    OptimizerConfig,
    PolicyConfig,
    RefConfig,
    TrainerConfig,
)
from tests.learners.pool import Pool
from tests.learners.spreading import Spread, Trained, course


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    started = Pool(4)
    yield started
    started.close()


@pytest.fixture(scope="module")
def processes() -> Iterator[Pool]:
    """Four processes for one module, which Megatron-core takes for ranks on CUDA: nothing else is to run there."""
    started = Pool(4)
    yield started
    started.close()


@pytest.fixture(scope="session")
def zero_pool() -> Iterator[Pool]:
    started = Pool(2, stay=True)
    yield started
    started.close()


@pytest.fixture(scope="session")
def wide_zero_pool() -> Iterator[Pool]:
    started = Pool(4, stay=True)
    yield started
    started.close()


@pytest.fixture(scope="session")
def small(nano: Path) -> TrainerConfig:
    """Nothing of it is left to be derived. The model's head is tied to its embeddings."""
    model = ModelConfig(path=str(nano / "model"))
    return TrainerConfig(
        policy=PolicyConfig(model=model, optimizer_config=OptimizerConfig(lr=1e-3)),
        critic=CriticConfig(model=model, optimizer_config=OptimizerConfig(lr=1e-2)),
        ref=RefConfig(model=model),
        algorithm=AlgorithmConfig(temperature=1.0, use_kl_loss=True, kl_loss_coef=0.1),
        device="cpu",
        compute_dtype="float32",
        attention="sdpa",
        micro_train_batch_size_per_gpu=2,
        micro_forward_batch_size_per_gpu=3,
    )


@pytest.fixture(scope="session")
def spread(pool: Pool, small: TrainerConfig, request: pytest.FixtureRequest) -> Spread:
    names = {2: "zero_pool", 4: "wide_zero_pool"}
    return Spread(pool, lambda ranks: request.getfixturevalue(names[ranks]), small)


@pytest.fixture(scope="session")
def baseline(spread: Spread) -> Trained:
    return asyncio.run(course(spread.policy({}, 1)))
