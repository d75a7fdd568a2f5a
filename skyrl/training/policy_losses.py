"""Makes the policy loss of a configuration; no other module does."""

from __future__ import annotations

from skyrl.algorithms.losses import PolicyLoss
from skyrl.config import AlgorithmConfig
from skyrl.config.derive.chosen_facts import loss_facts
from skyrl.config.foundation.import_paths import built_in
from skyrl.config.settings.losses import POLICY_LOSSES
from skyrl.config.settings.registry import PolicyLossRegistry
from skyrl.tree.classes import fields_of


def policy_loss(algorithm: AlgorithmConfig) -> PolicyLoss:
    """The loss that the configuration asks for. A built-in one has the fields that its line in `POLICY_LOSSES` names,
    and those of its table, under the same names. Raises `ConfigError` for an unknown loss.
    """
    if algorithm.policy_loss_type not in POLICY_LOSSES:
        own: PolicyLoss = PolicyLossRegistry.object(algorithm.policy_loss_type, algorithm.policy_loss)
        return own
    facts = loss_facts(algorithm)
    settings = {name: getattr(algorithm, name) for name in facts.fields}
    if facts.table:
        table = getattr(algorithm, facts.table)
        settings |= {name: getattr(table, name) for name in fields_of(type(table))}
    made: PolicyLoss = built_in(f"skyrl.algorithms.{facts.made_by}")(**settings)
    return made
