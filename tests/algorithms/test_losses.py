from __future__ import annotations

import torch

from skyrl.algorithms.clipped_losses import RegularLoss
from skyrl.algorithms.kl import kl_estimate
from skyrl.algorithms.losses import LossInputs, ppo_clip
from skyrl.algorithms.reductions import sequence_mean, token_mean
from skyrl.config import AlgorithmConfig
from skyrl.training.policy_losses import policy_loss


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
    clipped = RegularLoss(clip_low=0.2, clip_high=0.2).measure(inputs)["clip_ratio"]
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
