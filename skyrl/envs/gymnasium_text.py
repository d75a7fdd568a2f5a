"""Adapter for Gymnasium environments whose observations and actions are text.

Define one in a file of your own:

    import gymnasium
    from skyrl.envs.gymnasium_text import GymnasiumTextEnv

    def my_task(extras):
        return GymnasiumTextEnv(extras, lambda: gymnasium.make("MyText-v0"))

Only methods of Gymnasium's interface are called, so gymnasium is not imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from skyrl.envs.env import Env, EnvStep, Message
from skyrl.errors import TaskError


class GymnasiumTextEnv(Env):
    """The first observation follows the prompt. Each answer is an action, each later observation a user message.

    `reset` gets the row's `seed`, if it has one, and its `options`. A terminated or truncated episode is over.
    """

    def __init__(self, extras: Mapping[str, Any], make: Callable[[], Any]) -> None:
        """`make` returns a new Gymnasium environment."""
        super().__init__(extras)
        self._env = make()
        self._steps = 0

    def init(self, prompt: tuple[Message, ...]) -> tuple[tuple[Message, ...], dict[str, Any]]:
        observation, information = self._env.reset(seed=self.extras.get("seed"), options=self.extras.get("options"))
        return (*prompt, {"role": "user", "content": _text(observation)}), dict(information)

    def step(self, action: str) -> EnvStep:
        self._steps += 1
        observation, reward, terminated, truncated, information = self._env.step(action)
        done = bool(terminated or truncated)
        observations = () if done else ({"role": "user", "content": _text(observation)},)
        return EnvStep(reward=reward, done=done, observations=observations, metadata=dict(information))

    def get_metrics(self) -> dict[str, float]:
        return {"steps": float(self._steps)}

    def close(self) -> None:
        self._env.close()


def _text(observation: object) -> str:
    if not isinstance(observation, str):
        raise TaskError(
            f"the gymnasium environment shows {type(observation).__name__}, not text: wrap its observations"
        )
    return observation
