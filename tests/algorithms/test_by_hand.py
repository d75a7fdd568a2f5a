"""Losses and estimators beside a slow reference in plain Python, token by token; gradients beside differences."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from statistics import fmean, stdev

import pytest
import torch
from torch import Tensor

from skyrl.algorithms.advantages import (
    group_relative,
    leave_one_out,
    length_weighted,
    less_the_greedy_score,
    relative_to_mean,
    rescaled_for_silent_groups,
)
from skyrl.algorithms.clipped_losses import CISPOLoss, DualClipLoss, GMPOLoss, GSPOLoss, RegularLoss, SAPOLoss
from skyrl.algorithms.covariance_losses import KLCovLoss
from skyrl.algorithms.losses import LossInputs, PolicyLoss
from skyrl.algorithms.off_policy import Bounds, OffPolicyCorrection, correct
from skyrl.algorithms.returns import generalized_advantages
from skyrl.algorithms.rollout_losses import (
    CrossEntropyLoss,
    DecoupledLoss,
    DPPOLoss,
    ImportanceSamplingLoss,
    RolloutISLoss,
)

ROWS, WIDTH = 4, 6
Row = list[float]


def inputs(dtype: torch.dtype = torch.float64) -> LossInputs:
    """Ratios from far below to far above 1, advantages of both signs, some tokens not selected."""
    generator = torch.Generator().manual_seed(5)
    shape = (ROWS, WIDTH)
    old, rollout = (-2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 0.1 for _ in range(2))
    new = old + 0.8 * torch.randn(shape, generator=generator, dtype=torch.float64)
    mask = torch.rand(shape, generator=generator) < 0.7
    mask[:, 1] = True
    advantages = torch.randn(ROWS, 1, generator=generator, dtype=torch.float64).expand(shape)
    return LossInputs.selected(
        mask,
        logprobs=new.clamp(max=-0.01).to(dtype).requires_grad_(),
        old_logprobs=old.to(dtype),
        rollout_logprobs=rollout.to(dtype),
        advantages=advantages.to(dtype),
    )


def clip(ratio: float, low: float, high: float) -> float:
    return min(max(ratio, 1 - low), 1 + high)


def ppo(new: float, old: float, rollout: float, advantage: float) -> float:
    ratio = math.exp(new - old)
    return -min(ratio * advantage, clip(ratio, 0.2, 0.3) * advantage)


def dual(new: float, old: float, rollout: float, advantage: float) -> float:
    return min(ppo(new, old, rollout, advantage), -1.5 * advantage) if advantage < 0 else ppo(new, old, 0, advantage)


def sapo(new: float, old: float, rollout: float, advantage: float) -> float:
    tau = 1.0 if advantage > 0 else 1.05
    return -4 / tau / (1 + math.exp(-tau * (math.exp(new - old) - 1))) * advantage


def cispo(new: float, old: float, rollout: float, advantage: float) -> float:
    return -advantage * clip(math.exp(new - rollout), 0.5, 1.0) * new


def rollout_is(new: float, old: float, rollout: float, advantage: float) -> float:
    ratio = math.exp(new - rollout)
    return -advantage * (ratio if 0.5 < ratio < 1.5 else 0.0) * new


def dppo(new: float, old: float, rollout: float, advantage: float) -> float:
    moved = math.exp(new) - math.exp(rollout)
    cut = moved > 0.15 if advantage > 0 else moved < -0.1
    return 0.0 if cut else -math.exp(new - rollout) * advantage


def decoupled(new: float, old: float, rollout: float, advantage: float) -> float:
    weight = math.exp(old - rollout)
    return 0.0 if weight > 1.2 else weight * ppo(new, old, rollout, advantage)


def clamped(new: float, old: float, rollout: float, advantage: float) -> float:
    return min(math.exp(old - rollout), 1.2) * ppo(new, old, rollout, advantage)


PER_TOKEN: dict[str, tuple[PolicyLoss, Callable[[float, float, float, float], float]]] = {
    "regular": (RegularLoss(eps_clip_low=0.2, eps_clip_high=0.3), ppo),
    "dual_clip": (DualClipLoss(eps_clip_low=0.2, eps_clip_high=0.3, clip_ratio_c=1.5), dual),
    "sapo": (SAPOLoss(tau_pos=1.0, tau_neg=1.05), sapo),
    "cispo": (CISPOLoss(cispo_eps_clip_low=0.5, cispo_eps_clip_high=1.0, cispo_anchor="rollout"), cispo),
    "rollout_is": (RolloutISLoss(eps_clip_low=0.5, eps_clip_high=0.5), rollout_is),
    "dppo": (DPPOLoss(dppo_type="binary_tv", delta_low=0.1, delta_high=0.15), dppo),
    "decoupled": (DecoupledLoss(eps_clip_low=0.2, eps_clip_high=0.3, behav_imp_weight_cap=1.2), decoupled),
    "decoupled, clamped": (
        DecoupledLoss(eps_clip_low=0.2, eps_clip_high=0.3, behav_imp_weight_cap=1.2, cap_mode="clamp"),
        clamped,
    ),
    "importance_sampling": (ImportanceSamplingLoss(), lambda new, old, _, advantage: -math.exp(new - old) * advantage),
    "cross_entropy": (CrossEntropyLoss(), lambda new, *_: -new),
}


@pytest.mark.parametrize("name", PER_TOKEN)
def test_a_loss_is_its_formula_at_every_token(name: str) -> None:
    loss, formula = PER_TOKEN[name]
    seen = inputs()
    losses = loss(seen)
    for row, column in seen.mask.nonzero().tolist():
        numbers = (seen.logprobs, seen.old_logprobs, seen.rollout_logprobs, seen.advantages)
        expected = formula(*(tensor[row, column].item() for tensor in numbers))
        assert losses[row, column].item() == pytest.approx(expected, abs=1e-9), (row, column)


def test_gspo_is_the_clipped_geometric_mean_of_an_answers_ratios() -> None:
    seen = inputs()
    losses = GSPOLoss(eps_clip_low=0.05, eps_clip_high=0.1)(seen)
    (gradient,) = torch.autograd.grad(torch.where(seen.mask, losses, 0.0).sum(), seen.logprobs)
    for row in range(ROWS):
        columns = seen.mask[row].nonzero().flatten().tolist()
        ratio = math.exp(fmean((seen.logprobs - seen.old_logprobs)[row, column].item() for column in columns))
        advantage = seen.advantages[row, columns[0]].item()
        expected = -min(ratio * advantage, clip(ratio, 0.05, 0.1) * advantage)
        active = ratio * advantage <= clip(ratio, 0.05, 0.1) * advantage
        for column in columns:
            assert losses[row, column].item() == pytest.approx(expected, abs=1e-9)
            assert gradient[row, column].item() == pytest.approx(-ratio * advantage * active, abs=1e-9)


def test_gmpo_is_the_geometric_mean_of_clipped_ratios() -> None:
    seen = inputs()
    losses = GMPOLoss(log_clip_low=0.3, log_clip_high=0.2)(seen)
    for row in range(ROWS):
        columns = seen.mask[row].nonzero().flatten().tolist()
        advantage = seen.advantages[row, columns[0]].item()
        logs = [(seen.logprobs - seen.old_logprobs)[row, column].item() for column in columns]
        clipped = [min(log, 0.2) if advantage > 0 else max(log, -0.3) for log in logs]
        assert losses[row, columns[0]].item() == pytest.approx(-math.exp(fmean(clipped)) * advantage, abs=1e-9)


SMOOTH: dict[str, PolicyLoss] = {
    name: PER_TOKEN[name][0]
    for name in ("regular", "dual_clip", "sapo", "dppo", "decoupled", "importance_sampling", "cross_entropy")
} | {"gmpo": GMPOLoss(log_clip_low=0.3, log_clip_high=0.2), "kl_cov": KLCovLoss(kl_cov_frac=0.2, ppo_kl_coef=0.5)}
"""Losses whose gradient is the derivative of their value; cispo, rollout_is and gspo hold a part of it still."""


@pytest.mark.parametrize("name", SMOOTH)
def test_a_gradient_is_the_difference_quotient(name: str) -> None:
    seen = inputs()

    def total(logprobs: Tensor) -> Tensor:
        own = LossInputs.selected(
            seen.mask,
            logprobs=logprobs,
            old_logprobs=seen.old_logprobs,
            rollout_logprobs=seen.rollout_logprobs,
            advantages=seen.advantages,
        )
        return torch.where(seen.mask, SMOOTH[name](own), 0.0).sum()

    assert torch.autograd.gradcheck(total, (seen.logprobs.detach().requires_grad_(),), eps=1e-7, atol=1e-5)


# Estimators


def scored() -> tuple[Row, list[int], list[int]]:
    """Scores, groups (one of a single answer, one of equal scores) and lengths, in no order of groups."""
    draw = random.Random(0)
    groups = [2, 0, 1, 0, 2, 3, 1, 0, 2, 1]
    scores = [draw.choice([0.0, 0.5, 1.0, 2.0]) if group != 1 else 0.1 for group in groups]
    return scores, groups, [draw.randint(1, 9) for _ in groups]


def others(index: int, groups: list[int]) -> list[int]:
    return [other for other, group in enumerate(groups) if group == groups[index]]


def grpo_of(index: int, scores: Row, groups: list[int], lengths: list[int]) -> float:
    own = [scores[other] for other in others(index, groups)]
    return scores[index] / (1 + 1e-6) if len(own) == 1 else (scores[index] - fmean(own)) / (stdev(own) + 1e-6)


def rloo_of(index: int, scores: Row, groups: list[int], lengths: list[int]) -> float:
    rest = [scores[other] for other in others(index, groups) if other != index]
    return scores[index] - fmean(rest) if rest else 0.0


def maxrl_of(index: int, scores: Row, groups: list[int], lengths: list[int]) -> float:
    own = [scores[other] for other in others(index, groups)]
    return scores[index] if len(own) == 1 else (scores[index] - fmean(own)) / (fmean(own) + 1e-6)


def opo_of(index: int, scores: Row, groups: list[int], lengths: list[int]) -> float:
    own = others(index, groups)
    weighted = sum(scores[other] * lengths[other] for other in own) / sum(lengths[other] for other in own)
    return scores[index] if len(own) == 1 else scores[index] - weighted


def gpg_of(index: int, scores: Row, groups: list[int], lengths: list[int]) -> float:
    silent = [
        other
        for other in range(len(scores))
        if len(others(other, groups)) > 1 and len({scores[peer] for peer in others(other, groups)}) == 1
    ]
    own = [scores[other] for other in others(index, groups)]
    centered = scores[index] if len(own) == 1 else scores[index] - fmean(own)
    return len(scores) / (len(scores) - len(silent)) * centered


@pytest.mark.parametrize(
    ("estimate", "by_hand"),
    [
        (lambda scores, groups, _: group_relative(scores, groups, normalize_by_std=True), grpo_of),
        (lambda scores, groups, _: leave_one_out(scores, groups), rloo_of),
        (lambda scores, groups, _: relative_to_mean(scores, groups), maxrl_of),
        (length_weighted, opo_of),
        (lambda scores, groups, _: rescaled_for_silent_groups(scores, groups), gpg_of),
    ],
    ids=["grpo", "rloo", "maxrl", "opo", "gpg"],
)
def test_an_estimator_is_its_formula_for_every_answer(
    estimate: Callable[[Tensor, Tensor, Tensor], Tensor], by_hand: Callable[[int, Row, list[int], list[int]], float]
) -> None:
    scores, groups, lengths = scored()
    advantages = estimate(torch.tensor(scores, dtype=torch.float64), torch.tensor(groups), torch.tensor(lengths))
    expected = [by_hand(index, scores, groups, lengths) for index in range(len(scores))]
    assert advantages.tolist() == pytest.approx(expected, abs=1e-9)


def test_gae_goes_from_one_chosen_token_to_the_next() -> None:
    draw = torch.Generator().manual_seed(3)
    rewards, values = (torch.randn(3, 7, generator=draw, dtype=torch.float64) for _ in range(2))
    mask = torch.tensor([[0, 1, 1, 0, 0, 1, 0], [0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0]]).bool()
    rewards = rewards * mask
    advantages, returns = generalized_advantages(rewards, values, mask, gamma=0.9, lambd=0.8)
    for row in range(3):
        columns = mask[row].nonzero().flatten().tolist()
        running = following = 0.0
        for column in reversed(columns):
            delta = rewards[row, column].item() + 0.9 * following - values[row, column].item()
            running, following = delta + 0.9 * 0.8 * running, values[row, column].item()
            assert advantages[row, column].item() == pytest.approx(running)
            assert returns[row, column].item() == pytest.approx(running + following)
    assert (advantages[~mask] == 0).all() and (returns[~mask] == 0).all()


# Off-policy corrections


def test_corrections_go_one_after_the_other_and_count_real_tokens() -> None:
    seen = inputs()
    settings = OffPolicyCorrection(
        outlier_token=Bounds(high=6.0),
        token_mask=Bounds(low=0.4),
        tis="sequence",
        tis_cap=1.5,
        sequence_metric="geometric",
        sequence_mask=Bounds(low=0.5, high=2.0),
    )
    correction = correct(seen.old_logprobs, seen.rollout_logprobs, seen.mask, settings)
    logs = seen.old_logprobs - seen.rollout_logprobs
    for row in range(ROWS):
        columns = seen.mask[row].nonzero().flatten().tolist()
        outlier = any(math.exp(logs[row, column]) > 6.0 for column in columns)
        left = [column for column in columns if not outlier and math.exp(logs[row, column]) >= 0.4]
        weight = min(math.exp(sum(logs[row, column].item() for column in left)), 1.5)
        mean = math.exp(fmean(logs[row, column].item() for column in left)) if left else 1.0
        kept = left if 0.5 <= mean <= 2.0 else []
        assert correction.mask[row].nonzero().flatten().tolist() == kept
        assert correction.weights[row, 0].item() == pytest.approx(weight)
    assert len(correction.numbers["is_ratio"]) == int(seen.mask.sum())


# Bad input


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: leave_one_out(torch.zeros(3), torch.zeros(2, dtype=torch.long)),
            r"groups has shape \(2,\), scores \(3,\)",
        ),
        (
            lambda: leave_one_out(torch.tensor([1.0, float("nan")]), torch.zeros(2, dtype=torch.long)),
            r"scores\[1\] is nan: only finite numbers can be compared",
        ),
        (
            lambda: relative_to_mean(torch.tensor([float("inf"), 0.0]), torch.zeros(2, dtype=torch.long)),
            r"scores\[0\] is inf",
        ),
        (
            lambda: less_the_greedy_score(torch.zeros(3), torch.zeros(1)),
            r"baselines has shape \(1,\), scores \(3,\)",
        ),
        (
            lambda: less_the_greedy_score(torch.zeros(2), torch.tensor([0.0, float("-inf")])),
            r"baselines\[1\] is -inf",
        ),
        (
            lambda: generalized_advantages(
                torch.zeros(1, 2), torch.zeros(1, 3), torch.zeros(1, 2).bool(), gamma=1.0, lambd=1.0
            ),
            r"values has shape \(1, 3\), rewards \(1, 2\)",
        ),
        (
            lambda: correct(
                torch.zeros(1, 2), torch.zeros(1, 3), torch.zeros(1, 2).bool(), OffPolicyCorrection(tis="token")
            ),
            r"rollout_logprobs has shape \(1, 3\), old_logprobs \(1, 2\)",
        ),
    ],
)
def test_tensors_that_do_not_belong_together_are_refused_by_name(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_loss_refuses_tensors_of_different_shapes_by_name() -> None:
    zeros = torch.zeros(1, 2)
    with pytest.raises(ValueError, match=r"advantages has shape \(1, 3\), logprobs \(1, 2\)"):
        LossInputs(
            logprobs=zeros, old_logprobs=zeros, rollout_logprobs=zeros, advantages=torch.zeros(1, 3), mask=zeros.bool()
        )
