"""Advantage estimators, and facts about each. Formulas and papers are in `skyrl.algorithms`.

`ADVANTAGE_ESTIMATORS` registers the built-in ones: checks, effects, sampling and training read it;
`skyrl.training.advantage` makes them.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs


@attrs.frozen(kw_only=True)
class EstimatorFacts:
    """Facts about an advantage estimator.

    A user's estimator declares what differs from `USER_ESTIMATOR` as attributes of its class, under the same names.
    """

    fields: tuple[str, ...] = ()
    """Fields of `trainer.algorithm` that it reads."""

    is_group_relative: bool = False
    """Whether an answer is measured against the others to its prompt: with one answer there is nothing to compare."""

    compares_with_greedy: bool = False
    """Whether an answer is measured against a greedy one, whose reward is in the batch's `baselines`."""

    reads_values: bool | None = False
    """Whether the estimator reads a critic's values. None: unknown."""

    discounts: bool = False
    """Whether rewards of later tokens count less, which requires a trajectory to be a single row."""


ADVANTAGE_ESTIMATORS: Mapping[str, EstimatorFacts] = {
    "grpo": EstimatorFacts(fields=("grpo_norm_by_std",), is_group_relative=True),
    "rloo": EstimatorFacts(is_group_relative=True),
    "maxrl": EstimatorFacts(is_group_relative=True),
    "reinforce++": EstimatorFacts(fields=("gamma", "whiten_advantages"), discounts=True),
    "reinforce++-baseline": EstimatorFacts(is_group_relative=True),
    "gae": EstimatorFacts(fields=("gamma", "lambd", "whiten_advantages"), reads_values=True, discounts=True),
    "remax": EstimatorFacts(compares_with_greedy=True),
    "opo": EstimatorFacts(is_group_relative=True),
    "gpg": EstimatorFacts(is_group_relative=True),
}
"""Facts about each built-in estimator, keyed by the value of `advantage_estimator`."""

USER_ESTIMATOR = EstimatorFacts(reads_values=None)
"""Facts assumed of a user's estimator that declares none."""
