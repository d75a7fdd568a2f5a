"""With one optimizer step for a batch, pi_old is the policy itself: bounds of their ratio hold nothing, and say so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skyrl.training.objective import policy_objective
from tests.effects.algorithm import A, small_batch
from tests.effects.observables import plain
from tests.effects.probe import Scene, observable
from tests.effects.scenes import problems_of, see

BOUNDS: dict[str, tuple[str, float]] = {
    # field: a loss that reads it, and another value
    "eps_clip_low": ("regular", 0.0),
    "eps_clip_high": ("regular", 0.0),
    "clip_ratio_c": ("dual_clip", 1.1),
    "gmpo.log_clip_low": ("gmpo", 1e-9),
    "gmpo.log_clip_high": ("gmpo", 1e-9),
    "cispo.cispo_eps_clip_low": ("cispo", 0.0),
    "cispo.cispo_eps_clip_high": ("cispo", 0.0),
    "kl_cov.kl_cov_frac": ("kl_cov", 0.9),
    "kl_cov.ppo_kl_coef": ("kl_cov", 100.0),
}
CLIPS = [(loss, field) for loss in ("dual_clip", "gspo", "clip_cov", "decoupled") for field in ("low", "high")]
CASES = [
    *((field, loss, value) for field, (loss, value) in BOUNDS.items()),
    *((f"eps_clip_{side}", loss, 0.0) for loss, side in CLIPS),
]


@observable("the policy's loss of a batch whose old policy is the policy itself, and its gradient")
def loss_of_one_step(scene: Scene) -> object:
    batch = small_batch()
    logprobs = batch.rollout_logprobs
    assert logprobs is not None
    trained = (0.9 * logprobs).requires_grad_()
    objective = policy_objective(scene.run.trainer.algorithm)
    loss, parts, numbers = objective(trained, objective.weigh(batch.with_fields(old_logprobs=None)))
    loss.backward()
    return plain([loss, trained.grad, parts, numbers])


def said(field: str, loss: str, value: float, nano: Path, more: dict[str, Any]) -> list[str]:
    """What is said about a bound that was written."""
    values = {A + "policy_loss_type": loss, A + field: value, **more}
    return [problem.message for problem in problems_of("rl", values, nano) if problem.path == A + field]


@pytest.mark.parametrize(("field", "loss", "value"), CASES)
def test_a_bound_of_the_ratio_changes_nothing_with_one_optimizer_step_and_says_so(
    field: str, loss: str, value: float, nano: Path
) -> None:
    chosen = {A + "policy_loss_type": loss}
    before, after = (see(loss_of_one_step, "rl", chosen | more, nano) for more in ({}, {A + field: value}))
    assert before == after
    [message] = said(field, loss, value, nano, {})
    assert message.startswith("has no effect in this run: it acts only when ")
    assert "the ratio pi / pi_old can differ from 1" in message


ACTS: dict[str, dict[str, Any]] = {
    "several epochs": {"trainer.update_epochs_per_batch": 2},
    "several mini-batches": {"trainer.policy_mini_batch_size": 2},
    "pi_old of the engine": {A + "old_logprobs": "engine"},
    "scored for the reward": {A + "use_kl_in_reward": True},
    "asynchronous, pi_old of the engine": {"trainer.fully_async.enabled": True, A + "old_logprobs": "engine"},
    "the engine's ratio": {A + "policy_loss_type": "rollout_is"},
    "a loss of one's own": {A + "policy_loss_type": "tests.training.peer_functions_of_users:skyrl_ppo"},
}


@pytest.mark.parametrize("name", ACTS)
def test_a_clip_of_a_ratio_that_can_differ_from_1_is_not_warned_about_for_that(name: str, nano: Path) -> None:
    messages = said("eps_clip_low", "regular", 0.3, nano, ACTS[name])
    assert not [message for message in messages if "the ratio pi / pi_old" in message]


def test_the_other_bounds_act_beside_the_engine_and_at_their_edge(nano: Path) -> None:
    anchor = {A + "cispo.cispo_anchor": "rollout"}
    assert said("cispo.cispo_eps_clip_low", "cispo", 0.5, nano, anchor) == []
    assert said("clip_ratio_c", "dual_clip", 1.0, nano, {}) == []  # equal terms share the gradient
    chosen = {A + "policy_loss_type": "dual_clip"}
    assert see(loss_of_one_step, "rl", chosen, nano) != see(
        loss_of_one_step, "rl", chosen | {A + "clip_ratio_c": 1.0}, nano
    )
