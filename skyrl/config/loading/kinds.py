"""The kinds of run: reinforcement learning here, others in modules of their own. A new kind is a line of `KINDS`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from skyrl.config.checks.agents import AGENT_CHECKS
from skyrl.config.checks.algorithm import ALGORITHM_CHECKS
from skyrl.config.checks.allocation import ALLOCATION_CHECKS
from skyrl.config.checks.asynchronous import ASYNC_CHECKS
from skyrl.config.checks.batches import BATCH_CHECKS
from skyrl.config.checks.checkpoints import CHECKPOINT_CHECKS
from skyrl.config.checks.data import DATA_CHECKS
from skyrl.config.checks.engines import ENGINE_CHECKS
from skyrl.config.checks.every_kind import EVERY_KIND_CHECKS
from skyrl.config.checks.experts import EXPERT_CHECKS
from skyrl.config.checks.learners import LEARNER_CHECKS
from skyrl.config.checks.megatron import MEGATRON_CHECKS
from skyrl.config.checks.memory import MEMORY_CHECKS
from skyrl.config.checks.placement import PLACEMENT_CHECKS
from skyrl.config.checks.plausible import PLAUSIBLE_CHECKS
from skyrl.config.checks.rollouts import ROLLOUT_CHECKS
from skyrl.config.checks.sampling import SAMPLING_CHECKS
from skyrl.config.derive.model_tables import Role
from skyrl.config.derive.rl_models import RL_ROLES
from skyrl.config.derive.rules import RULES
from skyrl.config.derive.run_kind import RunKind
from skyrl.config.derive.sizes import sizes_of
from skyrl.config.effects.rl_effects import EFFECTS
from skyrl.config.foundation.entry import RunConfig
from skyrl.config.foundation.import_paths import built_in
from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.tree.classes import fields_of

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from skyrl.config.settings.supervised_root import RewardModelConfig, SFTConfig

RL = RunKind(
    name="rl",
    root=SkyRLTrainConfig,
    rules=RULES,
    checks=(
        *DATA_CHECKS,
        *SAMPLING_CHECKS,
        *AGENT_CHECKS,
        *EVERY_KIND_CHECKS,
        *CHECKPOINT_CHECKS,
        *ALGORITHM_CHECKS,
        *BATCH_CHECKS,
        *PLACEMENT_CHECKS,
        *MEGATRON_CHECKS,
        *ALLOCATION_CHECKS,
        *MEMORY_CHECKS,
        *EXPERT_CHECKS,
        *ENGINE_CHECKS,
        *LEARNER_CHECKS,
        *ROLLOUT_CHECKS,
        *ASYNC_CHECKS,
        *PLAUSIBLE_CHECKS,
    ),
    effects=EFFECTS,
    sizes=sizes_of,
    roles=tuple(RL_ROLES.values()),
    rows="prompts",
    data="data.train_data",
    length=("trainer.epochs", "trainer.max_training_steps"),
    experiment="skyrl.experiments.ppo:BasePPOExp",
    preflight="skyrl.experiments.preflight:PREFLIGHT",
    doctor="skyrl.experiments.preflight:DOCTOR",
)

_SUPERVISED = "skyrl.config.loading.supervised_kinds"

KINDS: Mapping[str, str] = {
    "rl": f"{__name__}:RL",
    "sft": f"{_SUPERVISED}:SFT",
    "reward_model": f"{_SUPERVISED}:REWARD_MODEL",
}
"""Value of `kind` in a file -> import path of its `RunKind`, imported on request: checking an RL file stays quick."""


@cache
def kind_named(name: str) -> RunKind:
    """The kind of run with this name. Raises `KeyError` for a kind that does not exist."""
    kind: RunKind = built_in(KINDS[name])
    return kind


def kind_of(run: Any) -> RunKind:
    """The kind of a run's tree, or of the tree's class."""
    return kind_named(str(fields_of(run)["kind"].default) if isinstance(run, type) else run.kind)


def roles_of(run: RunConfig) -> tuple[Role, ...]:
    """The models that a resolved run has."""
    return tuple(role for role in kind_of(run).roles if role.exists(run))


def samples_rollouts(run: RunConfig) -> TypeIs[SkyRLTrainConfig]:
    """Whether the run trains on what engines sample from one of its models."""
    return any(role.sent for role in kind_of(run).roles)


def reads_chats(run: RunConfig) -> TypeIs[SFTConfig]:
    """Whether a row of the run's data is one chat, text or list of tokens to learn."""
    return kind_of(run).rows == "chats"


def reads_pairs(run: RunConfig) -> TypeIs[RewardModelConfig]:
    """Whether a row of the run's data is a pair of a better and a worse chat."""
    return kind_of(run).rows == "pairs"


def header_of(root: type[RunConfig]) -> dict[str, str]:
    """First lines of a file of this kind of run: empty for reinforcement learning, which needs no `kind`."""
    kind = kind_of(root)
    return {} if kind is RL else {"kind": kind.name}


def root_of(kind: str) -> type[RunConfig]:
    """The class of the tree of a kind. Raises `KeyError` for a kind that does not exist."""
    return kind_named(kind).root
