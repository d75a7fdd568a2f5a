"""Finding a task by its name: one of ours, or an import path that the user's own configuration names.

    gsm8k                       a registered environment
    my_pkg.tasks:MyEnv          a subclass of `Env`, or a plain reward function, from an importable module
    rewards.py:my_reward        the same from a file

A reward function is called as `function(completion, ground_truth=..., **extras)` and returns a number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from skyrl.config.import_paths import import_object
from skyrl.envs.env import Env, EnvStep
from skyrl.envs.gsm8k import GSM8kEnv
from skyrl.errors import TaskError

MakeEnv = Callable[[Mapping[str, Any]], Env]
"""Extras of a row -> a fresh environment."""

_REGISTERED: dict[str, MakeEnv] = {"gsm8k": GSM8kEnv}


def register(name: str, make: MakeEnv) -> None:
    """Give an environment a name that datasets may use. Raises `TaskError` if the name is taken or not a plain name."""
    if ":" in name or not name:
        raise TaskError(f"{name!r} cannot be a registered name: a colon marks an import path")
    if name in _REGISTERED and _REGISTERED[name] is not make:
        raise TaskError(f"an environment named {name!r} is registered already")
    _REGISTERED[name] = make


def registered_names() -> tuple[str, ...]:
    """Every name that `find_env` knows without importing anything."""
    return tuple(sorted(_REGISTERED))


def find_env(name: str) -> MakeEnv:
    """What makes environments of this name. An import path is followed: give it only names from the user's
    configuration.

    Raises `TaskError` that says what was looked for and where.
    """
    if name in _REGISTERED:
        return _REGISTERED[name]
    return _imported(name)


@cache
def _imported(name: str) -> MakeEnv:
    if ":" not in name:
        known = ", ".join(registered_names())
        raise TaskError(
            f"there is no environment named {name!r}. Registered: {known}; your own: file.py:name or module:name"
        )
    target = import_object(name, TaskError)
    if isinstance(target, type) and issubclass(target, Env):
        return target
    if callable(target) and not isinstance(target, type):
        return lambda extras: RewardFunctionEnv(extras, target)
    raise TaskError(f"{name} is neither a subclass of skyrl.envs.Env nor a reward function")


def find_task(name: str, user_env_class: str | None) -> MakeEnv:
    """What makes the environments of a prompt, whose row may name a registered one or the one of the configuration.

    `user_env_class` is `environment.env_class`, the only import path that is ever followed. Raises `TaskError`.
    """
    if name != user_env_class and name not in _REGISTERED:
        raise TaskError(
            f"a row of the data names the environment {name!r}, which is not registered. Import paths are followed "
            f"from environment.env_class only. Registered: {', '.join(registered_names())}"
        )
    return find_env(name)


class RewardFunctionEnv(Env):
    """One turn, rewarded by a plain function."""

    def __init__(self, extras: Mapping[str, Any], function: Callable[..., Any]) -> None:
        super().__init__(extras)
        self._function = function

    def step(self, action: str) -> EnvStep:
        spec = self.extras.get("reward_spec")
        others = {key: value for key, value in self.extras.items() if key != "ground_truth"}
        ground_truth = spec.get("ground_truth") if isinstance(spec, Mapping) else self.extras.get("ground_truth")
        return EnvStep(reward=self._function(action, ground_truth=ground_truth, **others), done=True)
