"""Gradients in float16: the loss is scaled, and steps whose gradients overflow lower the scale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from skyrl.config import CriticConfig, FSDPConfig, MixedPrecisionConfig, OptimizerConfig, RefConfig, TrainerConfig
from skyrl.errors import ConfigError, NonFiniteError
from skyrl.learners.loss_scale import LARGEST, LossScale, loss_scale_of
from skyrl.training.objective import policy_objective
from tests.learners.spreading import (
    FSDP,
    Spread,
    changed,
    mini_batch,
    stored,
    weights_of,
)
from tests.learners.updating import PolicyWorker

pytestmark = pytest.mark.xdist_group("ranks")

HALF = MixedPrecisionConfig(param_dtype="fp16", reduce_dtype="fp32")


def settings(**changes: Any) -> OptimizerConfig:
    return OptimizerConfig(initial_loss_scale=8, min_loss_scale=2, loss_scale_window=2, hysteresis=2, **changes)


def scales(config: OptimizerConfig, finite: str) -> list[float]:
    """The scale after each step; "x" marks one whose gradient is not finite."""
    scale, values = LossScale(config), []
    for step in finite:
        scale.adapt(finite=step != "x")
        values.append(scale.value)
    return values


def test_the_scale_doubles_after_a_window_of_finite_gradients() -> None:
    assert scales(settings(), "......") == [8, 16, 16, 32, 32, 64]


def test_the_scale_halves_from_the_second_overflow_on_down_to_its_least() -> None:
    assert scales(settings(), "x.xxxx") == [8, 8, 4, 2, 2, 2]


def test_a_doubling_forgives_earlier_overflows() -> None:
    assert scales(settings(), "x..x") == [8, 8, 16, 16]


def test_the_scale_stays_where_float32_losses_do_not_overflow() -> None:
    config = evolve(settings(), initial_loss_scale=LARGEST)
    assert scales(config, "..") == [LARGEST, LARGEST]


def test_an_overflow_is_explained_while_the_scale_can_fall() -> None:
    scale = LossScale(evolve(settings(), initial_loss_scale=4, hysteresis=1))
    assert [scale.adapt(finite=False) for _ in range(3)] == [True, False, False]
    assert not scale.adapt(finite=True)


def test_a_scale_continues_where_its_state_was_taken() -> None:
    one, other = LossScale(settings()), LossScale(settings())
    for finite in (True, False, True):
        one.adapt(finite=finite)
    other.load(one.state())
    assert one.adapt(finite=True) == other.adapt(finite=True)
    assert one.state() == other.state()
    assert one.value == 16


def test_a_start_below_the_least_is_refused() -> None:
    with pytest.raises(ConfigError, match="1 is below min_loss_scale = 2"):
        OptimizerConfig(initial_loss_scale=1, min_loss_scale=2)


@pytest.mark.parametrize(
    ("changes", "ranks", "is_scaled"),
    [
        ({}, 1, False),
        ({FSDP + "mixed_precision": HALF}, 1, True),
        ({FSDP + "mixed_precision": MixedPrecisionConfig(reduce_dtype="float16")}, 1, False),
        ({FSDP + "mixed_precision": MixedPrecisionConfig(reduce_dtype="float16")}, 2, True),
        ({FSDP + "mixed_precision": HALF, "strategy": "deepspeed"}, 2, False),
    ],
)
def test_losses_are_scaled_where_gradients_are_in_float16(
    changes: dict[str, Any], ranks: int, is_scaled: bool, small: TrainerConfig
) -> None:
    trainer = changed(small, changes)
    assert (loss_scale_of(trainer, trainer.policy, ranks) is not None) == is_scaled


def test_other_models_have_settings_of_their_own() -> None:
    half = FSDPConfig(mixed_precision=HALF)
    assert loss_scale_of(TrainerConfig(), RefConfig(fsdp_config=half), 1) is None
    critic = CriticConfig(optimizer_config=settings(), fsdp_config=half)
    scale = loss_scale_of(TrainerConfig(), critic, 1)
    assert scale is not None and scale.value == 8


@pytest.mark.parametrize("ranks", [1, 2])
async def test_gradients_in_float16_stay_near_those_in_float32(ranks: int, spread: Spread) -> None:
    scaled = {FSDP + "mixed_precision": HALF, "policy.optimizer_config.initial_loss_scale": 512.0}
    full, half = spread.policy({}, 1), spread.policy(scaled, ranks)
    for step in range(2):
        one, other = await full.update(mini_batch(step)), await half.update(mini_batch(step))
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=0.05)
        assert other["grad_norm"] != pytest.approx(one["grad_norm"], rel=1e-6)
        assert other["loss_scale"] == 512 and other["skipped_updates"] == 0


async def test_gradients_that_vanish_in_float16_are_kept_by_the_scale(spread: Spread) -> None:
    """A loss of a millionth has gradients below 6e-8."""
    tiny = mini_batch(0)
    assert tiny.advantages is not None
    tiny = evolve(tiny, advantages=tiny.advantages * 1e-6)
    free = {"algorithm.use_kl_loss": False, FSDP + "mixed_precision": HALF}
    exact = await spread.policy({"algorithm.use_kl_loss": False}, 1).update(tiny)
    scaled = await spread.policy(free, 1).update(tiny)
    plain = await spread.policy({**free, "policy.optimizer_config.initial_loss_scale": 1.0}, 1).update(tiny)
    assert scaled["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.02)
    assert plain["grad_norm"] != pytest.approx(exact["grad_norm"], rel=0.02)


OVERFLOWING = {
    FSDP + "mixed_precision": HALF,
    "policy.optimizer_config.initial_loss_scale": 2.0**32,
    "policy.optimizer_config.hysteresis": 1,
    "policy.optimizer_config.max_skipped_updates": 0,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_step_that_overflows_lowers_the_scale_until_one_is_taken(ranks: int, spread: Spread) -> None:
    learner = spread.policy(OVERFLOWING, ranks)
    before = await weights_of(learner)
    metrics = await learner.update(mini_batch(0))
    assert (metrics["loss_scale"], metrics["skipped_updates"]) == (2.0**32, 1)
    assert all(torch.equal(weight, before[name]) for name, weight in (await weights_of(learner)).items())
    while metrics["skipped_updates"]:
        scale = metrics["loss_scale"]
        metrics = await learner.update(mini_batch(0))
        assert metrics["loss_scale"] == scale / 2
    assert 1 < metrics["loss_scale"] < 2.0**32


async def test_a_scale_resumes_with_its_learner(spread: Spread, tmp_path: Path) -> None:
    learner = spread.policy(OVERFLOWING, 1)
    for _ in range(3):
        await learner.update(mini_batch(0))
    tensors, numbers = await stored(learner, tmp_path)
    undisturbed = await learner.update(mini_batch(1))
    assert undisturbed["loss_scale"] == 2.0**29
    other = spread.policy(OVERFLOWING, 1)
    await other.load_state(tensors, numbers)
    resumed = await other.update(mini_batch(1))
    assert all(resumed[name] == undisturbed[name] for name in ("loss_scale", "skipped_updates"))


async def test_a_loss_that_is_not_finite_ends_the_run_at_the_least_scale(small: TrainerConfig) -> None:
    least = {**OVERFLOWING, "policy.optimizer_config.initial_loss_scale": 2.0}
    trainer = changed(small, least)
    worker = PolicyWorker(trainer, policy_objective(trainer.algorithm))
    rows = mini_batch(0)
    assert rows.advantages is not None
    broken = evolve(rows, advantages=rows.advantages * torch.nan)
    assert (await worker.update(broken))["loss_scale"] == 2.0
    with pytest.raises(NonFiniteError, match="the optimizer step was not taken"):
        await worker.update(broken)
