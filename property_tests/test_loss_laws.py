"""Laws of policy losses and of what is around them: what reduces to what, and what must not matter."""

from __future__ import annotations

from functools import partial
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from skyrl.algorithms.advantages import group_relative, leave_one_out, relative_to_mean, rescaled_for_silent_groups
from skyrl.algorithms.clipped_losses import CISPOLoss, DualClipLoss, GMPOLoss, GSPOLoss, RegularLoss, SAPOLoss
from skyrl.algorithms.estimators import OPO, AdvantageEstimator, Compared, ReinforcePlusPlusBaseline
from skyrl.algorithms.losses import LossInputs, PolicyLoss
from skyrl.algorithms.masked import whiten
from skyrl.algorithms.off_policy import OffPolicyCorrection, correct
from skyrl.algorithms.rewards import normalize
from skyrl.algorithms.rollout_losses import DecoupledLoss, DPPOLoss, ImportanceSamplingLoss, RolloutISLoss
from skyrl.batch import TrainingBatch
from skyrl.config.settings.algorithm import LossReduction
from skyrl.config.settings.losses import POLICY_LOSSES
from skyrl.training.objective import PolicyObjective, Reduction

a_quarter = settings(max_examples=settings.default.max_examples // 4)  # type: ignore[union-attr]  # a profile is loaded
"""Each law is asked of every loss: 6 examples for each, and 750 in the long profile."""

LOSSES: dict[str, PolicyLoss] = {
    "regular": RegularLoss(eps_clip_low=0.2, eps_clip_high=0.28),
    "dual_clip": DualClipLoss(eps_clip_low=0.2, eps_clip_high=0.2, clip_ratio_c=3.0),
    "gspo": GSPOLoss(eps_clip_low=0.1, eps_clip_high=0.1),
    "gmpo": GMPOLoss(log_clip_low=0.4, log_clip_high=0.4),
    "cispo": CISPOLoss(cispo_eps_clip_low=1.0, cispo_eps_clip_high=4.0),
    "sapo": SAPOLoss(tau_pos=1.0, tau_neg=1.05),
    "rollout_is": RolloutISLoss(eps_clip_low=0.5, eps_clip_high=0.5),
    "dppo": DPPOLoss(dppo_type="binary_kl", delta_low=0.05, delta_high=0.05),
    "decoupled": DecoupledLoss(eps_clip_low=0.2, eps_clip_high=0.2, behav_imp_weight_cap=2.0),
    "importance_sampling": ImportanceSamplingLoss(),
}
REDUCTIONS: tuple[LossReduction, ...] = (
    "token_mean",
    "sequence_mean",
    "seq_mean_token_sum_norm",
    "prompt_mean",
    "token_mean_legacy",
)


@st.composite
def batches(draw: st.DrawFn) -> TrainingBatch:
    """Rows of groups of two, with the policy's own log-probabilities as `values`, so that they go where rows go."""
    rows, width = 2 * draw(st.integers(1, 3)), draw(st.integers(2, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    mask = torch.rand(rows, width, generator=generator) < 0.6
    mask[:, 0] = False
    old, rollout, new = (-2 * torch.rand(rows, width, generator=generator) - 0.01 for _ in range(3))
    scores = torch.randint(0, 3, (rows, 1), generator=generator).float()
    return TrainingBatch(
        input_ids=torch.ones(rows, width, dtype=torch.long),
        lengths=torch.full((rows,), width),
        loss_mask=mask,
        rollout_logprobs=rollout,
        rewards=torch.cat([torch.zeros(rows, width - 1), scores], 1),
        groups=torch.arange(rows) // 2,
        old_logprobs=old,
        values=new,
        advantages=torch.randn(rows, 1, generator=generator) * mask,
    )


def inputs(batch: TrainingBatch, **changes: Tensor) -> LossInputs:
    assert batch.values is not None and batch.old_logprobs is not None and batch.advantages is not None
    assert batch.rollout_logprobs is not None
    tensors = {
        "logprobs": batch.values,
        "old_logprobs": batch.old_logprobs,
        "rollout_logprobs": batch.rollout_logprobs,
        "advantages": batch.advantages,
    }
    return LossInputs.selected(batch.loss_mask, **(tensors | changes))


def total_and_gradient(objective: PolicyObjective, batch: TrainingBatch, rows: int) -> tuple[Tensor, Tensor]:
    """Of one mini-batch, in micro-batches of so many rows."""
    assert batch.values is not None
    leaf = batch.values.clone().requires_grad_()
    parts = [
        objective(micro.values, micro)[0]
        for micro in objective.weigh(batch.with_fields(values=leaf)).split(rows)
        if micro.values is not None
    ]
    total = torch.stack(parts).sum()
    (gradient,) = torch.autograd.grad(total, leaf)
    return total.detach(), gradient


def objective(loss: str = "regular", reduction: LossReduction = "token_mean") -> PolicyObjective:
    return PolicyObjective(
        policy_loss=LOSSES[loss],
        zero_at_zero_advantage=POLICY_LOSSES[loss].zero_at_zero_advantage,
        reduction=Reduction(name=reduction, max_seq_len=10, micro_batch_rows=2),
        correction=OffPolicyCorrection(tis="token", tis_cap=2.0) if loss == "regular" else OffPolicyCorrection(),
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
@a_quarter
@given(batches(), st.integers(1, 6))
def test_cutting_a_mini_batch_changes_nothing(reduction: LossReduction, batch: TrainingBatch, rows: int) -> None:
    expected = total_and_gradient(objective(reduction=reduction), batch, 100)
    parts = total_and_gradient(objective(reduction=reduction), batch, rows)
    torch.testing.assert_close(parts, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
@a_quarter
@given(batches())
def test_what_stands_outside_the_mask_reaches_nothing(loss: str, batch: TrainingBatch) -> None:
    assert batch.values is not None and batch.old_logprobs is not None
    spoiled = {
        name: torch.where(batch.loss_mask, getattr(batch, name), torch.nan)
        for name in ("values", "old_logprobs", "rollout_logprobs", "advantages")
    }
    clean = total_and_gradient(objective(loss), batch, 100)
    other = total_and_gradient(objective(loss), batch.with_fields(**spoiled), 100)
    torch.testing.assert_close(other, clean)


@pytest.mark.parametrize("loss", LOSSES)
@a_quarter
@given(batches())
def test_rows_without_advantage_are_left_out_and_nothing_changes(loss: str, batch: TrainingBatch) -> None:
    assert batch.advantages is not None
    half = batch.with_fields(advantages=torch.where(batch.groups.unsqueeze(1) == 0, 0.0, batch.advantages))
    skipping, full = objective(loss), attrs.evolve(objective(loss), zero_at_zero_advantage=False)
    torch.testing.assert_close(
        total_and_gradient(skipping, half, 100), total_and_gradient(full, half, 100), atol=1e-6, rtol=1e-5
    )
    if batch.loss_mask[2:].any() and batch.loss_mask[:2].any():
        assert len(skipping.weigh(half)) < len(batch)


@pytest.mark.parametrize("loss", LOSSES)
@a_quarter
@given(batches())
def test_at_ratio_one_the_gradient_is_the_policy_gradient(loss: str, batch: TrainingBatch) -> None:
    assert batch.values is not None and batch.advantages is not None
    leaf = batch.values.clone().requires_grad_()
    seen = inputs(batch, logprobs=leaf, old_logprobs=batch.values, rollout_logprobs=batch.values)
    losses = LOSSES[loss](seen)
    counts = batch.loss_mask.sum(1, keepdim=True) if loss == "gmpo" else torch.ones(len(batch), 1)  # a mean of tokens
    (gradient,) = torch.autograd.grad((torch.where(batch.loss_mask, losses, 0.0) / counts.clamp(min=1)).sum(), leaf)
    scale = counts.clamp(min=1)
    torch.testing.assert_close(gradient * scale, -batch.advantages * batch.loss_mask, atol=1e-5, rtol=1e-4)


@a_quarter
@given(batches(), st.floats(0.05, 0.5), st.floats(0.05, 0.5))
def test_losses_reduce_to_their_parents(batch: TrainingBatch, low: float, high: float) -> None:
    regular = RegularLoss(eps_clip_low=low, eps_clip_high=high)(inputs(batch))
    assert torch.equal(DualClipLoss(eps_clip_low=low, eps_clip_high=high, clip_ratio_c=1e30)(inputs(batch)), regular)
    on_policy = inputs(batch, rollout_logprobs=inputs(batch).old_logprobs)
    torch.testing.assert_close(DecoupledLoss(eps_clip_low=low, eps_clip_high=high)(on_policy), regular)
    unclipped = ImportanceSamplingLoss()(inputs(batch))
    torch.testing.assert_close(RegularLoss(eps_clip_low=1.0, eps_clip_high=1e9)(inputs(batch)), unclipped)


@a_quarter
@given(batches())
def test_cispo_without_bounds_has_the_gradient_of_the_unclipped_ratio(batch: TrainingBatch) -> None:
    gradients = []
    for loss in (CISPOLoss(cispo_eps_clip_low=1.0, cispo_eps_clip_high=1e9), ImportanceSamplingLoss()):
        assert batch.values is not None
        leaf = batch.values.clone().requires_grad_()
        losses = torch.where(batch.loss_mask, loss(inputs(batch, logprobs=leaf)), 0.0)
        gradients.append(torch.autograd.grad(losses.sum(), leaf)[0])
    torch.testing.assert_close(*gradients)


@a_quarter
@given(batches())
def test_without_a_gap_no_correction_does_anything(batch: TrainingBatch) -> None:
    assert batch.old_logprobs is not None
    for kind in ("token", "sequence"):
        correction = OffPolicyCorrection(tis=kind, sequence_metric="product")
        result = correct(batch.old_logprobs, batch.old_logprobs, batch.loss_mask, correction)
        assert torch.equal(result.mask, batch.loss_mask)
        assert (result.weights == 1).all()


ESTIMATORS: tuple[AdvantageEstimator, ...] = (
    Compared(partial(group_relative, normalize_by_std=True)),
    Compared(leave_one_out),
    Compared(relative_to_mean),
    OPO(),
    Compared(rescaled_for_silent_groups),
    ReinforcePlusPlusBaseline(),
)


@a_quarter
@given(batches(), st.integers(0, 1000))
def test_the_order_of_rows_does_not_matter_to_an_estimator(batch: TrainingBatch, seed: int) -> None:
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
    for estimate in ESTIMATORS:
        torch.testing.assert_close(estimate(batch.select(order)), estimate(batch)[order], atol=1e-5, rtol=1e-4)


@a_quarter
@given(batches())
def test_padding_does_not_matter_to_an_estimator(batch: TrainingBatch) -> None:
    wide: dict[str, Any] = {
        field.name: torch.nn.functional.pad(value, (0, 3))
        for field in attrs.fields(TrainingBatch)
        if isinstance(value := getattr(batch, field.name), torch.Tensor) and value.dim() == 2
    }
    for estimate in ESTIMATORS:
        estimates = estimate(attrs.evolve(batch, **wide))
        torch.testing.assert_close(estimates[:, : batch.input_ids.shape[1]], estimate(batch), atol=1e-6, rtol=1e-5)
        assert (estimates[:, batch.input_ids.shape[1] :] == 0).all()


@a_quarter
@given(batches())
def test_whitened_numbers_have_mean_zero_and_deviation_one_or_are_all_equal(batch: TrainingBatch) -> None:
    assert batch.values is not None
    chosen = whiten(batch.values, batch.loss_mask)[batch.loss_mask]
    if len(chosen) > 1:
        assert abs(chosen.mean().item()) < 1e-4
        variance = batch.values[batch.loss_mask].double().var().item()
        assert chosen.std().item() == pytest.approx((variance / (variance + 1e-8)) ** 0.5, abs=1e-3)


@a_quarter
@given(batches(), st.floats(0.5, 4.0), st.floats(-3.0, 3.0))
def test_shift_and_scale_do_not_survive_normalization(batch: TrainingBatch, scale: float, shift: float) -> None:
    everything = torch.ones(len(batch), dtype=torch.bool)

    def of(values: Tensor) -> Tensor:
        return normalize(
            values,
            batch.groups,
            everything,
            mean_level="group",
            std_level="batch",
            leave_one_out=False,
            unbiased=True,
            eps=1e-9,
        )

    torch.testing.assert_close(of(batch.scores * scale + shift), of(batch.scores), atol=1e-4, rtol=1e-4)
