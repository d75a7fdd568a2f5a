"""The kinds of run: reinforcement learning here, supervised ones in `supervised_kinds.py`."""

from __future__ import annotations

from typing import Any

from skyrl.config.checks.agents import AGENT_CHECKS
from skyrl.config.checks.algorithm import ALGORITHM_CHECKS
from skyrl.config.checks.allocation import ALLOCATION_CHECKS
from skyrl.config.checks.asynchronous import ASYNC_CHECKS
from skyrl.config.checks.batches import BATCH_CHECKS
from skyrl.config.checks.checkpoints import CHECKPOINT_CHECKS
from skyrl.config.checks.data import DATA_CHECKS
from skyrl.config.checks.engines import ENGINE_CHECKS
from skyrl.config.checks.experts import EXPERT_CHECKS
from skyrl.config.checks.learners import LEARNER_CHECKS
from skyrl.config.checks.megatron import MEGATRON_CHECKS
from skyrl.config.checks.memory import MEMORY_CHECKS
from skyrl.config.checks.placement import PLACEMENT_CHECKS
from skyrl.config.checks.plausible import PLAUSIBLE_CHECKS
from skyrl.config.checks.rollouts import ROLLOUT_CHECKS
from skyrl.config.checks.sampling import SAMPLING_CHECKS
from skyrl.config.checks.sequences import SEQUENCE_CHECKS
from skyrl.config.derive.rules import RULES
from skyrl.config.derive.sizes import sizes_of
from skyrl.config.effects.rl_effects import EFFECTS
from skyrl.config.foundation.entry import RunConfig
from skyrl.config.foundation.run_kind import RunKind
from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.tree.classes import fields_of

RL = RunKind(
    name="rl",
    root=SkyRLTrainConfig,
    rules=RULES,
    checks=(
        *DATA_CHECKS,
        *SAMPLING_CHECKS,
        *AGENT_CHECKS,
        *CHECKPOINT_CHECKS,
        *ALGORITHM_CHECKS,
        *BATCH_CHECKS,
        *PLACEMENT_CHECKS,
        *MEGATRON_CHECKS,
        *ALLOCATION_CHECKS,
        *MEMORY_CHECKS,
        *SEQUENCE_CHECKS,
        *EXPERT_CHECKS,
        *ENGINE_CHECKS,
        *LEARNER_CHECKS,
        *ROLLOUT_CHECKS,
        *ASYNC_CHECKS,
        *PLAUSIBLE_CHECKS,
    ),
    effects=EFFECTS,
    sizes=sizes_of,
    trainer="trainer",
    model="trainer.policy.model",
    exported_as="policy",
    data="data.train_data",
    length=("trainer.epochs", "trainer.max_training_steps"),
    experiment="skyrl.experiments.ppo:BasePPOExp",
    preflight="skyrl.experiments.preflight:PREFLIGHT",
    doctor="skyrl.experiments.preflight:DOCTOR",
)

KINDS = ("rl", "sft", "reward_model")
"""Values that a file's `kind` may take."""


def kind_named(name: str) -> RunKind:
    """The kind of run with this name. Supervised kinds are imported only on request, which keeps checking an RL file
    quick.

    Raises `KeyError` for a kind that does not exist.
    """
    if name == RL.name:
        return RL
    from skyrl.config.loading.supervised_kinds import SUPERVISED_KINDS

    return {kind.name: kind for kind in SUPERVISED_KINDS}[name]


def kind_of(run: Any) -> RunKind:
    """The kind of a run's tree, or of the tree's class."""
    return kind_named(str(fields_of(run)["kind"].default) if isinstance(run, type) else run.kind)


def header_of(root: type[RunConfig]) -> dict[str, str]:
    """First lines of a file of this kind of run: empty for reinforcement learning, which needs no `kind`."""
    kind = kind_of(root)
    return {} if kind is RL else {"kind": kind.name}


def root_of(kind: str) -> type[RunConfig]:
    """The class of the tree of a kind. Raises `KeyError` for a kind that does not exist."""
    return kind_named(kind).root
