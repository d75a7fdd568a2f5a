"""The kinds of supervised runs: fine-tuning, reward models, and preferences without a reward model."""

from __future__ import annotations

from functools import partial

from skyrl.config.checks import checks_in, every_kind, megatron, preference_checks, sft_teachers, supervised_checks
from skyrl.config.checks.models import model_checks
from skyrl.config.derive.model_tables import Role, grids_of
from skyrl.config.derive.run_kind import RunKind
from skyrl.config.derive.supervised_rules import MODEL, REWARD, SUPERVISED_RULES
from skyrl.config.effects.supervised import PREFERENCE_EFFECTS, SUPERVISED_EFFECTS, TEACHER_EFFECTS
from skyrl.config.settings.preference_root import PreferenceConfig
from skyrl.config.settings.supervised_root import RewardModelConfig, SFTConfig, SupervisedConfig
from skyrl.planning.topology import Sizes


def _sizes(run: SupervisedConfig, roles: tuple[Role, ...] = (MODEL,)) -> Sizes:
    """Sizes of a supervised run: one model, or a policy and its reference on the same GPUs, and no engines."""
    gpus = run.placement.num_gpus_per_node
    return Sizes(
        models=grids_of(run, roles), colocate_all=False, colocate_policy_ref=len(roles) > 1, gpus_per_node=gpus
    )


_CHECKS = (*checks_in(supervised_checks, every_kind, megatron), *model_checks((MODEL,)))

_supervised = partial(
    RunKind,
    rules=SUPERVISED_RULES,
    checks=_CHECKS,
    effects=SUPERVISED_EFFECTS,
    sizes=_sizes,
    data="train_datasets",
    length=("num_epochs",),
    preflight="skyrl.experiments.preflight:SUPERVISED_PREFLIGHT",
    doctor="skyrl.experiments.preflight:SUPERVISED_DOCTOR",
)

SFT = _supervised(
    name="sft",
    root=SFTConfig,
    checks=(*_CHECKS, *checks_in(sft_teachers)),
    effects=(*SUPERVISED_EFFECTS, *TEACHER_EFFECTS),
    roles=(MODEL,),
    rows="chats",
    reader="skyrl.data.supervised_rows:supervised_reader",
    experiment="skyrl.experiments.sft:SFTExp",
)

REWARD_MODEL = _supervised(
    name="reward_model",
    root=RewardModelConfig,
    roles=(REWARD,),
    rows="pairs",
    reader="skyrl.data.supervised_rows:preference_reader",
    experiment="skyrl.experiments.sft:RewardModelExp",
)


REFERENCE = Role(
    name="ref",
    path="",
    trainer="",
    placement="placement.",
    title="reference",
    learns=False,
    stored_as="ref",
    exists=lambda run: run.compares and not run.reference_is_policy,
    exists_where="the losses compare with a reference that is not the policy without its adapter",
)
"""The frozen model of a preference run, on the ranks of the policy and sharded like it."""

PREFERENCE = _supervised(
    name="preference",
    root=PreferenceConfig,
    checks=(*_CHECKS, *checks_in(preference_checks)),
    effects=(*SUPERVISED_EFFECTS, *PREFERENCE_EFFECTS),
    sizes=partial(_sizes, roles=(MODEL, REFERENCE)),
    roles=(MODEL, REFERENCE),
    rows="pairs",
    reader="skyrl.data.preference_rows:preference_rows_reader",
    experiment="skyrl.experiments.preference:PreferenceExp",
)
