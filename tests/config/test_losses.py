"""Facts about the built-in policy losses, from the formulas of their papers."""

from __future__ import annotations

from attrs import asdict

from skyrl.config.settings.losses import POLICY_LOSSES


def those_with(fact: str, value: object) -> set[str]:
    return {name for name, facts in POLICY_LOSSES.items() if asdict(facts)[fact] is value}


def test_losses_whose_gradient_is_a_multiple_of_the_advantage_vanish_without_one() -> None:
    assert those_with("zero_at_zero_advantage", False) == {"clip_cov", "kl_cov", "cross_entropy"}


def test_losses_over_the_geometric_mean_or_mean_of_an_answer_give_each_answer_the_same_share() -> None:
    assert those_with("expects_sequence_mean", True) == {"gspo", "gmpo", "sapo"}


def test_losses_that_choose_tokens_of_all_answers_together_take_no_corrections_of_single_ones() -> None:
    assert those_with("takes_corrections", False) == {"clip_cov", "kl_cov", "online_dpo"}


def test_losses_that_compare_with_the_engine_in_place_of_the_policy_before_the_batch() -> None:
    assert those_with("reads_rollout_logprobs", True) == {"rollout_is", "dppo", "decoupled"}
    assert those_with("reads_old_logprobs", False) == {"rollout_is", "dppo", "cross_entropy", "online_dpo"}
