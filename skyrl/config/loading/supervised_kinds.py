"""The kinds of supervised runs: fine-tuning and reward models."""

from __future__ import annotations

from functools import partial

from skyrl.config.checks.supervised_checks import SUPERVISED_CHECKS
from skyrl.config.derive.supervised_rules import SUPERVISED_RULES
from skyrl.config.effects.supervised import SUPERVISED_EFFECTS
from skyrl.config.foundation.run_kind import RunKind
from skyrl.config.settings.supervised_root import RewardModelConfig, SFTConfig, SupervisedConfig
from skyrl.planning.topology import Grid, Sizes


def _sizes(run: SupervisedConfig) -> Sizes:
    """Sizes of a supervised run: one model and no engines."""
    grid = Grid(nodes=run.placement.num_nodes, gpus_per_node=run.placement.num_gpus_per_node)
    return Sizes(
        policy=grid,
        critic=None,
        ref=None,
        engines=None,
        colocate_all=False,
        colocate_policy_ref=False,
        gpus_per_node=grid.gpus_per_node,
    )


_supervised = partial(
    RunKind,
    rules=SUPERVISED_RULES,
    checks=SUPERVISED_CHECKS,
    effects=SUPERVISED_EFFECTS,
    sizes=_sizes,
    trainer="",
    model="model",
    data="train_datasets",
    length=("num_epochs",),
    preflight="skyrl.experiments.preflight:SUPERVISED_PREFLIGHT",
    doctor="skyrl.experiments.preflight:SUPERVISED_DOCTOR",
)

SUPERVISED_KINDS = (
    _supervised(name="sft", root=SFTConfig, experiment="skyrl.experiments.sft:SFTExp"),
    _supervised(
        name="reward_model",
        root=RewardModelConfig,
        role="critic",
        experiment="skyrl.experiments.reward_model:RewardModelExp",
    ),
)
