"""The kinds of run: reinforcement learning here, others in modules of their own. A new kind is a line of `KINDS`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from skyrl.config.checks import (
    agents,
    algorithm,
    asynchronous,
    batches,
    checkpoints,
    checks_in,
    data,
    engines,
    every_kind,
    experts,
    learners,
    megatron,
    placement,
    plausible,
    rollouts,
    sampling,
)
from skyrl.config.checks.models import model_checks
from skyrl.config.derive.algorithm_facts import unread_code
from skyrl.config.derive.model_tables import Role
from skyrl.config.derive.rl_models import RL_ROLES
from skyrl.config.derive.rules import RULES
from skyrl.config.derive.run_kind import RunKind
from skyrl.config.derive.sizes import sizes_of
from skyrl.config.effects.rl_effects import EFFECTS
from skyrl.config.foundation.entry import RunConfig
from skyrl.config.foundation.import_paths import load_builtin
from skyrl.config.settings.root import SkyRLTrainConfig
from skyrl.tree.classes import fields_of

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from skyrl.config.settings.preference_root import PreferenceConfig
    from skyrl.config.settings.supervised_root import RewardModelConfig, SFTConfig

RL = RunKind(
    name="rl",
    root=SkyRLTrainConfig,
    rules=RULES,
    checks=(
        *checks_in(data, sampling, agents, every_kind, checkpoints, algorithm, batches, placement, megatron),
        *checks_in(experts, engines, learners),
        *model_checks(tuple(RL_ROLES.values())),
        *checks_in(rollouts, asynchronous, plausible),
    ),
    effects=EFFECTS,
    unread_code=unread_code,
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
    "preference": f"{_SUPERVISED}:PREFERENCE",
}
"""Value of `kind` in a file -> import path of its `RunKind`, imported on request: checking an RL file stays quick."""


@cache
def kind_named(name: str) -> RunKind:
    """The kind of run with this name. Raises `KeyError` for a kind that does not exist."""
    kind: RunKind = load_builtin(KINDS[name])
    return kind


def kind_of(run: Any) -> RunKind:
    """The kind of a run's tree, or of the tree's class."""
    return kind_named(str(fields_of(run)["kind"].default) if isinstance(run, type) else run.kind)


def roles_of(run: RunConfig) -> tuple[Role, ...]:
    """The models that a resolved run has."""
    return tuple(role for role in kind_of(run).roles if role.exists(run))


def samples_rollouts(run: RunConfig) -> TypeIs[SkyRLTrainConfig]:
    """Whether the run trains on what engines sample from one of its models."""
    return any(role.is_sampled_from for role in kind_of(run).roles)


def reads_chats(run: RunConfig) -> TypeIs[SFTConfig]:
    """Whether a row of the run's data is one chat, text or list of tokens to learn."""
    return kind_of(run).rows == "chats"


def is_reward_model_run(run: RunConfig) -> TypeIs[RewardModelConfig]:
    """Whether the run trains a model that scores answers."""
    kind = kind_of(run)
    return kind.rows == "pairs" and kind.trained.scores


def is_preference_run(run: RunConfig) -> TypeIs[PreferenceConfig]:
    """Whether the run trains a policy on pairs of a better and a worse answer."""
    kind = kind_of(run)
    return kind.rows == "pairs" and not kind.trained.scores


def header_of(root: type[RunConfig]) -> dict[str, str]:
    """First lines of a file of this kind of run: empty for reinforcement learning, which needs no `kind`."""
    kind = kind_of(root)
    return {} if kind is RL else {"kind": kind.name}


def root_of(kind: str) -> type[RunConfig]:
    """The class of the tree of a kind. Raises `KeyError` for a kind that does not exist."""
    return kind_named(kind).root
