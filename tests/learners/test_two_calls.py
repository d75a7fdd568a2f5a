"""The two calls of a learner, and what lies between them. Each strategy's sums are tested with the strategy."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from skyrl.checkpoint.shards import StoredTensors
from skyrl.config import OptimizerConfig, SFTConfig, TrainerConfig
from skyrl.errors import RunError, UserError
from skyrl.learners.schedule import StepSettings, make_optimizer
from skyrl.learners.workers import learning_worker
from skyrl.learners.workers.learning_worker import LearningWorker, Objective
from skyrl.learners.workers.objectives import CrossEntropy, ReturnRegression
from skyrl.learners.workers.roles import CriticWorker, PolicyWorker, SFTWorker
from skyrl.storage.disk import Disk
from skyrl.training.objective import policy_objective
from skyrl.training.trainer import AS_CONFIGURED, update
from tests.learners.rows import batch
from tests.learners.spreading import changed, mini_batch
from tests.learners.updating import Imitation, imitate, taught

OPTIMIZER = "policy.optimizer_config."


def weights(worker: LearningWorker) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in worker.weights()}


def assert_equal(one: LearningWorker, other: LearningWorker) -> None:
    torch.testing.assert_close(weights(one), weights(other), rtol=0, atol=0)


CPU: dict[str, Any] = {"device": "cpu", "compute_dtype": "float32", "attention": "sdpa"}


def sft_worker(trainer: TrainerConfig) -> SFTWorker:
    """A worker of fine-tuning with the policy's model and optimizer."""
    policy = trainer.policy
    run = SFTConfig(model=policy.model, optimizer_config=policy.optimizer_config, **CPU)
    return SFTWorker(run)


ROLES: dict[str, tuple[Callable[[TrainerConfig], LearningWorker], Callable[[TrainerConfig], Objective]]] = {
    "policy": (PolicyWorker, lambda trainer: policy_objective(trainer.algorithm)),
    "critic": (CriticWorker, lambda trainer: ReturnRegression(value_clip=None)),
    "sft": (sft_worker, lambda trainer: CrossEntropy()),
}


@pytest.mark.parametrize("role", ROLES)
async def test_a_pass_moves_no_weight_and_a_step_moves_them_once(role: str, small: TrainerConfig) -> None:
    make, objective = ROLES[role]
    worker: Any = make(small)
    rows = mini_batch(0).with_fields(returns=torch.ones(8, 12))
    before = weights(worker)
    metrics = await worker.forward_backward(rows, objective(small))
    assert "grad_norm" not in metrics
    torch.testing.assert_close(weights(worker), before, rtol=0, atol=0)
    stepped = await worker.optimizer_step(AS_CONFIGURED)
    assert set(stepped) == {f"{'critic' if role == 'critic' else 'policy'}_lr", "grad_norm", "skipped_updates"}
    assert any(not torch.equal(weight, before[name]) for name, weight in weights(worker).items())
    with pytest.raises(RunError, match="has no gradient: call forward_backward before optimizer_step"):
        await worker.optimizer_step(AS_CONFIGURED)


async def test_scoring_between_the_calls_changes_nothing(small: TrainerConfig) -> None:
    one, other = PolicyWorker(small), PolicyWorker(small)
    for worker in (one, other):
        for number in range(2):
            await worker.forward_backward(taught(mini_batch(number)), Imitation())
            if worker is other:
                await worker.score(batch(6))
        await worker.optimizer_step(AS_CONFIGURED)
    assert_equal(one, other)


async def test_gradients_that_wait_for_a_step_are_not_lost_silently(small: TrainerConfig) -> None:
    one, other = PolicyWorker(small), PolicyWorker(small)
    rows = taught(mini_batch(0))
    await one.forward_backward(rows, Imitation())
    with pytest.raises(RunError, match="policy cannot be saved: gradients wait for it, call optimizer_step first"):
        one.stage()
    for parts in ({}, {"optimizer": False}, {"model": False}):
        with pytest.raises(RunError, match="policy cannot leave the device: gradients wait for it"):
            await one.offload(**parts)
    await one.optimizer_step(AS_CONFIGURED)
    await update(other, rows, Imitation())
    assert_equal(one, other)
    one.stage()
    await one.offload()


async def test_loading_a_state_drops_the_gradients_of_the_model_before(small: TrainerConfig, tmp_path: Path) -> None:
    first, second = PolicyWorker(small), PolicyWorker(small)
    numbers, _ = first.stage()
    file = await first.write_staged(Disk(tmp_path), "saved")
    await second.forward_backward(taught(mini_batch(1)), Imitation())
    second.load_state(StoredTensors(Disk(tmp_path), "saved", (file.name,)), numbers)
    with pytest.raises(RunError, match="no gradient"):
        await second.optimizer_step(AS_CONFIGURED)
    for worker in (first, second):
        await update(worker, taught(mini_batch(0)), Imitation())
    assert_equal(first, second)


async def test_a_loss_that_is_not_finite_skips_the_step_of_all_passes_and_no_later_one(small: TrainerConfig) -> None:
    trainer = changed(small, {OPTIMIZER + "max_skipped_updates": 1})
    one, other = PolicyWorker(trainer), PolicyWorker(trainer)
    broken = taught(mini_batch(0))
    broken.extras["teacher"].values[:] = math.nan
    before = weights(one)
    await one.forward_backward(broken, Imitation())
    await one.forward_backward(taught(mini_batch(1)), Imitation())
    assert (await one.optimizer_step(AS_CONFIGURED))["skipped_updates"] == 1.0
    torch.testing.assert_close(weights(one), before, rtol=0, atol=0)
    for worker in (one, other):
        await update(worker, taught(mini_batch(2)), Imitation())
    assert_equal(one, other)


async def test_dropout_draws_anew_in_each_pass_of_a_step(small: TrainerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    def noted(modules: object, device: object, seed: int) -> AbstractContextManager[None]:
        seeds.append(seed)
        return nullcontext()

    monkeypatch.setattr(learning_worker, "dropping", noted)
    worker = PolicyWorker(small)
    for _ in range(2):
        await worker.forward_backward(taught(mini_batch(0)), Imitation())
    assert len(set(seeds)) == 2


SETTINGS: dict[str, tuple[StepSettings, dict[str, Any]]] = {
    "learning rate": (StepSettings(lr=3e-3), {"lr": 3e-3}),
    "decay rates": (StepSettings(betas=(0.5, 0.8)), {"adam_betas": (0.5, 0.8)}),
    "eps": (StepSettings(eps=1e-3), {"adam_eps": 1e-3}),
    "weight decay": (StepSettings(weight_decay=0.3), {"weight_decay": 0.3}),
    "none decays": (StepSettings(weight_decay=0.0), {"weight_decay": 0.0}),
    "all": (
        StepSettings(lr=3e-3, betas=(0.5, 0.8), eps=1e-3, weight_decay=0.3),
        {"lr": 3e-3, "adam_betas": (0.5, 0.8), "adam_eps": 1e-3, "weight_decay": 0.3},
    ),
}


@pytest.mark.parametrize("decay", ["all", "matrices"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_a_step_act_as_those_of_the_configuration(name: str, optimizer: Any, decay: Any) -> None:
    settings, configured = SETTINGS[name]

    def stepped(settings: StepSettings, **configured: Any) -> tuple[list[Tensor], list[dict[str, Any]]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        used = {"optimizer": optimizer, "lr": 1e-3, "weight_decay": 0.1, "weight_decay_on": decay} | configured
        torch_optimizer = make_optimizer(model, OptimizerConfig(**used))
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape)
            with settings.applied(torch_optimizer.param_groups):
                torch_optimizer.step()
        return list(model.parameters()), [dict(group, params=[]) for group in torch_optimizer.param_groups]

    expected, _ = stepped(AS_CONFIGURED, **configured)
    weights, after = stepped(settings)
    plain, before = stepped(AS_CONFIGURED)
    assert all(torch.equal(one, two) for one, two in zip(weights, expected, strict=True))
    assert after == before, "only the steps had the settings"
    acts = optimizer != "sgd" or settings.lr is not None or settings.weight_decay is not None
    assert acts != all(torch.equal(one, two) for one, two in zip(weights, plain, strict=True))


async def test_a_step_of_a_learner_takes_all_of_its_settings(small: TrainerConfig) -> None:
    settings = StepSettings(lr=3e-3, betas=(0.5, 0.8), eps=1e-3, weight_decay=0.3, max_grad_norm=1e-2)
    configured = {"lr": 3e-3, "adam_betas": (0.5, 0.8), "adam_eps": 1e-3, "weight_decay": 0.3, "max_grad_norm": 1e-2}
    plain = PolicyWorker(small)
    other = PolicyWorker(changed(small, {OPTIMIZER + field: value for field, value in configured.items()}))
    batches = [mini_batch(step) for step in range(2)]
    assert await imitate(plain, 1, batches, settings) == await imitate(other, 1, batches)
    assert_equal(plain, other)
    await plain.forward_backward(taught(mini_batch(0)), Imitation())
    assert (await plain.optimizer_step(AS_CONFIGURED))["policy_lr"] == 1e-3


@pytest.mark.parametrize(("bound", "expected"), [(None, 7.0), (0.0, math.inf), (2.0, 2.0)])
def test_a_step_is_clipped_by_its_own_bound_or_the_configured_one(bound: float | None, expected: float) -> None:
    assert StepSettings(max_grad_norm=bound).bound(7.0) == expected


async def test_settings_that_the_optimizer_does_not_have_are_refused(small: TrainerConfig) -> None:
    worker = PolicyWorker(changed(small, {OPTIMIZER + "optimizer": "sgd"}))
    await worker.forward_backward(taught(mini_batch(0)), Imitation())
    for settings in (StepSettings(betas=(0.9, 0.9)), StepSettings(eps=1e-3)):
        with pytest.raises(UserError, match="the optimizer sgd has none; choose adamw, or leave"):
            await worker.optimizer_step(settings)
    assert (await worker.optimizer_step(AS_CONFIGURED))["skipped_updates"] == 0.0, "its gradient is still there"


class Likelihood(Objective):
    """The example of `Objective`'s documentation."""

    def __call__(self, outputs: Any, batch: Any, entropy: Any = None) -> Any:
        loss = -(outputs * batch.loss_weights).sum()
        return loss, {"loss": loss.detach()}, {}


async def test_an_objective_of_a_few_lines_learns_as_the_one_of_the_library(small: TrainerConfig) -> None:
    one, other = sft_worker(small), sft_worker(small)
    for step in range(2):
        assert await update(one, mini_batch(step), Likelihood()) == await update(
            other, mini_batch(step), CrossEntropy()
        )
    assert_equal(one, other)
