"""Optimizers and learning rates, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import pytest
import torch

from skyrl.config import OptimizerConfig
from skyrl.learners.schedule import learning_rate_schedule, make_optimizer, move_schedule


def optimizer() -> Any:
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def rates(steps: Sequence[int], total: int, per: int = 1, **settings: Any) -> list[float]:
    """The rate at each step."""
    schedule = learning_rate_schedule(optimizer(), OptimizerConfig(lr=1.0, **settings), total, per)
    return [schedule.lr_lambdas[0](step) for step in steps]


def test_a_first_step_of_adam_is_the_gradient_over_its_size_and_the_epsilon() -> None:
    """lr g / (|g| + eps), since both running means begin with this gradient: 0.1 x 3 / (3 + 1)."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    model.weight.grad = torch.full((1, 1), 3.0)
    make_optimizer(model, OptimizerConfig(lr=0.1, adam_eps=1.0, weight_decay=0.0)).step()
    assert model.weight.item() == pytest.approx(-0.075)


def test_a_step_of_sgd_is_the_rate_times_the_gradient_and_keeps_nothing() -> None:
    """2 - 0.1 x (3 + 0.5 x 2) = 1.6."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 2.0)
    model.weight.grad = torch.full((1, 1), 3.0)
    optimizer = make_optimizer(model, OptimizerConfig(optimizer="sgd", lr=0.1, weight_decay=0.5))
    optimizer.step()
    assert model.weight.item() == pytest.approx(1.6)
    assert not any(isinstance(value, torch.Tensor) for state in optimizer.state.values() for value in state.values())


@pytest.mark.parametrize(("decays", "bias"), [("all", 0.9), ("matrices", 1.0)])
def test_weight_decay_takes_its_part_of_the_weights_that_it_is_for(
    decays: Literal["all", "matrices"], bias: float
) -> None:
    """Without a gradient, a weight of 1 becomes 1 - lr x decay = 1 - 0.1 x 1."""
    model = torch.nn.Linear(1, 1)
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
        parameter.grad = torch.zeros_like(parameter)
    make_optimizer(model, OptimizerConfig(lr=0.1, weight_decay=1.0, weight_decay_on=decays)).step()
    assert (model.weight.item(), model.bias.item()) == pytest.approx((0.9, bias))


COSINE: dict[str, Any] = {"scheduler": "cosine", "min_lr_ratio": 0.1}


@pytest.mark.parametrize("warmup", [{"num_warmup_steps": 10}, {"warmup_steps_proportion": 0.1}])
def test_areals_cosine_rises_from_its_least_and_falls_back_to_it(warmup: dict[str, Any]) -> None:
    values = rates([0, 5, 10, 55, 100], 100, **COSINE, **warmup)
    assert values == pytest.approx([0.1, 0.55, 1.0, 0.55, 0.1])


def test_linear_ends_at_its_least() -> None:
    values = rates([0, 5, 10, 55, 100, 200], 100, scheduler="linear", min_lr_ratio=0.2, num_warmup_steps=10)
    assert values == pytest.approx([0.0, 0.5, 1.0, 0.6, 0.2, 0.2])


def test_a_trapezoid_warms_up_stays_and_falls_over_its_last_steps() -> None:
    settings: dict[str, Any] = {"scheduler": "warmup_stable_decay", "num_decay_steps": 100}
    values = rates([0, 9, 19, 200, 250, 299], 300, **settings, num_warmup_steps=19, warmup_start_ratio=1 / 20)
    assert values == pytest.approx([1 / 20, 10 / 20, 1.0, 1.0, 0.5, 0.01])


@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize("name", ["linear", "cosine", "constant_with_warmup", "constant", "inverse_sqrt"])
def test_without_settings_of_its_own_a_schedule_is_that_of_transformers(name: str, warmup: int) -> None:
    from transformers import get_scheduler

    reference: Any = get_scheduler(name, optimizer(), num_warmup_steps=warmup, num_training_steps=50)
    values = rates(range(51), 50, scheduler=name, num_warmup_steps=warmup)
    assert values == pytest.approx([reference.lr_lambdas[0](step) for step in range(51)])


def test_counted_in_training_steps_the_rate_is_one_for_all_their_mini_batches() -> None:
    settings: dict[str, Any] = {"scheduler": "linear", "num_warmup_steps": 2, "schedule_unit": "training_step"}
    assert rates(range(10), 10, per=2, **settings) == pytest.approx([0, 0, 0.5, 0.5, 1, 1, 2 / 3, 2 / 3, 1 / 3, 1 / 3])


def test_a_schedule_goes_on_where_it_was() -> None:
    schedule = learning_rate_schedule(optimizer(), OptimizerConfig(lr=1.0, **COSINE), 100)
    move_schedule(schedule, 50)
    assert schedule.optimizer.param_groups[0]["lr"] == pytest.approx(0.55)
    schedule.optimizer.step()
    schedule.step()
    assert schedule.last_epoch == 51
