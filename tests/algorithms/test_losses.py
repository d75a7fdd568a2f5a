from __future__ import annotations

import math
import struct
from collections.abc import Callable

import pytest
import torch
from attrs import evolve
from torch import Tensor

from skyrl.algorithms.clipped_losses import GMPOLoss, GSPOLoss, RegularLoss, SAPOLoss
from skyrl.algorithms.covariance_losses import ClipCovLoss, KLCovLoss
from skyrl.algorithms.kl import AdaptiveKLController, kl_estimate
from skyrl.algorithms.logprobs import entropy, token_logprobs
from skyrl.algorithms.losses import LossInputs, PolicyLoss, ppo_clip
from skyrl.algorithms.off_policy import Bounds, OffPolicyCorrection
from skyrl.algorithms.reductions import prompt_mean, sequence_mean, sequence_sum_by_length, token_mean
from skyrl.algorithms.returns import discounted_returns, generalized_advantages
from skyrl.algorithms.rollout_losses import DecoupledLoss, DPPOLoss
from skyrl.config import AlgorithmConfig
from skyrl.training.objective import PolicyObjective, policy_loss, policy_objective
from tests.algorithms.reference_functions import batch_of


def test_ppo_clip_stops_rewarding_tokens_that_already_moved_far() -> None:
    new = torch.tensor([[-0.5]], requires_grad=True)  # ratio e^0.5 = 1.65, above 1 + 0.2
    loss = ppo_clip(new, torch.tensor([[-1.0]]), torch.tensor([[1.0]]), clip_low=0.2, clip_high=0.2)
    loss.sum().backward()
    torch.testing.assert_close(loss, torch.tensor([[-1.2]]))
    assert new.grad is not None and new.grad.item() == 0.0


def test_ppo_clip_still_punishes_a_bad_token_that_became_likelier() -> None:
    new = torch.tensor([[-0.5]], requires_grad=True)
    loss = ppo_clip(new, torch.tensor([[-1.0]]), torch.tensor([[-1.0]]), clip_low=0.2, clip_high=0.2)
    loss.sum().backward()
    assert new.grad is not None and new.grad.item() > 0.0


def test_at_ratio_one_the_gradient_is_the_policy_gradient() -> None:
    new = torch.tensor([[-0.7, -0.2]], requires_grad=True)
    advantages = torch.tensor([[0.5, -2.0]])
    ppo_clip(new, new.detach(), advantages, clip_low=0.2, clip_high=0.2).sum().backward()
    assert new.grad is not None
    torch.testing.assert_close(new.grad, -advantages)


def test_a_log_ratio_beyond_all_bounds_stays_finite() -> None:
    loss = ppo_clip(
        torch.tensor([[0.0]]), torch.tensor([[-500.0]]), torch.tensor([[-1.0]]), clip_low=0.2, clip_high=0.2
    )
    assert torch.isfinite(loss).all()


def test_tokens_that_are_clipped_are_told() -> None:
    new, old = torch.tensor([[0.0, 0.0, 0.0]]), torch.tensor([[-1.0, 0.0, -1.0]])
    inputs = LossInputs(
        logprobs=new,
        old_logprobs=old,
        rollout_logprobs=old,
        advantages=torch.ones(1, 3),
        mask=torch.tensor([[True, True, False]]),
    )
    clipped = RegularLoss(eps_clip_low=0.2, eps_clip_high=0.2).measure(inputs)["clip_ratio"]
    assert clipped.tolist() == [[True, False, True]]


def test_k3_of_equal_policies_is_zero_and_otherwise_positive() -> None:
    new = torch.tensor([[-1.0, -1.0, -1.0]])
    values = kl_estimate(new, torch.tensor([[-1.0, -0.5, -2.0]]), "k3")
    torch.testing.assert_close(values, torch.tensor([[0.0, 0.1487213, 0.3678794]]))


def test_token_mean_gives_every_token_the_same_share() -> None:
    mask = torch.tensor([[1, 1, 1], [0, 0, 1]]).bool()
    torch.testing.assert_close(token_mean(mask), torch.tensor([[0.25, 0.25, 0.25], [0.0, 0.0, 0.25]]))


def test_sequence_mean_gives_every_answer_the_same_share() -> None:
    mask = torch.tensor([[0, 1, 1], [0, 0, 1]]).bool()
    torch.testing.assert_close(sequence_mean(mask), torch.tensor([[0.0, 0.25, 0.25], [0.0, 0.0, 0.5]]))


def test_an_empty_mask_weighs_nothing_instead_of_dividing_by_zero() -> None:
    mask = torch.zeros(2, 3, dtype=torch.bool)
    assert token_mean(mask).sum() == 0
    assert sequence_mean(mask).sum() == 0


def test_cispo_by_default_weighs_an_unlikely_token_by_its_ratio_and_holds_a_likely_one_to_five() -> None:
    new = torch.tensor([[-3.0, -0.5]], requires_grad=True)  # ratios e^-2 and e^2.5 = 12.2
    old = torch.tensor([[-1.0, -3.0]])
    cispo = policy_loss(AlgorithmConfig(policy_loss_type="cispo"))
    mask = torch.ones(1, 2, dtype=torch.bool)
    inputs = LossInputs(logprobs=new, old_logprobs=old, rollout_logprobs=old, advantages=-torch.ones(1, 2), mask=mask)
    cispo(inputs).sum().backward()
    assert new.grad is not None
    torch.testing.assert_close(new.grad, torch.tensor([[0.1353353, 5.0]]))


def test_k3_is_held_to_ten_and_has_no_gradient_beyond() -> None:
    new = torch.tensor([[-3.5, -4.0, -9.5, -300.0, -1.0]], requires_grad=True)
    values = kl_estimate(new, torch.tensor([[-1.0, -1.0, -1.0, -1.0, -12.5]]), "k3")
    values.sum().backward()
    # differences 2.5, 3, 8.5, 299 and -11.5: e^2.5 - 3.5, then e^3 - 4 = 16 and more, then 11.5 + e^-11.5 - 1
    torch.testing.assert_close(values, torch.tensor([[8.6824942, 10.0, 10.0, 10.0, 10.0]]))
    assert new.grad is not None
    torch.testing.assert_close(new.grad, torch.tensor([[-11.182494, 0.0, 0.0, 0.0, 0.0]]))  # 1 - e^2.5


def test_k3_below_its_bound_on_the_other_side_is_nearly_the_distance() -> None:
    values = kl_estimate(torch.tensor([[-1.0]]), torch.tensor([[-11.5]]), "k3")
    assert values.item() == pytest.approx(9.5 + math.exp(-10.5))  # 10.5 + e^-10.5 - 1


def dppo_cuts(now: float, then: float, advantage: float, *, low: float, high: float) -> bool:
    """Whether the divergence of two probabilities of a token is cut."""
    inputs = LossInputs(
        logprobs=torch.tensor([[now]]).log(),
        old_logprobs=torch.zeros(1, 1),
        rollout_logprobs=torch.tensor([[then]]).log(),
        advantages=torch.tensor([[advantage]]),
        mask=torch.ones(1, 1, dtype=torch.bool),
    )
    return bool(DPPOLoss(dppo_type="binary_kl", delta_low=low, delta_high=high).measure(inputs)["clip_ratio"])


@pytest.mark.parametrize(
    ("now", "then", "divergence"),
    [
        (0.95, 0.9, 0.0206544),  # 0.9 ln(0.9 / 0.95) + 0.1 ln(0.1 / 0.05)
        (0.6, 0.5, 0.0204110),  # 0.5 ln(0.5 / 0.6) + 0.5 ln(0.5 / 0.4)
        (0.2, 0.1, 0.0366907),  # 0.1 ln(0.1 / 0.2) + 0.9 ln(0.9 / 0.8)
    ],
)
def test_dppo_cuts_beyond_the_divergence_of_drawing_the_token_or_not(
    now: float, then: float, divergence: float
) -> None:
    below, above = divergence - 2e-6, divergence + 2e-6
    assert dppo_cuts(now, then, 1.0, low=0.0, high=below)
    assert not dppo_cuts(now, then, 1.0, low=0.0, high=above)
    assert not dppo_cuts(now, then, -1.0, low=0.0, high=0.0)  # a bad token that became likelier is still punished


def test_dppo_has_a_bound_of_its_own_for_tokens_that_became_less_likely() -> None:
    divergence = 0.9 * math.log(0.9 / 0.8) + 0.1 * math.log(0.1 / 0.2)
    assert dppo_cuts(0.8, 0.9, -1.0, low=divergence - 2e-6, high=9.0)
    assert not dppo_cuts(0.8, 0.9, -1.0, low=divergence + 2e-6, high=0.0)
    assert not dppo_cuts(0.8, 0.9, 1.0, low=0.0, high=0.0)


def test_dppo_knows_the_divergence_of_tokens_that_were_or_are_certain() -> None:
    assert dppo_cuts(0.5, 1.0, -1.0, low=0.69, high=9.0)  # ln 2
    assert not dppo_cuts(0.5, 1.0, -1.0, low=0.70, high=0.0)
    assert dppo_cuts(1.0, 0.5, 1.0, low=9.0, high=8.51)  # 0.5 ln 0.5 + 0.5 ln(0.5 / 1e-8) = 8.517
    assert not dppo_cuts(1.0, 0.5, 1.0, low=0.0, high=8.52)


@pytest.mark.parametrize(
    "loss",
    [GSPOLoss(eps_clip_low=0.2, eps_clip_high=0.2), GMPOLoss(log_clip_low=0.4, log_clip_high=0.4)],
    ids=["gspo", "gmpo"],
)
@pytest.mark.parametrize(("mean", "clamped"), [(9.0, 9.0), (12.0, 10.0)])
def test_the_ratio_of_a_bad_answer_is_held_to_e_to_the_ten(loss: PolicyLoss, mean: float, clamped: float) -> None:
    old = torch.tensor([[-mean - 2, -mean]])  # log-ratios mean + 1 and mean - 1
    inputs = LossInputs(
        logprobs=torch.full((1, 2), -1.0),
        old_logprobs=old,
        rollout_logprobs=old,
        advantages=torch.full((1, 2), -1.0),
        mask=torch.ones(1, 2, dtype=torch.bool),
    )
    torch.testing.assert_close(loss(inputs), torch.full((1, 2), math.exp(clamped)))


def test_rows_without_advantage_are_left_out_only_where_the_loss_is_known_to_vanish_there() -> None:
    def own(inputs: LossInputs) -> Tensor:
        return -inputs.logprobs

    rows = batch_of({"token_level_rewards": [[0.0], [0.0]], "response_mask": [[1], [1]]})
    rows = rows.with_fields(advantages=torch.tensor([[1.0], [0.0]]))
    assert len(PolicyObjective(policy_loss=own).weigh(rows)) == 2
    assert len(PolicyObjective(policy_loss=own, zero_at_zero_advantage=True).weigh(rows)) == 1
    assert len(policy_objective(AlgorithmConfig(use_kl_loss=False)).weigh(rows)) == 1


@pytest.mark.parametrize(("share", "drawn"), [(0.0, 1), (0.4, 1), (0.5, 2), (0.99, 3), (1.0, 4)])
def test_clip_cov_draws_its_share_of_the_selected_tokens_and_at_least_one(share: float, drawn: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs = -torch.rand(2, 4, generator=generator)
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=logprobs,
        rollout_logprobs=logprobs,
        advantages=torch.tensor([[1.0], [-1.0]]).expand(2, 4),
        mask=torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0]]).bool(),
    )
    loss = ClipCovLoss(eps_clip_low=0.2, eps_clip_high=0.2, clip_ratio=share, clip_cov_lb=-9.0, clip_cov_ub=9.0)
    clipped = loss.measure(inputs)["clip_ratio"]
    assert clipped.sum() == drawn
    assert not (clipped & ~inputs.mask).any()
    assert torch.equal(loss(inputs) == 0, clipped)


def test_clip_cov_draws_only_tokens_between_its_bounds() -> None:
    logprobs = torch.tensor([[-1.0, -2.0, -6.0]])  # mean -3: distances 2, 1, -3
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=logprobs,
        rollout_logprobs=logprobs,
        advantages=torch.tensor([[3.0, -1.0, -2.0]]),  # mean 0: covariances 6, -1, 6
        mask=torch.ones(1, 3, dtype=torch.bool),
    )

    def drawn(low: float, high: float) -> list[bool]:
        loss = ClipCovLoss(eps_clip_low=0.2, eps_clip_high=0.2, clip_ratio=1.0, clip_cov_lb=low, clip_cov_ub=high)
        clipped: list[list[bool]] = loss.measure(inputs)["clip_ratio"].tolist()
        return clipped[0]

    assert drawn(5.0, 7.0) == [True, False, True]
    assert drawn(6.0, 7.0) == drawn(5.0, 6.0) == [False, False, False]
    assert drawn(-2.0, 0.0) == [False, True, False]


def test_the_mean_over_prompts_weighs_a_prompt_with_one_token_as_any_other() -> None:
    mask, groups = torch.tensor([[0, 1], [0, 0], [1, 1], [1, 1]]).bool(), torch.tensor([7, 7, 3, 3])
    expected = torch.tensor([[0.0, 1 / 2], [0.0, 0.0], [1 / 8, 1 / 8], [1 / 8, 1 / 8]])
    torch.testing.assert_close(prompt_mean(mask, groups), expected)
    assert prompt_mean(torch.zeros(2, 2, dtype=torch.bool), torch.tensor([0, 1])).tolist() == [[0.0, 0.0]] * 2


def test_entropy_is_that_of_the_tempered_distribution() -> None:
    logits = torch.tensor([[2 * math.log(3.0), 0.0]])  # at temperature 2: 3/4 and 1/4
    assert entropy(logits, temperature=2.0).item() == pytest.approx(0.75 * math.log(4 / 3) + 0.25 * math.log(4))
    assert entropy(logits, temperature=1.0).item() == pytest.approx(0.9 * math.log(10 / 9) + 0.1 * math.log(10))


def test_entropy_of_short_logits_is_computed_in_float32() -> None:
    entropies = entropy(torch.zeros(1, 3, dtype=torch.bfloat16), temperature=1.0)
    torch.testing.assert_close(entropies, torch.tensor([math.log(3)]))  # bfloat16 would give 1.1016


@pytest.mark.parametrize(
    ("divergence", "samples", "value"),
    [(0.11, 10, 0.202), (0.09, 10, 0.198), (0.05, 10, 0.196), (9.0, 10, 0.204), (9.0, 20, 0.208), (0.1, 10, 0.2)],
)
def test_the_weight_of_the_penalty_moves_by_at_most_a_fifth_in_a_horizon(
    divergence: float, samples: int, value: float
) -> None:
    control = AdaptiveKLController(0.2, target=0.1, horizon=100)
    control.update(divergence, samples)  # 0.2 (1 + (KL / 0.1 - 1) samples / 100), the bracket within +-0.2
    assert control.value == pytest.approx(value)


def test_a_log_probability_is_that_of_the_tempered_distribution() -> None:
    logits = torch.tensor([[2 * math.log(3.0), 0.0]]).expand(2, 2)  # at temperature 2: 3/4 and 1/4
    logprobs = token_logprobs(logits, torch.tensor([0, 1]), temperature=2.0)
    assert logprobs.tolist() == pytest.approx([math.log(3 / 4), math.log(1 / 4)])


def of_tokens(logprobs: list[float], old: list[float], advantages: list[float]) -> LossInputs:
    """One answer, all of whose tokens are selected."""
    new, before, gains = (torch.tensor([values]) for values in (logprobs, old, advantages))
    mask = torch.ones_like(new, dtype=torch.bool)
    return LossInputs(logprobs=new, old_logprobs=before, rollout_logprobs=before, advantages=gains, mask=mask)


def test_what_is_not_selected_becomes_zero() -> None:
    mask, nothing = torch.tensor([[True, False]]), torch.tensor([[5.0, math.nan]])
    names = ("logprobs", "old_logprobs", "rollout_logprobs", "advantages")
    selected = LossInputs.selected(mask, **dict.fromkeys(names, nothing))
    assert [getattr(selected, name).tolist() for name in names] == [[[5.0, 0.0]]] * 4


def test_gmpo_holds_a_token_beyond_its_bounds_in_the_direction_of_its_advantage_only() -> None:
    inputs = of_tokens(
        [-1.0, -0.75, -0.75, -0.75, -2.0, -2.25, -2.25, -2.25],
        [-1.5, -1.5, -1.5, -1.5, -1.5, -1.5, -1.5, -1.5],  # log-ratios 1/2, then 3/4; -1/2, then -3/4
        [1.0, 0.25, 0.0, -1.0, -1.0, -0.25, 0.0, 1.0],
    )
    clipped = GMPOLoss(log_clip_low=0.5, log_clip_high=0.5).measure(inputs)["clip_ratio"]
    assert clipped.tolist() == [[False, True, False, False, False, True, False, False]]


def test_sapo_gates_any_good_token_with_its_own_temperature() -> None:
    inputs = of_tokens([0.0, 0.0], [-math.log(2.0)] * 2, [0.5, -0.5])  # ratio 2: -(4 / tau) sigmoid(tau) A
    losses = SAPOLoss(tau_pos=1.0, tau_neg=2.0)(inputs)
    torch.testing.assert_close(losses, torch.tensor([[-2 / (1 + math.exp(-1.0)), 1 / (1 + math.exp(-2.0))]]))


@pytest.mark.parametrize(("share", "penalised"), [(0.0, {0}), (0.25, {0}), (0.5, {0, 3})])
def test_kl_cov_penalises_its_share_of_the_tokens_and_at_least_one(share: float, penalised: set[int]) -> None:
    inputs = of_tokens([-1.0, -2.0, -3.0, -4.0], [-2.0, -3.0, -4.0, -5.0], [3.0, 1.0, 0.0, 0.0])
    loss = KLCovLoss(kl_cov_frac=share, ppo_kl_coef=7.0)(inputs)  # covariances 3, 0, 0.5, 1.5
    expected = [-math.e * gain + 7.0 * (index in penalised) for index, gain in enumerate([3.0, 1.0, 0.0, 0.0])]
    torch.testing.assert_close(loss, torch.tensor([expected]))


def lowbias32(value: float) -> int:
    """Chris Wellons' hash of 32 bits, in plain integers, of a float32."""
    bits = int.from_bytes(struct.pack("<f", value), "little")
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits = ((bits ^ (bits >> shift)) * factor) % 2**32
    return bits ^ (bits >> 16)


def test_clip_cov_draws_the_tokens_whose_log_probabilities_have_the_smallest_hashes() -> None:
    logprobs = [-0.01 * index for index in range(1, 201)]
    loss = ClipCovLoss(eps_clip_low=0.2, eps_clip_high=0.2, clip_ratio=0.25, clip_cov_lb=-9.0, clip_cov_ub=9.0)
    drawn = loss.measure(of_tokens(logprobs, logprobs, [1.0, -1.0] * 100))["clip_ratio"][0]
    smallest = sorted(range(200), key=lambda index: lowbias32(logprobs[index]))[:50]
    assert drawn.nonzero().flatten().tolist() == sorted(smallest)


def test_a_single_token_has_the_whole_share_and_lengths_divide_rows_as_well() -> None:
    mask = torch.tensor([[False, True], [False, False]])
    assert token_mean(mask).tolist() == [[0.0, 1.0], [0.0, 0.0]]
    assert (
        sequence_sum_by_length(torch.tensor([[True, True, True]] * 2), length=5).tolist()
        == [[pytest.approx(0.1)] * 3] * 2
    )


def test_decoupled_ppo_bounds_a_bad_token_by_the_dual_clip_and_counts_weights_above_the_cap() -> None:
    inputs = of_tokens([-1.0, -1.0], [-1.0 - math.log(8.0)] * 2, [-0.5, 0.5])  # ratio 8, clipped to 1.2 where A > 0
    assert DecoupledLoss(eps_clip_low=0.2, eps_clip_high=0.2, dual_clip=True, clip_ratio_c=3.0)(inputs).tolist()[
        0
    ] == pytest.approx([1.5, -0.6])
    off = evolve(inputs, rollout_logprobs=inputs.old_logprobs - torch.tensor([[math.log(2.0), 0.0]]))  # weights 2 and 1
    for cap, over in ((None, [False, False]), (1.5, [True, False]), (2.5, [False, False])):
        measured = DecoupledLoss(eps_clip_low=0.2, eps_clip_high=0.2, behav_imp_weight_cap=cap).measure(off)
        assert measured["behave_capped_ratio"].tolist() == [over]
        assert measured["behave_weight"].tolist()[0] == pytest.approx([2.0, 1.0])


def test_dppo_cuts_a_bad_token_of_any_advantage() -> None:
    assert dppo_cuts(0.5, 0.9, -0.25, low=0.1, high=9.0)
    assert dppo_cuts(0.5, 0.9, -4.0, low=0.1, high=9.0)
    assert not dppo_cuts(0.5, 0.9, 0.25, low=0.1, high=0.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r, m: discounted_returns(r, m[:, 1:], gamma=1.0), r"mask has shape \(1, 1\), rewards \(1, 2\)"),
        (lambda r, m: discounted_returns(r * math.inf, m, gamma=1.0), r"rewards\[0, 0\] is inf"),
        (lambda r, m: generalized_advantages(r * math.inf, r, m, gamma=1.0, lambd=1.0), r"rewards\[0, 0\] is inf"),
    ],
)
def test_returns_refuse_what_does_not_belong_together_or_is_not_finite(
    call: Callable[[Tensor, Tensor], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool))


@pytest.mark.parametrize(
    ("correction", "any_of_them"),
    [
        (OffPolicyCorrection(), False),
        (OffPolicyCorrection(outlier_token=Bounds(low=0.1)), True),
        (OffPolicyCorrection(token_mask=Bounds(high=9.0)), True),
        (OffPolicyCorrection(tis="token"), True),
        (OffPolicyCorrection(sequence_metric="product"), True),
    ],
)
def test_one_correction_is_a_correction(correction: OffPolicyCorrection, any_of_them: bool) -> None:
    assert bool(correction) == any_of_them
