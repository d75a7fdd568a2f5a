"""Adapter for unchanged SkyRL-Gym environments: subclasses of its `BaseTextEnv`.

    environment.env_class = "my_task.py:MyEnv"      # class MyEnv(BaseTextEnv), with __init__(self, env_config, extras)

`step` returns a `BaseTextEnvStepOutput`. Only methods of that interface are called, so SkyRL-Gym is not imported here.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from functools import cache
from typing import Any

from skyrl.envs.coroutines import awaited
from skyrl.envs.env import Env, EnvStep, Message
from skyrl.errors import TaskError

_log = logging.getLogger(__name__)


class SkyRLGymTextEnv(Env):
    """Forwards calls to a SkyRL-Gym environment. Only numeric metrics are kept."""

    def __init__(self, extras: Mapping[str, Any], kind: type) -> None:
        """`kind` is the environment's class; it receives an empty `env_config`, as SkyRL passes to environments that
        are not built in.
        """
        super().__init__(extras)
        warn_of_own_aggregation(kind)
        takes_config = "env_config" in inspect.signature(kind).parameters
        self._env: Any = kind(**({"env_config": {}} if takes_config else {}), extras=dict(extras))

    def init(self, prompt: tuple[Message, ...]) -> tuple[tuple[Message, ...], dict[str, Any]]:
        messages, information = awaited(self._env.init([dict(message) for message in prompt]))
        return tuple(messages), dict(information)

    def step(self, action: str) -> EnvStep:
        """Judge one answer. Raises `TaskError` if the environment would replace the policy's text."""
        output = awaited(self._env.step(action))
        if not isinstance(output, Mapping):
            raise TypeError(
                f"step() of {type(self._env).__name__} returned {output!r:.200}, not a BaseTextEnvStepOutput"
            )
        replaced = output.get("postprocessed_action")
        if replaced is not None and replaced != action:
            raise TaskError(
                f"{type(self._env).__name__} replaces what the policy wrote (postprocessed_action), and what was not "
                "sampled is not trained on: end turns with generator.sampling_params.stop instead"
            )
        return EnvStep(
            reward=output["reward"],
            done=bool(output["done"]),
            observations=tuple(output["observations"]),
            metadata=output.get("metadata") or {},
        )

    def get_metrics(self) -> dict[str, float]:
        measured = awaited(self._env.get_metrics()) if hasattr(self._env, "get_metrics") else {}
        return {name: float(value) for name, value in measured.items() if isinstance(value, bool | int | float)}

    def close(self) -> None:
        awaited(self._env.close())


def is_of_skyrl_gym(target: object) -> bool:
    """Whether `target` is a class with the methods of a SkyRL-Gym environment and a constructor that takes `extras`."""
    methods = ("init", "step", "close")
    if not isinstance(target, type) or not all(callable(getattr(target, name, None)) for name in methods):
        return False
    return "extras" in inspect.signature(target).parameters


@cache
def warn_of_own_aggregation(kind: type) -> None:
    """Warn that an `aggregate_metrics` of the class is never called: metrics are averaged over samples."""
    aggregate = getattr(kind, "aggregate_metrics", None)
    if aggregate is not None and not aggregate.__qualname__.startswith("BaseTextEnv."):
        _log.warning("%s.aggregate_metrics is not called: the numbers of get_metrics are averaged", kind.__name__)
