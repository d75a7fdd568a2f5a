"""Facts about the loss and the estimator that a configuration chooses, built in or a user's own."""

from __future__ import annotations

from typing import Any, TypeVar

import attrs

from skyrl.config.foundation.peer_signatures import (
    ESTIMATOR_SIGNATURES,
    LOSS_SIGNATURES,
    parameters_of,
    peer_signature_of,
)
from skyrl.config.settings.algorithm import AlgorithmConfig
from skyrl.config.settings.estimators import ADVANTAGE_ESTIMATORS, USER_ESTIMATOR, EstimatorFacts
from skyrl.config.settings.losses import POLICY_LOSSES, USER_LOSS, LossFacts
from skyrl.config.settings.registry import AdvantageEstimatorRegistry, PolicyLossRegistry
from skyrl.config.settings.root import SkyRLTrainConfig

F = TypeVar("F", LossFacts, EstimatorFacts)

FIELDS_OF_PEER_LOSSES = ("eps_clip_low", "eps_clip_high", "clip_ratio_c")
"""Fields of `trainer.algorithm` that a loss in another system's signature may read."""

PARAMETERS_OF_PEER_ESTIMATORS = {
    "gamma": {"gamma"},
    "lambd": {"lam", "lambd"},
    "grpo_norm_by_std": {"grpo_norm_by_std", "norm_adv_by_std_in_grpo"},
}
"""Field of `trainer.algorithm` -> parameters by which an estimator in another system's signature takes it."""


def loss_facts(algorithm: AlgorithmConfig) -> LossFacts:
    """Facts about the policy loss with its settings. A user's own loss is imported to read what it declares."""
    name = algorithm.policy_loss_type
    facts = POLICY_LOSSES.get(name)
    if facts is None:
        own = PolicyLossRegistry.declaring(name, algorithm.policy_loss)
        return _with_declared(_peer_loss_facts(own), own)
    return attrs.evolve(facts, **facts.overrides_for(getattr(algorithm, facts.table))) if facts.table else facts


def estimator_facts(algorithm: AlgorithmConfig) -> EstimatorFacts:
    """Facts about the advantage estimator. A user's own estimator is imported to read what it declares."""
    name = algorithm.advantage_estimator
    facts = ADVANTAGE_ESTIMATORS.get(name)
    if facts is not None:
        return facts
    own = AdvantageEstimatorRegistry.declaring(name, algorithm.advantage)
    return _with_declared(_peer_estimator_facts(own), own)


def is_peer_loss(algorithm: AlgorithmConfig) -> bool:
    """Whether the loss has the signature of another system, and so reduces itself."""
    name = algorithm.policy_loss_type
    own = None if name in POLICY_LOSSES else PolicyLossRegistry.declaring(name, algorithm.policy_loss)
    return own is not None and peer_signature_of(own, LOSS_SIGNATURES) is not None


def unread_code(run: SkyRLTrainConfig) -> dict[str, str]:
    """The loss and the estimator of the user's own that were not imported, keyed by the path of their settings.

    `loss_facts` and `estimator_facts` read that path, and assume the facts of code that declares none.
    """
    algorithm = run.trainer.algorithm
    chosen = (
        (PolicyLossRegistry, algorithm.policy_loss_type, algorithm.policy_loss),
        (AdvantageEstimatorRegistry, algorithm.advantage_estimator, algorithm.advantage),
    )
    return {
        registry.table: name
        for registry, name, settings in chosen
        if name not in registry.built_in and registry.declaring(name, settings) is None
    }


def _peer_loss_facts(own: object) -> LossFacts:
    """Facts by the parameters of a loss in another system's signature; `USER_LOSS` for skyrl's own."""
    signature = None if own is None else peer_signature_of(own, LOSS_SIGNATURES)
    if signature is None:
        return USER_LOSS
    names = _names(own)
    reads_rollout = names & {"rollout_logprobs", "rollout_log_probs"}
    reads_clip = names & {"config", "cliprange", "cliprange_low", "cliprange_high", "clip_ratio_c"}
    return LossFacts(
        fields=FIELDS_OF_PEER_LOSSES if reads_clip else (),
        reads_rollout_logprobs=None if reads_rollout else False,
    )


def _peer_estimator_facts(own: object) -> EstimatorFacts:
    """Facts by the parameters of an estimator in another system's signature; `USER_ESTIMATOR` for skyrl's own."""
    signature = None if own is None else peer_signature_of(own, ESTIMATOR_SIGNATURES)
    if signature is None:
        return USER_ESTIMATOR
    names = _names(own)
    taken = PARAMETERS_OF_PEER_ESTIMATORS.items()
    return EstimatorFacts(
        fields=tuple(field for field, parameters in taken if parameters & names or "config" in names),
        is_group_relative="index" in names,
        compares_with_greedy="reward_baselines" in names,
        reads_values="values" in names,
        discounts=True,  # as far as is known
    )


def _names(own: object) -> set[str]:
    return {item.name for item in parameters_of(own) or ()}


def _with_declared(facts: F, thing: object) -> F:
    """The facts, updated with those that the object declares as attributes that are True or False."""
    named = {attribute.name: getattr(thing, attribute.name, None) for attribute in attrs.fields(type(facts))}
    declared: Any = {name: value for name, value in named.items() if isinstance(value, bool)}
    return attrs.evolve(facts, **declared)
