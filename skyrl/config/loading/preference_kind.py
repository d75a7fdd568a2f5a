"""The kind of runs that learn from preferences without a reward model."""

from __future__ import annotations

from attrs import evolve

from skyrl.config.checks import checks_in, preference_checks
from skyrl.config.derive.model_tables import Role, grids_of
from skyrl.config.derive.supervised_rules import MODEL
from skyrl.config.effects.preference import PREFERENCE_EFFECTS
from skyrl.config.loading.supervised_kinds import REWARD_MODEL
from skyrl.config.settings.preference_root import PreferenceConfig
from skyrl.planning.topology import Sizes


def loads_reference(run: PreferenceConfig) -> bool:
    """Whether the run loads a second model, which the policy is compared with."""
    return run.compares and not run.reference_is_policy


REFERENCE = Role(
    name="ref",
    path="",
    trainer="",
    placement="placement.",
    title="reference",
    learns=False,
    stored_as="ref",
    exists=loads_reference,
    exists_where="the losses compare with a reference that is not the policy without its adapter",
)
"""The frozen model, on the ranks of the policy and sharded like it."""

_ROLES = (MODEL, REFERENCE)


def _sizes(run: PreferenceConfig) -> Sizes:
    """Sizes of a preference run: policy and reference on the same GPUs, and no engines."""
    gpus = run.placement.num_gpus_per_node
    return Sizes(models=grids_of(run, _ROLES), colocate_all=False, gpus_per_node=gpus)


PREFERENCE = evolve(
    REWARD_MODEL,
    name="preference",
    root=PreferenceConfig,
    checks=(*REWARD_MODEL.checks, *checks_in(preference_checks)),
    effects=(*REWARD_MODEL.effects, *PREFERENCE_EFFECTS),
    sizes=_sizes,
    roles=_ROLES,
    rows="pairs",
    reader="skyrl.data.preference_rows:preference_rows_reader",
    experiment="skyrl.experiments.preference:PreferenceExp",
)
