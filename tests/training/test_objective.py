"""The objective of the policy by hand, and the way from settings to it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from skyrl.algorithms.clipped_losses import RegularLoss
from skyrl.algorithms.kl import KLEstimator, kl_estimate
from skyrl.algorithms.losses import LossInputs
from skyrl.algorithms.off_policy import Bounds, OffPolicyCorrection
from skyrl.batch import TrainingBatch
from skyrl.config import AlgorithmConfig, load
from skyrl.training.objective import PolicyObjective, Reduction, off_policy_correction, policy_objective
from tests.training.batches import batch_of

NEW = torch.tensor([[9.0, -1.0, -2.0], [9.0, -3.0, -4.0]])


def likelihood(inputs: LossInputs) -> Tensor:
    return -inputs.logprobs


def algorithm(**settings: Any) -> AlgorithmConfig:
    return load([], {f"trainer.algorithm.{path}": value for path, value in settings.items()}).config.trainer.algorithm


def test_the_loss_is_that_of_the_policy_with_the_divergence_and_less_the_entropy() -> None:
    objective = PolicyObjective(policy_loss=likelihood, kl_loss_coef=0.1, kl_estimator="k1", entropy_loss_coef=0.4)
    batch = objective.weigh(evolve(batch_of(), ref_logprobs=NEW - 0.5))
    entropy = torch.tensor([[float("nan"), 0.1, 0.2], [float("nan"), 0.3, 0.4]])
    loss, parts, _ = objective(NEW, batch, entropy)
    assert {name: part.item() for name, part in parts.items()} == pytest.approx(
        {"policy_loss": 2.5, "policy_kl": 0.5, "final_loss": 2.5 + 0.05 - 0.1}
    )
    assert loss.item() == pytest.approx(2.45)


SLOPES: dict[KLEstimator, Callable[[Tensor], Tensor]] = {
    "k1": torch.ones_like,
    "k2": lambda distance: distance,
    "k3": lambda distance: 1 - torch.exp(-distance),
    "abs": torch.sign,
}
"""d KL / d log pi as a function of log pi - log pi_ref."""


@pytest.mark.parametrize("one_answer", [False, True])
@pytest.mark.parametrize("estimator", SLOPES)
def test_the_divergence_pulls_each_answer_alike_towards_the_reference(estimator: KLEstimator, one_answer: bool) -> None:
    """The gradient is that of the current policy, not of the old one, and of answers, however long."""
    batch = evolve(batch_of(), loss_mask=torch.tensor([[0, 1, 1], [0, 0, 1]]).bool(), advantages=torch.zeros(2, 3))
    batch = (steps_of(batch) if one_answer else batch).with_fields(old_logprobs=NEW - 0.7, ref_logprobs=NEW.cos() - 2.0)
    objective = PolicyObjective(
        policy_loss=RegularLoss(eps_clip_low=0.2, eps_clip_high=0.2), kl_loss_coef=0.3, kl_estimator=estimator
    )
    logprobs = NEW.clone().requires_grad_()
    loss, parts, _ = objective(logprobs, objective.weigh(batch))
    loss.backward()
    weights = torch.tensor([[0, 1 / 3, 1 / 3], [0, 0, 1 / 3]] if one_answer else [[0, 1 / 4, 1 / 4], [0, 0, 1 / 2]])
    assert batch.ref_logprobs is not None and logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, 0.3 * weights * SLOPES[estimator](NEW - batch.ref_logprobs))
    mean = (kl_estimate(NEW, batch.ref_logprobs, estimator) * weights).sum()
    assert (parts["policy_kl"].item(), loss.item()) == pytest.approx((mean.item(), 0.3 * mean.item()))


def test_without_divergence_and_entropy_nobody_needs_a_reference() -> None:
    objective = PolicyObjective(policy_loss=likelihood)
    batch = objective.weigh(batch_of())
    assert (batch.kl_weights, batch.entropy_weights, objective.wants_entropy) == (None, None, False)
    assert objective(NEW, batch)[1] == {"policy_loss": 2.5, "final_loss": 2.5}


@pytest.mark.parametrize(
    ("divergence", "entropy", "vanishes", "rows"),
    [(0.0, 0.0, True, 1), (0.0, 0.0, False, 2), (0.1, 0.0, True, 2), (0.0, 0.1, True, 2), (0.1, 0.1, True, 2)],
)
def test_rows_that_have_no_part_in_the_loss_are_left_out(
    divergence: float, entropy: float, vanishes: bool, rows: int
) -> None:
    objective = PolicyObjective(
        policy_loss=likelihood,
        zero_at_zero_advantage=vanishes,
        kl_loss_coef=divergence,
        entropy_loss_coef=entropy,
    )
    one_without = evolve(batch_of(), advantages=torch.tensor([[0.0, 1.0, 1.0], [0.0, 0.0, 0.0]]))
    weighed = objective.weigh(one_without)
    assert len(weighed) == rows
    assert weighed.advantages is not None and weighed.advantages[0].tolist() == [0.0, 1.0, 1.0]  # the right one stays
    assert weighed.loss_weights is not None and weighed.loss_weights[0].tolist() == [0.0, 0.25, 0.25]  # of all four
    assert (weighed.kl_weights is not None, weighed.entropy_weights is not None) == (divergence > 0, entropy > 0)


@pytest.mark.parametrize(
    ("learned", "left_out", "sample"),
    [
        (1, 0, []),
        (1, 1, [0]),
        (1, 5, [2]),
        (32, 3, [1]),
        (33, 3, [0, 2]),
        (64, 8, [2, 6]),
        (96, 3, [0, 1, 2]),
        (0, 4, []),
    ],
)
def test_one_row_without_an_advantage_is_measured_for_thirty_two_that_are_learned(
    learned: int, left_out: int, sample: list[int]
) -> None:
    count = learned + left_out
    is_learned = torch.arange(count) < learned
    lengths = 2 + torch.arange(count) % 3
    batch = TrainingBatch(
        input_ids=torch.arange(count).unsqueeze(1).expand(count, 4),
        lengths=lengths,
        loss_mask=(torch.arange(4) >= 1) & (torch.arange(4) < lengths.unsqueeze(1)),
        rollout_logprobs=None,
        rewards=torch.zeros(count, 4),
        groups=torch.zeros(count, dtype=torch.long),
        advantages=is_learned.float().unsqueeze(1).expand(count, 4),
    )
    objective = PolicyObjective(policy_loss=likelihood, zero_at_zero_advantage=True)
    measured = objective.measured_only(batch)
    if not sample:
        assert measured is None
    else:
        assert measured is not None
        rows, times = measured
        assert [row - learned for row in rows.input_ids[:, 0].tolist()] == sample
        assert times * rows.loss_mask.sum() == pytest.approx(batch.loss_mask[learned:].sum().item())
        assert rows.loss_weights is not None and not rows.loss_weights.any()
    assert evolve(objective, kl_loss_coef=0.1).measured_only(batch) is None  # then every row is learned


def test_a_row_without_a_token_is_left_out_unless_there_is_no_other() -> None:
    objective, batch = PolicyObjective(policy_loss=likelihood), batch_of()
    assert len(objective.weigh(evolve(batch, loss_mask=batch.loss_mask * torch.tensor([[True], [False]])))) == 1
    assert len(objective.weigh(evolve(batch, loss_mask=torch.zeros_like(batch.loss_mask)))) == 2


def test_a_loss_is_measured_and_corrected_at_the_selected_tokens() -> None:
    class Measured:
        def __call__(self, inputs: LossInputs) -> Tensor:
            return torch.ones_like(inputs.logprobs)

        def measure(self, inputs: LossInputs) -> dict[str, Tensor]:
            return {"old": inputs.old_logprobs}

    batch = evolve(batch_of(), rollout_logprobs=torch.zeros(2, 3), old_logprobs=torch.tensor([[0.0, 1.0, 0.0]] * 2))
    objective = PolicyObjective(policy_loss=Measured(), correction=OffPolicyCorrection(tis="token", tis_cap=2.0))
    loss, _, numbers = objective(NEW, objective.weigh(batch))
    assert loss.item() == pytest.approx((2 + 1 + 2 + 1) / 4)  # e is held to 2
    assert numbers["old"].tolist() == [1.0, 0.0, 1.0, 0.0]
    assert numbers["tis_token_clip_high_ratio"].tolist() == [True, False, True, False]
    current = PolicyObjective(policy_loss=Measured())
    assert current(NEW, current.weigh(batch_of()))[2]["old"].tolist() == [-1.0, -2.0, -3.0, -4.0]


def test_the_decoupled_loss_weighs_and_clips_by_interpolated_log_probabilities() -> None:
    """At share a and distance d = log pi - log pi_rollout: weight e^(a d), ratio e^((1 - a) d)."""
    drawn = NEW - torch.tensor([[0.0, 0.4, 0.4], [0.0, 0.0, 0.0]])
    share = torch.tensor([[0.0, 0.5, 0.75], [0.0, 0.5, 0.5]])
    batch = batch_of().with_fields(old_logprobs=drawn, rollout_logprobs=drawn, interpolation=share)
    objective = policy_objective(
        algorithm(policy_loss_type="decoupled", old_logprobs="interpolated", use_kl_loss=False)
    )
    logprobs = NEW.clone().requires_grad_()
    loss, _, numbers = objective(logprobs, objective.weigh(batch))
    assert numbers["behave_weight"].tolist() == pytest.approx([math.exp(0.2), math.exp(0.3), 1.0, 1.0])
    ratios = [1.2, math.exp(0.1), 1.0, 1.0]  # e^0.2 is above 1 + 0.2
    signs = [-1, -1, 1, 1]
    terms = [sign * w * u for sign, w, u in zip(signs, numbers["behave_weight"].tolist(), ratios, strict=True)]
    assert loss.item() == pytest.approx(sum(terms) / 4)
    loss.backward()
    assert logprobs.grad is not None  # of the current policy alone: the clipped token has none
    assert logprobs.grad[0, 1:].tolist() == pytest.approx([0.0, -math.exp(0.3) * math.exp(0.1) / 4])


CORRECTION = {
    "outlier_token_is_threshold_low": 0.11,
    "outlier_token_is_threshold_high": 11.0,
    "token_mask_is_threshold_low": 0.12,
    "token_mask_is_threshold_high": 12.0,
    "token_tis_ratio_clip_high": 2.1,
    "sequence_tis_ratio_clip_high": 5.1,
    "geo_mask_low": 0.91,
    "geo_mask_high": 1.09,
    "product_mask_low": 0.51,
    "product_mask_high": 1.51,
}


@pytest.mark.parametrize(
    ("tis", "cap", "metric", "bounds"),
    [
        ("token", 2.1, "geometric", Bounds(low=0.91, high=1.09)),
        ("sequence", 5.1, "product", Bounds(low=0.51, high=1.51)),
    ],
)
def test_each_bound_of_a_correction_arrives_where_it_belongs(tis: str, cap: float, metric: str, bounds: Bounds) -> None:
    chosen = {**CORRECTION, "tis_ratio_type": tis, "sequence_mask_metric": metric}
    config = algorithm(**{f"off_policy_correction.{name}": value for name, value in chosen.items()})
    assert off_policy_correction(config.off_policy_correction) == OffPolicyCorrection(
        outlier_token=Bounds(low=0.11, high=11.0),
        token_mask=Bounds(low=0.12, high=12.0),
        tis=tis,  # type: ignore[arg-type]  # one of the names
        tis_cap=cap,
        sequence_metric=metric,  # type: ignore[arg-type]  # one of the names
        sequence_mask=bounds,
    )


def test_the_settings_of_the_objective_count_where_they_are_switched_on() -> None:
    numbers = {"kl_loss_coef": 0.3, "entropy_loss_coef": 0.4, "kl_estimator_type": "k2", "max_seq_len": 77}
    on = policy_objective(
        algorithm(use_kl_loss=True, use_entropy_loss=True, loss_reduction="seq_mean_token_sum_norm", **numbers),
        micro_batch_rows=3,
    )
    assert (on.kl_loss_coef, on.entropy_loss_coef, on.kl_estimator, on.wants_entropy) == (0.3, 0.4, "k2", True)
    assert on.reduction == Reduction(name="seq_mean_token_sum_norm", max_seq_len=77, micro_batch_rows=3)
    off = policy_objective(algorithm(use_kl_loss=False, use_entropy_loss=False, **numbers))
    assert (off.kl_loss_coef, off.entropy_loss_coef, off.wants_entropy) == (0.0, 0.0, False)
    assert isinstance(off.reduction, Reduction) and off.reduction.micro_batch_rows == 1


def steps_of(batch: TrainingBatch) -> TrainingBatch:
    """Both rows are turns of one answer."""
    return evolve(batch, trajectories=torch.tensor([0, 0]), last_step=torch.tensor([False, True]))


@pytest.mark.parametrize(
    ("reduction", "of_answers", "of_one_answer"),
    [
        (Reduction(name="token_mean"), [1 / 3, 1 / 3, 1 / 3], [1 / 3, 1 / 3, 1 / 3]),
        (Reduction(name="sequence_mean"), [1 / 4, 1 / 4, 1 / 2], [1 / 3, 1 / 3, 1 / 3]),
        (Reduction(name="prompt_mean"), [1 / 3, 1 / 3, 1 / 3], [1 / 3, 1 / 3, 1 / 3]),
        (Reduction(name="seq_mean_token_sum_norm", max_seq_len=10), [0.05, 0.05, 0.05], [0.1, 0.1, 0.1]),
        (Reduction(name="token_mean_legacy"), [1 / 4, 1 / 4, 1 / 2], [1 / 4, 1 / 4, 1 / 2]),
        (Reduction(name="token_mean_legacy", micro_batch_rows=1), [1 / 4, 1 / 4, 1 / 2], [1 / 4, 1 / 4, 1 / 2]),
        (Reduction(name="token_mean_legacy", micro_batch_rows=2), [1 / 3, 1 / 3, 1 / 3], [1 / 3, 1 / 3, 1 / 3]),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_share_of_each_token_of_an_answer_of_two_tokens_and_one_of_one(
    reduction: Reduction, of_answers: list[float], of_one_answer: list[float]
) -> None:
    batch = evolve(batch_of(), loss_mask=torch.tensor([[0, 1, 1], [0, 0, 1]]).bool())
    for rows, shares in ((batch, of_answers), (steps_of(batch), of_one_answer)):
        assert reduction(rows)[batch.loss_mask].tolist() == pytest.approx(shares)
