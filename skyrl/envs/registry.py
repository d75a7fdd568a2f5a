"""Finds a task by its name: a registered environment, or an import path from the user's configuration.

    gsm8k                       a registered environment
    reasoning_gym:chain_sum     a task of the package reasoning-gym
    mcp                         tools of MCP servers, with the reward that environment.skyrl_gym.mcp names
    my_pkg.tasks:MyEnv          a subclass of `Env`, or a plain reward function, from an importable module
    rewards.py:my_reward        the same from a file; subclasses of SkyRL-Gym's `BaseTextEnv` work unchanged

A reward function is called as `function(completion, ground_truth=..., **extras)` and returns a number; functions
written for TRL or verl are called with the arguments they expect (`reward_functions.py`). A function of one parameter,
`extras`, makes environments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from attrs import frozen

from skyrl.config import EnvironmentConfig, SkyRLGymConfig
from skyrl.config.foundation.import_paths import is_import_path
from skyrl.config.settings.environment import (
    ENVIRONMENTS,
    MCP,
    GSM8kLLMJudgeEnvConfig,
    PairwiseJudgeEnvConfig,
    built_in_name,
    weighted_names,
)
from skyrl.envs.builtin.aime import AIMEEnv
from skyrl.envs.builtin.code import CodeEnv
from skyrl.envs.builtin.gsm8k import GSM8kEnv, GSM8kMultiTurnEnv
from skyrl.envs.builtin.judge_service import JudgeService
from skyrl.envs.builtin.llm_judge import LLMJudgeEnv
from skyrl.envs.builtin.math_equal import math_equal
from skyrl.envs.builtin.multiply import MultiplyEnv
from skyrl.envs.builtin.pairwise_judge import PairwiseJudge
from skyrl.envs.builtin.reasoning_gym import ReasoningGymEnv
from skyrl.envs.builtin.reward_model import TOKEN_VARIABLE as REWARD_TOKEN
from skyrl.envs.builtin.reward_model import RewardModelEnv
from skyrl.envs.builtin.search_code import SearchCodeEnv
from skyrl.envs.env import Env
from skyrl.envs.group_rewards import GroupReward, is_group_reward
from skyrl.envs.isolated import IsolatedTask, isolated
from skyrl.envs.mcp.environment import TABLE as MCP_TABLE
from skyrl.envs.mcp.environment import McpTask
from skyrl.envs.reward_functions import PlainReward, reserved_names
from skyrl.envs.search import TOKEN_VARIABLE, Retrieve, SearchEnv, ask_retriever
from skyrl.envs.services.remote_sandbox import TOKEN_VARIABLE as CODE_TOKEN
from skyrl.envs.services.remote_sandbox import RemoteSandbox, RunsPrograms
from skyrl.envs.skyrl_gym_text import SkyRLGymTextEnv, is_of_skyrl_gym
from skyrl.envs.text2sql import Text2SQLEnv
from skyrl.envs.weighted_rewards import WeightedPart, WeightedRewards
from skyrl.errors import TaskError
from skyrl.processes.credentials import api_key
from skyrl.sandbox.sandbox import shared_sandbox
from skyrl.tree.code_names import OF_PROGRAM
from skyrl.tree.imports import import_object

PAIRWISE = "pairwise_judge"
"""The environment whose rewards come from comparing the answers of a group."""

MakeEnv = Callable[[Mapping[str, Any]], Env]
"""Factory: extras of a row -> a new environment."""


def _program_runner(gym: SkyRLGymConfig) -> RunsPrograms:
    """The sandbox that programs run in: a remote service, or one on this machine."""
    if gym.code_url:
        return RemoteSandbox(gym.code_url, api_key(CODE_TOKEN), gym.service_patience_seconds)
    return shared_sandbox(gym.sandbox_tier)


def _math_comparison(gym: SkyRLGymConfig) -> Callable[[str, str], bool] | None:
    """Compares answers as mathematics; None to compare them as text."""
    return math_equal(gym.sandbox_tier) if gym.math_equivalence else None


def _judge(name: str, settings: GSM8kLLMJudgeEnvConfig | PairwiseJudgeEnvConfig, gym: SkyRLGymConfig) -> JudgeService:
    return JudgeService(
        model=settings.model,
        base_url=settings.base_url,
        api_key=api_key("OPENAI_API_KEY"),
        patience=gym.service_patience_seconds,
        setting=f"environment.skyrl_gym.{name}.base_url",
    )


def _retrieve(gym: SkyRLGymConfig) -> Retrieve:
    return partial(ask_retriever, gym.search, api_key(TOKEN_VARIABLE), patience=gym.service_patience_seconds)


_BUILT_IN: dict[str, Callable[[Mapping[str, Any], SkyRLGymConfig], Env]] = {
    "aime": lambda extras, gym: AIMEEnv(extras, _math_comparison(gym)),
    "code": lambda extras, gym: CodeEnv(extras, _program_runner(gym)),
    "gsm8k": lambda extras, gym: GSM8kEnv(extras, _math_comparison(gym)),
    "gsm8k_multi_turn": lambda extras, gym: GSM8kMultiTurnEnv(extras),
    "lcb": lambda extras, gym: CodeEnv(extras, _program_runner(gym)),
    "llm_as_a_judge": lambda extras, gym: LLMJudgeEnv(extras, _judge("llm_as_a_judge", gym.llm_as_a_judge, gym)),
    MCP: lambda extras, gym: _mcp(gym)(extras),
    "multiply": lambda extras, gym: MultiplyEnv(extras),
    PAIRWISE: lambda extras, gym: _pairwise_judge(gym)(extras),
    "reasoning_gym": lambda extras, gym: ReasoningGymEnv(extras, gym.sandbox_tier),
    "reward_model": lambda extras, gym: RewardModelEnv(
        extras, gym.reward_model, api_key(REWARD_TOKEN), gym.service_patience_seconds
    ),
    "search": lambda extras, gym: SearchEnv(extras, _retrieve(gym)),
    "searchcode": lambda extras, gym: SearchCodeEnv(extras, _retrieve(gym), shared_sandbox(gym.sandbox_tier)),
    "text2sql": lambda extras, gym: Text2SQLEnv(
        extras, gym.text2sql, shared_sandbox(gym.sandbox_tier, (Path(gym.text2sql.db_path).expanduser().resolve(),))
    ),
}
"""Makers of the built-in environments, whose facts are in `ENVIRONMENTS`."""

_USER_REGISTERED: dict[str, MakeEnv] = {}
"""Environments that `register` has added, without the built-in ones."""


ACCEPT_TIER = 'to accept the tier, set environment.skyrl_gym.sandbox_tier = "{tier}"'
"""Remedy for a tier that is weaker than others."""


def sandboxed_parts(environment: EnvironmentConfig, tasks: Iterable[str]) -> list[str]:
    """Tasks, and the agent, that run programs in a sandbox of this machine."""
    sandboxed = sorted(task for task in tasks if uses_sandbox(task, environment.skyrl_gym))
    agent = environment.agent
    return [*sandboxed, "environment.agent"] if agent.isolate and agent.plays else sandboxed


def uses_sandbox(name: str, gym: SkyRLGymConfig) -> bool:
    """Whether any part of this environment runs in a sandbox."""
    parts = weighted_names(name)
    if len(parts) > 1:
        return any(uses_sandbox(part, gym) for _, part in parts)
    name = built_in_name(parts[0][1])
    if name not in ENVIRONMENTS:
        return is_import_path(name) and gym.isolate_user_env
    if name == MCP:
        return gym.mcp.runs_programs or (gym.mcp.reward is not None and uses_sandbox(gym.mcp.reward, gym))
    facts, is_elsewhere = ENVIRONMENTS[name], ENVIRONMENTS[name].service == "code_url" and bool(gym.code_url)
    return (facts.sandboxed and not is_elsewhere) or (facts.supports_math_equivalence and gym.math_equivalence)


def register(name: str, make: MakeEnv) -> None:
    """Register an environment under a name that datasets may use. Raises `TaskError` for a name that is taken or
    invalid.
    """
    if ":" in name or not name:
        raise TaskError(f"{name!r} cannot be a registered name: a colon marks an import path")
    if name in _BUILT_IN or (name in _USER_REGISTERED and _USER_REGISTERED[name] is not make):
        raise TaskError(f"an environment named {name!r} is already registered")
    _USER_REGISTERED[name] = make


def registered_names() -> tuple[str, ...]:
    """Every name that `find_env` knows without importing anything: the built-in ones, and those of `register`."""
    return tuple(sorted([*_USER_REGISTERED, *_BUILT_IN]))


def find_env(name: str, settings: SkyRLGymConfig | None = None) -> MakeEnv:
    """Factory of environments of this name, which is trusted: `find_env_of_row` is for names in data.

    An import path is followed: pass only names from the user's configuration. `settings` are the settings of the
    built-in environments; None: their defaults. Raises `TaskError`, which says what was looked for and where.
    """
    parts = weighted_names(name)
    if len(parts) > 1 or parts[0][0] != 1:
        return _several(parts, settings)
    if name == MCP and settings is not None:
        return _mcp(settings)
    if name == PAIRWISE:
        return _pairwise_judge(settings or SkyRLGymConfig())
    if (builtin_name := built_in_name(name)) in _BUILT_IN:
        return _built_in(builtin_name, settings or SkyRLGymConfig())
    if settings is not None and settings.isolate_user_env and is_import_path(name):
        return isolated(name, settings)
    if name in _USER_REGISTERED:
        return _USER_REGISTERED[name]
    return _imported(name)


def _several(parts: Sequence[tuple[float, str]], settings: SkyRLGymConfig | None) -> WeightedRewards:
    """Factory of the weighted sum of several rewards. Raises `TaskError`."""
    short_names = [name.rpartition(":")[2] for _, name in parts]
    weighted_parts = []
    for (weight, name), short in zip(parts, short_names, strict=True):
        make = find_env(name, settings)
        if isinstance(make, GroupReward):
            raise TaskError(f"{name} compares the answers of a group, and cannot be one of several rewards")
        weighted_parts.append(
            WeightedPart(name=short if short_names.count(short) == 1 else name, weight=weight, make=make)
        )
    return WeightedRewards(tuple(weighted_parts))


def _mcp(gym: SkyRLGymConfig) -> McpTask:
    """Factory of environments with tools of MCP servers, which are not started yet. Raises `TaskError`."""
    if gym.mcp.reward is None:
        raise TaskError(f"the environment mcp has no reward: set {MCP_TABLE}.reward")
    reward = find_env(gym.mcp.reward, gym)
    if isinstance(reward, GroupReward | McpTask):
        raise TaskError(f"{gym.mcp.reward} cannot judge single answers: set {MCP_TABLE}.reward to a reward that does")
    return McpTask(settings=gym.mcp, tier=gym.sandbox_tier, reward=reward)


def _pairwise_judge(gym: SkyRLGymConfig) -> GroupReward:
    """Rewards by a judge that compares the answers of a group."""
    settings = gym.pairwise_judge
    return GroupReward(PairwiseJudge(service=_judge(PAIRWISE, settings, gym), settings=settings))


@frozen
class BuiltIn:
    """Makes environments of a built-in task."""

    name: str
    gym: SkyRLGymConfig

    def __call__(self, extras: Mapping[str, Any]) -> Env:
        return _BUILT_IN[self.name](extras, self.gym)


_built_in = cache(BuiltIn)


def answers_immediately(make: MakeEnv) -> bool:
    """Whether environments start and judge within microseconds: nothing in them waits, runs a program or is code of
    users, so that they may be called without a thread.
    """
    match make:
        case BuiltIn(name=name, gym=gym):
            facts = ENVIRONMENTS[name]
            return facts.immediate and not (facts.supports_math_equivalence and gym.math_equivalence)
        case WeightedRewards(parts=parts):
            return all(answers_immediately(part.make) for part in parts)
        case _:
            return isinstance(make, GroupReward)  # judges nothing before the group is complete


def starts_immediately(make: MakeEnv) -> bool:
    """Whether environments start within microseconds, even if code of users then judges answers."""
    if isinstance(make, WeightedRewards):
        return all(starts_immediately(part.make) for part in make.parts)
    return isinstance(make, PlainReward) or answers_immediately(make)


def _imported(name: str) -> MakeEnv:
    """Factory of what an import path names. If a program or notebook redefines it, the new definition counts."""
    return _maker(name, import_object(name, TaskError)) if name.startswith(OF_PROGRAM) else _import_environment(name)


@cache
def _import_environment(name: str) -> MakeEnv:
    if ":" not in name:
        known = ", ".join(registered_names())
        raise TaskError(
            f"there is no environment named {name!r}. Registered: {known}; your own: file.py:name or module:name"
        )
    return _maker(name, import_object(name, TaskError))


@cache
def _maker(name: str, target: object) -> MakeEnv:
    if isinstance(target, type) and issubclass(target, Env):
        return target
    if callable(target) and not isinstance(target, type):
        if _makes_environments(target):
            make: MakeEnv = target
            return make
        return GroupReward(target) if is_group_reward(target) else PlainReward(target)
    if isinstance(target, type) and is_of_skyrl_gym(target):
        return lambda extras: SkyRLGymTextEnv(extras, target)
    raise TaskError(
        f"{name} is neither a subclass of skyrl.envs.Env, nor an environment of SkyRL-Gym (init, step, close, and a "
        "constructor that takes extras), nor a reward function"
    )


def _makes_environments(target: Callable[..., Any]) -> bool:
    """Whether a function is a factory: its only parameter is called `extras`."""
    try:
        return list(inspect.signature(target).parameters) == ["extras"]
    except (TypeError, ValueError):  # a builtin without a signature
        return False


def find_env_of_row(name: str, user_env_class: str | None, settings: SkyRLGymConfig | None = None) -> MakeEnv:
    """Factory of the environments of a prompt, whose row is not trusted: it may name only a registered environment or
    `user_env_class`.

    `user_env_class` is `environment.task`, the only text whose import paths are ever followed. `settings` are the
    settings of the built-in environments; None: their defaults. Raises `TaskError`.
    """
    if name != user_env_class and name not in registered_names():
        raise TaskError(
            f"a row of the data names the environment {name!r}, which is not registered. Import paths are followed "
            f"from environment.env_class only. Registered: {', '.join(registered_names())}"
        )
    return find_env(name, settings)


def ignored_columns(make: MakeEnv, columns: Iterable[str]) -> tuple[str, ...]:
    """Columns of rows that are not passed to its reward function, because their names are taken by other arguments."""
    match make:
        case PlainReward(function=function) | GroupReward(function=function):
            names = reserved_names(function)
        case IsolatedTask(taken=names):
            pass
        case McpTask(reward=reward):
            return ignored_columns(reward, columns)
        case WeightedRewards(parts=parts):
            column_names = [*columns]
            return tuple(dict.fromkeys(name for part in parts for name in ignored_columns(part.make, column_names)))
        case _:
            return ()
    return tuple(sorted(names & {*columns}))


def ignored_columns_warning(columns: Sequence[str], task: str) -> str:
    """A warning that these columns are not passed to a reward function."""
    named = f"columns {', '.join(columns)} are" if len(columns) > 1 else f"column {columns[0]} is"
    return f"the data's {named} not passed to {task}, whose other arguments have such names: rename what it has to read"
