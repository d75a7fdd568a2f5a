"""Losses and estimators in the signatures of SkyRL and verl, by import path."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl.batch import TrainingBatch
from skyrl.config import AlgorithmConfig, ConfigError
from skyrl.config.derive.algorithm_facts import estimator_facts, loss_facts
from skyrl.experiments.preflight import custom_algorithms_can_be_called
from skyrl.training.advantage import advantage_estimator
from skyrl.training.objective import PolicyObjective, policy_objective
from tests.nano_run import all_metrics, config, train

FILE = Path(__file__).parent / "peer_functions_of_users.py"
LOSSES = ("skyrl_ppo", "skyrl_reinforce", "skyrl_gspo", "verl_vanilla", "verl_of_2025")
ESTIMATORS = ("skyrl_grpo", "skyrl_baseline", "skyrl_ranks", "verl_returns", "verl_leave_one_out")
SUMS = ("token_mean", "sequence_mean", "prompt_mean", "seq_mean_token_sum_norm")


def path(name: str) -> str:
    return f"{FILE}:{name}" if name in (*LOSSES, *ESTIMATORS) or name in REFUSED else name


def objective(loss: str, reduction: Any = "token_mean", **settings: Any) -> PolicyObjective:
    return policy_objective(
        AlgorithmConfig(
            policy_loss_type=path(loss), loss_reduction=reduction, max_seq_len=9, use_kl_loss=False, **settings
        )
    )


def batch() -> TrainingBatch:
    """Six answers of unlike lengths to two prompts; that of the fourth row has no trained token."""
    starts, lengths = torch.tensor([1, 2, 3, 1, 1, 4]), torch.tensor([4, 1, 3, 0, 2, 3])
    columns = torch.arange(7)
    mask = (columns >= starts[:, None]) & (columns < (starts + lengths)[:, None])
    mask[0, 2] = False  # what a tool answered
    drawn = torch.randn(4, 6, 7, generator=torch.Generator().manual_seed(1))
    return TrainingBatch(
        input_ids=torch.ones(6, 7, dtype=torch.int64),
        lengths=starts + lengths,
        loss_mask=mask,
        rollout_logprobs=-drawn[0].abs(),
        rewards=torch.where(mask, drawn[1], 0.0),
        groups=torch.tensor([4, 4, 4, 7, 7, 7]),
        old_logprobs=-drawn[2].abs(),
        advantages=torch.where(mask, drawn[3], 0.0),
    )


def descent(policy_objective: PolicyObjective, *cuts: int) -> tuple[float, torch.Tensor]:
    """Loss and gradient of a mini-batch that is cut at these rows."""
    weighed = batch()
    weighed = weighed.with_fields(loss_weights=policy_objective.reduction(weighed))
    assert weighed.old_logprobs is not None
    logprobs = (weighed.old_logprobs.cos() - 1.5).requires_grad_()
    total = torch.zeros(())
    for start, stop in zip((0, *cuts), (*cuts, len(weighed)), strict=True):
        part = weighed.rows(start, stop)
        total = total + policy_objective(logprobs[start:stop, : part.input_ids.shape[1]], part)[0]
    total.backward()
    assert logprobs.grad is not None
    return total.item(), logprobs.grad


WORKS = [
    *((loss, reduction) for loss in ("skyrl_ppo", "skyrl_gspo") for reduction in SUMS),
    *((loss, reduction) for loss in ("verl_vanilla", "verl_of_2025") for reduction in ("token_mean", "sequence_mean")),
    ("skyrl_reinforce", "token_mean"),
]


@pytest.mark.parametrize(("loss", "reduction"), WORKS)
def test_micro_batches_do_not_change_the_loss_of_a_mini_batch(loss: str, reduction: str) -> None:
    policy_objective = objective(loss, reduction)
    expected, slope = descent(policy_objective)
    for cuts in ((3,), (2, 3), (1, 4)):  # (3, 4) of the last is a row without a trained token, alone
        value, gradient = descent(policy_objective, *cuts)
        assert value == pytest.approx(expected, rel=1e-4)
        torch.testing.assert_close(gradient, slope)
    assert slope[~batch().loss_mask].eq(0).all() and slope[batch().loss_mask].ne(0).any()


SAME = [
    *(("skyrl_ppo", reduction, "regular") for reduction in SUMS),
    ("verl_vanilla", "token_mean", "dual_clip"),
    ("verl_of_2025", "token_mean", "regular"),
    ("skyrl_gspo", "sequence_mean", "gspo"),
]


@pytest.mark.parametrize(("loss", "reduction", "same"), SAME)
def test_a_loss_of_another_system_equals_the_built_in_one(loss: str, reduction: str, same: str) -> None:
    clips = {"eps_clip_low": 0.1, "eps_clip_high": 0.3}
    value, slope = descent(objective(loss, reduction, **clips), 2)
    expected, expected_slope = descent(objective(same, reduction, **clips))
    assert value == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(slope, expected_slope)


@pytest.mark.parametrize(
    ("estimator", "same", "settings"),
    [
        ("skyrl_grpo", "grpo", {}),
        ("skyrl_grpo", "grpo", {"grpo_norm_by_std": False}),
        ("verl_leave_one_out", "rloo", {}),
        ("verl_returns", "reinforce++", {"gamma": 1.0, "whiten_advantages": False}),
    ],
)
def test_an_estimator_of_another_system_equals_the_built_in_one(
    estimator: str, same: str, settings: dict[str, Any]
) -> None:
    rows = batch().select(torch.tensor([0, 1, 2, 4, 5]))
    advantages, expected = (
        advantage_estimator(AlgorithmConfig(advantage_estimator=path(name), **settings))(rows)
        for name in (estimator, same)
    )
    torch.testing.assert_close(advantages, expected)


REFUSED = {
    "takes_two": ("token_mean", "py:158 takes_two(first, second) has no known signature"),
    "asks_for_entropy": ("token_mean", "asks for entropy: SkyRL's signature has log_probs,"),
    "reduces_nothing": ("token_mean", "gives one number that depends on the log-probabilities, not a tensor (5, 5)"),
    "counts_padding": ("token_mean", "neither a sum over the tokens of its mask nor their token_mean"),
    "takes_a_logarithm": ("token_mean", "takes_a_logarithm gives the loss nan for 15 of 15 tokens"),
    "compares_answers": ("token_mean", "gives nan for a part of a small batch whose answers together have a finite"),
    "always_by_answer": ("token_mean", "nor their token_mean"),
    "skyrl_reinforce": ("sequence_mean", "AssertionError"),
    "verl_vanilla": ("prompt_mean", "AssertionError"),
    "reads_what_is_not_here": ("token_mean", "config.policy_loss.dro_beta is not here"),
    "asks_for_entropies": ("", "asks for entropies: SkyRL or verl's signature has"),
    "OfNoCall": ("token_mean", "OfNoCall has no __call__"),
    "forgets_the_tokens": ("", "of the shape of response_mask, and not (a tensor (10,), a tensor (10, 5))"),
}


def make(name: str, reduction: str) -> object:
    return (
        objective(name, reduction)
        if reduction
        else advantage_estimator(AlgorithmConfig(advantage_estimator=path(name)))
    )


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_called_or_split_is_refused(name: str) -> None:
    reduction, message = REFUSED[name]
    with pytest.raises(ConfigError) as raised:
        make(name, reduction)
    (problem,) = raised.value.problems
    assert message in problem.message
    assert problem.path == f"trainer.algorithm.{'policy_loss_type' if reduction else 'advantage_estimator'}"


def test_a_mean_by_answer_is_right_where_that_is_the_reduction() -> None:
    policy_objective = objective("always_by_answer", "sequence_mean")
    assert descent(policy_objective, 3)[0] == pytest.approx(descent(policy_objective)[0], rel=1e-4)


def test_parameters_tell_what_a_function_reads() -> None:
    facts = {name: loss_facts(AlgorithmConfig(policy_loss_type=path(name))) for name in LOSSES}
    assert {name for name, fact in facts.items() if fact.reads_rollout_logprobs is None} == {"skyrl_ppo"}
    compared = {name: estimator_facts(AlgorithmConfig(advantage_estimator=path(name))) for name in ESTIMATORS}
    assert {name for name, fact in compared.items() if fact.is_group_relative} == {*ESTIMATORS} - {"verl_returns"}
    assert all(fact.reads_values is False and not fact.compares_with_greedy for fact in compared.values())


def test_an_objective_reaches_another_process_with_its_loss() -> None:
    policy_objective = objective("verl_vanilla")
    assert descent(pickle.loads(pickle.dumps(policy_objective)), 2)[0] == descent(policy_objective, 2)[0]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("loss", "estimator"), list(zip(LOSSES, ESTIMATORS, strict=True)))
def test_it_trains(nano: Path, tmp_path: Path, loss: str, estimator: str) -> None:
    train(
        nano,
        tmp_path,
        trainer__max_training_steps=2,
        trainer__micro_train_batch_size_per_gpu=3,
        trainer__eval_before_train=False,
        trainer__eval_interval=-1,
        trainer__ckpt_interval=-1,
        trainer__algorithm__policy_loss_type=path(loss),
        trainer__algorithm__advantage_estimator=path(estimator),
    )
    own = {f"policy/{name}" for name in ("clip_ratio", "ratio", "ppo_kl", "pg_clipfrac", "pg_clipfrac_lower")}
    steps = [row for row in all_metrics(tmp_path, own) if "policy/policy_loss" in row]
    assert len(steps) == 2 and all(math.isfinite(row["policy/policy_loss"]) for row in steps)
    assert any(own & row.keys() for row in steps)


@pytest.mark.parametrize(("name", "count"), [("counts_padding", 1), ("verl_vanilla", 0)])
def test_it_is_tried_before_the_start(nano: Path, tmp_path: Path, name: str, count: int) -> None:
    run = config(nano, tmp_path, trainer__algorithm__policy_loss_type=path(name))
    problems = list(custom_algorithms_can_be_called(run))
    assert [problem.path for problem in problems] == ["trainer.algorithm.policy_loss_type"] * count
