"""The kinds of supervised runs: fine-tuning and reward models."""

from __future__ import annotations

from functools import partial

from skyrl.config.checks import checks_in, every_kind, megatron, sft_teachers, supervised_checks
from skyrl.config.checks.models import model_checks
from skyrl.config.derive.model_tables import grids_of
from skyrl.config.derive.run_kind import RunKind
from skyrl.config.derive.supervised_rules import MODEL, REWARD, SUPERVISED_RULES
from skyrl.config.effects.supervised import SUPERVISED_EFFECTS, TEACHER_EFFECTS
from skyrl.config.settings.supervised_root import RewardModelConfig, SFTConfig, SupervisedConfig
from skyrl.planning.topology import Sizes


def _sizes(run: SupervisedConfig) -> Sizes:
    """Sizes of a supervised run: one model and no engines."""
    models = grids_of(run, [MODEL])
    gpus = run.placement.num_gpus_per_node
    return Sizes(models=models, colocate_all=False, colocate_policy_ref=False, gpus_per_node=gpus)


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
