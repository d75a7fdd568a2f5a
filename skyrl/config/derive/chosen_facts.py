"""Facts about the loss and the estimator that a configuration chooses, built in or a user's own."""

from __future__ import annotations

from typing import Any, TypeVar

import attrs

from skyrl.config.settings.algorithm import AlgorithmConfig
from skyrl.config.settings.estimators import ADVANTAGE_ESTIMATORS, OWN_ESTIMATOR, EstimatorFacts
from skyrl.config.settings.losses import POLICY_LOSSES, USER_LOSS, LossFacts
from skyrl.config.settings.registry import AdvantageEstimatorRegistry, PolicyLossRegistry

F = TypeVar("F", LossFacts, EstimatorFacts)


def loss_facts(algorithm: AlgorithmConfig) -> LossFacts:
    """Facts about the policy loss with its settings. A user's own loss is imported to read what it declares."""
    name = algorithm.policy_loss_type
    facts = POLICY_LOSSES.get(name)
    if facts is None:
        return _declared(USER_LOSS, PolicyLossRegistry.declaring(name, algorithm.policy_loss))
    return attrs.evolve(facts, **facts.by_settings(getattr(algorithm, facts.table))) if facts.table else facts


def estimator_facts(algorithm: AlgorithmConfig) -> EstimatorFacts:
    """Facts about the advantage estimator. A user's own estimator is imported to read what it declares."""
    name = algorithm.advantage_estimator
    facts = ADVANTAGE_ESTIMATORS.get(name)
    return facts or _declared(OWN_ESTIMATOR, AdvantageEstimatorRegistry.declaring(name, algorithm.advantage))


def _declared(facts: F, thing: object) -> F:
    """The facts, updated with those that the object declares as attributes that are True or False."""
    named = {each.name: getattr(thing, each.name, None) for each in attrs.fields(type(facts))}
    declared: Any = {name: value for name, value in named.items() if isinstance(value, bool)}
    return attrs.evolve(facts, **declared)
