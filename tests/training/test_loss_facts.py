"""What the tables of losses and estimators say is what they do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import attrs
import pytest
import torch
from torch import Tensor

from skyrl.algorithms.losses import LossInputs
from skyrl.config import (
    AlgorithmConfig,
    CISPOConfig,
    CriticConfig,
    DecoupledConfig,
    ModelConfig,
    SkyRLTrainConfig,
    load,
    resolve,
)
from skyrl.config.checks.algorithm import critic_values_are_read, sequence_loss_weighs_answers_equally
from skyrl.config.checks.asynchronous import stale_samples_are_corrected
from skyrl.config.derive.algorithm_facts import estimator_facts, loss_facts
from skyrl.config.loading.check import has_effect
from skyrl.config.settings.estimators import ADVANTAGE_ESTIMATORS
from skyrl.config.settings.losses import POLICY_LOSSES
from skyrl.config.settings.registry import AdvantageEstimatorRegistry, PolicyLossRegistry
from skyrl.training.advantage import advantage_estimator, advantages_of, critic_targets, reward_shaping
from skyrl.training.objective import policy_loss, policy_objective
from skyrl.tree import evolve_at, frozen
from skyrl.tree.rules import paths_read

ALGORITHMS = {name: AlgorithmConfig(policy_loss_type=name) for name in POLICY_LOSSES} | {
    "cispo by the engine": AlgorithmConfig(policy_loss_type="cispo", cispo=CISPOConfig(cispo_anchor="rollout")),
    "decoupled, clipped twice": AlgorithmConfig(
        policy_loss_type="decoupled", decoupled=DecoupledConfig(dual_clip=True)
    ),
}
CHANGED = {"eps_clip_low": 0.05, "eps_clip_high": 0.07, "clip_ratio_c": 1.5}
"""Fields of `trainer.algorithm` that losses share, each with another value than its default."""

EVERY_LOSS = pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS.keys())


def seen(**changes: Tensor) -> LossInputs:
    new = torch.tensor([[-0.2, -0.7, -1.9], [-0.5, -0.4, -1.1]])
    tensors = {
        "logprobs": new,
        "old_logprobs": new - 0.1,
        "rollout_logprobs": new + 0.2,
        "advantages": torch.tensor([[1.0, 1.0, 1.0], [-2.0, -2.0, -2.0]]),
    }
    return LossInputs(mask=torch.ones(2, 3, dtype=torch.bool), **(tensors | changes))


def moved(algorithm: AlgorithmConfig, name: str) -> bool:
    """Does the loss change with these log-probabilities?"""
    loss, spread = policy_loss(algorithm), torch.tensor([[0.9, -0.3, 2.5], [-1.2, 0.5, 0.1]])
    torch.manual_seed(0)  # of the tokens that clip_cov draws
    before = loss(seen())
    torch.manual_seed(0)
    return not torch.equal(before, loss(seen(**{name: seen().logprobs - spread})))


@EVERY_LOSS
def test_a_loss_reads_the_logprobs_that_the_table_has_for_it(algorithm: AlgorithmConfig) -> None:
    facts = loss_facts(algorithm)
    assert moved(algorithm, "old_logprobs") == facts.reads_old_logprobs
    assert moved(algorithm, "rollout_logprobs") == facts.reads_rollout_logprobs


@EVERY_LOSS
def test_a_loss_reads_advantages_where_the_table_says_so(algorithm: AlgorithmConfig) -> None:
    facts = loss_facts(algorithm)  # a loss of pairs gets its weights in place of advantages
    assert moved(algorithm, "advantages") == (facts.reads_advantages or facts.learns_from_pairs)


TRAINED: dict[str, Any] = {
    "trainer.policy.model.path": "policy",
    "trainer.teacher.model.path": "teacher",
    "trainer.algorithm.use_kl_in_reward": True,
    "trainer.algorithm.use_kl_loss": False,
}
"""A run in which everything that makes or changes rewards and advantages is on."""


def read_by(make: Callable[[SkyRLTrainConfig], object], run: SkyRLTrainConfig) -> set[str]:
    """Paths in `trainer.algorithm` and `trainer.teacher` that are read to make something; the loss itself apart."""
    paths = {path for path in paths_read(make, run) if path.startswith(("trainer.algorithm.", "trainer.teacher."))}
    return paths - {"trainer.algorithm.policy_loss_type", "trainer.algorithm.policy_loss"}


@pytest.mark.parametrize("critic", [None, "critic"])
@pytest.mark.parametrize("estimator", ADVANTAGE_ESTIMATORS)
@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_what_shapes_rewards_and_advantages_acts_where_the_loss_or_a_critic_learns_from_them(
    loss: str, estimator: str, critic: str | None
) -> None:
    values = {"trainer.algorithm.policy_loss_type": loss, "trainer.algorithm.advantage_estimator": estimator}
    run = resolve(load([], TRAINED | values | {"trainer.critic.model.path": critic}))
    of_advantages = read_by(lambda run: advantages_of(run.trainer, 2), run)
    of_rewards = read_by(lambda run: reward_shaping(run.trainer.algorithm), run)
    of_returns = read_by(lambda run: critic_targets(run.trainer.algorithm), run)
    facts, learned_from = POLICY_LOSSES[loss], set[str]()
    learned_from |= of_advantages if facts.reads_advantages else set()
    learned_from |= of_rewards if facts.reads_advantages or facts.learns_from_pairs or critic else set()
    learned_from |= of_returns if critic else set()
    every_path = of_advantages | of_rewards | of_returns
    assert {path for path in every_path if has_effect(run, path)} == learned_from


@EVERY_LOSS
def test_a_loss_reads_the_fields_that_the_table_has_for_it(algorithm: AlgorithmConfig) -> None:
    loss = policy_loss(algorithm)
    read = {name for name, value in CHANGED.items() if policy_loss(evolve_at(algorithm, name, value)) != loss}
    assert read == set(loss_facts(algorithm).fields)


@EVERY_LOSS
def test_a_loss_has_the_table_that_the_facts_name(algorithm: AlgorithmConfig) -> None:
    tables = {facts.table for facts in POLICY_LOSSES.values()} - {""}
    loss = policy_loss(algorithm)
    changed = {name for name in tables if policy_loss(evolve_at(algorithm, name, other(algorithm, name))) != loss}
    assert changed == {loss_facts(algorithm).table} - {""}


def other(algorithm: AlgorithmConfig, table: str) -> Any:
    """The table with another value in each field of numbers."""
    settings = getattr(algorithm, table)
    numbers = {name: value for name, value in attrs.asdict(settings).items() if isinstance(value, float)}
    capped = {"behav_imp_weight_cap": 7.0} if table == "decoupled" else {}
    return attrs.evolve(settings, **{name: value / 2 + 0.01 for name, value in numbers.items()}, **capped)


@EVERY_LOSS
def test_a_loss_vanishes_without_advantage_where_the_table_says_so(algorithm: AlgorithmConfig) -> None:
    leaf = seen().logprobs.requires_grad_()
    value = policy_loss(algorithm)(seen(logprobs=leaf, advantages=torch.zeros(2, 3))).sum()
    vanishes = value.item() == 0.0 and not torch.autograd.grad(value, leaf)[0].any()
    assert vanishes or not loss_facts(algorithm).zero_at_zero_advantage
    assert policy_objective(algorithm).zero_at_zero_advantage == loss_facts(algorithm).zero_at_zero_advantage


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
def test_an_estimator_reads_the_fields_that_the_table_has_for_it(name: str) -> None:
    algorithm = AlgorithmConfig(advantage_estimator=name)
    changes = {"grpo_norm_by_std": False, "gamma": 0.5, "lambd": 0.5, "whiten_advantages": False}
    estimator_repr = repr(advantage_estimator(algorithm))
    read = {
        field
        for field, value in changes.items()
        if repr(advantage_estimator(evolve_at(algorithm, field, value))) != estimator_repr
    }
    assert read == set(estimator_facts(algorithm).fields)


def stale(loss: str) -> SkyRLTrainConfig:
    """An asynchronous run with this loss."""
    run = evolve_at(SkyRLTrainConfig(), "trainer.fully_async.enabled", True)
    return evolve_at(run, "trainer.algorithm.policy_loss_type", loss)


@pytest.mark.parametrize(
    ("loss", "is_corrected"),
    [("regular", False), ("importance_sampling", False), ("decoupled", True), ("rollout_is", True), ("dppo", True)],
)
def test_stale_samples_are_corrected_by_losses_that_read_the_engines_logprobs(loss: str, is_corrected: bool) -> None:
    problems = list(stale_samples_are_corrected(stale(loss)))
    assert [problem.severity for problem in problems] == ([] if is_corrected else ["warning"])


@frozen
class Own:
    """A loss of a user's own that declares what it is."""

    width: float = 0.1
    reads_rollout_logprobs: ClassVar[bool] = False
    expects_sequence_mean: ClassVar[bool] = True
    zero_at_zero_advantage: ClassVar[bool] = True

    def __call__(self, inputs: LossInputs) -> Tensor:
        return -inputs.advantages * inputs.logprobs


class OwnEstimator:
    """An estimator without settings that declares what it is."""

    reads_values = False

    def __call__(self, batch: Any) -> Tensor:
        raise AssertionError("the facts are read without a call")


@pytest.fixture
def registered() -> Iterator[None]:
    registries: tuple[Mapping[str, Any], ...] = (PolicyLossRegistry._own, AdvantageEstimatorRegistry._own)
    before = [dict(registry) for registry in registries]
    PolicyLossRegistry.register("own", Own)
    AdvantageEstimatorRegistry.register("own", OwnEstimator)
    yield
    for registry, names in zip(registries, before, strict=True):
        assert isinstance(registry, dict)
        registry.clear()
        registry.update(names)


@pytest.mark.usefixtures("registered")
def test_what_a_loss_of_ones_own_declares_is_checked_like_ours() -> None:
    run = stale("own")
    assert [problem.severity for problem in stale_samples_are_corrected(run)] == ["warning"]
    assert [problem.path for problem in sequence_loss_weighs_answers_equally(run)] == [
        "trainer.algorithm.loss_reduction"
    ]
    assert policy_objective(run.trainer.algorithm).zero_at_zero_advantage


@pytest.mark.usefixtures("registered")
def test_what_an_estimator_of_ones_own_declares_is_checked_like_ours() -> None:
    run = evolve_at(SkyRLTrainConfig(), "trainer.critic", CriticConfig(model=ModelConfig(path="critic")))
    run = evolve_at(run, "trainer.algorithm.advantage_estimator", "own")
    assert [problem.severity for problem in critic_values_are_read(run)] == ["warning"]


@pytest.mark.usefixtures("registered")
def test_a_loss_of_ones_own_that_declares_nothing_is_taken_for_nothing() -> None:
    PolicyLossRegistry.register("plain", lambda inputs: -inputs.logprobs)
    facts = loss_facts(AlgorithmConfig(policy_loss_type="plain"))
    assert facts.reads_old_logprobs and facts.reads_rollout_logprobs is None and not facts.zero_at_zero_advantage
